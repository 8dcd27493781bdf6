"""CacheListener: who wants to know what can be found in the cache."""

from __future__ import annotations

from typing import Protocol

from megatron_hybrid.cache.block_hash import BlockKey, SequenceKeys


class CacheListener(Protocol):
    """Told of every change of what `PrefixStore` can find, in the order in which it happens.

    A state here is a position at which a sequence can be continued: in a model with recurrent
    layers a cached state, in one without a tail, or the logits at a prompt's end.
    """

    def blocks_stored(self, keys: SequenceKeys, first: int, end: int) -> None:
        """The full blocks [first, end) of a sequence can be found; they could not before."""

    def block_removed(self, key: BlockKey) -> None:
        """Its children went before it."""

    def state_stored(self, keys: SequenceKeys, position: int, has_logits: bool) -> None:
        """A sequence can be continued after `position` tokens. Told again when the logits of the
        last of them (`has_logits`) come later."""

    def state_removed(self, key: BlockKey) -> None:
        """Also when its KV is what went."""

    def logits_removed(self, key: BlockKey) -> None:
        """A sequence can still be continued there."""

    def cleared(self, epoch: int) -> None:
        """Nothing can be found any more. `epoch`: what later keys depend on."""
