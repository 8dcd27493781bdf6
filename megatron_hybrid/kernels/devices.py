"""What launches of Triton kernels ask of the device and of their inputs."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import PrefillSegments
from megatron_hybrid.kernels.protocols import ScanTokens


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 where Triton's interpreter runs."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def stages_that_fit(most: int, step_bytes: int, device: torch.device) -> int:
    """Of a loop that loads so much a step into a program's shared memory: `most`, or fewer on GPUs
    with less of it than data centres'."""
    if device.type != "cuda":
        return most
    from triton.runtime import driver  # of GPUs alone

    index = torch.cuda.current_device() if device.index is None else device.index
    shared = driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return max(1, min(most, int(shared) // step_bytes))


def aligned(rows: Tensor) -> Tensor:
    """Rows that begin at multiples of 16 bytes, and that Triton knows to: of a stride it knows only
    whether 16 divides it. For others Triton 3.6 compiles wrong loads. A model's rows pass."""
    if rows.data_ptr() % 16 or rows.stride(0) % 16:
        return rows.contiguous()
    return rows


class ChunkedSegments(NamedTuple):
    """The plan of a scan whose kernels find their tiles themselves, on the device."""

    segments: PrefillSegments
    kernel_chunk: int


def row_strides(*tensors: Tensor) -> tuple[int, ...]:
    """The strides of their first dimensions, in elements."""
    return tuple(tensor.stride(0) for tensor in tensors)


def checked_output(tokens: ScanTokens, state: Tensor, out: Tensor | None) -> Tensor:
    """`out`, or a new tensor like the tokens' output. Kernels take only the stride of the rows:
    raises ValueError for a tensor that has others."""
    like = tokens.like
    y = torch.empty(like.shape, dtype=like.dtype, device=like.device) if out is None else out
    for name, tensor in zip((*tokens._fields, "state", "out"), (*tokens, state, y), strict=True):
        # A single row tells nothing about its strides; then only the inner ones are looked at.
        if not _is_dense(tensor.shape[1:], tensor.stride()[1:]):
            raise ValueError(
                f"{name} has strides {tuple(tensor.stride())} for the shape {tuple(tensor.shape)}; "
                "all but the first dimension must be contiguous."
            )
    return y


@functools.lru_cache(maxsize=4096)
def _is_dense(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """Whether entries of this shape lie side by side. Layers have few shapes, and a view that torch
    is asked about takes the host longer than to find one of them."""
    side_by_side = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != side_by_side:
            return 0 in shape
        side_by_side *= size
    return True
