"""Many copies between a GPU and pinned memory in one call, by the copy engines alone.

CUDA's cudaMemcpy3DBatchAsync, which torch does not offer: nothing is gathered on the GPU first, so
that steps lose only the bandwidth of the copies themselves. Each copy is of rows at a distance from
each other: the fewer copies there are, the less is delayed what others launch meanwhile.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Numbers = npt.NDArray[np.uint64]  # addresses, and sizes in bytes

AT_ONCE = 512  # copies that one call enqueues
_RUNTIME = 13  # whose signature this is
_POINTER = 1  # cudaMemcpyOperandTypePointer
_IN_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream
_PLACE = np.dtype(  # cudaMemcpy3DOperand
    [("type", "i4"), ("", "i4"), ("address", "u8"), ("pitch", "u8"), ("rows", "u8"), ("hint", "i8")]
)
COPY = np.dtype(  # cudaMemcpy3DBatchOp
    [
        ("source", _PLACE), ("to", _PLACE), ("width", "u8"), ("rows", "u8"), ("layers", "u8"),
        ("order", "i4"), ("flags", "u4"),
    ]
)  # fmt: skip
Copies = npt.NDArray[np.void]  # of COPY


class Place(NamedTuple):
    """Where rows are, of each copy."""

    addresses: Numbers  # [n] of the first ones
    pitches: Numbers  # [n] from one row to the next


def copies_of(
    on_gpu: Place, in_pages: Place, widths: Numbers, rows: Numbers | int = 1, *, to_host: bool
) -> Copies:
    """[n] each; a width is that of one row."""
    found = np.zeros(len(widths), dtype=COPY)
    source, to = (on_gpu, in_pages) if to_host else (in_pages, on_gpu)
    for name, place in (("source", source), ("to", to)):
        operand = found[name]
        operand["type"], operand["rows"] = _POINTER, rows
        operand["address"], operand["pitch"] = place
    found["width"], found["rows"], found["layers"] = widths, rows, 1
    found["order"] = _IN_STREAM_ORDER
    return found


def joined(copies: Sequence[Copies]) -> Copies:
    """One behind the other. (numpy takes them apart into their fields for that.)"""
    return np.concatenate([some.view(np.uint8) for some in copies]).view(COPY)


class BatchCopies:
    """Raises OSError or AttributeError where CUDA's runtime has no such function."""

    def __init__(self) -> None:
        if int((torch.version.cuda or "0").split(".")[0]) != _RUNTIME:
            raise OSError(f"torch is built for CUDA {torch.version.cuda}, not {_RUNTIME}.")
        self._copy = ctypes.CDLL(f"libcudart.so.{_RUNTIME}").cudaMemcpy3DBatchAsync
        self._copy.restype = ctypes.c_int
        pointer = ctypes.c_void_p
        self._copy.argtypes = ctypes.c_size_t, pointer, ctypes.c_ulonglong, pointer

    def enqueue(self, copies: Copies) -> Iterator[None]:
        """In torch's current stream, which must not be the default one; some in each step of it, in
        the stream of then. Raises RuntimeError."""
        for first in range(0, len(copies), AT_ONCE):
            some = copies[first : first + AT_ONCE]
            stream = torch.cuda.current_stream().cuda_stream
            code = self._copy(len(some), some.ctypes.data, 0, stream)
            if code:
                raise RuntimeError(
                    f"{len(some)} copies could not be enqueued: CUDA's error {code}."
                )
            yield


def batch_copies() -> BatchCopies | None:
    """None where there are none."""
    try:
        return BatchCopies()
    except (OSError, AttributeError):
        return None
