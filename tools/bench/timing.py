"""How long a kernel takes on the device, and how long it could take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

Call = Callable[[], Any]

# Calls rotate among sets of inputs of this many bytes together, so that none finds its own in the
# L2 cache (60 MB on an H200).
ROTATED_BYTES = 256 * 2**20
MOST_SETS = 32
_SECONDS = 0.04  # of replays that a median is taken of
_LEAST, _MOST = 5, 50


def number_of_sets(bytes_per_call: float) -> int:
    return int(min(max(ROTATED_BYTES // max(bytes_per_call, 1) + 1, 2), MOST_SETS))


class Timing(NamedTuple):
    seconds: float  # of one call, the median
    captured: bool  # in a CUDA graph; otherwise the time to launch it may be in it


def time_calls(calls: Sequence[Call], device: torch.device) -> Timing:
    """Seconds of one call, of several that do the same on different inputs.

    On a GPU all of them are captured in one CUDA graph, which is replayed; what can't be captured
    is launched one by one.
    """
    for call in (*calls, *calls[:1]):  # compiles what has to be compiled
        call()
    if device.type != "cuda":
        return Timing(_median(lambda: _host_seconds(calls)) / len(calls), False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except RuntimeError:  # it waits for the device, or allocates outside of torch
        torch.cuda.synchronize()
        return Timing(_median(lambda: _device_seconds(calls)) / len(calls), False)
    graph.replay()
    return Timing(_median(lambda: _device_seconds([graph.replay])) / len(calls), True)


def _median(once: Callable[[], float]) -> float:
    times: list[float] = []
    while len(times) < _LEAST or (sum(times) < _SECONDS and len(times) < _MOST):
        times.append(once())
    return statistics.median(times)


def _host_seconds(calls: Sequence[Call]) -> float:
    begin = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - begin


def _device_seconds(calls: Sequence[Call]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for call in calls:
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


class Ceilings(NamedTuple):
    """What the device can do at most, measured by torch's own copy and matrix product."""

    bytes_per_second: float  # read and written together
    flops: float  # bfloat16 on a GPU

    @classmethod
    def measure(cls, device: torch.device) -> Ceilings:
        on_gpu = device.type == "cuda"
        size, width = (2**31, 8192) if on_gpu else (2**22, 256)
        dtype = torch.bfloat16 if on_gpu else torch.float32
        source = torch.randn(size // dtype.itemsize, device=device).to(dtype)
        target = torch.empty_like(source)
        # not copy_: captured in a graph it is a transfer, which is slower than a kernel
        copy = time_calls([lambda: torch.neg(source, out=target)], device).seconds
        a, b = (torch.randn((width, width), device=device).to(dtype) for _ in range(2))
        product = time_calls([lambda: a @ b], device).seconds
        return cls(2 * size / copy, 2 * width**3 / product)

    def floor(self, num_bytes: float, flops: float) -> float:
        """Seconds that moving so many bytes, or computing so much, takes at least."""
        return max(num_bytes / self.bytes_per_second, flops / self.flops)
