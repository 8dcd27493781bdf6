"""Launches that leave Triton's own path out: what they share, what they call, when they don't."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler.compiler import make_backend  # noqa: E402
from triton.runtime.jit import JITFunction, create_function_from_signature  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from megatron_hybrid.kernels import launching  # noqa: E402
from megatron_hybrid.kernels.launching import (  # noqa: E402
    LaunchedKernel,
    cdiv,
    launched,
    launched_by_triton,
    next_power_of_2,
)
from tests.thorough import A_THIRD  # noqa: E402


class Kind(NamedTuple):
    group: int
    name: str


def kernel(
    x, out, weight, rows, columns, step, scale, flag, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    pass


BLOCK_OF_8 = torch.zeros(64, dtype=torch.bfloat16)
PLAIN: dict[str, Any] = {
    "x": torch.zeros(64),
    "out": torch.zeros(64),
    "weight": None,
    "rows": 5,
    "columns": 48,
    "step": 7,
    "scale": 0.5,
    "flag": False,
    "KIND": Kind(16, "int8"),
    "BLOCK": 128,
}
OTHERS: list[dict[str, Any]] = [
    {},
    {"x": BLOCK_OF_8},
    {"x": torch.zeros(64)[1:]},
    {"x": torch.zeros(64)[4:]},
    {"out": torch.zeros(64)[1:]},
    {"x": torch.zeros(64)[1:], "out": torch.zeros(64)[1:]},
    {"weight": torch.zeros(64)},
    {"weight": torch.zeros(64)[1:]},
    {"weight": BLOCK_OF_8},
    *({name: n} for name in ("rows", "columns", "step") for n in (0, 1, 16, 17, -1, -16, -17)),
    *({name: 2**31 + n} for name in ("rows", "columns", "step") for n in (-1, 0, 1, 16)),
    *({name: -(2**31) + n} for name in ("rows", "columns", "step") for n in (-1, 0, 1)),
    *({"columns": n} for n in (2**63 - 1, 2**63, 2**64 - 16, 1.5, True, None)),
    {"columns": torch.zeros(64)},
    {"rows": 16, "columns": 5},
    {"scale": 2.0},
    {"scale": 1},
    {"scale": 16},
    {"flag": True},
    {"flag": 1},
    {"KIND": None},
    {"KIND": Kind(16, "fp8")},
    {"BLOCK": 256},
    {"BLOCK": 1.5},
]


class Launcher:
    """Of a compiled kernel, with the attributes and the calls of Triton 3.6."""

    def __init__(self, scratch: int = 0) -> None:
        self.global_scratch_size, self.profile_scratch_size = scratch, 0
        self.launch_cooperative_grid, self.launch_pdl = False, True
        self.launches: list[tuple[Any, ...]] = []
        self.launch: Callable[..., None] = lambda *arguments: self.launches.append(arguments)
        self.calls = 0

    def __call__(
        self, gridX: int, gridY: int, gridZ: int, stream: int, function: int, *args: Any
    ) -> None:
        self.calls += 1
        scratch = torch.empty(self.global_scratch_size) if self.global_scratch_size else None
        self.launch(
            gridX, gridY, gridZ, stream, function, self.launch_cooperative_grid, self.launch_pdl,
            scratch, None, *args,
        )  # fmt: skip


class OtherLauncher(Launcher):
    """Of Triton 3.9, which calls what C has compiled for all kernels."""

    def __call__(
        self, gridX: int, gridY: int, gridZ: int, stream: int, function: int, *args: Any
    ) -> None:
        self.calls += 1
        *own, metadata = args[4:], args[:4]
        self.launch(gridX, gridY, gridZ, stream, function, *metadata, None, None, tuple(own))


class Compiled:
    function = 321
    packed_metadata = (4, 1, 0)

    def __init__(self, run: Launcher) -> None:
        self.run = run


class Triton:
    """In place of JITFunction.run: compiles for each of Triton's own keys."""

    def __init__(self, make: Callable[[], Launcher] = Launcher, **options: Any) -> None:
        self.function = JITFunction(kernel, **options)
        self.function.run = self.run
        self.make = make
        self.runs = 0
        self.compiled: dict[str, Compiled] = {}
        backend = make_backend(GPUTarget("cuda", 90, 32))
        parameters = self.function.signature, self.function.params
        self.bind = create_function_from_signature(*parameters, backend)

    def key(self, *arguments: Any, **options: Any) -> str:
        _, specialization, given = self.bind(*arguments, **options)
        return f"{specialization} {given}"

    def run(self, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Compiled:
        self.runs += 1
        return self.compiled.setdefault(self.key(*arguments, **options), Compiled(self.make()))


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_current_device", lambda: 3)
    monkeypatch.setattr(launching, "_current_stream", lambda device: 70 + device)


def launch(ours: LaunchedKernel, **changes: Any) -> Any:
    return ours[(2, 3)](**{**PLAIN, "num_warps": 4, **changes})


OPTIONS = [
    {},
    {"do_not_specialize": ["rows", "x"]},
    {"do_not_specialize_on_alignment": ["columns", "out"]},
]


@A_THIRD
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("first", range(len(OTHERS)))
def test_launches_share_what_triton_compiled_for_both(first: int, options: dict[str, Any]) -> None:
    """Whichever kinds of arguments came first."""
    triton_ = Triton(**options)
    ours = LaunchedKernel(triton_.function)
    cases = OTHERS[first:] + OTHERS[:first]
    for changes in cases + cases:
        arguments = {**PLAIN, **changes, "num_warps": 4}
        assert launch(ours, **changes) is triton_.compiled[triton_.key(**arguments)], changes
    before = triton_.runs
    for changes in cases:
        launch(ours, **changes)
    assert triton_.runs == before


def test_values_that_are_compiled_alike_share_a_key() -> None:
    triton_ = Triton()
    ours = LaunchedKernel(triton_.function)
    alike = [
        {"rows": 7, "columns": 4096, "scale": 3.25, "flag": True},
        {"x": torch.zeros(100), "out": torch.zeros(64)[8:], "step": 12345},
    ]
    launch(ours)
    for changes in alike:
        launch(ours, **changes)
    assert triton_.runs == 1


def test_options_have_their_own_kernels() -> None:
    triton_ = Triton()
    ours = LaunchedKernel(triton_.function)
    known = [{}, {"num_warps": 8}, {"num_stages": 2}, {"launch_pdl": True}, {"maxnreg": 64}]
    options = [*known, {"num_ctas": 2}]
    kernels = [launch(ours, **given) for given in options]
    assert len({id(found) for found in kernels}) == 6
    assert [launch(ours, **given) for given in options] == kernels
    assert triton_.runs == 7  # options without a place in the key are Triton's


def test_devices_have_their_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    device = 0
    monkeypatch.setattr(launching, "_current_device", lambda: device)
    triton_ = Triton()
    ours = LaunchedKernel(triton_.function)
    for device in (0, 1, 0, 1):  # noqa: B007
        launch(ours)
    assert triton_.runs == 2


def test_a_known_launch_calls_what_is_compiled() -> None:
    triton_ = Triton()
    ours = LaunchedKernel(triton_.function)
    weight = torch.zeros(64)
    launcher = launch(ours, weight=weight).run
    checked = launcher.calls
    assert launcher.launches == []  # the stand-in of Triton's run does not launch
    launch(ours, weight=weight, rows=9)
    addresses = [PLAIN["x"].data_ptr(), PLAIN["out"].data_ptr(), weight.data_ptr()]
    own = (*addresses, 9, 48, 7, 0.5, False, PLAIN["KIND"], 128)
    constants = (321, False, True, None, None, (4, 1, 0), None, None, None)
    assert launcher.launches == [(2, 3, 1, 73, *constants, *own)]
    assert launcher.calls == checked


@pytest.mark.parametrize("make", [lambda: Launcher(scratch=8), OtherLauncher])
def test_a_launcher_that_does_more_is_called_itself(make: Callable[[], Launcher]) -> None:
    ours = LaunchedKernel(Triton(make).function)
    launcher = launch(ours).run
    before = launcher.calls
    launch(ours)
    assert launcher.calls == before + 1
    assert launcher.launches[-1][:5] == (2, 3, 1, 73, 321)


@pytest.mark.parametrize("grid", [(5,), [5, 6], (5, 6, 7)])
def test_grids_of_one_to_three_sizes(grid: Any) -> None:
    ours = LaunchedKernel(Triton().function)
    launcher = launch(ours).run
    ours[grid](**PLAIN, num_warps=4)
    assert launcher.launches[-1][:3] == (*grid, 1, 1)[:3]


def test_arguments_by_place() -> None:
    triton_ = Triton()
    ours = LaunchedKernel(triton_.function)
    for _ in range(2):
        ours[(2, 3)](*PLAIN.values(), num_warps=4)
    launch(ours)
    assert triton_.runs == 1


# ---------------------------------------------------------------- what Triton launches itself


@contextmanager
def hooked(chain: str) -> Iterator[None]:
    hooks = getattr(knobs.runtime, chain)

    def hook(*arguments: Any) -> None: ...

    hooks.add(hook)
    yield
    hooks.remove(hook)


@contextmanager
def replaced_run() -> Iterator[None]:
    """As a pass does that compiles without launching."""
    usual = JITFunction.run
    JITFunction.run = lambda *arguments, **options: None
    yield
    JITFunction.run = usual


WAYS = {
    "a hook before": lambda: hooked("launch_enter_hook"),
    "a hook behind": lambda: hooked("launch_exit_hook"),
    "switched off": launched_by_triton,
}


@pytest.mark.parametrize("way", WAYS)
def test_known_launches_are_tritons_again(way: str) -> None:
    triton_ = Triton()
    ours = LaunchedKernel(triton_.function)
    launcher = launch(ours).run
    with WAYS[way]():
        launch(ours)
        assert triton_.runs == 2
    launch(ours)
    assert triton_.runs == 2
    assert len(launcher.launches) == 1


def test_a_run_that_was_replaced_gets_every_launch_and_nothing_is_kept_of_it() -> None:
    triton_ = Triton()
    ours = LaunchedKernel(triton_.function)
    with replaced_run():
        launch(ours)
    launcher = launch(ours).run
    assert triton_.runs == 2
    with replaced_run():
        launch(ours)
    assert triton_.runs == 3
    assert launcher.launches == []


def test_functions_that_are_called_before_each_launch_are() -> None:
    triton_ = Triton()
    ours = LaunchedKernel(triton_.function)
    ours.add_pre_run_hook(lambda *arguments, **options: None)
    for _ in range(3):
        launch(ours)
    assert triton_.runs == 3


def described(block: list[int], dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    return TensorDescriptor(torch.zeros(16, 16, dtype=dtype), [16, 16], [16, 1], block, **more)


def test_tensor_descriptors_are_told_apart_by_what_is_compiled() -> None:
    triton_ = Triton()
    ours = LaunchedKernel(triton_.function)
    cases = [([8, 8],), ([16, 8],), ([8, 16],), ([8, 8], torch.float16)]
    for _ in range(3):
        for case in cases:
            given = described(*case)
            found = launch(ours, x=given)
            assert found is triton_.compiled[triton_.key(**{**PLAIN, "x": given, "num_warps": 4})]
            if found.run.launches:
                assert found.run.launches[-1][-10] is given
    assert triton_.runs == len(cases)


def test_tensors_may_come_in_the_place_of_tensor_descriptors() -> None:
    triton_ = Triton()
    ours = LaunchedKernel(triton_.function)
    cases = [{"x": described([8, 8])}, {}, {"x": described([16, 8])}]
    for _ in range(3):
        for changes in cases:
            arguments = {**PLAIN, **changes, "num_warps": 4}
            assert launch(ours, **changes) is triton_.compiled[triton_.key(**arguments)]
    before = triton_.runs
    for changes in cases:
        launch(ours, **changes)
    assert triton_.runs == before


def test_tuples_are_tritons() -> None:
    triton_ = Triton()
    ours = LaunchedKernel(triton_.function)
    launch(ours)
    for _ in range(2):
        launch(ours, x=(PLAIN["x"], PLAIN["out"]))
    assert triton_.runs == 3
    launch(ours)
    assert triton_.runs == 3


def test_grids_that_are_functions_and_constants_without_a_hash_are_tritons() -> None:
    triton_ = Triton()
    ours = LaunchedKernel(triton_.function)
    for _ in range(2):
        ours[lambda meta: (2,)](**PLAIN, num_warps=4)
    for _ in range(2):
        launch(ours, KIND=[1, 2])
    assert triton_.runs == 4


def test_wrong_arguments_are_an_error() -> None:
    ours = LaunchedKernel(Triton().function)
    launch(ours)
    with pytest.raises(TypeError):
        ours[(1,)](PLAIN["x"])


def test_what_triton_interprets_stays_tritons() -> None:
    if not knobs.runtime.interpret:
        pytest.skip("kernels are compiled")
    assert not isinstance(launched(kernel), LaunchedKernel)
    assert not isinstance(launched(do_not_specialize=["rows"])(kernel), LaunchedKernel)


def test_a_launched_kernel_has_what_the_function_has() -> None:
    ours = LaunchedKernel(Triton(do_not_specialize=["rows"]).function)
    assert ours.arg_names == list(PLAIN)
    assert ours.do_not_specialize == ["rows"]


def test_sizes_are_tritons() -> None:
    for n in [*range(1, 70), 1023, 1024, 1025]:
        assert next_power_of_2(n) == triton.next_power_of_2(n)
        assert cdiv(n, 16) == triton.cdiv(n, 16)
    assert next_power_of_2(0) == triton.next_power_of_2(0)
    assert cdiv(0, 16) == triton.cdiv(0, 16)
