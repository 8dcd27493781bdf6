"""The watch thread where the kernel lacks what it would like to have, and where a connection breaks
early."""

from __future__ import annotations

import errno
import os

import pytest
from msgspec.structs import replace

from megatron_hybrid.rank_layout import ParallelSizes, RankLayout
from megatron_hybrid.watchdog import Watchdog
from megatron_hybrid.watchdog.rank_beat import RankBeat, own_beat


def test_a_process_that_cannot_be_opened_is_watched_by_its_beats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(pid: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refused)
    layouts = [RankLayout(ParallelSizes(tensor=2), rank, 2) for rank in range(2)]
    watchdog = Watchdog(layouts[0], 5.0)
    watchdog._finder.look([own_beat(layout) for layout in layouts], 0.0)
    assert watchdog._open_processes() == set()
    assert watchdog._open_processes() == set()


class Clock:
    """Time that passes only while somebody sleeps."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class StoreOfTheDead:
    """Rank 1, on another machine, has sent one beat; rank 0 sends another each time."""

    def __init__(self, own: RankBeat, other: RankBeat) -> None:
        self._own, self._other = own, replace(other, place="another machine")
        self._reads = 0

    def read_now(self) -> list[RankBeat | None]:
        self._reads += 1
        return [replace(self._own, count=self._reads), self._other]


def test_a_rank_that_is_lost_before_anybody_has_looked_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with a small model, which serves before the second beat."""
    layouts = [RankLayout(ParallelSizes(tensor=2), rank, 2) for rank in range(2)]
    watchdog = Watchdog(layouts[0], 5.0)
    watchdog._exchange = StoreOfTheDead(*map(own_beat, layouts))  # type: ignore[assignment]
    monkeypatch.setattr("megatron_hybrid.watchdog.watchdog.time", Clock())
    ended: list[tuple[str, list[int]]] = []
    monkeypatch.setattr(watchdog, "_end", lambda *fault: ended.append(fault))
    watchdog._wait_for_cause()
    ((message, culprits),) = ended
    assert culprits == [1] and "has said nothing for 5 s" in message
