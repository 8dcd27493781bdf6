"""Arena: tensors whose memory can be given back and taken again, at the same addresses.

What holds an address stays valid meanwhile: tensors, views of them, CUDA graphs. torch_memory_saver
does that for all that a process allocates, by a hook that has to be preloaded, in a binary for each
version of CUDA, and ends the process where memory does not come back; an engine has two known
groups of tensors to give back, for which the driver's own calls are enough (driver.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

ALIGNMENT = 512  # bytes, as torch's own allocator has it
# Copied to the host at a time. A power of 2: torch's pinned memory comes in no other sizes.
PIECE_BYTES = 256 * 2**20


class Pages(Protocol):
    """Addresses on one device, of which the first ones have memory, unless it was dropped."""

    device: torch.device

    @property
    def nbytes(self) -> int:
        """Of the first ones."""

    def grow(self, nbytes: int) -> None:
        """Memory for the first `nbytes` addresses, or some more. Raises MemoryError."""

    def drop(self) -> None:
        """Give all memory back, when the device is done with it. The addresses stay ours."""

    def restore(self) -> None:
        """Memory for them again, all zeros. Raises MemoryError, and has none then."""

    def view(self, start: int, stop: int) -> Tensor:
        """[stop - start] uint8, of addresses that have memory; keeps the pages."""


class Arena:
    """Of one device. Tensors are cut from it one behind the other, and never given back alone."""

    def __init__(self, pages: Pages) -> None:
        self.device = pages.device
        self.is_released = False
        self._pages = pages
        self._used = 0
        self._kept: list[Tensor] | None = None  # on the host, what was in it

    @property
    def nbytes(self) -> int:
        """That it takes of the device, unless it is released."""
        return self._pages.nbytes

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor with undefined contents; on a CPU they are zeros. Raises MemoryError."""
        assert not self.is_released, "nothing can be put where there is no memory"
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        stop = self._used + size
        self._pages.grow(stop)
        found = self._pages.view(self._used, stop)
        self._used = -(-stop // ALIGNMENT) * ALIGNMENT
        return found.view(dtype).view(tuple(shape))

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The same, zeroed. On a CPU it takes memory only where something is written."""
        found = self.empty(shape, dtype)
        return found if self.device.type == "cpu" else found.zero_()

    def release(self, *, keep: bool) -> None:
        """Give the memory back. keep: what is in it is copied to the host, and is there again after
        `restore`; else that finds zeros. Released already: nothing happens."""
        if self.is_released:
            return
        if keep:
            self._kept = [self._on_host(piece) for piece in self._pieces()]
        self._pages.drop()
        self.is_released = True

    def restore(self) -> None:
        """Take memory again, at the same addresses; what was kept is copied back. There already:
        nothing happens. Raises MemoryError, and leaves it released: it can be tried again."""
        if not self.is_released:
            return
        self._pages.restore()
        self.is_released = False
        if self._kept is None:
            return
        for piece, kept in zip(self._pieces(), self._kept, strict=True):
            piece.copy_(kept[: len(piece)], non_blocking=True)
        self._kept = None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch._C._host_emptyCache()  # torch would keep the pinned memory for its next use

    def _pieces(self) -> Iterator[Tensor]:
        for start in range(0, self._used, PIECE_BYTES):
            yield self._pages.view(start, min(start + PIECE_BYTES, self._used))

    def _on_host(self, piece: Tensor) -> Tensor:
        """There when the device is done with what it has to do."""
        pinned = self.device.type == "cuda"
        return torch.empty(len(piece), dtype=torch.uint8, pin_memory=pinned).copy_(
            piece, non_blocking=True
        )
