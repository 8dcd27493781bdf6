"""HybridCache: matching, transactional admission, publishing."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from megatron_hybrid.cache.block_hash import extend_keys, root_key
from megatron_hybrid.cache.checkpoint_placement import CheckpointPlacement
from megatron_hybrid.cache.eviction import LeastRecentlyUsed
from megatron_hybrid.cache.geometry import CacheGeometry, slots_for_budget
from megatron_hybrid.cache.hybrid_cache import HybridCache, Lease, PromptKeys
from megatron_hybrid.errors import KVBlocksExhausted, StatePoolExhausted

B = 4


def make_cache(num_blocks: int = 16, max_requests: int = 2, cached_slots: int = 4) -> HybridCache:
    return HybridCache(CacheGeometry(B, B, num_blocks, max_requests, cached_slots, 1, 1))


def tokens(count: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.int32)


def admit(cache: HybridCache, prompt: np.ndarray, extra: int = 0, **options) -> Lease:  # type: ignore[no-untyped-def]
    keys = cache.keys_of(prompt)
    match = cache.match(keys, len(prompt), **options)
    return cache.admit(match, keys, len(prompt), len(prompt) + extra)


def prefill(cache: HybridCache, lease: Lease, prompt: np.ndarray) -> None:
    """What the scheduler does around one step that computes the whole prompt."""
    checkpoints = cache.reserve_checkpoints(lease, len(prompt))
    cache.state_was_read(lease)
    cache.publish_blocks(lease, len(prompt), lambda start, end: prompt[start:end])
    for checkpoint in checkpoints:
        cache.publish_state(lease, checkpoint, at_end=checkpoint.position == len(prompt))


def run(cache: HybridCache, prompt: np.ndarray) -> int:
    lease = admit(cache, prompt)
    skip = lease.skip
    prefill(cache, lease, prompt)
    cache.release(lease)
    cache.check_integrity([])
    return skip


def snapshot(cache: HybridCache) -> dict[str, object]:
    """Everything that eviction, matching and counting depend on."""
    pools = {"kv": vars(cache.kv), "states": vars(cache.states), "cache": vars(cache)}
    plain = (int, list, dict)
    return {
        f"{pool}.{name}": copy.deepcopy(value)
        for pool, values in pools.items()
        for name, value in values.items()
        if isinstance(value, plain)
    }


def test_keys_depend_on_every_earlier_token_the_salt_and_the_epoch():
    first = extend_keys(root_key(0), tokens(3 * B), B)
    assert len(set(first)) == 3 and len(first[0]) == 16
    changed = tokens(3 * B)
    changed[0] = 99
    assert not set(extend_keys(root_key(0), changed, B)) & set(first)
    roots = {root_key(0), root_key(1), root_key(0, "a"), root_key(0, "", "a"), root_key(0, "b")}
    assert len(roots) == 5
    # a chain that goes on equals one that is computed at once; a partial block has no key
    assert first[:1] + extend_keys(first[0], tokens(2 * B + 3, B), B) == first


def test_placement_names_divergence_and_the_last_aligned_positions():
    placement = CheckpointPlacement(CacheGeometry(4, 16, 9, 1, 1, 1, 1))
    assert placement.for_prompt(60, skip=0, matched_tokens=0) == [(48, "last_aligned")]
    assert placement.for_prompt(64, 0, 0) == [(48, "last_aligned"), (64, "last_aligned")]
    assert placement.for_prompt(60, 0, 40) == [(32, "divergence"), (48, "last_aligned")]
    assert placement.for_prompt(60, 32, 44) == [(48, "last_aligned")]
    assert placement.for_prompt(60, 48, 48) == []
    assert placement.for_prompt(7, 0, 0) == []


def test_a_prompt_is_matched_up_to_the_last_block_that_leaves_a_token_to_compute():
    cache = make_cache()
    assert run(cache, tokens(12)) == 0
    assert run(cache, tokens(12)) == 8
    assert run(cache, tokens(13)) == 12
    assert run(cache, tokens(3)) == 0


def test_a_request_that_wants_all_logits_shares_blocks_but_skips_nothing():
    cache = make_cache()
    run(cache, tokens(12))
    lease = admit(cache, tokens(13), may_skip=False)
    assert (lease.skip, lease.read_slot, lease.num_shared) == (0, 0, 3)
    assert lease.lost_tokens == {"prompt_logprobs": 12}
    cache.release(lease)
    cache.check_integrity([])


def test_a_failed_admission_for_want_of_blocks_has_no_effect_at_all():
    cache = make_cache(num_blocks=6)
    run(cache, tokens(12))
    before = snapshot(cache)
    with pytest.raises(KVBlocksExhausted, match="more KV blocks"):
        admit(cache, tokens(28))
    assert snapshot(cache) == before


def test_blocks_that_matched_are_not_counted_as_room():
    cache = make_cache(num_blocks=6)
    run(cache, tokens(16))  # four cached, two free
    keys = cache.keys_of(tokens(17))
    match = cache.match(keys, 17)
    assert len(match.blocks) == 4
    with pytest.raises(KVBlocksExhausted):
        cache.admit(match, keys, 17, 25)  # three more: two are free and the four are taken
    lease = cache.admit(match, keys, 17, 24)
    cache.check_integrity([lease])


def test_a_failed_admission_for_want_of_a_slot_has_no_effect_at_all():
    cache = make_cache(max_requests=2, cached_slots=1)
    run(cache, tokens(9))
    assert cache.states.num_cached == 1
    held = [cache.states.allocate(), cache.states.allocate()]
    before = snapshot(cache)
    with pytest.raises(StatePoolExhausted):
        admit(cache, tokens(9))  # the only state is the one that it would read
    assert snapshot(cache) == before
    cache.states.release(held[0])
    lease = admit(cache, tokens(9))
    assert lease.skip == 8 and lease.live_slot == held[0]


def test_reserved_blocks_are_not_given_to_others():
    cache = make_cache(num_blocks=6)
    lease = admit(cache, tokens(5), extra=11)  # two now, two more later
    with pytest.raises(KVBlocksExhausted):
        admit(cache, tokens(9, 100))
    other = admit(cache, tokens(8, 100))
    assert cache.extend(lease) and cache.extend(lease)
    cache.check_integrity([lease, other])


def test_a_state_at_the_prompts_end_changes_owner_without_a_copy():
    cache = make_cache()
    prompt = tokens(8)
    lease = admit(cache, prompt)
    live = lease.live_slot
    prefill(cache, lease, prompt)
    assert lease.read_slot == live and lease.live_slot != live and lease.pinned
    assert cache.states.mamba_hash_to_slot_id[lease.keys[1]] == live
    cache.check_integrity([lease])
    cache.state_was_read(lease)
    assert lease.read_slot == lease.live_slot and not lease.pinned


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
    others = [cache.states.allocate(), cache.states.allocate()]
    prefill(cache, lease, prompt)
    assert cache.checkpoints_skipped == 1 and not cache.states.mamba_hash_to_slot_id
    assert others


def test_requests_that_began_before_a_reset_publish_nothing():
    cache = make_cache()
    prompt = tokens(9)
    lease = admit(cache, prompt)
    checkpoints = cache.reserve_checkpoints(lease, 8)
    waiting = admit(cache, tokens(9, 100))  # none of its checkpoints is reserved yet
    cache.reset()
    assert len(checkpoints) == 1 and cache.reserve_checkpoints(waiting, 9) == []
    cache.release(waiting)
    cache.publish_blocks(lease, 9, lambda start, end: prompt[start:end])
    for checkpoint in checkpoints:
        cache.publish_state(lease, checkpoint, at_end=False)
    assert cache.kv.num_mapped == cache.states.num_cached == 0
    cache.check_integrity([lease])
    cache.release(lease)
    assert run(cache, prompt) == 0


def test_new_weights_hide_what_the_old_ones_computed():
    cache = make_cache()
    keys = cache.keys_of(tokens(9))
    run(cache, tokens(9))
    cache.set_epoch(1)
    assert cache.keys_of(tokens(9)) != keys
    assert run(cache, tokens(9)) == 0
    assert run(cache, tokens(9)) == 8


def test_a_state_that_two_requests_captured_counts_once():
    cache = make_cache()
    prompt = tokens(9)
    first, second = admit(cache, prompt), admit(cache, prompt)
    prefill_together = [(lease, cache.reserve_checkpoints(lease, 9)) for lease in (first, second)]
    for lease, checkpoints in prefill_together:
        cache.publish_blocks(lease, 9, lambda start, end: prompt[start:end])
        for checkpoint in checkpoints:
            cache.publish_state(lease, checkpoint, at_end=False)
    assert cache.checkpoints_published == {"last_aligned": 1}
    assert first.blocks[:2] == second.blocks[:2]
    cache.check_integrity([first, second])


def test_nothing_is_kept_when_the_budget_holds_no_state():
    cache = make_cache(cached_slots=0)
    assert not cache.enabled and cache.keys_of(tokens(9)) == PromptKeys(root_key(0), [])
    assert slots_for_budget(0.5, 2**28) == 2
    assert slots_for_budget(0.5, 2**30) == slots_for_budget(0, 8) == slots_for_budget(-1, 8) == 0


def test_the_eviction_queue_keeps_its_heap_linear_in_its_items():
    queue = LeastRecentlyUsed()
    for use in range(10_000):
        queue.add(use % 10, use)
    assert len(queue) == 10 and len(queue._heap) < 200
    assert [queue.pop() for _ in range(11)] == [*range(10), None]
