"""Routers for a thousand replicas. A prompt is looked up once for all of them, and what each would
cost is one operation on arrays: a decision takes less than a tenth of a millisecond."""

from __future__ import annotations

import hashlib
from bisect import bisect
from collections.abc import Sequence

import numpy as np

from megatron_hybrid.cache.block_hash import SequenceKeys, root_key
from megatron_hybrid.cache.changes import Change
from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.server.replicas.placer import RECENT_ANSWERS
from simulation.holders import Contents, Groups, Underway, raise_to
from simulation.replicas import Ask

PLACER_POLICIES = ("longest_prefix", "longest_kv_prefix", "load_balanced")


class _Indexed:
    """What is known of each replica: `prefill` tokens that wait there to be computed, `answers`
    that have a place there, `total` tokens of all prompts that were placed there."""

    def __init__(self, geometry: CacheGeometry, replicas: int) -> None:
        self._geometry = geometry
        self._contents = Contents(geometry, replicas)
        self._underway = Underway(geometry.block_size, replicas)
        self._prefill = np.zeros(replicas)
        self._answers = np.zeros(replicas)
        self._total = np.zeros(replicas)
        self._placed: dict[str, tuple[SequenceKeys, float]] = {}  # and tokens to compute
        self._waiting: set[str] = set()

    def changed(self, replica: int, changes: list[Change]) -> None:
        self._contents.apply(replica, changes)

    def lost(self, replica: int) -> None:
        self._contents.lose(replica)
        self._prefill[replica] = np.inf  # so that it is never the least

    def started(self, ask: Ask) -> None:
        self._waiting.remove(ask.name)
        self._prefill[ask.replica] -= self._placed[ask.name][1]

    def ended(self, ask: Ask, *, is_whole: bool) -> None:
        if ask.name in self._waiting:
            self.started(ask)
        del self._placed[ask.name]
        self._answers[ask.replica] -= 1

    def _keys(self, ask: Ask) -> SequenceKeys:
        """Of all full blocks of the prompt."""
        prompt, root = ask.prompt, root_key(0, stored_as=self._geometry.stored_as)
        keys = SequenceKeys(root, self._geometry.block_size, lambda low, high: prompt[low:high])
        keys.extend_to(len(prompt))
        return keys

    def _tokens(self, *known: Groups) -> np.ndarray:
        """The most tokens of any group that a replica is in, for each of them."""
        tokens = np.zeros(len(self._prefill))
        for groups in known:
            for count, replicas in groups:
                raise_to(tokens, count, replicas)
        return tokens

    def _put(self, ask: Ask, replica: int, keys: SequenceKeys, tokens: float) -> None:
        """tokens: to be computed of it."""
        self._placed[ask.name] = keys, tokens
        self._waiting.add(ask.name)
        self._prefill[replica] += tokens
        self._answers[replica] += 1
        self._total[replica] += len(ask.prompt)
        self._underway.begin(replica, keys.blocks)


