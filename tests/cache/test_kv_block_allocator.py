"""KVBlockAllocator, with the store that evicts: sharing, mapping, leaf-first eviction."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from megatron_hybrid.cache.kv_block_allocator import KVBlockAllocator
from megatron_hybrid.cache.prefix_store import PrefixStore
from megatron_hybrid.cache.tail_index import Tail
from megatron_hybrid.errors import KVBlocksExhausted
from tests.cache.stores import make_store


def map_path(store: PrefixStore, names: str) -> list[int]:
    """Allocate and map a path; its i-th key is the first i + 1 letters."""
    blocks: list[int] = []
    allocator = store.kv
    for i in range(len(names)):
        key = names[: i + 1].encode()
        mapped = allocator.kv_hash_to_block_id.get(key)
        if mapped is None:
            (block,) = store.allocate_blocks(1)
            mapped = allocator.map(block, key, blocks[-1] if blocks else 0)
        else:
            allocator.acquire([mapped])
        blocks.append(mapped)
    return blocks


def keys(allocator: KVBlockAllocator) -> set[str]:
    return {key.decode() for key in allocator.kv_hash_to_block_id}


def test_private_blocks_are_free_again_after_release():
    store = make_store(4)
    allocator = store.kv
    blocks = store.allocate_blocks(4)
    assert sorted(blocks) == [1, 2, 3, 4]
    allocator.release(blocks)
    assert allocator.num_free == 4
    allocator.check_integrity([])


def test_allocating_more_than_there_is_changes_nothing():
    store = make_store(4)
    allocator = store.kv
    held = map_path(store, "abc")
    allocator.release(held)
    with pytest.raises(KVBlocksExhausted, match="5 KV blocks"):
        store.allocate_blocks(5)
    assert allocator.num_free == 1 and keys(allocator) == {"a", "ab", "abc"}
    assert allocator.evictions == 0


def test_leaves_go_before_their_parents():
    evicted: list[bytes] = []
    store = make_store(3, evicted=evicted)
    allocator = store.kv
    allocator.release(map_path(store, "abc"))
    store.allocate_blocks(3)
    assert evicted == [b"abc", b"ab", b"a"]


def test_the_least_recently_used_leaf_goes_first_and_the_newest_outlives_it():
    store = make_store(6)
    allocator = store.kv
    old = map_path(store, "ab")
    new = map_path(store, "xy")
    allocator.release(old)
    allocator.release(new)
    old = map_path(store, "ab")  # used again
    allocator.release(old)
    store.allocate_blocks(3)  # two are free
    assert keys(allocator) == {"a", "ab", "x"}


def test_a_parent_becomes_a_leaf_with_the_age_it_has():
    store = make_store(4)
    allocator = store.kv
    allocator.release(map_path(store, "ab"))
    allocator.release(map_path(store, "x"))
    allocator.release(map_path(store, "a"))  # a is the newest now, ab is still the oldest
    store.allocate_blocks(2)  # one is free, ab goes
    assert keys(allocator) == {"a", "x"}
    store.allocate_blocks(1)
    assert keys(allocator) == {"a"}


def test_a_referenced_block_and_its_ancestors_are_never_evicted():
    store = make_store(4)
    allocator = store.kv
    held = map_path(store, "abc")
    allocator.release(map_path(store, "abcd"))
    store.allocate_blocks(1)
    assert keys(allocator) == {"a", "ab", "abc"}
    with pytest.raises(KVBlocksExhausted):
        store.allocate_blocks(1)
    allocator.release(held)
    assert allocator.num_available == 3


def test_a_block_with_a_mapped_child_is_no_leaf_even_when_it_is_published_last():
    store = make_store(3)
    allocator = store.kv
    a = map_path(store, "a")
    allocator.release(a)
    ab = map_path(store, "ab")  # the child comes while a is evictable
    allocator.release(ab)
    allocator.check_integrity([])
    dropped = allocator.evict()
    assert dropped is not None and dropped.block == ab[1] and dropped.key == b"ab"


def test_a_newcomer_with_known_content_gets_the_mapped_block_and_frees_its_own():
    store = make_store(4)
    allocator = store.kv
    (first,) = map_path(store, "a")
    (twin,) = store.allocate_blocks(1)
    assert allocator.map(twin, b"a") == first
    assert allocator._references[first] == 2 and allocator.num_free == 3
    allocator.release([first])
    allocator.release([first])
    assert keys(allocator) == {"a"}
    allocator.check_integrity([])


def test_clearing_frees_idle_blocks_now_and_used_ones_at_their_release():
    store = make_store(4)
    allocator = store.kv
    held = map_path(store, "ab")
    allocator.release(map_path(store, "xy"))
    allocator.clear()
    assert keys(allocator) == set() and allocator.num_free == 2
    allocator.check_integrity([held])
    # the same content, computed anew: the old block's release must not touch its entry
    allocator.release(map_path(store, "a"))
    allocator.release(held)
    assert keys(allocator) == {"a"} and allocator.num_available == 4
    allocator.check_integrity([])


@pytest.mark.parametrize("seed", range(5))
def test_evictions_follow_a_brute_force_simulation(seed):
    """Against a simulator that looks at every block each time."""
    rng = np.random.default_rng(seed)
    store = make_store(12)
    allocator = store.kv
    last_use: dict[str, int] = {}
    for now in range(300):
        path = "".join(rng.choice(list("abc"), size=int(rng.integers(1, 5))))
        mapped = keys(allocator)
        missing = [path[:i] for i in range(1, len(path) + 1) if path[:i] not in mapped]
        evict = max(0, len(missing) - (12 - len(mapped)))
        survivors = set(mapped)
        for _ in range(evict):
            on_path = {path[:i] for i in range(1, len(path) + 1)}
            leaves = [
                k
                for k in survivors - on_path
                if not any(o != k and o.startswith(k) for o in survivors)
            ]
            # blocks of one age were used by one request, and only one of a path is a leaf
            survivors.remove(min(leaves, key=lambda k: last_use[k]))
        held = [allocator.kv_hash_to_block_id[path[:i].encode()] for i in range(1, len(path) + 1)
                if path[:i] in mapped]  # fmt: skip
        allocator.acquire(held)
        new = store.allocate_blocks(len(missing))
        for name, block in zip(missing, new, strict=True):
            parent = allocator.kv_hash_to_block_id.get(name[:-1].encode(), 0)
            allocator.map(block, name.encode(), parent)
        allocator.release(held + new)
        for i in range(1, len(path) + 1):
            last_use[path[:i]] = now
        assert keys(allocator) == survivors | set(missing)
        allocator.check_integrity([])


def test_a_block_with_a_tail_alone_is_free_when_the_tail_goes():
    store = make_store(4)
    allocator = store.kv
    (a,) = map_path(store, "a")
    (block,) = store.allocate_blocks(1)
    for fill in (1, 2):
        allocator.map_tail(block, b"a" + b"." * fill, Tail(b"a", fill, block), a)
    assert allocator.num_mapped == 2
    allocator.drop_tail(b"a.")
    allocator.release([a, block])
    assert (allocator.num_free, allocator.num_cached) == (2, 2)
    allocator.check_integrity([])
    allocator.drop_tail(b"a..")
    allocator.drop_tail(b"a..")
    assert (allocator.num_free, allocator.num_cached) == (3, 1)
    allocator.check_integrity([])


def test_a_tails_block_is_evicted_before_the_block_that_it_continues():
    evicted: list[bytes] = []
    store = make_store(3, evicted=evicted)
    allocator = store.kv
    a, ab = map_path(store, "ab")
    (block,) = store.allocate_blocks(1)
    allocator.map_tail(block, b"ab.", Tail(b"ab", 1, block), ab)
    allocator.map_tail(block, b"ab..", Tail(b"ab", 2, block), ab)
    allocator.release([a, ab, block])
    store.allocate_blocks(1)
    assert sorted(evicted) == [b"ab.", b"ab.."] and not len(allocator.tails)
    store.allocate_blocks(2)
    assert evicted[2:] == [b"ab", b"a"]


def test_a_newcomers_tails_move_to_the_block_that_is_mapped_already():
    store = make_store(4, is_hybrid=True)
    allocator = store.kv
    (first,) = map_path(store, "a")
    (twin,) = store.allocate_blocks(1)
    allocator.map_tail(twin, b".", Tail(b"", 1, twin), 0)
    allocator.cover(twin)
    assert allocator.map(twin, b"a") == first
    tail = allocator.tails.get(b".")
    assert tail is not None and tail.block == first
    allocator.check_cover([first])
    allocator.release([first, first])
    allocator.check_integrity([])
    assert allocator.num_free == 3
    allocator.drop_tail(b".")
    assert allocator.num_free == 3 and keys(allocator) == {"a"}


def test_without_idle_blocks_everything_goes_with_its_last_user():
    evicted: list[bytes] = []
    store = make_store(4, evicted=evicted, keeps_idle=False)
    allocator = store.kv
    first, second = map_path(store, "ab"), map_path(store, "abc")
    allocator.map_tail(second[2], b"ab.", Tail(b"ab", 1, second[2]), second[1])
    store.release_blocks(second)
    assert keys(allocator) == {"a", "ab"} and not len(allocator.tails)
    store.release_blocks(first)
    assert allocator.num_free == 4 and sorted(evicted) == [b"a", b"ab", b"ab.", b"abc"]
    allocator.check_integrity([])


class NaiveBlocks:
    """What the allocator should hold: paths of letters, one a block, looked at from end to end."""

    def __init__(self) -> None:
        self.mapped: set[str] = set()
        self.references: Counter[str] = Counter()
        self.states: Counter[str] = Counter()  # of paths, their tails' included
        self.stamp: dict[str, int] = {}  # when an idle block got to the end of its queue
        self.now = 0

    def is_covered(self, path: str) -> bool:
        return any(n and other.startswith(path) for other, n in self.states.items())

    def touch(self, path: str) -> None:
        self.now += 1
        self.stamp[path] = self.now

    def release(self, path: str) -> None:
        for end in range(len(path), 0, -1):
            self.references[path[:end]] -= 1
            if not self.references[path[:end]]:
                self.touch(path[:end])

    def change_states(self, path: str, change: int) -> None:
        before = [self.is_covered(path[:end]) for end in range(1, len(path) + 1)]
        self.states[path] += change
        for end in range(len(path), 0, -1):
            part = path[:end]
            if before[end - 1] != self.is_covered(part) and not self.references[part]:
                self.touch(part)

    def next_evicted(self) -> str:
        idle = [path for path in self.mapped if not self.references[path]]
        return min(idle, key=lambda path: (self.is_covered(path), self.stamp[path]))

    def evict(self) -> str:
        path = self.next_evicted()
        self.mapped.remove(path)
        while self.states[path]:
            self.change_states(path, -1)
        return path


@pytest.mark.parametrize("seed", range(8))
def test_sharing_covering_and_evicting_agree_with_a_plain_model(seed):
    rng = np.random.default_rng(seed)
    size, naive = 14, NaiveBlocks()
    evicted: list[bytes] = []
    store = make_store(size, evicted=evicted, is_hybrid=True)
    allocator = store.kv
    held: list[tuple[str, list[int]]] = []
    tails: dict[bytes, str] = {}  # tail -> the path of the block that holds it

    def evict_for(count: int) -> None:
        while size - len(naive.mapped) < count:
            path = naive.evict()
            assert naive.references[path] == 0
            assert not any(p != path and p.startswith(path) for p in naive.mapped), "no leaf"
            for tail in [t for t, owner in tails.items() if owner == path]:
                del tails[tail]

    for turn in range(1200):
        action = rng.random()
        if action < 0.45:
            path = "".join(rng.choice(list("abc"), size=int(rng.integers(1, 6))))
            parts = [path[: i + 1] for i in range(len(path))]
            missing = [part for part in parts if part not in naive.mapped]
            found = [allocator.kv_hash_to_block_id[p.encode()] for p in parts if p in naive.mapped]
            idle = [p for p in naive.mapped if not naive.references[p]]
            room = size - len(naive.mapped) + len([p for p in idle if p not in parts])
            if len(missing) > room:
                continue
            for part in parts:
                naive.references[part] += 1
            allocator.acquire(found)
            evict_for(len(missing))
            blocks = found + store.allocate_blocks(len(missing))
            naive.mapped |= set(missing)
            for i in range(len(found), len(parts)):
                parent = blocks[i - 1] if i else 0
                assert allocator.map(blocks[i], parts[i].encode(), parent) == blocks[i]
            held.append((path, blocks))
        elif action < 0.65 and held:
            path, blocks = held.pop(int(rng.integers(len(held))))
            allocator.release(blocks)
            naive.release(path)
        elif action < 0.8 and held:  # a state, at a block's end or inside it
            path, blocks = held[int(rng.integers(len(held)))]
            if rng.random() < 0.5:
                tail = f"{path}.{turn}".encode()
                parent = path[:-1].encode()
                allocator.map_tail(
                    blocks[-1], tail, Tail(parent, turn, blocks[-1]), ([0] + blocks)[-2]
                )
                tails[tail] = path
            allocator.cover(blocks[-1])
            naive.change_states(path, 1)
        elif action < 0.95:
            with_states = sorted(path for path, n in naive.states.items() if n)
            if with_states:
                path = str(rng.choice(with_states))
                block = allocator.kv_hash_to_block_id[path.encode()]
                mine = [tail for tail, owner in tails.items() if owner == path]
                allocator.uncover(block)
                naive.change_states(path, -1)
                if mine and naive.states[path] < len(mine):
                    allocator.drop_tail(mine[0])
                    del tails[mine[0]]
        elif any(not naive.references[path] for path in naive.mapped):
            before = len(naive.mapped)
            evict_for(size - before + 1)
            allocator.evict()
        assert keys(allocator) == naive.mapped
        assert {key for key, _ in allocator.tails.items()} == set(tails)
        allocator.check_integrity([blocks for _, blocks in held])
        allocator.check_cover(
            allocator.kv_hash_to_block_id[path.encode()] for path in naive.states.elements()
        )
    assert evicted and allocator.evictions > 50
