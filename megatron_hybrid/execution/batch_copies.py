"""Many copies between a GPU and pinned memory in one call, by the copy engines alone.

CUDA's cudaMemcpyBatchAsync, which torch does not offer: nothing is gathered on the GPU first, so
that steps lose only the bandwidth of the copies themselves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

Addresses = npt.NDArray[np.uint64]

_RUNTIME = 13  # whose signature this is
_ADDRESS_BYTES = 8
_IN_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class BatchCopies:
    """Raises OSError or AttributeError where CUDA's runtime has no such function."""

    def __init__(self) -> None:
        if int((torch.version.cuda or "0").split(".")[0]) != _RUNTIME:
            raise OSError(f"torch is built for CUDA {torch.version.cuda}, not {_RUNTIME}.")
        self._copy = ctypes.CDLL(f"libcudart.so.{_RUNTIME}").cudaMemcpyBatchAsync
        self._copy.restype = ctypes.c_int
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._copy.argtypes = *[pointer] * 3, size, pointer, pointer, size, pointer
        self._attributes, self._first = _Attributes(_IN_STREAM_ORDER), ctypes.c_size_t(0)

    def enqueue(
        self, to: Addresses, source: Addresses, sizes: Addresses, ends: Sequence[int]
    ) -> Iterator[None]:
        """In torch's current stream, which must not be the default one; each step of it those up to
        the next end, in the stream of then. [n] each; sizes in bytes. Raises RuntimeError."""
        lists = [np.ascontiguousarray(values, dtype=np.uint64) for values in (to, source, sizes)]
        # Little but the call itself: who launches steps wants Python's lock, too.
        to_list, source_list, size_list = (values.ctypes.data for values in lists)
        attributes, nothing = ctypes.addressof(self._attributes), ctypes.addressof(self._first)
        for first, end in pairwise([0, *ends]):
            number, at = end - first, _ADDRESS_BYTES * first
            where = to_list + at, source_list + at, size_list + at
            stream = torch.cuda.current_stream().cuda_stream
            code = self._copy(*where, number, attributes, nothing, 1, stream)
            if code:
                raise RuntimeError(f"{number} copies could not be enqueued: CUDA's error {code}.")
            yield


def batch_copies() -> BatchCopies | None:
    """None where there are none."""
    try:
        return BatchCopies()
    except (OSError, AttributeError):
        return None
