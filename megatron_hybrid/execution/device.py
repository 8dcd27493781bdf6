"""The way between host and device, without waiting for the device; and what says that it failed."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_hybrid.errors import DeviceLostError
from megatron_hybrid.kernels.pinned import WORD, as_on_device, copy_by_kernel

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_ALIGNMENT = 16  # bytes
# Of the pinned memory that uploads take in turn, in words. Longer ones have memory of their own.
_PARTS, _PART = 4, 2**16
_LONG = 2**14


def upload(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """A copy on the device."""
    if not values.size:
        return torch.empty(values.shape, dtype=_torch_type(values.dtype), device=device)
    if device.type != "cuda":
        return torch.tensor(np.ascontiguousarray(values))
    words = -(-values.nbytes // WORD)
    if words > _LONG:
        host = torch.from_numpy(np.ascontiguousarray(values))
        # From pageable memory the copy would wait for the device.
        return host.pin_memory().to(device, non_blocking=True)
    numbers, there = _uploads(device).take(words)
    flat = np.ascontiguousarray(values).reshape(-1)
    numbers.view(np.uint8)[: values.nbytes] = flat.view(np.uint8)
    target = torch.empty(words, dtype=torch.int32, device=device)
    copy_by_kernel(target, there)
    found = target.view(torch.uint8)[: values.nbytes]
    return found.view(_torch_type(values.dtype)).view(values.shape)


def upload_together(
    values: Sequence[npt.NDArray[np.generic]], device: torch.device
) -> list[Tensor]:
    """Copies of arrays [n] of any types, which go to the device as one; each begins at a multiple
    of 16 bytes, as kernels want it."""
    sizes = [-(-part.nbytes // _ALIGNMENT) * _ALIGNMENT for part in values]
    numbers, start = np.empty(sum(sizes), dtype=np.uint8), 0
    for part, size in zip(values, sizes, strict=True):
        numbers[start : start + part.nbytes].view(part.dtype)[:] = part
        start += size
    parts = upload(numbers, device).split_with_sizes(sizes)
    return [
        part.view(_torch_type(own.dtype))[: len(own)]
        for part, own in zip(parts, values, strict=True)
    ]


@functools.cache
def _torch_type(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


class _Uploads:
    """Pinned memory of what one thread puts on one stream of a GPU, whose kernels read it where it
    is. A part is written to again when all that was put there has been read."""

    def __init__(self, device: torch.device) -> None:
        host = torch.empty(_PARTS * _PART, dtype=torch.int32, pin_memory=True)
        self._host, self._numbers, self._there = host, host.numpy(), as_on_device(host)
        self._device = device
        self._read = [torch.cuda.Event(blocking=True) for _ in range(_PARTS)]
        self._part = self._used = 0

    def take(self, words: int) -> tuple[npt.NDArray[np.int32], Tensor]:
        """The next words, for the host and for the GPU."""
        if self._used + words > _PART:
            record(self._read[self._part], self._device)
            self._part, self._used = (self._part + 1) % _PARTS, 0
            self._read[self._part].synchronize()
        first = self._part * _PART + self._used
        self._used += -(-words // 2) * 2  # so that each begins where a number of 64 bits may
        return self._numbers[first : first + words], self._there[first : first + words]


def _uploads(device: torch.device) -> _Uploads:
    stream = torch._C._cuda_getCurrentStream(device.index)
    return _uploads_of(threading.get_ident(), stream, device)


@functools.cache  # for good: kernels may read there when their thread is gone
def _uploads_of(thread: int, stream: tuple[int, int, int], device: torch.device) -> _Uploads:
    return _Uploads(device)


# Memory of downloads, which kernels may still write to if nobody waited for them: of more than are
# ever under way.
_downloads: deque[Tensor] = deque(maxlen=64)


def download(values: Tensor) -> Tensor:
    """On the host once the step is done."""
    if values.device.type == "cpu":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    if not values.numel() or values.nbytes % WORD or not values.is_contiguous():
        return host.copy_(values, non_blocking=True)
    _downloads.append(host)
    copy_by_kernel(as_on_device(host), values.view(-1).view(torch.int32))
    return host


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
