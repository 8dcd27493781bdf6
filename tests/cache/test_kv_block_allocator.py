"""KVBlockAllocator: sharing, publishing, leaf-first eviction."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_hybrid.cache.kv_block_allocator import KVBlockAllocator
from megatron_hybrid.errors import KVBlocksExhausted


def publish_path(allocator: KVBlockAllocator, names: str) -> list[int]:
    """Allocate and publish a path; its i-th key is the first i + 1 letters."""
    blocks = []
    for i in range(len(names)):
        key = names[: i + 1].encode()
        mapped = allocator.kv_hash_to_block_id.get(key)
        if mapped is None:
            (block,) = allocator.allocate(1)
            mapped = allocator.publish(block, key)
        else:
            allocator.acquire([mapped])
        blocks.append(mapped)
    return blocks


def keys(allocator: KVBlockAllocator) -> set[str]:
    return {key.decode() for key in allocator.kv_hash_to_block_id}


def test_private_blocks_are_free_again_after_release():
    allocator = KVBlockAllocator(4)
    blocks = allocator.allocate(4)
    assert sorted(blocks) == [1, 2, 3, 4]
    allocator.release(blocks)
    assert allocator.num_free == 4
    allocator.check_integrity([])


def test_allocating_more_than_there_is_changes_nothing():
    allocator = KVBlockAllocator(4)
    held = publish_path(allocator, "abc")
    allocator.release(held)
    with pytest.raises(KVBlocksExhausted, match="5 KV blocks"):
        allocator.allocate(5)
    assert allocator.num_free == 1 and keys(allocator) == {"a", "ab", "abc"}
    assert allocator.evictions == 0


def test_leaves_go_before_their_parents():
    evicted: list[bytes] = []
    allocator = KVBlockAllocator(3, on_evict=evicted.append)
    allocator.release(publish_path(allocator, "abc"))
    allocator.allocate(3)
    assert evicted == [b"abc", b"ab", b"a"]


def test_the_least_recently_used_leaf_goes_first_and_the_newest_outlives_it():
    allocator = KVBlockAllocator(6)
    old = publish_path(allocator, "ab")
    new = publish_path(allocator, "xy")
    allocator.release(old)
    allocator.release(new)
    old = publish_path(allocator, "ab")  # used again
    allocator.release(old)
    allocator.allocate(3)  # two are free
    assert keys(allocator) == {"a", "ab", "x"}


def test_a_parent_becomes_a_leaf_with_the_age_it_has():
    allocator = KVBlockAllocator(4)
    allocator.release(publish_path(allocator, "ab"))
    allocator.release(publish_path(allocator, "x"))
    allocator.release(publish_path(allocator, "a"))  # a is the newest now, ab is still the oldest
    allocator.allocate(2)  # one is free, ab goes
    assert keys(allocator) == {"a", "x"}
    allocator.allocate(1)
    assert keys(allocator) == {"a"}


def test_a_referenced_block_and_its_ancestors_are_never_evicted():
    allocator = KVBlockAllocator(4)
    held = publish_path(allocator, "abc")
    allocator.release(publish_path(allocator, "abcd"))
    allocator.allocate(1)
    assert keys(allocator) == {"a", "ab", "abc"}
    with pytest.raises(KVBlocksExhausted):
        allocator.allocate(1)
    allocator.release(held)
    assert allocator.num_available == 3


def test_a_block_with_a_mapped_child_is_no_leaf_even_when_it_is_published_last():
    allocator = KVBlockAllocator(3)
    a = publish_path(allocator, "a")
    allocator.release(a)
    ab = publish_path(allocator, "ab")  # the child comes while a is evictable
    allocator.release(ab)
    allocator.check_integrity([])
    evicted = allocator.evict()
    assert evicted == ab[1]


def test_a_newcomer_with_known_content_gets_the_mapped_block_and_frees_its_own():
    allocator = KVBlockAllocator(4)
    (first,) = publish_path(allocator, "a")
    (twin,) = allocator.allocate(1)
    assert allocator.publish(twin, b"a") == first
    assert allocator.references(first) == 2 and allocator.num_free == 3
    allocator.release([first])
    allocator.release([first])
    assert keys(allocator) == {"a"}
    allocator.check_integrity([])


def test_clearing_frees_idle_blocks_now_and_used_ones_at_their_release():
    allocator = KVBlockAllocator(4)
    held = publish_path(allocator, "ab")
    allocator.release(publish_path(allocator, "xy"))
    allocator.clear()
    assert keys(allocator) == set() and allocator.num_free == 2
    allocator.check_integrity([held])
    # the same content, computed anew: the old block's release must not touch its entry
    allocator.release(publish_path(allocator, "a"))
    allocator.release(held)
    assert keys(allocator) == {"a"} and allocator.num_available == 4
    allocator.check_integrity([])


@pytest.mark.parametrize("seed", range(5))
def test_evictions_follow_a_brute_force_simulation(seed):
    """Against a simulator that looks at every block each time."""
    rng = np.random.default_rng(seed)
    allocator = KVBlockAllocator(12)
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
        new = allocator.allocate(len(missing))
        for name, block in zip(missing, new, strict=True):
            allocator.publish(block, name.encode())
        allocator.release(held + new)
        for i in range(1, len(path) + 1):
            last_use[path[:i]] = now
        assert keys(allocator) == survivors | set(missing)
        allocator.check_integrity([])
