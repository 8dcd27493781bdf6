"""The steps in which cached blocks and states were used last, for what shows their ages."""

from __future__ import annotations

import time

from megatron_hybrid.cache.cached_state import CachedState
from megatron_hybrid.cache.kv_block_allocator import KVBlockAllocator
from megatron_hybrid.cache.state_pool import StatePool


def released_at(kv: KVBlockAllocator, *steps: int) -> list[int]:
    """A chain of blocks; block i's last user goes in step i of these."""
    blocks = kv.allocate(len(steps))
    parent = 0
    for block in blocks:
        parent = kv.map(block, f"{block}".encode(), parent)
    for block, step in reversed(list(zip(blocks, steps, strict=True))):
        kv.step = step
        kv.release([block])
    return blocks


def test_a_blocks_last_use_is_when_its_last_user_went():
    kv = KVBlockAllocator(8)
    blocks = released_at(kv, 9, 5, 2)
    assert sorted(kv.last_uses()) == [2, 5, 9]
    kv.step = 20
    kv.acquire(blocks[:2])
    assert sorted(kv.last_uses()) == [2]
    kv.acquire(blocks[:1])
    kv.step = 30
    kv.release(blocks[:2])
    assert sorted(kv.last_uses()) == [2, 30]
    kv.step = 31
    kv.release(blocks[:1])
    assert sorted(kv.last_uses()) == [2, 30, 31]


def test_covering_and_uncovering_a_block_is_no_use_of_it():
    kv = KVBlockAllocator(8, needs_cover=True)
    first, last = released_at(kv, 9, 5)
    kv.step = 20
    kv.cover(last)
    assert kv.num_uncovered == 0 and sorted(kv.last_uses()) == [5, 9]
    kv.step = 30
    kv.uncover(last)
    assert kv.num_uncovered == 2 and sorted(kv.last_uses()) == [5, 9]


def test_private_and_evicted_blocks_have_no_last_use():
    kv = KVBlockAllocator(3)
    released_at(kv, 4, 3)
    kv.release(kv.allocate(1))
    assert sorted(kv.last_uses()) == [3, 4]
    kv.evict()
    kv.allocate(2)  # the free one, and the leaf
    assert sorted(kv.last_uses()) == [4]


def test_a_states_last_use_is_when_it_was_left_or_read():
    pool = StatePool(4)
    for step, name in ((3, b"a"), (5, b"b")):
        pool.queue.now = step
        pool.cache(pool.allocate(), CachedState(name, step, "fork"))
    assert sorted(pool.last_uses()) == [3, 5]
    slot = pool.mamba_hash_to_slot_id[b"a"]
    pool.queue.now = 8
    pool.pin(slot)
    pool.unpin(slot, used=False)
    assert sorted(pool.last_uses()) == [3, 5]
    pool.pin(slot)
    pool.unpin(slot, used=True)
    assert sorted(pool.last_uses()) == [5, 8]


def test_the_last_uses_of_100_000_blocks_are_there_in_no_time():
    kv = KVBlockAllocator(100_000)
    released_at(kv, *range(100_000, 0, -1))
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        assert len(kv.last_uses()) == 100_000
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.1  # a few milliseconds, with much to spare for a busy machine
