"""StatePool, with the store that evicts: live and cached slots from one pool."""

from __future__ import annotations

import random

import pytest

from megatron_hybrid.cache.cached_state import CachedState
from megatron_hybrid.cache.prefix_store import PrefixStore
from megatron_hybrid.cache.state_pool import FreeSlots, StatePool
from megatron_hybrid.errors import StatePoolExhausted
from tests.cache.stores import make_store


def new_state(
    name: str, kind: str = "last_aligned", has_logits: bool = False, position: int = 4
) -> CachedState:
    return CachedState(name.encode(), position, kind, has_logits=has_logits)


def cached(store: PrefixStore, name: str, **options) -> int:  # type: ignore[no-untyped-def]
    return store.states.cache(store.allocate_slot(), new_state(name, **options)).slot


def names(pool: StatePool) -> set[str]:
    return {key.decode() for key in pool.mamba_hash_to_slot_id}


def test_exhaustion_is_an_error_without_effect():
    store = make_store(num_slots=2)
    pool = store.states
    first, second = store.allocate_slot(), store.allocate_slot()
    assert {first, second} == {1, 2}
    with pytest.raises(StatePoolExhausted, match="All 2 state slots"):
        store.allocate_slot()
    pool.check_integrity(owned=[1, 2], pinned=[])
    pool.release(first)
    assert store.allocate_slot() == first


def test_the_null_slot_is_never_handed_out():
    store = make_store(num_slots=3)
    assert 0 not in [store.allocate_slot() for _ in range(3)]


def test_the_least_recently_read_state_is_evicted_first():
    evicted: list[bytes] = []
    store = make_store(num_slots=3, evicted=evicted)
    pool = store.states
    a, _, _ = cached(store, "a"), cached(store, "b"), cached(store, "c")
    pool.pin(a)
    pool.unpin(a, used=True)
    store.allocate_slot()
    store.allocate_slot()
    assert evicted == [b"b", b"c"] and names(pool) == {"a"} and pool.evictions == 2


def test_a_pin_that_is_taken_back_unused_leaves_the_order_alone():
    store = make_store(num_slots=2)
    pool = store.states
    a, _ = cached(store, "a"), cached(store, "b")
    pool.pin(a)
    pool.unpin(a, used=False)
    store.allocate_slot()
    assert names(pool) == {"b"}


def test_a_pinned_state_is_not_evicted():
    store = make_store(num_slots=2)
    pool = store.states
    a, _ = cached(store, "a"), cached(store, "b")
    pool.pin(a)
    store.allocate_slot()
    with pytest.raises(StatePoolExhausted):
        store.allocate_slot()
    assert names(pool) == {"a"}


def test_a_state_dropped_while_pinned_is_free_after_the_last_pin():
    store = make_store(num_slots=1)
    pool = store.states
    a = cached(store, "a")
    pool.pin(a)
    pool.pin(a)
    assert pool.drop(b"a") and not pool.drop(b"a")
    pool.unpin(a, used=True)
    assert pool.num_free == 0
    pool.unpin(a, used=True)
    assert pool.num_free == 1
    pool.check_integrity(owned=[], pinned=[])


def test_a_duplicate_state_frees_its_own_slot():
    store = make_store(num_slots=3)
    pool = store.states
    a = cached(store, "a")
    assert cached(store, "a") == a
    assert pool.num_free == 2 and pool.num_cached == 1
    pool.check_integrity(owned=[], pinned=[])


def test_a_duplicate_with_logits_takes_the_place_of_one_without():
    store = make_store(num_slots=3)
    pool = store.states
    old = cached(store, "a")
    state = pool.get(b"a")
    new = cached(store, "a", has_logits=True)
    assert new != old and pool.get(b"a") is state
    assert state is not None and state.has_logits and state.slot == new
    assert pool.num_free == 2
    pool.check_integrity(owned=[], pinned=[])
    assert cached(store, "a") == new, "a third one adds nothing"
    assert cached(store, "a", has_logits=True) == new
    pool.check_integrity(owned=[], pinned=[])


def test_a_slot_that_is_being_read_outlives_the_move_of_its_state():
    store = make_store(num_slots=4)
    pool = store.states
    old = cached(store, "a")
    pool.pin(old)
    new = cached(store, "a", has_logits=True)
    pool.check_integrity(owned=[], pinned=[old])
    assert pool.num_free == 2 and pool.state_in(old) is None
    pool.pin(new)
    pool.unpin(old, used=True)
    assert pool.num_free == 3
    pool.unpin(new, used=True)
    pool.check_integrity(owned=[], pinned=[])


def test_what_may_not_evict_takes_free_slots_alone():
    store = make_store(num_slots=2)
    pool = store.states
    cached(store, "a")
    assert store.allocate_slot(for_checkpoint=True, evicts=False)
    with pytest.raises(StatePoolExhausted):
        store.allocate_slot(for_checkpoint=True, evicts=False)
    assert names(pool) == {"a"} and pool.evictions == 0
    pool.check_integrity()
    store.allocate_slot(for_checkpoint=True)
    assert names(pool) == set() and pool.evictions == 1


