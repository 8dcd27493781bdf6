"""CUDA graphs of decode steps: one for each of some batch sizes, replayed for any batch that fits.

At batch 1 a step is a few hundred kernels of a few microseconds: launched one by one from Python
they take several times as long as they run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

# Sizes beyond which the next one is an eighth to a quarter larger: padding costs little.
_SMALL = (1, 2, 4, 8, 16, 24, 32)


class DecodeGraph(NamedTuple):
    num_decodes: int
    graph: torch.cuda.CUDAGraph
    logits: Tensor  # [num_decodes, vocabulary], where every replay leaves them

    def replay(self) -> Tensor:
        self.graph.replay()
        return self.logits


class DecodeGraphs:
    """`prepare(n)` puts a dummy step of n decodes where the graph will read its inputs, and returns
    the function that computes it."""

    def __init__(self, prepare: Callable[[int], Callable[[], Tensor]]) -> None:
        self._prepare = prepare
        self._graphs: list[DecodeGraph] = []
        self._sizes: list[int] = []

    def capture(self, sizes: tuple[int, ...], progress: bool) -> None:
        """The largest first: the smaller ones then fit into its memory, which all share."""
        pool = torch.cuda.graph_pool_handle()
        for size in tqdm(
            sorted(sizes, reverse=True), desc="capturing CUDA graphs", disable=not progress
        ):
            compute = self._prepare(size)
            compute()  # compiles kernels, which can't happen while capturing
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = compute()
            self._graphs.insert(0, DecodeGraph(size, graph, logits))
        self._sizes = [graph.num_decodes for graph in self._graphs]

    def for_decodes(self, num_decodes: int) -> DecodeGraph | None:
        """The smallest graph that has room for so many; None if there is none."""
        at = bisect_left(self._sizes, num_decodes)
        return self._graphs[at] if at < len(self._graphs) else None


def graph_sizes(count: int, max_requests: int) -> tuple[int, ...]:
    """At most `count` batch sizes up to `max_requests`, which is always one of them; -1: as many
    as are of use; 0: none."""
    sizes = [size for size in _SMALL if size < max_requests]
    step = 16
    size = _SMALL[-1] + step
    while size < max_requests:
        sizes.append(size)
        step = max(step, 8 * (size // 64))
        size += step
    sizes.append(max_requests)
    if count < 0 or count >= len(sizes):
        return tuple(sizes)
    if count == 0:
        return ()
    # evenly over the list, which is dense where the steps are small
    kept = {sizes[-1 - (i * (len(sizes) - 1)) // max(count - 1, 1)] for i in range(count)}
    return tuple(sorted(kept))
