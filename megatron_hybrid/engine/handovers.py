"""Handovers: what a server that computes prompts has written to host memory, for those that decode.

A prefix is on offer from then on, and pinned, until it was read or nobody came for it. One that was
there before is offered when it is asked for, and so is the KV of a prompt that is still computed.
The first rank talks to the others; all of them keep the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from megatron_hybrid.cache.host_tier import Move
from megatron_hybrid.cache.lower_tier import LowerTier, Save, names_of
from megatron_hybrid.cache.tier import COUNTERS, GAUGES
from megatron_hybrid.disaggregation.desk import Answer, Desk, Offer, Wanted
from megatron_hybrid.engine.agreement import Agreement
from megatron_hybrid.engine.below import Below

NAME = "peers"  # in figures


class Handovers(Below):
    """Of one rank; all calls are its engine's thread's."""

    def __init__(
        self,
        lower: LowerTier,
        desk: Desk,
        agreement: Agreement,
        close: Callable[[], None],
        is_open: Callable[[str], bool],
    ) -> None:
        """desk: the first rank's; others have one at which nobody asks. close: ends those who
        ask. is_open: whether a request with this id has not ended."""
        self.lower, self._desk, self._agreement = lower, desk, agreement
        self._is_open = is_open
        self._parts = itertools.count(1)
        # what was asked for, and what is not on offer any more
        self._news: tuple[list[Wanted], list[tuple[bytes, bool]]] = [], []
        self._saves: dict[bytes, tuple[Save, int]] = {}  # by end, and bytes
        self._close = close

    @property
    def is_underway(self) -> bool:
        return True  # others may ask at any time

    def progress(self) -> list[int]:
        if self._agreement.is_first:
            self._news = self._desk.take_wanted(), self._desk.take_back()
        return [0 if any(self._news) else 1]

    def end_copies(self, agreed: Sequence[int]) -> None:
        if agreed[0]:
            return
        wanted, gone = self._agreement.of_first(self._news)
        for end, was_read in gone:
            save, size = self._saves.pop(end)
            self.lower.end_save(save, size if was_read else None)
            if not was_read and save.ending is not None:
                self.lower.upper.refused["unread"] += 1
        for one in wanted:
            if one.request:
                self._desk.answer(one, self._so_far(one))
            else:
                self._look_for(one)

    def was_written(self, move: Move) -> None:
        end = move.keys.at(move.position)
        if end not in self._saves:
            self._offer(end, move.position, self.lower.begin_save(move.keys, move.position))

    def saves(self) -> list[Save]:
        return [save for save, _ in self._saves.values()]

    def figures(self) -> dict[str, dict[str, int]]:
        found = {name: self.lower.counts[name] for name in COUNTERS if name != "tier_refused"}
        found |= dict.fromkeys(GAUGES, 0)
        found["tier_states"] = len(self._saves)
        found["tier_bytes_used"] = sum(size for _, size in self._saves.values())
        return {name: {NAME: number} for name, number in found.items()}

    def close(self) -> None:
        """Nobody is answered any more."""
        self._close()

    def _look_for(self, wanted: Wanted) -> None:
        """The furthest place of it that is in host memory, or will be."""
        tier = self.lower.upper
        for position, end in wanted.ends:
            if end in self._saves:
                return
            names = names_of(wanted.kv, position, end, tier.host.geometry)
            save = self.lower.begin_save_of(names, end, position)
            if save is not None:
                self._offer(end, position, save)
                return
        if not any(tier.may_come(end) for _, end in wanted.ends):
            self._desk.answer(wanted, Answer())

    def _so_far(self, wanted: Wanted) -> Answer:
        """What there is of a prompt that is computed: on offer, if it is more than who asks has."""
        if not self._is_open(wanted.request):
            return Answer()
        save = self.lower.begin_save_of_part(wanted.kv, wanted.first)
        if save is None:
            return Answer(comes=True)
        end, blocks = b"part %d" % next(self._parts), wanted.first + len(save.pages)
        self._offer(end, blocks * self.lower.upper.host.geometry.block_size, save)
        return Answer(end, comes=True)

    def _offer(self, end: bytes, position: int, save: Save | None) -> None:
        if save is None:
            return
        pages = len(save.pages) + len(save.state_pages)
        self._saves[end] = save, pages * self.lower.upper.host.page_bytes
        self._desk.offer(end, Offer(position, save.pages, save.state_pages, save.ending))
