"""Routers for simulated replicas: our placer, and what others do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from megatron_hybrid.cache.changes import Change
from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.kv_events.messages import events_of
from megatron_hybrid.server.link.messages import CacheSizes
from megatron_hybrid.server.replicas.placer import Placer
from megatron_hybrid.server.replicas.rendezvous import bounded_place, key_of
from megatron_hybrid.server.replicas.replica import PromptKeys
from simulation.indexed_routers import PLACER_POLICIES, DynamoKV, HashRing, IndexedPlacer
from simulation.replicas import Ask, Router


class PlacerRouter:
    """The coordinator, which hears at once what happens."""

    def __init__(self, policy: str, geometry: CacheGeometry) -> None:
        self._sizes = CacheSizes(
            geometry.block_size, geometry.smallest_reusable_prefix, geometry.stored_as
        )
        self.placer = Placer(policy, self._sizes)

    def place(self, ask: Ask, replicas: Sequence[int]) -> int:
        sizes = self._sizes
        keys = PromptKeys(ask.prompt.astype("<i4").tobytes(), sizes.block_size, "", sizes.stored_as)
        return self.placer.place(ask.name, [keys], 1, len(ask.answer), replicas)

    def started(self, ask: Ask) -> None:
        self.placer.start(f"{ask.name}-0")

    def ended(self, ask: Ask, *, is_whole: bool) -> None:
        self.placer.end(ask.name, len(ask.answer) if is_whole else None)

    def changed(self, replica: int, changes: list[Change]) -> None:
        self.placer.replicas[replica].contents.apply(events_of(changes))

    def lost(self, replica: int) -> None:
        self.placer.lose(replica)


class _Counting:
    """Knows how many requests run where, and nothing that replicas say."""

    def __init__(self) -> None:
        self._running: Counter[int] = Counter()

    def started(self, ask: Ask) -> None:
        pass

    def ended(self, ask: Ask, *, is_whole: bool) -> None:
        self._running[ask.replica] -= 1

    def changed(self, replica: int, changes: list[Change]) -> None:
        pass

    def lost(self, replica: int) -> None:
        pass


class CacheAware(_Counting):
    """What SGLang's router and those that came of it do with `cache_aware`: the replica that was
    sent the longest prefix of this, if it is `threshold` of the prompt, else the one that was sent
    least; the one with the fewest requests, if the numbers differ by more than `absolute` and by
    more than `relative` times. It remembers texts for ever, and counts in blocks."""

    def __init__(
        self,
        geometry: CacheGeometry,
        threshold: float = 0.3,
        absolute: int = 64,
        relative: float = 1.5,
    ) -> None:
        super().__init__()
        self._geometry = geometry
        self._threshold, self._absolute, self._relative = threshold, absolute, relative
        self._sent: dict[int, set[int]] = {}

    def place(self, ask: Ask, replicas: Sequence[int]) -> int:
        size = self._geometry.block_size
        blocks = PromptKeys(ask.prompt.astype("<i4").tobytes(), size, "").blocks()
        running = {one: self._running[one] for one in replicas}
        least, most = min(running.values()), max(running.values())
        if most - least > self._absolute and most > self._relative * least:
            chosen = min(replicas, key=lambda one: running[one])
        else:
            chosen = self._longest(blocks, len(ask.prompt), replicas)
        self._sent.setdefault(chosen, set()).update(blocks)
        self._running[chosen] += 1
        return chosen

    def _longest(self, blocks: list[int], tokens: int, replicas: Sequence[int]) -> int:
        def known(one: int) -> int:
            sent = self._sent.get(one, set())
            return next((i for i, name in enumerate(blocks) if name not in sent), len(blocks))

        best = max(replicas, key=known)
        if known(best) * self._geometry.block_size > self._threshold * tokens:
            return best
        return min(replicas, key=lambda one: len(self._sent.get(one, ())))

    def lost(self, replica: int) -> None:
        self._sent.pop(replica, None)


class BoundedRendezvous(_Counting):
    """Knows nothing but what runs where: see server/replicas/rendezvous.py."""

    def __init__(self, geometry: CacheGeometry, bound: float, first_blocks: int = 1) -> None:
        super().__init__()
        self._block_size = geometry.block_size
        self._bound, self._first_blocks = bound, first_blocks

    def place(self, ask: Ask, replicas: Sequence[int]) -> int:
        blocks = PromptKeys(ask.prompt.astype("<i4").tobytes(), self._block_size, "").blocks()
        loads = {one: self._running[one] for one in replicas}
        key = key_of(blocks, self._first_blocks)
        if key:
            chosen = bounded_place(key, loads, self._bound)
        else:
            chosen = min(replicas, key=lambda one: loads[one])
        self._running[chosen] += 1
        return chosen


def _rendezvous(bound: float, first_blocks: int = 1) -> Callable[[CacheGeometry, int], Router]:
    return lambda geometry, _: BoundedRendezvous(geometry, bound, first_blocks)


# By name, for replicas of this geometry and number.
ROUTERS: dict[str, Callable[[CacheGeometry, int], Router]] = {
    **{policy: partial(IndexedPlacer, policy) for policy in PLACER_POLICIES},
    "coordinator": lambda geometry, _: PlacerRouter("longest_prefix", geometry),
    "first_prefix_block": lambda geometry, _: PlacerRouter("first_prefix_block", geometry),
    "dynamo_kv": DynamoKV,
    "dynamo_kv-4": partial(DynamoKV, prefill_load_scale=4.0),
    "dynamo_kv-8": partial(DynamoKV, prefill_load_scale=8.0),
    "cache_aware": lambda geometry, _: CacheAware(geometry),
    "rendezvous-1.25": _rendezvous(1.25),
    "rendezvous-1.5": _rendezvous(1.5),
    "rendezvous-2": _rendezvous(2.0),
    "rendezvous-8-blocks-1.5": _rendezvous(1.5, 8),
    "rendezvous-8-blocks-2": _rendezvous(2.0, 8),
    "ring-8-blocks": partial(HashRing, first_blocks=8),
    "ring-8-blocks-1.5": partial(HashRing, first_blocks=8, bound=1.5),
    "ring-8-blocks-2": partial(HashRing, first_blocks=8, bound=2.0),
}
