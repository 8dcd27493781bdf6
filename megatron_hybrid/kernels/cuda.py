"""CUDA C++ from a file of this package, compiled when it is first called by the NVRTC that torch
brings: for kernels whose threads' registers Triton does not let one choose."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

_log = logging.getLogger(__name__)

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
    if torch.cuda.get_device_capability(device) < (9, 0):
        return False
    try:
        torch.cuda._utils._get_gpu_rtc_library()
    except OSError as error:
        _log.warning("Slower kernels are used, since CUDA's NVRTC is not found: %s", error)
        return False
    return True


@functools.cache
def kernel(file: Path, name: str, shared_memory: int, device: torch.device) -> Kernel:
    """`name`: of a __global__ function, with the arguments of a template. shared_memory: bytes that
    it needs besides what its source declares."""
    if shared_memory:
        # More than 48 KB with what is declared must be asked for, which torch does from 48 KB on.
        shared_memory = max(shared_memory, 48 * 1024)
    with torch.cuda.device(device):
        compiled = torch.cuda._compile_kernel(_source(file), name)
        if shared_memory:
            compiled.set_shared_memory_config(shared_memory)
    return Kernel(compiled, shared_memory)


@functools.cache
def _source(file: Path) -> str:
    return file.read_text(encoding="utf-8")
