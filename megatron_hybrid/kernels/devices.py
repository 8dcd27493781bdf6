"""What launches of Triton kernels ask of the device and of their inputs."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 where Triton's interpreter runs."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def aligned(rows: Tensor) -> Tensor:
    """Rows that begin at multiples of 16 bytes, and that Triton knows to: of a stride it knows only
    whether 16 divides it. For others Triton 3.6 compiles wrong loads. A model's rows pass."""
    if rows.data_ptr() % 16 or rows.stride(0) % 16:
        return rows.contiguous()
    return rows
