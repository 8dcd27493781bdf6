"""What another server computes of a prompt is read part by part, beside everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
import pytest

from megatron_hybrid.cache.block_hash import BlockKey
from megatron_hybrid.cache.lower_tier import LowerTier
from megatron_hybrid.cache.stored_prefixes import Found, StoredPrefixes
from megatron_hybrid.engine.lower_transfers import LowerTransfers
from megatron_hybrid.engine.transfers import HostTransfers
from megatron_hybrid.errors import StoreError
from tests.engine.symbolic import random_tokens
from tests.engine.symbolic_store import SymbolicStore
from tests.engine.test_host_tier import engine_with

PEER = "10.0.0.1:7000"


class _Later(Future[Any]):
    """Nobody waits for it."""

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            pytest.fail("a step waits for it")  # no Exception, which would be logged
        return super().result(timeout)


class ByHand(Executor):
    """What is submitted is done when a test says so."""

    def __init__(self) -> None:
        self.waiting: list[tuple[_Later, Callable[..., Any], tuple[Any, ...]]] = []

    def submit(self, work: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        future = _Later()
        self.waiting.append((future, work, given))
        return future

    def run(self) -> None:
        """The first one."""
        future, work, given = self.waiting.pop(0)
        try:
            future.set_result(work(*given))
        except StoreError as error:
            future.set_exception(error)


class Peer(StoredPrefixes):
    """Answers as a test says."""

    is_always_read = True
    asker: ByHand

    def __init__(self, geometry: Any) -> None:
        super().__init__(SymbolicStore(), geometry)
        self.asked: list[tuple[str, int]] = []  # request, and blocks that were there
        self.answers: dict[str, list[Found | None | StoreError]] = {}
        self.is_read = True
        self.ended_places: list[Any] = []

    def is_asked(self, peer: str) -> bool:
        return peer == PEER

    def follow(
        self, peer: str, request: str, kv: list[BlockKey], first: int
    ) -> Future[Found | None]:
        return self.asker.submit(self._follow, request, first)

    def _follow(self, request: str, first: int) -> Found | None:
        self.asked.append((request, first))
        answer = self.answers[request].pop(0)
        if isinstance(answer, StoreError):
            raise answer
        return answer

    def read(self, stored: Any, blocks: Sequence[Any], state: Any) -> bool:
        return self.is_read

    def ended(self, place: Any) -> None:
        self.ended_places.append(place)


class Reading:
    """Of a prompt of eight blocks for each name."""

    def __init__(self, names: str = "a", pages: int = 100) -> None:
        self.engine = engine_with(pages, block_size=4)
        transfers = self.engine.context.transfers
        assert isinstance(transfers, HostTransfers)
        self.transfers, self.tier = transfers, transfers.tier
        self.peer = Peer(self.tier.host.geometry)
        self.threads: dict[str, ByHand] = {}

        def executor(name: str) -> ByHand:
            self.threads[name] = ByHand()
            return self.threads[name]

        self.now = 0.0
        lower = LowerTransfers(
            LowerTier(self.tier), self.peer, lambda pages: [], lambda: "", 0.0,
            executor=executor, clock=lambda: self.now,
        )  # fmt: skip
        transfers.add_lower(lower)
        self.asker, self.reader = self.threads["tier-ask"], self.threads["tier-read"]
        self.peer.asker = self.asker
        for seed, name in enumerate(names):
            tokens = np.array(random_tokens(seed, 32), dtype=np.int32)
            transfers.read_ahead(name, tokens, "", PEER, f"there {name}")

    def say(self, name: str, *answers: Found | None | StoreError) -> None:
        self.peer.answers[f"there {name}"] = list(answers)

    def step(self) -> None:
        self.transfers.end_copies()
        self.engine.check_integrity()

    def go_on(self) -> None:
        """Each thread does one thing."""
        for thread in (self.asker, self.reader):
            if thread.waiting:
                thread.run()
        self.step()

    def until_it_ends(self) -> None:
        for _ in range(50):
            self.go_on()
            if not self.transfers.lower.is_underway:
                return
        raise AssertionError("it does not end")

    def finish(self) -> None:
        """All that was given back is, and nothing is kept."""
        while self.asker.waiting:
            self.asker.run()
        assert not self.transfers.lower.is_underway and not self.transfers.lower.loads()
        self.tier.host.check_integrity([], [], [])


def part(blocks: int) -> Found:
    return Found(4 * blocks, None, f"place {blocks}")


NOTHING_YET = Found(0, None)


def test_parts_are_read_one_behind_the_other_until_the_request_has_ended() -> None:
    reading = Reading()
    reading.say("a", part(2), NOTHING_YET, part(5), None)
    for _ in range(4):
        assert not reading.transfers.is_read_ahead("a")
        reading.go_on()
    reading.until_it_ends()
    assert reading.transfers.is_read_ahead("a")
    assert reading.peer.asked == [("there a", 0), ("there a", 2), ("there a", 2), ("there a", 5)]
    assert reading.peer.ended_places == ["place 2", "place 5"]
    counts = reading.transfers.lower.lower.counts  # type: ignore[attr-defined]
    assert counts["tier_bytes_fetched"] == 5 and not counts["tier_fetches"]
    reading.finish()


def test_one_may_be_read_while_others_are_answered() -> None:
    """Whose places change meanwhile."""
    reading = Reading("ab")
    reading.say("a", part(2), None)
    reading.say("b", NOTHING_YET, NOTHING_YET, part(3), None)
    reading.asker.run()
    reading.step()  # a part of a's is read
    for thread in (reading.reader, reading.asker):
        thread.run()
    reading.step()  # it has come, and b was answered
    reading.until_it_ends()
    assert sorted(reading.peer.asked) == [
        *(("there a", first) for first in (0, 2)),
        *(("there b", first) for first in (0, 0, 0, 3)),
    ]
    reading.finish()


def test_the_last_of_many_is_read_while_the_others_wait() -> None:
    names = "abcdefghijklmnopqrstuvwxyz"
    reading = Reading(names)
    for name in names:
        reading.say(name, None)
    reading.say("z", part(3), None)
    *others, last = reading.asker.waiting
    reading.asker.waiting = [last]
    reading.asker.run()
    reading.step()
    reading.reader.run()
    reading.step()
    assert reading.peer.asked == [("there z", 0)]
    assert [given for _, _, given in reading.asker.waiting][-1] == ("there z", 3)
    reading.asker.waiting += others
    reading.until_it_ends()
    reading.finish()


@pytest.mark.parametrize("why", ["no room", "not read"])
def test_a_part_that_can_not_be_had_is_the_last_one(why: str) -> None:
    """The other server computes it all the same: that is waited for."""
    reading = Reading(pages=1 if why == "no room" else 100)
    reading.peer.is_read = why != "not read"
    reading.say("a", part(2), NOTHING_YET, None)
    reading.until_it_ends()
    assert [first for _, first in reading.peer.asked] == [0, 8, 8]
    assert reading.tier.refused["tier_full"] == (why == "no room")
    reading.finish()
    assert reading.peer.ended_places == ["place 2"]


def test_a_part_that_takes_too_long_holds_nobody_up() -> None:
    reading = Reading()
    reading.say("a", part(2), part(4))
    reading.asker.run()
    reading.step()  # and it hangs
    reading.now = reading.peer.patience - 0.1
    reading.step()
    assert not reading.transfers.is_read_ahead("a")
    reading.now = reading.peer.patience + 0.1
    for _ in range(3):
        reading.step()
    assert reading.transfers.is_read_ahead("a")
    assert reading.tier.refused["late"] == 1
    reading.until_it_ends()  # it comes after all
    reading.finish()
    assert reading.peer.ended_places == ["place 2", "place 4"]


@pytest.mark.parametrize("why", ["left", "new weights", "dead"])
def test_nothing_is_kept_for_nobody(why: str) -> None:
    reading = Reading()
    lost = StoreError("gone")
    reading.say("a", part(2), lost if why == "dead" else part(4))
    reading.asker.run()
    reading.step()
    if why == "left":
        reading.transfers.stop_reading_ahead("a")
        assert reading.transfers.is_read_ahead("a")
    elif why == "new weights":
        reading.tier.clear()
    reading.until_it_ends()
    assert reading.transfers.is_read_ahead("a")
    assert reading.tier.refused["failed"] == (why == "dead")
    reading.finish()
    assert reading.peer.ended_places == ["place 2", *(["place 4"] if why != "dead" else [])]


def test_who_is_none_of_the_peers_is_not_asked() -> None:
    reading = Reading("")
    reading.transfers.read_ahead("a", np.arange(32, dtype=np.int32), "", "10.0.0.9:1", "r")
    assert reading.transfers.is_read_ahead("a") and not reading.asker.waiting
    reading.finish()


def test_an_engine_without_peers_has_nothing_to_wait_for() -> None:
    for engine in (engine_with(0), engine_with(100), engine_with(100, store=SymbolicStore())):
        transfers = engine.context.transfers
        transfers.read_ahead("a", np.arange(32, dtype=np.int32), "", PEER, "r")
        for _ in range(10):
            transfers.end_copies()
        assert transfers.is_read_ahead("a")
        transfers.stop_reading_ahead("a")
