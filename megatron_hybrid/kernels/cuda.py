"""CUDA C++ from a file of this package, compiled when it is first called by the NVRTC that torch
brings: for kernels whose threads' registers Triton does not let one choose."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Bytes of shared memory of a block of threads on GPUs from Hopper on.
SHARED_MEMORY = 227 * 1024


class Kernel(NamedTuple):
    """A compiled kernel."""

    launcher: Any
    shared_memory: int  # bytes that a launch asks for

    def launch(self, grid: int, threads: int, *arguments: Tensor | int) -> None:
        """`grid` blocks of `threads` on the present stream; integers are 32 bits wide."""
        self.launcher((grid, 1, 1), (threads, 1, 1), list(arguments), shared_mem=self.shared_memory)


@functools.cache
def is_available(device: torch.device) -> bool:
    """Whether such kernels run there: on CUDA from Hopper on."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def kernel(file: Path, name: str, shared_memory: int, device: torch.device) -> Kernel:
    """`name`: of a __global__ function, with the arguments of a template."""
    with torch.cuda.device(device):
        compiled = torch.cuda._compile_kernel(_source(file), name)
        if shared_memory >= 48 * 1024:
            compiled.set_shared_memory_config(shared_memory)
    return Kernel(compiled, shared_memory)


@functools.cache
def _source(file: Path) -> str:
    return file.read_text(encoding="utf-8")
