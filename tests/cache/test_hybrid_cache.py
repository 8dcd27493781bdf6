"""HybridCache: transactional admission, publishing, exact ends, pins, resets."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from megatron_hybrid.cache.block_hash import SequenceKeys
from megatron_hybrid.cache.checkpoint_placement import (
    ANSWER_END,
    DECODE,
    PROMPT_END,
    CheckpointHints,
    CheckpointPlacement,
)
from megatron_hybrid.cache.geometry import CacheGeometry, slots_for_budget
from megatron_hybrid.cache.hybrid_cache import HybridCache
from megatron_hybrid.cache.lease import Lease, Pin
from megatron_hybrid.errors import KVBlocksExhausted, StatePoolExhausted
from tests.thorough import A_THIRD

B = 4
Tokens = np.ndarray


def make_cache(
    num_blocks: int = 16,
    max_requests: int = 2,
    cached_slots: int = 4,
    *,
    exact_ends: bool = False,
    policy: str = "replay_cost",
    attention: bool = True,
    recurrent: bool = True,
) -> HybridCache:
    geometry = CacheGeometry(
        B, B, num_blocks * attention, max_requests, cached_slots, int(attention), int(recurrent)
    )
    placement = CheckpointPlacement(geometry, exact_ends=exact_ends, interval=0)
    return HybridCache(geometry, policy=policy, checkpoints=placement)


def tokens(count: int, start: int = 0) -> Tokens:
    return np.arange(start, start + count, dtype=np.int32)


def keys_of(cache: HybridCache, sequence: Tokens, salt: str = "") -> SequenceKeys:
    keys = SequenceKeys(cache.root(salt), B, lambda start, end: sequence[start:end])
    if cache.enabled:
        keys.extend_to(len(sequence))
    return keys


def admit(cache: HybridCache, prompt: Tokens, *, most: int | None = None, **options) -> Lease:  # type: ignore[no-untyped-def]
    keys = keys_of(cache, prompt)
    match = cache.match(keys, len(prompt), most=most)
    return cache.admit(match, keys, len(prompt), **options)


def prefill(cache: HybridCache, lease: Lease, prompt: Tokens, end: int | None = None) -> None:
    """What the scheduler does around one step that computes the prompt up to `end`."""
    end = len(prompt) if end is None else end
    checkpoints = cache.reserve_checkpoints(lease, lease.skip, end)
    cache.tail_was_copied(lease)
    cache.state_was_read(lease)
    cache.publish_blocks(lease, end)
    for checkpoint in checkpoints:
        cache.publish_state(lease, checkpoint, at_end=checkpoint.position == end)


def run(cache: HybridCache, prompt: Tokens) -> int:
    lease = admit(cache, prompt)
    skip = lease.skip
    if skip < len(prompt):
        prefill(cache, lease, prompt)
    cache.release(lease)
    cache.check_integrity([])
    return skip


def snapshot(cache: HybridCache) -> dict[str, object]:
    """Everything that eviction, matching and counting depend on."""
    pools = {
        "kv": vars(cache.kv), "tails": vars(cache.kv.tails), "states": vars(cache.states),
        "cache": vars(cache),
    }  # fmt: skip
    plain = (int, list, dict)
    same: dict[int, object] = {id(state): state for state in cache.states.cached()}
    return {
        f"{pool}.{name}": copy.deepcopy(value, same)  # states are compared by identity
        for pool, values in pools.items()
        for name, value in values.items()
        if isinstance(value, plain)
    } | {
        "queue": evictable_order(cache),
        "figures": [
            (state.position, state.hits, state.last_use, state.children, state.slot)
            for state in cache.states.cached()
        ],
    }


def evictable_order(cache: HybridCache) -> list[tuple[object, object]]:
    return sorted((slot, entry[0]) for slot, entry in cache.states.queue._entry.items())


def test_a_prompt_is_matched_up_to_the_last_block_that_leaves_a_token_to_compute():
    cache = make_cache()
    assert run(cache, tokens(12)) == 0
    assert run(cache, tokens(12)) == 8
    assert run(cache, tokens(13)) == 12
    assert run(cache, tokens(3)) == 0


def test_with_exact_ends_the_same_prompt_is_matched_in_full_and_a_longer_one_up_to_its_end():
    cache = make_cache(num_blocks=40, cached_slots=20, exact_ends=True)
    for length in (1, 3, 4, 7, 8, 11):
        prompt = tokens(length, 100 * length)
        assert run(cache, prompt) == 0
        assert run(cache, prompt) == length
        assert run(cache, tokens(length + 1, 100 * length)) == length
        if length > 1:
            # without the logits a state at the very end can't be used: one token is missing
            on_grid = (length - 2) // B * B
            assert run(cache, tokens(length - 1, 100 * length)) == on_grid


def test_the_tail_is_copied_into_a_block_of_the_readers_own():
    cache = make_cache(exact_ends=True)
    run(cache, tokens(6))
    lease = admit(cache, tokens(9))
    assert lease.skip == 6 and lease.num_shared == 1
    assert lease.copy is not None
    source, destination, count = lease.copy
    assert (destination, count) == (lease.blocks[1], 2)
    assert source != destination and source not in lease.blocks
    cache.check_integrity([lease])
    assert cache.kv._references[source] == 1
    cache.tail_was_copied(lease)
    assert cache.kv._references[source] == 0 and lease.copy is None
    cache.check_integrity([lease])
    cache.release(lease)
    cache.check_integrity([])


def test_a_lease_that_ends_before_its_copy_gives_the_source_back():
    cache = make_cache(exact_ends=True)
    run(cache, tokens(6))
    lease = admit(cache, tokens(9))
    cache.release(lease)
    cache.check_integrity([])


def test_a_tail_and_its_full_block_share_one_reference_count():
    """The producer goes on in the block that holds the tail; once full, it is shared as it is."""
    cache = make_cache(exact_ends=True)
    prompt = tokens(20)
    lease = admit(cache, prompt[:6])
    prefill(cache, lease, prompt[:6])
    lease.keys.tokens = lambda start, end: prompt[start:end]  # it generated two tokens more
    assert not cache.publish_blocks(lease, 8)
    tail_block = lease.blocks[1]
    assert cache.kv.kv_hash_to_block_id[lease.keys.at(8)] == tail_block
    reader = admit(cache, prompt[:9])
    # KV up to 8 is found, so the state at 6 needs no copy; 6 and 7 are computed without writing
    assert (reader.skip, reader.num_shared, reader.copy) == (6, 2, None)
    assert reader.blocks[1] == tail_block and cache.kv._references[tail_block] == 2
    cache.check_integrity([lease, reader])


def test_evicting_the_block_under_a_tail_drops_tail_and_state():
    cache = make_cache(num_blocks=4, exact_ends=True)
    run(cache, tokens(6))
    assert len(cache.kv.tails) == 1 and cache.states.num_cached == 2
    assert run(cache, tokens(16, 100)) == 0
    assert run(cache, tokens(6)) == 0


def test_evicting_the_state_of_a_tail_frees_the_block_that_holds_only_that():
    cache = make_cache(exact_ends=True)
    run(cache, tokens(3))
    assert cache.kv.num_free == 15
    assert cache.store.evict_state()
    assert cache.kv.num_free == 16 and not len(cache.kv.tails)
    cache.check_integrity([])


def test_kv_behind_the_last_state_goes_before_everything_else():
    cache = make_cache(num_blocks=8, cached_slots=2)
    first = admit(cache, tokens(9))  # leaves a state at 8
    prefill(cache, first, tokens(9))
    cache.release(first)
    second = admit(cache, tokens(16, 100))
    cache.publish_blocks(second, 16)  # four blocks, no state: as if its slots had run out
    cache.release(second)
    cache.check_integrity([])
    cache.store.allocate_blocks(6)  # two are free
    assert set(cache.kv.kv_hash_to_block_id) == set(first.keys.blocks)


def test_a_request_that_wants_all_logits_shares_blocks_but_skips_nothing():
    for exact_ends in (True, False):
        cache = make_cache(exact_ends=exact_ends)
        run(cache, tokens(12))
        lease = admit(cache, tokens(13), most=0)
        assert (lease.skip, lease.read_slot, lease.num_shared) == (0, 0, 3)
        assert lease.lost_tokens == {"prompt_logprobs": 12}
        cache.release(lease)
        lease = admit(cache, tokens(12), most=0)
        assert (lease.skip, lease.num_shared, lease.copy) == (0, 2, None)
        cache.release(lease)
        cache.check_integrity([])


def test_a_failed_admission_for_want_of_blocks_has_no_effect_at_all():
    for exact_ends in (True, False):
        cache = make_cache(num_blocks=6, exact_ends=exact_ends)
        run(cache, tokens(11))
        before = snapshot(cache)
        with pytest.raises(KVBlocksExhausted, match="more KV blocks"):
            admit(cache, tokens(28))
        with pytest.raises(KVBlocksExhausted, match="more KV blocks"):
            admit(cache, tokens(12), headroom=6)
        assert snapshot(cache) == before


def test_blocks_that_matched_are_not_counted_as_room():
    cache = make_cache(num_blocks=6)
    run(cache, tokens(16))  # four cached, two free
    keys = keys_of(cache, tokens(25))
    match = cache.match(keys, 25)
    assert len(match.blocks) == 4
    with pytest.raises(KVBlocksExhausted):
        cache.admit(match, keys, 25)  # three more: two are free and the four are taken
    keys = keys_of(cache, tokens(24))
    lease = cache.admit(cache.match(keys, 24), keys, 24)
    cache.check_integrity([lease])


def test_the_block_that_is_to_be_copied_is_not_counted_as_room():
    cache = make_cache(num_blocks=3, exact_ends=True)
    run(cache, tokens(6))  # a block, and one with a tail
    lease = admit(cache, tokens(8))
    assert lease.copy is not None
    cache.check_integrity([lease])
    cache.release(lease)
    with pytest.raises(KVBlocksExhausted):
        admit(cache, tokens(12))  # the free one, and none besides


def test_headroom_stays_free_or_evictable():
    cache = make_cache(num_blocks=6)
    lease = admit(cache, tokens(5))  # two blocks
    with pytest.raises(KVBlocksExhausted):
        admit(cache, tokens(13, 100), headroom=1)
    other = admit(cache, tokens(12, 100), headroom=1)
    assert cache.extend(lease)
    with pytest.raises(KVBlocksExhausted):
        cache.extend(lease)
    cache.check_integrity([lease, other])


def test_a_failed_admission_for_want_of_a_slot_has_no_effect_at_all():
    cache = make_cache(max_requests=2, cached_slots=1)
    run(cache, tokens(9))
    assert cache.states.num_cached == 1
    held = [cache.store.allocate_slot(), cache.store.allocate_slot()]
    order, (state,) = evictable_order(cache), cache.states.cached()
    before = state.hits, state.last_use, cache.states.uses
    kv = copy.deepcopy((cache.kv._references, list(cache.kv._cached), cache.kv._free))
    with pytest.raises(StatePoolExhausted):
        admit(cache, tokens(9))  # the only state is the one that it would read
    assert evictable_order(cache) == order
    assert (state.hits, state.last_use, cache.states.uses) == before
    assert (cache.kv._references, list(cache.kv._cached), cache.kv._free) == kv
    cache.check_integrity()
    cache.states.release(held[0])
    lease = admit(cache, tokens(9))
    assert lease.skip == 8 and lease.write_slot == held[0]


def test_a_state_at_the_prompts_end_is_written_where_it_stays_and_read_once_from_there():
    for exact_ends in (True, False):
        cache = make_cache(exact_ends=exact_ends)
        prompt = tokens(8)
        lease = admit(cache, prompt)
        live = lease.write_slot
        prefill(cache, lease, prompt)
        cached = cache.states.mamba_hash_to_slot_id[lease.keys.at(8)]
        assert lease.read_slot == cached != live and lease.pinned
        cache.check_integrity([lease])
        assert cache.states.is_pinned(cached)
        cache.state_was_read(lease)
        assert lease.read_slot == lease.write_slot == live and not lease.pinned
        (state,) = [s for s in cache.states.cached() if s.position == 8]
        # what a request reads of its own is not a hit
        assert state.hits == 0 and not cache.checkpoints_read


def test_the_state_at_an_answers_end_is_kept_from_the_live_slot():
    cache = make_cache(exact_ends=True)
    text = tokens(30)
    lease = admit(cache, text[:6])
    prefill(cache, lease, text[:6])
    cache.state_was_read(lease)
    lease.keys.tokens = lambda start, end: text[start:end]
    cache.extend(lease)
    cache.publish_blocks(lease, 11)
    live = lease.write_slot
    cache.keep_end(lease, 11, ANSWER_END)
    assert lease.write_slot == 0
    cache.release(lease)
    cache.check_integrity([])
    assert cache.states.mamba_hash_to_slot_id[keys_of(cache, text).at(11)] == live
    next_turn = admit(cache, text[:15])
    assert next_turn.skip == 11 and cache.checkpoints_published[ANSWER_END] == 1


def test_without_exact_ends_an_answers_end_is_kept_on_the_grid_alone():
    for fed, expected in ((11, 4), (12, 12)):
        cache = make_cache()
        text = tokens(30)
        lease = admit(cache, text[:6])
        prefill(cache, lease, text[:6])
        lease.keys.tokens = lambda start, end: text[start:end]  # noqa: B023
        cache.extend(lease)
        cache.publish_blocks(lease, fed)
        cache.keep_end(lease, fed, ANSWER_END)
        cache.release(lease)
        cache.check_integrity([])
        assert admit(cache, text[:15]).skip == expected


def test_a_state_that_stands_in_a_cached_slot_already_is_not_kept_twice():
    cache = make_cache(exact_ends=True)
    prompt = tokens(6)
    lease = admit(cache, prompt)
    prefill(cache, lease, prompt)  # its state is cached; it has not been read since
    cache.keep_end(lease, 6, ANSWER_END)
    cache.check_integrity([lease])
    cache.release(lease)
    cache.check_integrity([])
    assert cache.checkpoints_published == {"last_aligned": 1, PROMPT_END: 1}


def test_the_newest_decode_checkpoint_takes_the_place_of_the_last_one_unless_that_was_read():
    cache = make_cache(exact_ends=True, cached_slots=6)
    text = tokens(40)
    lease = admit(cache, text[:6])
    prefill(cache, lease, text[:6])
    lease.keys.tokens = lambda start, end: text[start:end]

    leases = [lease]

    def decode_to(position: int) -> None:
        cache.state_was_read(lease)  # by the step before
        assert cache.reserve_decode_checkpoint(lease, position - 1) is None
        checkpoint = cache.reserve_decode_checkpoint(lease, position)
        assert checkpoint is not None
        cache.publish_blocks(lease, position)
        assert cache.publish_state(lease, checkpoint, at_end=True)
        cache.check_integrity(leases)

    def kept() -> list[int]:
        return sorted(s.position for s in cache.states.cached() if s.kind == DECODE)

    decode_to(8)
    cache.extend(lease)
    decode_to(12)
    assert kept() == [12]
    reader = admit(cache, text[:13])
    assert reader.skip == 12
    leases.append(reader)
    cache.extend(lease)
    decode_to(16)
    assert kept() == [12, 16]  # 12 is about to be read
    cache.state_was_read(reader)
    cache.extend(lease)
    decode_to(20)
    assert kept() == [12, 20]
    cache.release(reader)
    cache.release(lease)
    cache.check_integrity([])


def test_logits_are_added_to_a_state_that_has_none():
    cache = make_cache(num_blocks=20, exact_ends=True)
    text = tokens(20)
    lease = admit(cache, text[:6])
    prefill(cache, lease, text[:6])
    cache.state_was_read(lease)
    lease.keys.tokens = lambda start, end: text[start:end]
    cache.publish_blocks(lease, 8)
    cache.keep_end(lease, 8, ANSWER_END)  # without logits
    cache.release(lease)
    before = cache.states.num_cached
    prompt = text[:8]
    assert run(cache, prompt) == 6
    assert cache.states.num_cached == before
    assert run(cache, prompt) == 8


def test_a_decode_checkpoint_is_not_left_off_the_grid_or_after_a_reset():
    cache = make_cache(exact_ends=True)
    lease = admit(cache, tokens(6))
    assert cache.reserve_decode_checkpoint(lease, 7) is None
    cache.reset()
    assert cache.reserve_decode_checkpoint(lease, 8) is None
    cache.release(lease)
    cache.check_integrity([])


def test_evicting_a_block_drops_the_state_that_stands_on_it():
    cache = make_cache(num_blocks=4)
    run(cache, tokens(9))
    assert len(cache.states.mamba_hash_to_slot_id) == 1
    run(cache, tokens(13, 100))
    assert len(cache.states.mamba_hash_to_slot_id) == 1  # the second prompt's
    assert run(cache, tokens(9)) == 0


def test_checkpoints_without_a_slot_are_skipped_and_counted():
    cache = make_cache(max_requests=2, cached_slots=1)
    prompt = tokens(9)
    lease = admit(cache, prompt)
    others = [cache.store.allocate_slot(), cache.store.allocate_slot()]
    prefill(cache, lease, prompt)
    assert cache.checkpoints_skipped == 1 and not cache.states.mamba_hash_to_slot_id
    assert others


def test_a_checkpoint_that_is_cached_already_is_not_captured_again():
    cache = make_cache(exact_ends=True)
    first, second = admit(cache, tokens(9)), admit(cache, tokens(9))
    prefill(cache, first, tokens(9))
    assert cache.reserve_checkpoints(second, 0, 9) == []
    assert cache.is_cached(second, 8) and not cache.is_cached(second, 4)
    cache.release(second)
    cache.check_integrity([first])


def test_a_state_that_is_evicted_for_one_before_it_is_not_captured_inside_the_chunk():
    """The chunk does not end there, because the state was cached when that was decided."""
    cache = make_cache(max_requests=1, cached_slots=2, exact_ends=True, policy="lru")
    run(cache, tokens(5))
    keys = keys_of(cache, tokens(9))
    cache.store.forget(cache.states.get(keys.at(4)))
    run(cache, tokens(3, start=50))
    hints = CheckpointHints(checkpoints=(4, 5))
    lease = admit(cache, tokens(9), most=0, hints=hints)
    assert cache.is_cached(lease, 5)
    reserved = cache.reserve_checkpoints(lease, 0, 9)
    assert not cache.is_cached(lease, 5)
    assert [checkpoint.position for checkpoint in reserved] == [4, 9]


def test_each_step_reserves_what_it_passes_and_nothing_else():
    cache = make_cache(num_blocks=20, cached_slots=10, exact_ends=True)
    hints = CheckpointHints(checkpoints=(6, 9, 13))
    lease = admit(cache, tokens(30), hints=hints)
    expected = [[6], [9], [13], [], [28, 30]]
    for (start, end), positions in zip(
        [(0, 6), (6, 12), (12, 14), (14, 20), (20, 30)], expected, strict=True
    ):
        step = cache.reserve_checkpoints(lease, start, end)
        assert [checkpoint.position for checkpoint in step] == positions
        for checkpoint in step:
            cache.discard_checkpoint(checkpoint)
    assert lease.checkpoints == []
    cache.release(lease)
    cache.check_integrity([])


def test_requests_that_began_before_a_reset_publish_nothing():
    for exact_ends in (True, False):
        cache = make_cache(exact_ends=exact_ends)
        prompt = tokens(9)
        lease = admit(cache, prompt)
        checkpoints = cache.reserve_checkpoints(lease, 0, 8)
        waiting = admit(cache, tokens(9, 100))  # none of its checkpoints is reserved yet
        cache.reset()
        assert len(checkpoints) == 1 and cache.reserve_checkpoints(waiting, 0, 9) == []
        cache.release(waiting)
        cache.publish_blocks(lease, 9)
        for checkpoint in checkpoints:
            cache.publish_state(lease, checkpoint, at_end=False)
        cache.keep_end(lease, 9, ANSWER_END)
        assert cache.kv.num_mapped == cache.states.num_cached == len(cache.kv.tails) == 0
        cache.check_integrity([lease])
        cache.release(lease)
        assert run(cache, prompt) == 0


def test_new_weights_hide_what_the_old_ones_computed():
    cache = make_cache()
    before = keys_of(cache, tokens(9)).blocks
    run(cache, tokens(9))
    cache.set_epoch(1)
    assert cache.epoch == 1 and not set(keys_of(cache, tokens(9)).blocks) & set(before)
    assert run(cache, tokens(9)) == 0
    assert run(cache, tokens(9)) == 8


def test_a_state_that_two_requests_captured_counts_once():
    cache = make_cache()
    prompt = tokens(9)
    first, second = admit(cache, prompt), admit(cache, prompt)
    together = [(lease, cache.reserve_checkpoints(lease, 0, 9)) for lease in (first, second)]
    for lease, checkpoints in together:
        cache.publish_blocks(lease, 9)
        for checkpoint in checkpoints:
            cache.publish_state(lease, checkpoint, at_end=False)
    assert cache.checkpoints_published == {"last_aligned": 1}
    assert first.blocks[:2] == second.blocks[:2]
    cache.check_integrity([first, second])


def test_what_is_held_is_not_evicted_and_given_back_unused():
    for recurrent in (True, False):
        cache = make_cache(num_blocks=4, exact_ends=True, recurrent=recurrent)
        prompt = tokens(6)
        lease = admit(cache, prompt)
        prefill(cache, lease, prompt)
        pin = cache.pin(lease, 6)
        assert isinstance(pin, Pin) and len(pin.blocks) == 2
        cache.release(lease)
        cache.check_integrity([], [pin])
        assert cache.kv.num_available == 2
        other = cache.store.allocate_blocks(2)
        assert cache.match(keys_of(cache, prompt), 6).skip == 6
        cache.kv.release(other)
        hits = [state.hits for state in cache.states.cached()]
        cache.store.unpin(pin)
        assert [state.hits for state in cache.states.cached()] == hits
        cache.check_integrity([])
        assert cache.kv.num_available == 4


def test_nothing_is_held_where_the_state_is_gone():
    cache = make_cache(exact_ends=True)
    lease = admit(cache, tokens(6))
    prefill(cache, lease, tokens(6))
    cache.state_was_read(lease)
    assert cache.pin(lease, 5) is None
    cache.release(lease)
    cache.check_integrity([])


def test_under_ref_zero_nothing_outlives_its_last_user():
    cache = make_cache(exact_ends=True, policy="ref_zero")
    prompt = tokens(9)
    first = admit(cache, prompt)
    prefill(cache, first, prompt)
    second = admit(cache, prompt)
    assert second.skip == 9
    cache.state_was_read(first)
    cache.release(first)
    cache.check_integrity([second])
    assert cache.match(keys_of(cache, prompt), 9).skip == 9
    cache.release(second)
    cache.check_integrity([])
    assert cache.kv.num_free == 16 and cache.states.num_free == 6


def test_a_model_without_attention_keeps_tails_without_blocks():
    cache = make_cache(exact_ends=True, attention=False)
    assert run(cache, tokens(6)) == 0
    assert run(cache, tokens(6)) == 6
    assert run(cache, tokens(9)) == 6
    assert len(cache.kv.tails) == 2
    cache.reset()
    cache.check_integrity([])
    assert run(cache, tokens(6)) == 0


def test_a_model_without_recurrent_layers_keeps_kv_anywhere_and_logits_in_slots():
    cache = make_cache(exact_ends=True, recurrent=False, cached_slots=2)
    assert run(cache, tokens(6)) == 0
    assert run(cache, tokens(6)) == 6
    lease = admit(cache, tokens(9))
    assert lease.skip == 6 and lease.copy is not None and not lease.pinned
    cache.release(lease)
    assert cache.store.evict_state()
    cache.check_integrity([])
    assert admit(cache, tokens(7)).skip == 6  # its KV needs no state


def test_nothing_is_kept_when_the_budget_holds_no_state():
    cache = make_cache(cached_slots=0)
    assert not cache.enabled and run(cache, tokens(9)) == run(cache, tokens(9)) == 0
    assert cache.kv.num_mapped == 0
    assert slots_for_budget(0.5, 2**28) == 2
    assert slots_for_budget(0.5, 2**30) == slots_for_budget(0, 8) == slots_for_budget(-1, 8) == 0


@pytest.mark.parametrize("evicted", [True, False])
def test_lost_tokens_are_told_apart_by_their_cause(evicted: bool):
    cache = make_cache(cached_slots=2)
    if evicted:
        run(cache, tokens(13))  # leaves a state at 12
        assert cache.store.evict_state()
    else:
        first = admit(cache, tokens(13))
        cache.publish_blocks(first, 13)
        cache.release(first)
    lease = admit(cache, tokens(13))
    assert lease.lost_tokens == {"state_evicted" if evicted else "state_missing": 12}


@A_THIRD
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["hybrid", "attention", "recurrent"])
def test_a_request_is_admitted_if_and_only_if_it_fits(seed: int, kind: str):
    """What fits: blocks that are free, or evictable and not wanted, less the headroom; and a slot
    that is free, or evictable and not read."""
    rng = np.random.default_rng(seed)
    cache = make_cache(
        num_blocks=int(rng.integers(6, 20)), max_requests=3, cached_slots=3, exact_ends=True,
        attention=kind != "recurrent", recurrent=kind != "attention",
    )  # fmt: skip
    geometry, leases, refused = cache.geometry, list[Lease](), 0
    for _ in range(300):
        base = int(rng.integers(3)) * 100
        prompt = np.append(tokens(int(rng.integers(1, 30)), base), rng.integers(0, 3)).astype("i4")
        keys = keys_of(cache, prompt)
        match = cache.match(keys, len(prompt))
        wanted = {*match.blocks, match.tail_block} - {0}
        idle = set(cache.kv._cached) | set(cache.kv._uncovered)
        room = cache.kv.num_free + len(idle - wanted)
        headroom = int(rng.integers(3))
        fits = geometry.blocks_for(len(prompt)) - len(match.blocks) <= room - headroom
        fits = fits or not geometry.has_attention
        if geometry.has_recurrent:
            read = {match.state.slot} if match.state is not None else set()
            evictable = {s.slot for s in cache.states.cached() if not cache.states._pins[s.slot]}
            fits = fits and bool(cache.states.num_free or evictable - read)
        before = snapshot(cache)
        try:
            lease = cache.admit(match, keys, len(prompt), headroom=headroom)
        except (KVBlocksExhausted, StatePoolExhausted) as error:
            assert not fits, error
            refused += 1
            if isinstance(error, KVBlocksExhausted):
                assert snapshot(cache) == before
        else:
            assert fits
            leases.append(lease)
            if lease.skip < len(prompt):
                prefill(cache, lease, prompt)
            if geometry.has_recurrent:
                cache.state_was_read(lease)
        cache.check_integrity(leases)
        while leases and rng.random() < 0.4:
            cache.release(leases.pop(int(rng.integers(len(leases)))))
            cache.check_integrity(leases)
    assert refused > 10
