"""Ranks whose copies and stores take different times, and fail one by one, decide alike."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from megatron_hybrid.engine.agreement import Agreement
from megatron_hybrid.engine.transfers import HostTransfers
from megatron_hybrid.request import SamplingParams
from tests.engine.symbolic import CheckedEngine, expected_answer, random_tokens
from tests.engine.symbolic_store import SymbolicStore
from tests.engine.test_host_tier import KINDS, engine_with
from tests.thorough import A_THIRD

RANKS = 2
SECONDS = 60.0


class _Meeting:
    """Where threads exchange values, each the same number of times."""

    def __init__(self) -> None:
        self._values: list[Any] = [None] * RANKS
        self.barrier = threading.Barrier(RANKS)
        self.count = 0

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self.barrier.wait(SECONDS)
        found = list(self._values)
        self.count += rank == 0
        self.barrier.wait(SECONDS)
        return found


class Thread:
    """One of the ranks."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self.meeting, self.rank = meeting, rank
        self.is_first = rank == 0

    def maxima(self, values: Sequence[int]) -> list[int]:
        each = self.meeting.exchange(self.rank, ("maxima", list(values)))
        assert {kind for kind, _ in each} == {"maxima"}, "ranks make different calls"
        return [max(column) for column in zip(*(found for _, found in each), strict=True)]

    def broadcast_object(self, value: Any) -> Any:
        each = self.meeting.exchange(self.rank, ("broadcast", value))
        assert {kind for kind, _ in each} == {"broadcast"}, "ranks make different calls"
        return each[0][1]


def on_all_ranks(work: Callable[[Thread], Any]) -> list[Any]:
    meeting = _Meeting()

    def one(rank: int) -> Any:
        try:
            return work(Thread(meeting, rank))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(one, range(RANKS)))


def talk(engine: CheckedEngine, chats: int, turns: int) -> list[Any]:
    """All that can be seen of an engine that several chats use at once."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    texts = [random_tokens(seed, 50) for seed in range(chats)]
    seen: list[Any] = []
    for turn in range(turns):
        order = list(range(chats))[:: 1 if turn % 2 else -1]  # the last ones come back first
        for first in range(0, chats, 3):
            for chat in order[first : first + 3]:
                engine.add_request(f"{turn}.{chat}", texts[chat], params)
            while engine.has_work():
                events = engine.step()
                seen += [(e.request_id, e.token_ids, e.cached_tokens) for e in events]
                engine.check_integrity()
            for _ in range(12):
                seen.append(engine.use_idle_time())
        texts = [text + expected_answer(text, 4) + [5, 6] for text in texts]
    stats = engine.stats()
    return [seen, {name: stats[name] for name in stats if name.startswith("tier_")}]


@A_THIRD
@pytest.mark.parametrize("fails", [0.0, 0.05])
@pytest.mark.parametrize("kind", ["hybrid", "packed", "attention"])
def test_ranks_see_the_same_however_long_their_copies_take(kind: str, fails: float) -> None:
    stores = [SymbolicStore(loses=0.02, fails=fails, seed=rank) for rank in range(RANKS)]

    def work(ranks: Thread) -> list[Any]:
        engine = engine_with(
            160, store=stores[ranks.rank], slowest_copy=4, ranks=ranks, seed=ranks.rank,
            num_blocks=60, cached_slots=8, **KINDS[kind],
        )  # fmt: skip
        return talk(engine, 12, 3)

    (seen, figures), *others = on_all_ranks(work)
    for others_seen, others_figures in others:
        assert others_seen == seen
        for name, by_tier in figures.items():  # what each has written to its own store may differ
            assert by_tier.get("host") == others_figures[name].get("host"), name
        for name in ("tier_fetches", "tier_tokens_fetched", "tier_refused"):
            assert others_figures[name] == figures[name], name
    assert figures["tier_fetches"]["host"] > 5
    assert bool(figures["tier_refused"]["failed"]) == bool(fails)
    assert fails or figures["tier_fetches"]["symbolic"] > 0  # it is left alone once it has failed


def test_nothing_is_exchanged_while_nothing_is_under_way() -> None:
    def work(ranks: Thread) -> int:
        engine = engine_with(store=SymbolicStore(), ranks=ranks, exact_ends=False)
        assert isinstance(engine.context.transfers, HostTransfers)
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        engine.add_request("one", random_tokens(1, 30), params)
        for _ in range(3):
            engine.step()
        before = ranks.meeting.count
        for _ in range(10):
            engine.step()
        return ranks.meeting.count - before

    assert on_all_ranks(work) == [0, 0]


def test_the_slowest_rank_counts_and_the_first_knows() -> None:
    def work(ranks: Thread) -> tuple[list[int], str, bool]:
        agreement = Agreement(ranks)
        mine = [np.int64(5).item() + ranks.rank, 5 - ranks.rank]
        return agreement.least(mine), agreement.of_first(f"of {ranks.rank}"), agreement.is_first

    assert on_all_ranks(work) == [([5, 4], "of 0", True), ([5, 4], "of 0", False)]
