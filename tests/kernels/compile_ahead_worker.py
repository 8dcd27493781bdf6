"""A process in which Triton compiles for a GPU that is not there: its driver refuses to launch
anything. Prints as JSON what test_compile_ahead.py asks for."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from megatron_hybrid import EngineConfig, SamplingParams
from megatron_hybrid.engine.build import build_engine
from megatron_hybrid.engine.profiling import _compile_kernels, largest_step
from megatron_hybrid.engine.sizing import write_interval
from megatron_hybrid.execution.cuda_graphs import GraphSize, graph_sizes
from megatron_hybrid.execution.plan import StepPlan
from megatron_hybrid.execution.runner import ModelRunner
from megatron_hybrid.kernels import devices, kernel_set, launching
from megatron_hybrid.kernels.compile_ahead import compiling_ahead
from megatron_hybrid.kernels.compiled import KERNELS
from megatron_hybrid.layers.inputs import allocate_caches
from megatron_hybrid.models.checkpoints.weights import load_model
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import initialize
from tests.thorough import usually

CPU = torch.device("cpu")


class PretendedDriver:
    """Of a Hopper GPU."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, bool]] = []

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return CPU

    def launcher_cls(self, source: Any, metadata: Any) -> None:
        self.loaded.append((metadata.name, threading.current_thread() is threading.main_thread()))
        raise RuntimeError("There is no GPU.")


@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def wrong(x):  # type: ignore[no-untyped-def]
    tl.store(x, tl.load(x) + NOBODY_KNOWS)  # type: ignore[name-defined]  # noqa: F821


def two_kernels(pretended: PretendedDriver) -> dict[str, Any]:
    x, usual = torch.arange(10.0), JITFunction.run
    threads: set[str] = set()
    compile = triton.compiler.compile

    def noted(*args: Any, **options: Any) -> Any:
        threads.add(threading.current_thread().name)
        return compile(*args, **options)

    triton.compiler.compile = noted
    torch.set_deterministic_debug_mode("error")  # memory that is not written to is full of NaN
    with compiling_ahead(CPU):
        assert not launching._is_direct
        for n in (3, 5, 16):  # what 16 divides is another kernel
            for block in (16, 32):
                y = torch.empty_like(x)
                double[(1,)](x, y, n, BLOCK=block)
                found = [torch.empty(3), torch.empty_like(y, dtype=torch.int64), y.new_empty(2)]
                assert not any(bool(one.any()) for one in (y, *found))
        wrong[(1,)](x)
    assert JITFunction.run is usual
    assert threads and all(name.startswith("compile") for name in threads), threads
    compiled, said = KERNELS.compiled, []
    for launch in (lambda: double[(1,)](x, x, 7, BLOCK=16), lambda: wrong[(1,)](x)):
        try:
            launch()
        except (RuntimeError, triton.CompilationError) as error:
            said.append(str(error))
    return {
        "compiled": compiled,
        "for launches": KERNELS.compiled - compiled,
        "read": KERNELS.read,
        "loaded": pretended.loaded,
        "said": said,
    }


def without_flashinfer() -> None:
    """Its kernels want a GPU."""
    whole = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *rest: None if name == "flashinfer" else whole(name)


def pretend_processors(count: int) -> None:
    """A GPU's multiprocessors, for which work is split."""
    for module in list(sys.modules.values()):
        if getattr(module, "processors", None) is devices.processors:
            module.processors = lambda _: count  # type: ignore[attr-defined]


def load(folder: str, **sizes: int) -> tuple[HybridModel, ModelRunner, StepPlan]:
    """A model with a GPU's kernels, and what runs its largest step, as when an engine starts."""
    parallel = initialize()
    model = load_model(
        folder, device=CPU, dtype="bfloat16", parallel=parallel, load_format="dummy", progress=False
    )
    model.kernels = kernel_set._gpu()
    rows, plan = largest_step(block_size=64, **sizes)
    caches = allocate_caches(
        model.kv_specs,
        model.state_specs,
        num_blocks=int(rows.block_table.max()) + 1,
        block_size=64,
        num_slots=len(plan.prefills) + 1,
        device=CPU,
    )
    max_tokens = sizes["max_tokens"]
    runner = ModelRunner(
        model, caches, rows, 64, CPU, parallel, max_tokens=max_tokens, asynchronous=False
    )
    return model, runner, plan


