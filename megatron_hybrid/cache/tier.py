"""Tier: what a cache tells of what can be found in it, to whoever keeps it elsewhere, too."""

from __future__ import annotations

from typing import Protocol

from megatron_hybrid.cache.block_hash import SequenceKeys
from megatron_hybrid.cache.cached_state import CachedState
from megatron_hybrid.cache.changes import CacheChanges

# What `figures` has: numbers by tier, or by reason (tier_refused). They grow ...
COUNTERS = """
    tier_writes tier_fetches tier_bytes_written tier_bytes_fetched tier_tokens_fetched tier_refused
""".split()
GAUGES = "tier_bytes tier_bytes_used tier_states tier_rate".split()  # ... or not
# Why something was not moved: all of the tier is in use; there was no room on the device beside the
# prompt; computing it is quicker; a store below did not answer in time, or has too much to write;
# it failed; nobody came for what was handed over.
REFUSED = "tier_full", "device_full", "slower", "late", "failed", "unread"


class Tier(Protocol):
    """All calls are O(1)."""

    def was_published(self, keys: SequenceKeys, position: int, state: CachedState | None) -> None:
        """A prefix of `position` tokens can be found from now on. state: at its end; None in a
        model that needs none there, and of KV whose end is being computed."""

    def was_used(self, keys: SequenceKeys, state: CachedState) -> None:
        """A cached state of the sequence with these keys is about to be read."""

    def take_down(self, changes: CacheChanges) -> None:
        """Tell of all that can be found here from now on."""

    def clear(self) -> None:
        """Nothing can be found any more."""

    def figures(self) -> dict[str, dict[str, int]]:
        """COUNTERS and GAUGES."""


class _NoTier:
    def was_published(self, keys: SequenceKeys, position: int, state: CachedState | None) -> None:
        pass

    def was_used(self, keys: SequenceKeys, state: CachedState) -> None:
        pass

    def take_down(self, changes: CacheChanges) -> None:
        pass

    def clear(self) -> None:
        pass

    def figures(self) -> dict[str, dict[str, int]]:
        return {name: {} for name in (*COUNTERS, *GAUGES)}


NO_TIER = _NoTier()