class IndexedPlacer(_Indexed):
    """The coordinator with longest_prefix or load_balanced, decision by decision: what they are is
    in server/replicas/placer.py, which looks at one replica after the other. With longest_kv_prefix
    it takes KV blocks for what is skipped, as if it had never heard of states."""

    def __init__(self, policy: str, geometry: CacheGeometry, replicas: int) -> None:
        super().__init__(geometry, replicas)
        assert policy in PLACER_POLICIES
        self._policy = policy
        self._ended = 0
        self._mean_answer = 1.0

    def place(self, ask: Ask, replicas: Sequence[int]) -> int:
        length, keys = len(ask.prompt), self._keys(ask)
        mean, own = self._mean_answer, min(self._mean_answer, len(ask.answer))
        together = mean * own / (mean + own)
        costs = self._prefill + 2 * self._answers * together
        unit = self._geometry.smallest_reusable_prefix
        expected = [
            # The last token of what is only expected is always computed.
            (min(tokens, length - 1) // unit * unit, held)
            for tokens, held in self._underway.blocks(keys)
        ]
        contents = self._contents
        knows_states = self._policy != "longest_kv_prefix"
        cached = contents.skippable(keys, length) if knows_states else contents.blocks(keys)
        left = length - self._tokens(expected, cached)
        if self._policy != "load_balanced":
            costs += (1 + self._answers) * left
        (ties,) = np.nonzero(costs == costs.min())
        filling = np.lexsort((self._total[ties], contents.num_blocks[ties]))
        chosen = int(ties[filling[0]])
        self._put(ask, chosen, keys, left[chosen])
        return chosen

    def started(self, ask: Ask) -> None:
        super().started(ask)
        self._underway.end(ask.replica, self._placed[ask.name][0].blocks)

    def ended(self, ask: Ask, *, is_whole: bool) -> None:
        super().ended(ask, is_whole=is_whole)
        if is_whole:
            self._ended = min(self._ended + 1, RECENT_ANSWERS)
            self._mean_answer += (len(ask.answer) - self._mean_answer) / self._ended


class DynamoKV(_Indexed):
    """Dynamo's KV router, `--router-mode kv` of ai-dynamo 1.6.1: the least sum of blocks to prefill
    (of requests that have had no token there, and of this one less the KV blocks that are cached)
    times `--router-prefill-load-scale`, and full blocks of the prompts of all requests there and of
    this one, where shared ones count once. On a tie the one with the fewest cached blocks, and any
    of these. States are nothing to it."""

    def __init__(
        self, geometry: CacheGeometry, replicas: int, prefill_load_scale: float = 1.0
    ) -> None:
        super().__init__(geometry, replicas)
        self._scale = prefill_load_scale
        self._random = np.random.default_rng(0)

    def place(self, ask: Ask, replicas: Sequence[int]) -> int:
        length, keys, size = len(ask.prompt), self._keys(ask), self._geometry.block_size
        left = length - self._tokens(self._contents.blocks(keys))
        shared = self._tokens(self._underway.blocks(keys)) / size
        costs = self._scale * (self._prefill + left) / size
        costs += self._underway.num_blocks + len(keys.blocks) - shared
        (ties,) = np.nonzero(costs == costs.min())
        cached = self._contents.num_blocks[ties]
        chosen = int(self._random.choice(ties[cached == cached.min()]))
        self._put(ask, chosen, keys, left[chosen])
        return chosen

    def ended(self, ask: Ask, *, is_whole: bool) -> None:
        self._underway.end(ask.replica, self._placed[ask.name][0].blocks)
        super().ended(ask, is_whole=is_whole)


class HashRing:
    """Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2016) of a prompt's
    first blocks: the first replica clockwise on which less than `bound` times the mean runs."""

    POINTS = 64  # of each replica

    def __init__(
        self, geometry: CacheGeometry, replicas: int, first_blocks: int, bound: float = np.inf
    ) -> None:
        self._first_tokens, self._bound = first_blocks * geometry.block_size, bound
        ring = sorted(
            (hashlib.blake2b(f"{one} {k}".encode()).digest(), one)
            for one in range(replicas)
            for k in range(self.POINTS)
        )
        self._points = [point for point, _ in ring]
        self._owners = [one for _, one in ring]
        self._running = dict.fromkeys(range(replicas), 0)
        self._total = 0

    def place(self, ask: Ask, replicas: Sequence[int]) -> int:
        first = ask.prompt[: self._first_tokens]
        chosen = self._clockwise(hashlib.blake2b(first.tobytes()).digest())
        self._running[chosen] += 1
        self._total += 1
        return chosen

    def _clockwise(self, point: bytes) -> int:
        running, owners = self._running, self._owners
        limit = self._bound * (self._total + 1) / len(running)
        index = bisect(self._points, point)
        while running.get(owners[index % len(owners)], limit) >= limit:
            index += 1
        return owners[index % len(owners)]

    def started(self, ask: Ask) -> None:
        pass

    def ended(self, ask: Ask, *, is_whole: bool) -> None:
        if ask.replica in self._running:
            self._running[ask.replica] -= 1
            self._total -= 1

    def changed(self, replica: int, changes: list[Change]) -> None:
        pass

    def lost(self, replica: int) -> None:
        self._total -= self._running.pop(replica)
