"""What many replicas hold of a prompt, against asking each of them."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest

from megatron_hybrid.cache.block_hash import SequenceKeys, root_key
from megatron_hybrid.cache.changes import BLOCKS, LOGITS, STATES, Change, Cleared, Removed, Stored
from megatron_hybrid.kv_events import CacheContents, wire_hash
from megatron_hybrid.kv_events.contents import shared_blocks
from megatron_hybrid.kv_events.messages import events_of
from simulation.holders import FEW, Contents, Groups, Underway, raise_to
from simulation.replicas import REFERENCE

SIZE = REFERENCE.block_size
REPLICAS = 3 * FEW


def keys_of(tokens: np.ndarray) -> SequenceKeys:
    keys = SequenceKeys(root_key(0), SIZE, lambda low, high: tokens[low:high])
    keys.extend_to(len(tokens))
    return keys


def by_replica(groups: Groups) -> list[int]:
    """Tokens of each; a replica is in one group at most."""
    tokens = [0] * REPLICAS
    for count, replicas in groups:
        for one in range(REPLICAS):
            if replicas >> one & 1:
                assert not tokens[one] and count
                tokens[one] = count
    return tokens


class Cache:
    """One replica's, to which anything happens that can."""

    def __init__(self) -> None:
        self.contents = CacheContents()
        self.blocks: dict[bytes, bytes | None] = {}  # and the parent of each
        self.states: set[bytes] = set()

    def change(self, random: Random, prompts: list[SequenceKeys], length: int) -> list[Change]:
        keys = random.choice(prompts)
        known = next((i for i, key in enumerate(keys.blocks) if key not in self.blocks), None)
        what = random.randrange(5)
        tokens = np.zeros(0, np.int32)
        if what == 0 and self.states:
            key = random.choice(sorted(self.states))
            if random.random() < 0.3:
                return [Removed(key, LOGITS)]
            self.states.remove(key)
            return [Removed(key, STATES)]
        if what == 1 and (leaves := sorted(self.blocks.keys() - set(self.blocks.values()))):
            key = random.choice(leaves)
            del self.blocks[key]
            return [Removed(key, BLOCKS)]
        if what < 4 and known is not None:
            new = keys.blocks[known : known + random.randint(1, 3)]
            above = keys.of_block(known) if known else None
            self.blocks.update(zip(new, [above, *new], strict=False))
            return [Stored(new, above, tokens, SIZE, BLOCKS, "", "")]
        end = random.choice([SIZE, 2 * SIZE, 2 * SIZE + 7, 3 * SIZE + 1, length, 9])
        start = (end - 1) // SIZE * SIZE
        self.states.add(keys.at(end))
        above = keys.at(start) if start else None
        logits = random.random() < 0.5
        return [Stored([keys.at(end)], above, tokens, end - start, STATES, "", "", logits)]


@pytest.mark.parametrize("seed", range(3))
def test_contents_are_those_of_every_replica(seed: int) -> None:
    random = Random(seed)
    numbers = np.random.default_rng(seed)
    common = numbers.integers(0, 99, 2 * SIZE + 20)
    length = 4 * SIZE + 11
    prompts = [
        keys_of(np.concatenate((common, numbers.integers(0, 99, length - len(common)))))
        for _ in range(3)
    ]
    contents = Contents(REFERENCE, REPLICAS)
    caches = [Cache() for _ in range(REPLICAS)]
    seen: set[int] = set()
    for one, cache in enumerate(caches):
        changes: list[Change] = [Cleared(0, REFERENCE)]
        contents.apply(one, changes)
        cache.contents.apply(events_of(changes))
    for step in range(600):
        one = random.randrange(REPLICAS)
        changes = caches[one].change(random, prompts, length)
        contents.apply(one, changes)
        caches[one].contents.apply(events_of(changes))
        if step == 500:
            contents.lose(2)
            caches[2] = Cache()
            caches[2].contents.apply(events_of([Cleared(0, REFERENCE)]))
        keys = random.choice(prompts)
        skipped = [cache.contents.skippable(keys, length) for cache in caches]
        assert by_replica(contents.skippable(keys, length)) == skipped
        hashes = [wire_hash(key) for key in keys.blocks]
        held = [SIZE * shared_blocks(hashes, cache.contents.blocks) for cache in caches]
        assert by_replica(contents.blocks(keys)) == held
        assert contents.num_blocks.tolist() == [len(cache.contents.blocks) for cache in caches]
        seen.update(skipped)
    assert {0, 9, 2 * SIZE + 7, length} <= seen
    for one in range(REPLICAS):
        contents.lose(one)
    assert not contents._fills and not contents._tails


def test_blocks_of_several_requests_are_there_until_the_last_has_ended() -> None:
    random, tokens = Random(0), np.arange(8 * SIZE, dtype=np.int32)
    prompts = [keys_of(tokens[: count * SIZE]) for count in range(1, 9)]
    underway, running = Underway(SIZE, REPLICAS), [Counter[int]() for _ in range(REPLICAS)]
    for _ in range(400):
        one = random.randrange(REPLICAS)
        if random.random() < 0.5 and (some := [*running[one].elements()]):
            count = random.choice(some)
            underway.end(one, prompts[count].blocks)
            running[one][count] -= 1
        else:
            count = random.randrange(len(prompts))
            underway.begin(one, prompts[count].blocks)
            running[one][count] += 1
        longest = [1 + max(some.elements(), default=-1) for some in running]
        assert underway.num_blocks.tolist() == longest
        keys = random.choice(prompts)
        shared = [SIZE * min(len(keys.blocks), blocks) for blocks in longest]
        assert by_replica(underway.blocks(keys)) == shared


@pytest.mark.parametrize("count", [0, 1, FEW, FEW + 1, REPLICAS])
def test_values_of_the_chosen_are_raised(count: int) -> None:
    chosen = Random(count).sample(range(REPLICAS), count)
    values = np.arange(float(REPLICAS))
    raise_to(values, 5.5, sum(1 << one for one in chosen))
    expected = [max(one, 5.5) if one in chosen else one for one in range(REPLICAS)]
    assert values.tolist() == expected
