"""Triton's kernels, compiled side by side before they are needed.

A kernel is compiled when it is first launched, and the launch waits for that: with nothing in
Triton's cache the first steps take minutes on one core. Here a step is gone through without
launching any of its kernels; threads compile them meanwhile, which most of the compiler allows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

MOST_THREADS = 32


@contextmanager
def compiling_ahead(device: torch.device) -> Iterator[None]:
    """Kernels that are launched inside are compiled, by the end of it, and not launched. What they
    would write is zeros, where memory was allocated for it inside: torch's own operations, which do
    run, find valid indices there."""
    import triton  # of GPUs alone
    from triton.runtime.jit import JITFunction

    from megatron_hybrid.kernels.launching import launched_by_triton

    launched: list[Any] = []
    usual = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = usual(self, *args, grid=grid, warmup=True, **options)
        launched.append(kernel)
        return kernel

    index = torch.cuda.current_device() if device.type == "cuda" else None

    def begin() -> None:
        if index is not None:
            torch.cuda.set_device(index)

    with ThreadPoolExecutor(_threads(), "compile", initializer=begin) as pool:
        # What can't be compiled says so when it is launched.
        with launched_by_triton(), triton.AsyncCompileMode(pool, ignore_errors=True), _Zeros():
            JITFunction.run = run  # Triton has no other way to ask for all launches at once
            try:
                yield
            finally:
                JITFunction.run = usual
        kernels = list({id(kernel): kernel for kernel in launched}.values())
        for kernel in kernels:
            pool.submit(_compile_launcher, kernel)
    for kernel in kernels:  # by one thread
        with suppress(Exception):  # as above
            _ = kernel.run  # brings it to the device, too


def _compile_launcher(kernel: Any) -> None:
    """Have Triton's cache hold what launches a compiled kernel, which is compiled, too.

    It is not kept: Triton gives all these modules one name, and while other threads import theirs,
    Python may put another kernel's function into this one's. That is called with arguments that it
    is not for, or worse, with such as it takes for its own.
    """
    from triton.runtime import driver

    with suppress(Exception):  # as above
        driver.active.launcher_cls(kernel.src, kernel.metadata)


class _Zeros(TorchFunctionMode):
    """Memory is allocated as zeros."""

    _EMPTY = (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        return found.zero_() if function in self._EMPTY else found


def _threads() -> int:
    """A share of the machine's cores for each of its processes that do the same."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MOST_THREADS, (os.cpu_count() or 1) // processes))
