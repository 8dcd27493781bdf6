"""RowTable: the running requests as dense host arrays, one row each.

A decode step touches no per-request Python object: it reads and writes these arrays.
"""

from __future__ import annotations

import heapq

import numpy as np


class RowTable:
    """`max_requests` rows. A row's figures are valid while a request holds it."""

    def __init__(self, max_requests: int, max_blocks: int) -> None:
        n = max_requests
        self.decoding = np.zeros(n, dtype=bool)  # its prompt is computed; one token a step
        self.position = np.zeros(n, dtype=np.int64)  # tokens computed; the next one's position
        self.last_token = np.zeros(n, dtype=np.int64)  # the input of the next decode
        self.generated = np.zeros(n, dtype=np.int64)
        self.max_tokens = np.zeros(n, dtype=np.int64)
        self.read_slot = np.zeros(n, dtype=np.int64)
        self.write_slot = np.zeros(n, dtype=np.int64)
        self.block_table = np.zeros((n, max(max_blocks, 1)), dtype=np.int64)
        self.temperature = np.zeros(n, dtype=np.float32)
        self.top_k = np.zeros(n, dtype=np.int64)
        self.top_p = np.ones(n, dtype=np.float32)
        self.min_p = np.zeros(n, dtype=np.float32)
        self.seed = np.zeros(n, dtype=np.uint64)
        self.logprobs = np.full(n, -1, dtype=np.int64)  # -1: none wanted
        # the lowest is taken first, as with live slots: a batch's rows and slots keep one order
        self._free = list(range(n))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free row; there must be one."""
        return heapq.heappop(self._free)

    def give_back(self, row: int) -> None:
        self.decoding[row] = False
        heapq.heappush(self._free, row)

    def set_blocks(self, row: int, blocks: list[int]) -> None:
        self.block_table[row, : len(blocks)] = blocks
