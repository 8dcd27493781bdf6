"""Tier: what a cache tells of what can be found in it, to whoever keeps it elsewhere, too."""

from __future__ import annotations

from typing import Protocol

from megatron_hybrid.cache.block_hash import BlockKey, SequenceKeys
from megatron_hybrid.cache.cached_state import CachedState


class Tier(Protocol):
    """All calls are O(1)."""

    def was_published(self, keys: SequenceKeys, position: int, state: CachedState | None) -> None:
        """A prefix of `position` tokens can be found from now on. state: at its end; None in a
        model that needs none there."""

    def was_used(self, key: BlockKey) -> None:
        """A cached state is about to be read."""

    def clear(self) -> None:
        """Nothing can be found any more."""


class _NoTier:
    def was_published(self, keys: SequenceKeys, position: int, state: CachedState | None) -> None:
        pass

    def was_used(self, key: BlockKey) -> None:
        pass

    def clear(self) -> None:
        pass


NO_TIER = _NoTier()
