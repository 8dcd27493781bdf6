"""Matching: how far a prompt's KV and its recurrent state are in the cache."""

from __future__ import annotations

from typing import NamedTuple

from megatron_hybrid.cache.block_hash import SequenceKeys
from megatron_hybrid.cache.cached_state import CachedState
from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.cache.kv_block_allocator import DUMMY_BLOCK, KVBlockAllocator
from megatron_hybrid.cache.state_pool import StatePool


class PrefixMatch(NamedTuple):
    """What the cache holds of one prompt."""

    blocks: list[int]  # the leading KV blocks found, to be shared
    matched_tokens: int  # how far KV was found
    skip: int  # tokens that need no computing: KV and state are both there
    state: CachedState | None = None  # at `skip`; None at 0 and where no state is needed
    tail_block: int = DUMMY_BLOCK  # holds the KV behind `blocks` up to `skip`, to be copied
    may_skip: bool = True  # False: the request wants every prompt token computed


NOTHING = PrefixMatch([], 0, 0)


class PrefixIndex:
    """Joins the KV map, the tails and the mamba map of one model. Reads them, changes nothing."""

    def __init__(self, geometry: CacheGeometry, kv: KVBlockAllocator, states: StatePool) -> None:
        self._geometry = geometry
        self._kv = kv
        self._states = states

    def match(self, keys: SequenceKeys, length: int, *, may_skip: bool = True) -> PrefixMatch:
        """The longest reusable prefix of a prompt of `length` tokens.

        It leaves at least one token to compute, unless the state at the prompt's very end comes
        with the logits of its last token. (Without them that state can't be used: the last token
        would be applied to it twice.) `may_skip=False` still shares KV blocks, for a request that
        needs every logit.
        """
        size, has_attention = self._geometry.block_size, self._geometry.has_attention
        keys.extend_to(length)
        blocks: list[int] = []
        full = length // size
        if has_attention:
            mapped = self._kv.kv_hash_to_block_id
            for key in keys.blocks[:full]:
                block = mapped.get(key)
                if block is None:
                    break
                blocks.append(block)
            full = len(blocks)
        if not may_skip:
            del blocks[(length - 1) // size :]
            return PrefixMatch(blocks, len(blocks) * size, 0, may_skip=False)
        skip, state, tail_block = self._deepest(keys, length, full)
        if skip < length:
            del blocks[(length - 1) // size :]
        if skip // size < len(blocks):
            tail_block = DUMMY_BLOCK  # a shared block holds it anyway
        return PrefixMatch(blocks, max(len(blocks) * size, skip), skip, state, tail_block)

    def _deepest(
        self, keys: SequenceKeys, length: int, full: int
    ) -> tuple[int, CachedState | None, int]:
        """(position, state, block of the tail) of the deepest usable prefix of the first `full`
        blocks and what follows them."""
        size, tails, states = self._geometry.block_size, self._kv.tails, self._states
        needs_state = self._geometry.has_recurrent
        for count in range(full, -1, -1):
            parent = keys.of_block(count)
            boundary = count * size
            for fill in tails.fills(parent):
                if boundary + fill > length:
                    continue
                key = keys.at(boundary + fill)
                tail = tails.get(key)
                if tail is not None:
                    state = states.get(key)
                    if _is_usable(state, boundary + fill, length, needs_state):
                        return boundary + fill, state, tail.block
            if count:
                state = states.get(parent)
                if _is_usable(state, boundary, length, needs_state):
                    return boundary, state, DUMMY_BLOCK
        return 0, None, DUMMY_BLOCK


def _is_usable(state: CachedState | None, position: int, length: int, needs_state: bool) -> bool:
    if position == length:
        return state is not None and state.has_logits
    return state is not None or not needs_state
