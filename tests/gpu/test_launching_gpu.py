"""Launches that leave Triton's own path out, on a GPU: each is made three times, the first of them
by Triton, and the last in a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

import triton.language as tl  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from megatron_hybrid.kernels.dependent_launch import OPTIONS, wait_for_inputs  # noqa: E402
from megatron_hybrid.kernels.launching import LaunchedKernel, launched  # noqa: E402

COUNT = 300


@launched
def _kernel(x, weight, out, count, step, scale, flag, ADDED: tl.constexpr, BLOCK: tl.constexpr):
    wait_for_inputs()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(x + at * step, mask=at < count, other=0).to(tl.float32) * scale
    if weight is not None:
        numbers *= tl.load(weight + at, mask=at < count, other=0).to(tl.float32)
    if flag:
        numbers = -numbers
    if ADDED is not None:
        numbers += ADDED
    tl.store(out + at, numbers.to(out.dtype.element_ty), mask=at < count)


@launched(do_not_specialize=["count"], do_not_specialize_on_alignment=["x", "step"])
def _plain_kernel(x, out, count, step, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at * step, mask=at < count, other=0), mask=at < count)


@launched
def _tile_kernel(x, out, row, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """x: a tensor descriptor."""
    place = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + place, x.load([row, 0]))


def _numbers(dtype: torch.dtype, first: int = 0) -> Tensor:
    """From the element `first` on of memory that begins at a multiple of 16 bytes."""
    return torch.randint(-8, 9, (COUNT * 17 + first,), device="cuda").to(dtype)[first:]


CASES: list[dict[str, Any]] = [
    {},
    {"first": 1},
    {"first": 8},
    {"dtype": torch.bfloat16},
    {"dtype": torch.bfloat16, "first": 1},
    {"dtype": torch.int32},
    *({"step": step} for step in (1, 16, 17)),
    *({"count": count} for count in (1, 16, 17, 256)),
    {"weight": torch.float32},
    {"weight": torch.float16},
    {"scale": 2.0},
    {"scale": 3},
    {"flag": True},
    {"added": 5},
    {"blocks": 128},
]


def _call(
    dtype: torch.dtype = torch.float32,
    first: int = 0,
    weight: torch.dtype | None = None,
    count: int = COUNT,
    step: int = 3,
    scale: float = 1.0,
    flag: bool = False,
    added: int | None = None,
    blocks: int = 64,
) -> None:
    x = _numbers(dtype, first)
    weights = None if weight is None else _numbers(weight, first)
    out = torch.zeros(COUNT, dtype=dtype, device="cuda")

    def launch() -> None:
        _kernel[(-(-count // blocks),)](
            x, weights, out, count, step, scale, flag, ADDED=added, BLOCK=blocks, num_warps=2,
            **OPTIONS,
        )  # fmt: skip

    expected = x[: count * step : step].float() * scale
    if weights is not None:
        expected = expected * weights[:count].float()
    expected = (-expected if flag else expected) + (added or 0)
    for way in (launch, launch, _in_a_graph(launch)):
        out.zero_()
        way()
        assert torch.equal(out[:count], expected.to(dtype))
        assert not out[count:].any()


def _in_a_graph(launch: Any) -> Any:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        launch()
    return graph.replay


@pytest.mark.parametrize("first", range(len(CASES)))
def test_every_launch_computes_what_torch_does(first: int) -> None:
    """In any order: none gets what was compiled for another one."""
    for case in CASES[first:] + CASES[:first]:
        _call(**case)


def test_integers_that_are_not_compiled_in() -> None:
    for step in (1, 2, 16, 17):
        for count in (1, 16, 17, 300):
            x, out = _numbers(torch.float32, 1), torch.zeros(COUNT, device="cuda")
            for _ in range(2):
                _plain_kernel[(5,)](x, out, count, step, BLOCK=64)
            assert torch.equal(out[:count], x[: count * step : step])
            assert not out[count:].any()


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16)] * 2)
def test_tensor_descriptors(dtypes: tuple[torch.dtype, ...]) -> None:
    """Of other tensors in every launch."""
    for dtype in dtypes:
        for rows, columns in ((8, 32), (16, 32), (8, 64)):
            for row in (0, 3, 16):
                x = _numbers(dtype)[: 32 * 64].view(32, 64)
                out = torch.zeros(rows, columns, dtype=dtype, device="cuda")
                described = TensorDescriptor(x, [32, 64], [64, 1], [rows, columns])
                _tile_kernel[(1,)](described, out, row, ROWS=rows, COLUMNS=columns)
                assert torch.equal(out, x[row : row + rows, :columns]), (dtype, rows, columns, row)
    assert len(_tile_kernel._known) >= 6


def test_known_launches_do_not_go_through_triton() -> None:
    _call()
    assert isinstance(_kernel, LaunchedKernel)
    usual = _kernel.function.run
    try:
        _kernel.function.run = None
        x, out = _numbers(torch.float32), torch.zeros(COUNT, device="cuda")
        _kernel[(5,)](
            x, None, out, COUNT, 3, 1.0, False, ADDED=None, BLOCK=64, num_warps=2, **OPTIONS
        )
    finally:
        _kernel.function.run = usual
    assert torch.equal(out, x[: COUNT * 3 : 3])


def test_a_stream_that_is_not_the_default_one() -> None:
    x, out = _numbers(torch.float32), torch.zeros(COUNT, device="cuda")
    stream = torch.cuda.Stream()
    for _ in range(2):
        out.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # what is put on another stream is done before it
            _plain_kernel[(5,)](x, out, COUNT, 2, BLOCK=64)
        first = out.clone()
        stream.synchronize()
        assert not first.any()
        assert torch.equal(out, x[: COUNT * 2 : 2])
