"""Host memory for a SymbolicRunner: slow copies, which notice what is read or changed too early."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_hybrid.cache.host_tier import Copy

if TYPE_CHECKING:
    from tests.engine.symbolic import SymbolicRunner


class SymbolicCopy:
    """A copy that is done when it was asked about `polls` times. Until then nobody may read its
    destination, and its pages must not change."""

    def __init__(self, polls: int, finish: Callable[[], None]) -> None:
        self._polls, self._finish = polls, finish

    def is_done(self) -> bool:
        self._polls -= 1
        if self._polls == 0:
            self._finish()
        return self._polls <= 0


class SymbolicCopier:
    """Pages that hold what a SymbolicRunner's caches do."""

    def __init__(
        self, runner: SymbolicRunner, block_size: int, slowest: int, seed: int = 0
    ) -> None:
        """`slowest`: polls that a copy takes, at most."""
        self._runner, self._size, self.slowest = runner, block_size, slowest
        self._random = np.random.default_rng(seed)
        self.pages: dict[int, Any] = {}  # of a block: its KV; of a state: number and what it is

    def _copy(self, finish: Callable[[], None]) -> SymbolicCopy:
        return SymbolicCopy(int(self._random.integers(1, self.slowest + 1)), finish)

    def write(self, copy: Copy) -> SymbolicCopy:
        runner, size = self._runner, self._size
        found: dict[int, Any] = {
            page: [runner._kv.get(block * size + i) for i in range(size)]
            for block, page in zip(copy.blocks, copy.pages, strict=True)
        }
        slot = copy.slot
        state = runner._states.get(slot), runner.roundings.get(slot), runner._logits.get(slot)
        found |= {page: (i, state) for i, page in enumerate(copy.state_pages)}
        for page in found:
            self.pages[page] = None
        return self._copy(lambda: self.pages.update(found))

    def fetch(self, copy: Copy) -> SymbolicCopy:
        runner, size, slot = self._runner, self._size, copy.slot
        for block in copy.blocks:
            for i in range(size):
                runner._kv.pop(block * size + i, None)
        for values in (runner._states, runner._logits) if slot else ():
            values.pop(slot, None)

        def finish() -> None:
            for block, page in zip(copy.blocks, copy.pages, strict=True):
                values = self.pages[page]
                assert isinstance(values, list), "the page has no KV"
                kept = {block * size + i: v for i, v in enumerate(values) if v is not None}
                runner._kv.update(kept)
            if slot:
                pages = [self.pages[page] for page in copy.state_pages]
                assert [page[0] for page in pages] == list(range(len(pages)))
                assert len({page[1] for page in pages}) == 1, "pages of several states"
                state, rounded, logits = pages[0][1]
                if state is not None:
                    runner._states[slot], runner.roundings[slot] = state, rounded
                if logits is not None:
                    runner._logits[slot] = logits

        return self._copy(finish)
