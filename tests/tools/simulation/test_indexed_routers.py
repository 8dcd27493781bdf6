"""Routers for a thousand replicas, against the same rules applied to one replica after another."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from megatron_hybrid.cache.changes import BLOCKS, Change, Cleared
from megatron_hybrid.kv_events import CacheContents
from megatron_hybrid.kv_events.contents import shared_blocks
from megatron_hybrid.kv_events.messages import events_of
from megatron_hybrid.server.replicas.replica import PromptKeys
from simulation.indexed_routers import DynamoKV, HashRing, IndexedPlacer
from simulation.replicas import COSTS, REFERENCE, Ask, Chats, Replicas
from simulation.routers import PlacerRouter
from tests.thorough import A_THIRD

CHATS = Chats(
    requests=300, systems=4, system_tokens=350, clients=24, open_chats=60, documents=10, spread=0.3
)
REPLICAS = 5


@A_THIRD
@pytest.mark.parametrize("kill", [False, True])
@pytest.mark.parametrize("policy", ["longest_prefix", "load_balanced"])
def test_indexed_placer_decides_as_the_coordinator(policy: str, kill: bool) -> None:
    """Also where prompts share what is only expected, under costs that make queues."""
    geometry = replace(REFERENCE, kernel_chunk=2 * REFERENCE.block_size)
    more: dict[str, Any] = {"costs": COSTS["cpu"], "kill": kill, "geometry": geometry}
    for chats in (CHATS, replace(CHATS, think=1.0, bursts=True, seed=1)):
        indexed = IndexedPlacer(policy, geometry, REPLICAS)
        result = Replicas(chats, indexed, REPLICAS, **more).run()
        plain = Replicas(chats, PlacerRouter(policy, geometry), REPLICAS, **more).run()
        assert result == plain
        assert result.skipped_tokens > 0 and (result.failed > 0) == kill


class BlocksAlone(PlacerRouter):
    """The coordinator of replicas without recurrent layers, as far as it is told."""

    def changed(self, replica: int, changes: list[Change]) -> None:
        told: list[Change] = []
        for one in changes:
            if isinstance(one, Cleared):
                told.append(Cleared(one.epoch, replace(one.geometry, bytes_per_state=0)))
            elif one.kind == BLOCKS:
                told.append(one)
        super().changed(replica, told)


def test_without_states_it_decides_as_if_there_were_none() -> None:
    results = [
        Replicas(CHATS, router, REPLICAS).run()
        for router in (
            IndexedPlacer("longest_kv_prefix", REFERENCE, REPLICAS),
            BlocksAlone("longest_prefix", REFERENCE),
            IndexedPlacer("longest_prefix", REFERENCE, REPLICAS),
        )
    ]
    assert results[0] == results[1] != results[2]


class Checked(DynamoKV):
    """Adds up for each replica what Dynamo's router does, from all that is there."""

    def __init__(self, scale: float) -> None:
        super().__init__(REFERENCE, REPLICAS, scale)
        self._factor = scale
        self._caches = [CacheContents() for _ in range(REPLICAS)]
        self._there: dict[str, tuple[int, list[int], int]] = {}  # replica, blocks, to prefill
        self.decided: Counter[int] = Counter()

    def place(self, ask: Ask, replicas: Sequence[int]) -> int:
        prompt = ask.prompt.astype("<i4").tobytes()
        blocks = PromptKeys(prompt, 64, "", REFERENCE.stored_as).blocks()
        scores: dict[int, tuple[float, int]] = {}
        new: dict[int, int] = {}
        for one in replicas:
            new[one] = len(ask.prompt) - 64 * shared_blocks(blocks, self._caches[one].blocks)
            requests = [rest for at, *rest in self._there.values() if at == one]
            active = set(blocks).union(*(some for some, _ in requests))
            prefill = new[one] + sum(tokens for _, tokens in requests)
            cost = self._factor * prefill / 64 + len(active)
            scores[one] = cost, len(self._caches[one].blocks)
        chosen = super().place(ask, replicas)
        assert scores[chosen] == min(scores.values())
        self.decided[chosen] += 1
        self._there[ask.name] = chosen, blocks, new[chosen]
        return chosen

    def started(self, ask: Ask) -> None:
        super().started(ask)
        self._there[ask.name] = *self._there[ask.name][:2], 0

    def ended(self, ask: Ask, *, is_whole: bool) -> None:
        super().ended(ask, is_whole=is_whole)
        del self._there[ask.name]

    def changed(self, replica: int, changes: list[Change]) -> None:
        super().changed(replica, changes)
        self._caches[replica].apply(events_of(changes))


@A_THIRD
@pytest.mark.parametrize(("scale", "clients"), [(1.0, 24), (4.0, 24), (1.0, 2)])
def test_dynamos_sum_is_the_least(scale: float, clients: int) -> None:
    """With two clients there are ties."""
    router = Checked(scale)
    Replicas(replace(CHATS, clients=clients), router, REPLICAS, kill=True).run()
    assert len(router.decided) == REPLICAS


class Clockwise(HashRing):
    """Goes by distances on the ring, over all points."""

    def __init__(self, bound: float) -> None:
        super().__init__(REFERENCE, REPLICAS, 8, bound)
        self._most = bound
        self._open: Counter[int] = Counter()

    def place(self, ask: Ask, replicas: Sequence[int]) -> int:
        limit = self._most * (self._open.total() + 1) / len(replicas)
        point = _point(ask.prompt[: 8 * 64].tobytes())

        def distance(one: int) -> int:
            points = [_point(f"{one} {k}".encode()) for k in range(self.POINTS)]
            return min((end - point) % (1 << 512) for end in points)

        expected = min((one for one in replicas if self._open[one] < limit), key=distance)
        chosen = super().place(ask, replicas)
        assert chosen == expected
        self._open[chosen] += 1
        return chosen

    def ended(self, ask: Ask, *, is_whole: bool) -> None:
        super().ended(ask, is_whole=is_whole)
        if ask.replica in self._open:
            self._open[ask.replica] -= 1

    def lost(self, replica: int) -> None:
        super().lost(replica)
        del self._open[replica]


@pytest.mark.parametrize("bound", [1.2, float("inf")])
def test_the_next_replica_with_room_takes_it(bound: float) -> None:
    chats = replace(CHATS, requests=120)
    result = Replicas(chats, Clockwise(bound), REPLICAS, kill=True).run()
    assert len(result.by_replica) == REPLICAS and (result.moved > 20) == (bound < 2)


def _point(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data).digest(), "big")
