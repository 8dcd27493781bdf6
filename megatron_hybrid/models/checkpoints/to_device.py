"""Weights of files onto a GPU by several threads, each through pinned memory of its own, from which
the device fetches them: from memory that is not pinned a copy takes several times as long.

file -> page cache -> pinned memory, in pieces -> device -> in place
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

THREADS = 8
PIECE_BYTES = 16 * 2**20

T = TypeVar("T")
Upload = Callable[[Tensor], Tensor]


class Lane:
    """One thread's way to a device: two pieces of pinned memory, of which one is filled while the
    other one is fetched."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"  # else there is nothing to wait for
        self._device = device
        self.stream = torch.cuda.Stream(device) if on_gpu else None
        self._pieces = [
            torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)
        ]
        self._fetched = [torch.cuda.Event() if on_gpu else None for _ in range(2)]
        self._next = 0

    def upload(self, values: Tensor) -> Tensor:
        """The same values on the device, once the lane's stream has come there."""
        if values.device.type != "cpu" or values.nbytes == 0:
            return values.to(self._device)
        found = torch.empty(values.shape, dtype=values.dtype, device=self._device)
        if values.dim() == 0:
            return found.copy_(values)
        for source, target in zip(_pieces(values), _pieces(found), strict=True):
            piece, fetched = self._pieces[self._next], self._fetched[self._next]
            self._next = 1 - self._next
            if fetched is not None:
                fetched.synchronize()
            pinned = piece[: source.nbytes].view(source.dtype).view(source.shape)
            pinned.copy_(source)
            target.copy_(pinned, non_blocking=True)
            if fetched is not None:
                fetched.record()
        return found


def _pieces(values: Tensor) -> Iterator[Tensor]:
    """Views of so much as a piece has room for, in order."""
    row_bytes = values[0].nbytes
    if row_bytes > PIECE_BYTES:
        for row in values:
            yield from _pieces(row)
    else:
        yield from values.split(PIECE_BYTES // row_bytes)


def on_lanes(
    put: Callable[[T, Upload], object], items: Iterable[T], device: torch.device
) -> Iterator[None]:
    """Have `put(item, upload)` of every item called in one of several threads; one yield for each
    that is done. Work of the device is done at the end. Raises what the first one that fails
    does."""
    own = threading.local()
    on_gpu = device.type == "cuda"

    def begin() -> None:
        torch.set_num_threads(1)  # of this thread's copies
        own.lane = Lane(device)

    def run(item: T) -> None:
        with torch.cuda.stream(own.lane.stream):
            put(item, own.lane.upload)

    if on_gpu:
        torch.cuda.synchronize(device)  # what is there may be written over
    count, usual = max(1, min(THREADS, os.cpu_count() or 1)), torch.get_num_threads()
    with ThreadPoolExecutor(count, "weights", initializer=begin) as pool:
        jobs = [pool.submit(run, item) for item in items]
        try:
            for job in jobs:
                yield job.result()
        finally:
            for job in jobs:
                job.cancel()
            torch.set_num_threads(usual)  # of threads to come
    if on_gpu:
        torch.cuda.synchronize(device)