def steps(folder: str) -> list[int]:
    """Kernels that were compiled by then: for one step, for two more, for all of them again."""
    without_flashinfer()
    _, runner, plan = load(folder, max_requests=4, max_tokens=32, max_seq_length=512)
    sizes = [GraphSize(2), GraphSize(2, 16, 2, 4)]
    counts = []
    for _ in range(2):
        with compiling_ahead(CPU):
            runner.execute(plan)
        counts.append(KERNELS.compiled)
        runner.compile_kernels(sizes)
        counts.append(KERNELS.compiled)
    return counts


def serving(folder: str) -> dict[str, Any]:
    """How many kernels an engine's start asks for, and the names of those that its steps ask for
    besides. Nothing is compiled."""
    without_flashinfer()
    pretend_processors(132)
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.synchronize = lambda *_: None
    asked: set[tuple[str, ...]] = set()

    def ask(src: Any, target: Any = None, options: Any = None, **_: Any) -> None:
        asked.add((src.name, *map(str, (src.signature, src.constants, src.attrs, options))))
        KERNELS.compiled += 1  # or a start would take what it needs to be in Triton's cache
        raise RuntimeError("It is not to be compiled.")

    triton.compiler.compile = ask
    requests, tokens = 24, 2048
    model, runner, plan = load(
        folder, max_requests=requests, max_tokens=tokens, max_seq_length=tokens
    )
    _compile_kernels(runner, plan, initialize(), CPU)
    config = EngineConfig(
        load=folder,
        device="cpu",
        dtype="bfloat16",
        inference_dynamic_batching_buffer_size_gb=0.25,
        inference_dynamic_batching_prefix_caching_mamba_gb=0.25,
        inference_dynamic_batching_max_requests=requests,
        inference_dynamic_batching_max_tokens=tokens,
        mamba_inference_state_write_interval=write_interval(model.config.pattern),  # as on a GPU
    )
    kernel_set.select = lambda *_, **__: kernel_set._gpu()
    engine = build_engine(config, model=model)
    assert isinstance(engine.runner, ModelRunner)
    engine.runner.compile_kernels(graph_sizes(-1, 4, requests, tokens))
    at_start = set(asked)
    generator = torch.Generator().manual_seed(1)
    every = [[n] for n in (1, 5, 17, 40, 100, 130, 200, 300, 500, 700, 1000, 1500, 1990)]
    every += [[600] * 3, [250] * 8, [128] * 16, [60] * 20, [900, 900, 30]]
    some = every[:: usually(4, 1)]  # what draws tokens sees only how many there are
    for params, waves in (
        (SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True), every),
        (SamplingParams(temperature=0.8, top_p=0.9, top_k=20, max_tokens=3, ignore_eos=True), some),
        (SamplingParams(temperature=1.0, max_tokens=3, ignore_eos=True), some),
        (SamplingParams(frequency_penalty=0.5, max_tokens=3, ignore_eos=True), some),
    ):
        for wave in waves:
            for i, n in enumerate(wave):
                prompt = torch.randint(0, 160, (n,), generator=generator).tolist()
                engine.add_request(str(i), prompt, params)
            with compiling_ahead(CPU):
                while engine.has_work():
                    engine.step()
    return {"at start": len(at_start), "serving": sorted({name for name, *_ in asked - at_start})}


if __name__ == "__main__":
    pretended = PretendedDriver()
    driver.set_active(pretended)
    KERNELS.count()
    ways: dict[str, Callable[[str], Any]] = {"steps": steps, "serving": serving}
    found = ways[sys.argv[1]](sys.argv[2]) if sys.argv[1:] else two_kernels(pretended)
    print(json.dumps(found))
