"""WindowRows: the rows of running requests have the blocks of sliding windows that the cache gives
them; where no layer has such a window there is nothing to do."""

from __future__ import annotations

import numpy as np

from megatron_hybrid.cache.hybrid_cache import HybridCache
from megatron_hybrid.engine.tracked_request import Running
from megatron_hybrid.execution.rows import RowTable


class WindowRows:
    """Of one engine."""

    def __init__(self, rows: RowTable, cache: HybridCache) -> None:
        self._rows, self._windows = rows, cache.windows
        self._geometry, self._has_window = cache.geometry, cache.geometry.has_window
        self._running: dict[int, Running] = {}  # by row

    def fill_row(self, running: Running) -> None:
        """A request is admitted, with the blocks that are kept with the state that it reads."""
        if self._has_window:
            self._running[running.row] = running
            self._set(running)

    def give_back(self, running: Running) -> None:
        """It has left its row."""
        self._running.pop(running.row, None)

    def add_block(self, running: Running) -> None:
        """A place for as many tokens as the row's other blocks hold; without those, for a block
        more."""
        rows, row = self._rows, running.row
        if self._has_window:
            blocks = int(rows.num_blocks[row]) + (not self._geometry.has_attention)
            self.extend(running, blocks * self._geometry.block_size)

    def extend(self, running: Running, end: int) -> None:
        """Places for the tokens before `end`."""
        if self._has_window and self._windows.extend_to(running.lease, end):
            self._set(running)

    def move(self) -> None:
        """A step was launched: give back what nobody sees from the rows' positions on."""
        if not self._has_window:
            return
        rows = np.fromiter(self._running, dtype=np.int64)
        position = self._rows.position[rows]
        first = self._geometry.first_in_window(position)
        moved = first > self._rows.window_first[rows]
        for row, at in zip(rows[moved].tolist(), position[moved].tolist(), strict=True):
            if self._windows.move_on(self._running[row].lease, at):
                self._set(self._running[row])

    def _set(self, running: Running) -> None:
        table, rows = running.lease.window, self._rows
        assert table is not None
        rows.set_window(running.row, table.first, table.blocks)
        if not self._geometry.has_attention:
            rows.num_blocks[running.row] = table.end
