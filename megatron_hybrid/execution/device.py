"""The way between host and device, without waiting for the device; and what says that it failed."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_hybrid.errors import DeviceLostError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_ALIGNMENT = 16  # bytes
_WORD = 4
_TORCH_TYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "int64": torch.int64,
    "int32": torch.int32,
}


def upload(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """A copy on the device."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cuda":  # from pageable memory the copy would wait for the device
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def upload_together(
    values: Sequence[npt.NDArray[np.generic]], device: torch.device
) -> list[Tensor]:
    """Copies of arrays [n] of any types, which go to the device as one; each begins at a multiple
    of 16 bytes, as kernels want it."""
    sizes = [-(-part.nbytes // _ALIGNMENT) * _ALIGNMENT for part in values]
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    numbers, start = host.numpy(), 0
    for part, size in zip(values, sizes, strict=True):
        numbers[start : start + part.nbytes].view(part.dtype)[:] = part
        start += size
    parts = host.to(device, non_blocking=True).split_with_sizes(sizes)
    return [
        part.view(_TORCH_TYPES[own.dtype.name])[: len(own)]
        for part, own in zip(parts, values, strict=True)
    ]


# Memory of downloads, which kernels may still write to if nobody waited for them: of more than are
# ever under way.
_downloads: deque[Tensor] = deque(maxlen=64)


def download(values: Tensor) -> Tensor:
    """On the host once the step is done."""
    if values.device.type == "cpu":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    if not values.numel() or values.nbytes % _WORD or not values.is_contiguous():
        return host.copy_(values, non_blocking=True)
    _downloads.append(host)
    copy_by_kernel(as_on_device(host), values.view(-1).view(torch.int32))
    return host


def as_on_device(host: Tensor) -> Tensor:
    """[32-bit words] of pinned memory, as a tensor of the GPU's, whose kernels read and write it
    where it is. It does not keep the memory, and torch's cache of pinned memory does not know of
    these kernels."""
    return torch.as_tensor(_PinnedWords(host), device="cuda")


def copy_by_kernel(target: Tensor, source: Tensor) -> None:
    """int32, of one size, either of which may be pinned memory. The copy engines, which a copy of
    torch's would wait for, may be busy with larger ones for milliseconds."""
    torch.bitwise_or(source, 0, out=target)


class _PinnedWords:
    """Memory in the form in which torch takes others' arrays."""

    def __init__(self, host: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (host.nbytes // _WORD,),
            "typestr": "<i4",
            "data": (host.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


def record(event: torch.cuda.Event, device: torch.device) -> None:
    """The event is behind all that was put on the current stream of a device. torch's own way to
    ask for that stream, by names and through several functions, takes longer than all else."""
    event.record(_stream(*torch._C._cuda_getCurrentStream(device.index)))


@functools.cache
def _stream(stream_id: int, device_index: int, device_type: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(
        stream_id=stream_id, device_index=device_index, device_type=device_type
    )


def device_errors(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorates what may find that the device failed: raises DeviceLostError."""

    @functools.wraps(function)
    def guarded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except torch.AcceleratorError as error:
            raise DeviceLostError(f"The device failed: {error}") from error

    return guarded
