"""Host memory for a SymbolicRunner: slow copies, which notice what is read or changed too early."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_hybrid.cache.host_tier import Copy

if TYPE_CHECKING:
    from tests.engine.symbolic import SymbolicRunner


class SymbolicMemory(dict[int, int]):
    """What steps read and write, by place; and by which launch each was last used and written."""

    def __init__(self, values: dict[int, int], launches: Callable[[], int]) -> None:
        """launches: those before the present one."""
        super().__init__(values)
        self._launches = launches
        self.last_used: dict[int, int] = {}
        self._written: dict[int, tuple[int, int | None]] = {}  # when, and what was there before

    def get(self, place: int, default: Any = None) -> Any:
        self.last_used[place] = self._launches()
        return super().get(place, default)

    def read(self, places: range) -> list[int | None]:
        """What is at each of them."""
        self.last_used.update(dict.fromkeys(places, self._launches()))
        return list(map(super().get, places))

    def __getitem__(self, place: int) -> int:
        self.last_used[place] = self._launches()
        return super().__getitem__(place)

    def __setitem__(self, place: int, value: int) -> None:
        now = self.last_used[place] = self._launches()
        self._written[place] = now, super().get(place)
        super().__setitem__(place, value)

    def update(self, values: Iterable[tuple[int, int]]) -> None:  # type: ignore[override]
        for place, value in values:
            self[place] = value

    def put(self, place: int, value: int | None) -> None:
        """By a copy, not by a launch. None: nothing is there."""
        self._written.pop(place, None)
        super().pop(place, None)
        if value is not None:
            super().__setitem__(place, value)

    def behind(self, place: int, launches: int) -> int | None:
        """What so many launches leave there, when the others may not have begun."""
        when, before = self._written.get(place, (-1, None))
        return super().get(place) if when < launches else before


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
        self._begun: deque[tuple[int, int]] = deque(maxlen=2)  # steps, and launches before each

    def _copy(self, finish: Callable[[], None]) -> SymbolicCopy:
        return SymbolicCopy(int(self._random.integers(1, self.slowest + 1)), finish)

    def begin_step(self, step: int) -> None:
        self._begun.append((step, self._runner.launches))

    def _launched(self, copy: Copy) -> int:
        """Those that a copy waits for; it may come ahead of all others."""
        behind = (launches for step, launches in self._begun if step > copy.touched)
        return next(behind, self._runner.launches)

    def write(self, copy: Copy) -> SymbolicCopy:
        runner, size, launched = self._runner, self._size, self._launched(copy)
        found: dict[int, Any] = {
            page: [runner._kv.behind(block * size + i, launched) for i in range(size)]
            for block, page in zip(copy.blocks, copy.pages, strict=True)
        }
        slot = copy.slot
        states, logits = (m.behind(slot, launched) for m in (runner._states, runner._logits))
        state = states, runner.roundings.get(slot), logits
        found |= {page: (i, state) for i, page in enumerate(copy.state_pages)}
        for page in found:
            self.pages[page] = None
        return self._copy(lambda: self.pages.update(found))

    def fetch(self, copy: Copy) -> SymbolicCopy:
        runner, size, slot, launched = self._runner, self._size, copy.slot, self._launched(copy)
        kv = [block * size + i for block in copy.blocks for i in range(size)]
        states = [slot] if slot else []
        for memory, places in (runner._kv, kv), (runner._states, states), (runner._logits, states):
            for place in places:
                in_use = memory.last_used.get(place, -1) >= launched
                assert not in_use, "it is fetched to where a step that it does not wait for is"
                memory.put(place, None)

        def finish() -> None:
            for block, page in zip(copy.blocks, copy.pages, strict=True):
                values = self.pages[page]
                assert isinstance(values, list), "the page has no KV"
                for i, value in enumerate(values):
                    runner._kv.put(block * size + i, value)
            if slot:
                pages = [self.pages[page] for page in copy.state_pages]
                assert [page[0] for page in pages] == list(range(len(pages)))
                assert len({page[1] for page in pages}) == 1, "pages of several states"
                state, rounded, logits = pages[0][1]
                if state is not None:
                    runner.roundings[slot] = rounded
                runner._states.put(slot, state)
                runner._logits.put(slot, logits)

        return self._copy(finish)
