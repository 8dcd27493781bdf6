"""Matching: how far a prompt's KV and its recurrent state are in the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron_hybrid.cache.block_hash import BlockKey
from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.cache.state_pool import NULL_SLOT


class PrefixMatch(NamedTuple):
    """What the cache holds of one prompt."""

    blocks: list[int]  # the leading KV blocks found
    matched_tokens: int  # as many tokens as those blocks hold
    skip: int  # tokens that need no computing: KV and state are both there
    state_slot: int  # holds the state at `skip`; the null slot at 0
    may_skip: bool  # False: the request wants every prompt token computed


class PrefixIndex:
    """Joins the KV map and the mamba map of one model. Reads them, changes nothing."""

    def __init__(
        self,
        geometry: CacheGeometry,
        kv_hash_to_block_id: Mapping[BlockKey, int],
        mamba_hash_to_slot_id: Mapping[BlockKey, int],
    ) -> None:
        self._geometry = geometry
        self._kv = kv_hash_to_block_id
        self._states = mamba_hash_to_slot_id

    def match(
        self, keys: Sequence[BlockKey], prompt_tokens: int, *, may_skip: bool = True
    ) -> PrefixMatch:
        """The longest reusable prefix that leaves at least one token to compute.

        A state at the prompt's very end is never used: its last token would be applied twice.
        `may_skip=False` still shares KV blocks, for a request that needs every logit.
        """
        size = self._geometry.block_size
        limit = (prompt_tokens - 1) // size
        blocks: list[int] = []
        if self._geometry.has_attention:
            for key in keys[:limit]:
                block = self._kv.get(key)
                if block is None:
                    break
                blocks.append(block)
            matched = len(blocks)
        else:
            matched = limit
        reusable, slot = matched, NULL_SLOT
        if self._geometry.has_recurrent:
            while reusable and (slot := self._states.get(keys[reusable - 1], NULL_SLOT)) == 0:
                reusable -= 1
        if not may_skip:
            reusable, slot = 0, NULL_SLOT
        return PrefixMatch(blocks, matched * size, reusable * size, slot, may_skip)
