"""Pinned memory that a GPU's kernels read and write where it is.

For what is small: the copy engines, which a copy of torch's would wait for, may be busy with larger
ones for milliseconds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

WORD = 4  # bytes


def as_on_device(host: Tensor) -> Tensor:
    """[32-bit words] of pinned memory, as a tensor of the GPU's. It does not keep the memory, and
    torch's cache of pinned memory does not know of these kernels."""
    return torch.as_tensor(_PinnedWords(host), device="cuda")


def copy_by_kernel(target: Tensor, source: Tensor) -> None:
    """int32, of one size, either of which may be pinned memory."""
    torch.bitwise_or(source, 0, out=target)


class PinnedNumbers:
    """For some arrays at a time: whoever uses it waits until a GPU has read the last ones."""

    def __init__(self) -> None:
        self._host = torch.empty(0, dtype=torch.int32)
        self._there = self._host

    def hold(self, *parts: npt.NDArray[np.integer[Any]]) -> tuple[tuple[Tensor, ...], Tensor]:
        """The arrays [n] as the host sees them, and all of them, one behind the other, as a GPU
        does."""
        sizes = [len(part) for part in parts]
        count = sum(sizes)
        if count > len(self._host):
            self._host = torch.empty(2 * count, dtype=torch.int32, pin_memory=True)
            self._there = as_on_device(self._host)
        host = self._host[:count]
        np.concatenate(parts, out=host.numpy())
        return host.split(sizes), self._there[:count]


class _PinnedWords:
    """Memory in the form in which torch takes others' arrays."""

    def __init__(self, host: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (host.nbytes // WORD,),
            "typestr": "<i4",
            "data": (host.data_ptr(), False),
            "strides": None,
            "version": 3,
        }
