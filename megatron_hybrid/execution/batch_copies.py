"""Many copies between a GPU and pinned memory in one call, by the copy engines alone.

CUDA's cudaMemcpyBatchAsync, which torch does not offer: nothing is gathered on the GPU first, so
that steps lose only the bandwidth of the copies themselves.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch

Addresses = npt.NDArray[np.uint64]

_RUNTIME = 13  # whose signature this is
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

    def enqueue(self, to: Addresses, source: Addresses, sizes: Addresses) -> None:
        """In torch's current stream, which must not be the default one. [n] each; sizes in bytes.
        Raises RuntimeError."""
        attributes, first = _Attributes(_IN_STREAM_ORDER), ctypes.c_size_t(0)
        lists = [np.ascontiguousarray(values, dtype=np.uint64) for values in (to, source, sizes)]
        code = self._copy(
            *(values.ctypes.data_as(ctypes.c_void_p) for values in lists),
            ctypes.c_size_t(len(sizes)),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )
        if code:
            raise RuntimeError(f"{len(sizes)} copies could not be enqueued: CUDA's error {code}.")


def batch_copies() -> BatchCopies | None:
    """None where there are none."""
    try:
        return BatchCopies()
    except (OSError, AttributeError):
        return None
