"""Pinned memory that a GPU's kernels read and write where it is.

For what is small: the copy engines, which a copy of torch's would wait for, may be busy with larger
ones for milliseconds.
"""

from __future__ import annotations

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
