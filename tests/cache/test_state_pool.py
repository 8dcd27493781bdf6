"""StatePool: live and cached slots from one pool."""

from __future__ import annotations

import random

import pytest

from megatron_hybrid.cache.free_slots import FreeSlots
from megatron_hybrid.cache.state_pool import Checkpoint, StatePool
from megatron_hybrid.errors import StatePoolExhausted


def cached(pool: StatePool, name: str) -> int:
    return pool.publish(pool.allocate(), Checkpoint(name.encode(), 4, "last_aligned"))


def names(pool: StatePool) -> set[str]:
    return {key.decode() for key in pool.mamba_hash_to_slot_id}


def test_exhaustion_is_an_error_without_effect():
    pool = StatePool(2)
    first, second = pool.allocate(), pool.allocate()
    assert {first, second} == {1, 2}
    with pytest.raises(StatePoolExhausted, match="All 2 state slots"):
        pool.allocate()
    pool.check_integrity(owned=[1, 2], pinned=[])
    pool.release(first)
    assert pool.allocate() == first


def test_the_null_slot_is_never_handed_out():
    pool = StatePool(3)
    assert 0 not in [pool.allocate() for _ in range(3)]


def test_the_least_recently_read_state_is_evicted_first():
    evicted: list[bytes] = []
    pool = StatePool(3, on_evict=evicted.append)
    a, _, _ = cached(pool, "a"), cached(pool, "b"), cached(pool, "c")
    pool.pin(a)
    pool.unpin(a, used=True)
    pool.allocate()
    pool.allocate()
    assert evicted == [b"b", b"c"] and names(pool) == {"a"}


def test_a_pin_that_is_taken_back_unused_leaves_the_order_alone():
    pool = StatePool(2)
    a, _ = cached(pool, "a"), cached(pool, "b")
    pool.pin(a)
    pool.unpin(a, used=False)
    pool.allocate()
    assert names(pool) == {"b"}


def test_a_pinned_state_is_not_evicted():
    pool = StatePool(2)
    a, _ = cached(pool, "a"), cached(pool, "b")
    pool.pin(a)
    pool.allocate()
    with pytest.raises(StatePoolExhausted):
        pool.allocate()
    assert names(pool) == {"a"}


def test_a_state_dropped_while_pinned_is_free_after_the_last_pin():
    pool = StatePool(1)
    a = cached(pool, "a")
    pool.pin(a)
    pool.pin(a)
    assert pool.drop(b"a") and not pool.drop(b"a")
    pool.unpin(a, used=True)
    assert pool.num_free == 0
    pool.unpin(a, used=True)
    assert pool.num_free == 1
    pool.check_integrity(owned=[], pinned=[])


def test_a_duplicate_state_frees_its_own_slot():
    pool = StatePool(3)
    a = cached(pool, "a")
    assert cached(pool, "a") == a
    assert pool.num_free == 2 and pool.num_cached == 1
    pool.check_integrity(owned=[], pinned=[])


def test_clearing_keeps_owned_slots():
    pool = StatePool(3)
    live = pool.allocate()
    cached(pool, "a")
    pool.clear()
    assert names(pool) == set() and pool.num_free == 2
    pool.check_integrity(owned=[live], pinned=[])


def test_live_slots_are_low_and_checkpoints_high_whatever_happened_before():
    pool = StatePool(8)
    held = [pool.allocate() for _ in range(4)] + [pool.allocate(for_checkpoint=True)]
    assert held == [1, 2, 3, 4, 8]
    for slot in (3, 1, 8):
        pool.release(slot)
    assert [pool.allocate(), pool.allocate(for_checkpoint=True), pool.allocate()] == [1, 8, 3]


def test_free_slots_are_the_lowest_and_highest_of_a_set():
    rng = random.Random(0)
    free, truth = FreeSlots(20), set(range(1, 21))
    for _ in range(3000):
        action = rng.randrange(3)
        if action < 2 and truth:
            slot = free.take_lowest() if action else free.take_highest()
            assert slot == (min(truth) if action else max(truth))
            truth.remove(slot)
        elif len(truth) < 20:
            slot = rng.choice(sorted(set(range(1, 21)) - truth))
            free.add(slot)
            truth.add(slot)
        assert len(free) == len(truth) and all(slot in free for slot in truth)
    assert len(free._lowest) + len(free._highest) <= 4 * 20 + 66