def test_clearing_keeps_owned_slots():
    store = make_store(num_slots=3)
    pool = store.states
    live = store.allocate_slot()
    cached(store, "a")
    pool.clear()
    assert names(pool) == set() and pool.num_free == 2
    pool.check_integrity(owned=[live], pinned=[])


def test_a_state_that_loses_its_ancestor_is_worth_more_from_then_on():
    store = make_store(num_slots=4)
    pool = store.states
    root = pool.cache(store.allocate_slot(), new_state("a", position=8))
    leaf = CachedState(b"b", 20, "fork", root)
    pool.cache(store.allocate_slot(), leaf)
    assert (leaf.replay_tokens, root.children) == (12, 1)
    pool.drop(b"a")
    assert leaf.replay_tokens == 20
    pool.check_integrity(owned=[], pinned=[])


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_calls_agrees_with_a_plain_model(seed: int):
    """The model: names by age; who is pinned; who owns how many slots."""
    rng = random.Random(seed)
    evicted: list[bytes] = []
    size = rng.randrange(1, 9)
    store = make_store(num_slots=size, evicted=evicted)
    pool = store.states
    age: dict[str, int] = {}  # of cached states: the time of their last use
    owned: list[int] = []
    pins: list[tuple[int, str]] = []

    for now in range(1, 1500):
        action = rng.random()
        pinned = {slot for slot, _ in pins}
        if action < 0.4:
            idle = [n for n in age if pool.mamba_hash_to_slot_id[n.encode()] not in pinned]
            busy = len(owned) + len(pinned)
            free = size - busy - len(idle)
            wanted = {"for_checkpoint": rng.random() < 0.5, "evicts": rng.random() < 0.7}
            if not free and not (idle and wanted["evicts"]):
                with pytest.raises(StatePoolExhausted):
                    store.allocate_slot(**wanted)
            else:
                owned.append(store.allocate_slot(**wanted))
                if not free:
                    victim = min(idle, key=lambda name: age[name])
                    assert evicted[-1] == victim.encode()
                    del age[victim]
        elif action < 0.65 and owned:
            slot = owned.pop(rng.randrange(len(owned)))
            name = f"s{rng.randrange(12)}"
            known = name in age
            state = new_state(name, rng.choice(["fork", "interval"]), rng.random() < 0.5)
            assert pool.cache(slot, state) is pool.get(name.encode())
            if not known:
                age[name] = now
        elif action < 0.75 and owned:
            pool.release(owned.pop(rng.randrange(len(owned))))
        elif action < 0.85 and age:
            name = rng.choice(sorted(age))
            slot = pool.mamba_hash_to_slot_id[name.encode()]
            pool.pin(slot)
            pins.append((slot, name))
        elif action < 0.95 and pins:
            slot, _ = pins.pop(rng.randrange(len(pins)))
            used, state_there = rng.random() < 0.7, pool.state_in(slot)
            pool.unpin(slot, used=used)
            if used and state_there is not None:
                age[state_there.key.decode()] = now
        elif action < 0.98 and age:
            name = rng.choice(sorted(age))
            assert pool.drop(name.encode()) is not None
            del age[name]
        elif action > 0.999:
            pool.clear()
            age.clear()
        assert names(pool) == set(age)
        pool.check_integrity(owned=owned, pinned=[slot for slot, _ in pins])
        busy = len(owned) + len({slot for slot, _ in pins})
        assert pool.num_free + pool.num_evictable == size - busy


def test_live_slots_are_low_and_checkpoints_high_whatever_happened_before():
    store = make_store(num_slots=8)
    pool = store.states
    held = [store.allocate_slot() for _ in range(4)] + [store.allocate_slot(for_checkpoint=True)]
    assert held == [1, 2, 3, 4, 8]
    for slot in (3, 1, 8):
        pool.release(slot)
    again = [store.allocate_slot(), store.allocate_slot(for_checkpoint=True), store.allocate_slot()]
    assert again == [1, 8, 3]


def test_free_slots_are_the_lowest_and_highest_of_a_set():
    rng = random.Random(0)
    free, truth = FreeSlots(1, 20), set(range(1, 21))
    for _ in range(3000):
        action = rng.randrange(3)
        if action < 2 and truth:
            slot = free.take(highest=not action)
            assert slot == (min(truth) if action else max(truth))
            truth.remove(slot)
        elif len(truth) < 20:
            slot = rng.choice(sorted(set(range(1, 21)) - truth))
            free.add(slot)
            truth.add(slot)
        assert len(free) == len(truth) and all(slot in free for slot in truth)


def test_a_state_that_is_gone_is_not_ranked_in_the_place_of_its_slots_next_one():
    """Requests remember the last state that they read, evicted or not."""
    store = make_store(num_slots=1)
    pool = store.states
    cached(store, "a")
    gone = pool.get(b"a")
    slot = store.allocate_slot()
    state = pool.cache(slot, new_state("b"))
    pool.rescore(gone)
    pool.rescore(None)
    pool.check_integrity(owned=[], pinned=[])
    assert pool.queue.pop() is state
