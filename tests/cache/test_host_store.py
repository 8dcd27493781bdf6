"""Host memory is one budget of pages for KV and states."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_hybrid.cache.block_hash import BlockKey, SequenceKeys, root_key
from megatron_hybrid.cache.cached_state import CachedState
from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.cache.host_store import HostStore
from megatron_hybrid.cache.replay_cost import queue_of

SIZE = 4


def make_store(pages: int, *, kv: int = 10, state: int = 25, gone: list[BlockKey] | None = None):
    geometry = CacheGeometry(
        block_size=SIZE,
        kernel_chunk=1,
        num_blocks=8,
        max_requests=2,
        num_cached_slots=2,
        bytes_per_block=kv,
        bytes_per_state=state,
    )
    told = [] if gone is None else gone
    return HostStore(geometry, pages, queue_of("lru"), told.append)


def keys_of(number: int, length: int) -> SequenceKeys:
    tokens = np.full(length, number, dtype=np.int32)
    keys = SequenceKeys(root_key(0), SIZE, lambda start, end: tokens[start:end])
    keys.extend_to(length)
    return keys


def put(store: HostStore, number: int, length: int) -> bool:
    """A sequence with a state at its end."""
    keys = keys_of(number, length)
    place = store.allocate(-(-length // SIZE), state=True)
    if place is None:
        return False
    blocks, slot = place
    store.check_integrity([blocks], [slot], [])
    store.map_blocks(keys, blocks, 0, length // SIZE)
    store.map_state(keys, blocks, slot, CachedState(b"", length, "answer_end"))
    store.release_blocks(blocks)
    store.check_integrity([], [], [])
    return True


def test_a_state_takes_the_pages_of_its_bytes_beside_kv():
    store = make_store(20)
    assert store.page_bytes == 10 and store.pages_per_state == 3
    assert put(store, 1, 10)
    assert store.num_used == 3 + 3
    blocks, slot = store.allocate(2, state=True)
    assert len(store.pages_of(slot)) == 3
    assert not set(blocks) & set(store.pages_of(slot))
    store.states.release(slot)
    store.release_blocks(blocks)
    assert store.num_used == 6


@pytest.mark.parametrize(("length", "fit"), [(4, 5), (40, 1), (16, 2)])
def test_what_sequences_leave_decides_how_much_is_kv(length: int, fit: int):
    """Of 20 pages a state takes 3, and 4 tokens of KV one."""
    store = make_store(20)
    for number in range(7):
        assert put(store, number, length)
    found = [store.match(keys_of(n, length + 1), length + 1).skip for n in range(7)]
    assert found == [0] * (7 - fit) + [length] * fit


def test_what_goes_is_told_and_takes_its_kv_along():
    gone: list[BlockKey] = []
    store = make_store(20, gone=gone)
    put(store, 1, 24)
    put(store, 2, 24)
    put(store, 3, 16)
    assert gone == [keys_of(1, 24).at(24)]
    assert store.match(keys_of(1, 25), 25).matched_tokens < 24
    assert store.match(keys_of(2, 25), 25).skip == 24


def test_what_is_in_use_stays_and_nothing_is_taken_in_vain():
    store = make_store(12)
    put(store, 1, 20)
    found = store.match(keys_of(1, 21), 21)
    store.kv.acquire(found.blocks)
    store.states.pin(found.state.slot)
    assert store.allocate(5, state=False) is None
    assert store.allocate(2, state=True) is None
    assert store.num_used == 8
    store.states.unpin(found.state.slot, used=False)
    store.release_blocks(found.blocks)
    blocks, slot = store.allocate(5, state=True)
    assert len(blocks) == 5 and slot


def test_without_attention_a_page_is_a_state():
    store = make_store(3, kv=0, state=25)
    assert store.page_bytes == 25 and store.pages_per_state == 1
    for number in range(5):
        place = store.allocate(0, state=True)
        assert place is not None
        keys = keys_of(number, 7)
        store.map_state(keys, [], place[1], CachedState(b"", 7, "answer_end"))
    found = [store.match(keys_of(n, 8), 8).skip for n in range(5)]
    assert found == [0, 0, 7, 7, 7]


def test_clearing_gives_every_page_back_but_those_in_use():
    store = make_store(20)
    put(store, 1, 12)
    blocks, slot = store.allocate(1, state=True)
    store.clear(1)
    assert store.num_used == 4
    store.states.release(slot)
    store.release_blocks(blocks)
    assert store.num_used == 0
    store.check_integrity([], [], [])
