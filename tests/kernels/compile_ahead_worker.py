"""A process in which Triton compiles for a GPU that is not there: its driver refuses to launch
anything. Prints as JSON what test_compile_ahead.py asks for."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from megatron_hybrid.kernels import launching
from megatron_hybrid.kernels.compile_ahead import compiling_ahead
from megatron_hybrid.kernels.compiled import KERNELS

CPU = torch.device("cpu")


class PretendedDriver:
    """Of a Hopper GPU."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return CPU

    def launcher_cls(self, source: Any, metadata: Any) -> None:
        self.loaded.append(metadata.name)
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
    torch.use_deterministic_algorithms(True)  # memory that is not written to is full of NaN
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


def steps(folder: str) -> list[int]:
    """Kernels that were compiled by then: for one step, for two more, for all of them again."""
    whole = importlib.util.find_spec
    # flashinfer's kernels want a GPU
    importlib.util.find_spec = lambda name, *rest: None if name == "flashinfer" else whole(name)
    from megatron_hybrid.engine.profiling import largest_step
    from megatron_hybrid.execution.cuda_graphs import GraphSize
    from megatron_hybrid.execution.runner import ModelRunner
    from megatron_hybrid.kernels import kernel_set
    from megatron_hybrid.layers.inputs import allocate_caches
    from megatron_hybrid.models.checkpoints.weights import load_model
    from megatron_hybrid.parallel import initialize

    parallel = initialize()
    model = load_model(
        folder, device=CPU, dtype="bfloat16", parallel=parallel, load_format="dummy", progress=False
    )
    model.kernels = kernel_set._gpu()
    rows, plan = largest_step(block_size=64, max_requests=4, max_tokens=32, max_seq_length=512)
    caches = allocate_caches(
        model.kv_specs,
        model.state_specs,
        num_blocks=int(rows.block_table.max()) + 1,
        block_size=64,
        num_slots=len(plan.prefills) + 1,
        device=CPU,
    )
    runner = ModelRunner(model, caches, rows, 64, CPU, parallel, max_tokens=64, asynchronous=False)
    sizes = [GraphSize(2), GraphSize(2, 16, 2, 4)]
    counts = []
    for _ in range(2):
        with compiling_ahead(CPU):
            runner.execute(plan)
        counts.append(KERNELS.compiled)
        runner.compile_kernels(sizes)
        counts.append(KERNELS.compiled)
    return counts


if __name__ == "__main__":
    pretended = PretendedDriver()
    driver.set_active(pretended)
    KERNELS.count()
    print(json.dumps(steps(sys.argv[1]) if sys.argv[1:] else two_kernels(pretended)))
