"""What is known of one replica: what it has cached, or will have, and what it has to do.

A prompt that waits or is being computed counts as cached where it runs: a request that shares its
prefix is computed behind it, and then finds what it left. With recurrent layers a state is left
where the two part, floored to the grid: the scheduler looks ahead for such forks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from megatron_hybrid.cache.block_hash import SequenceKeys, Tokens, root_key
from megatron_hybrid.kv_events import CacheContents, wire_hash
from megatron_hybrid.kv_events.contents import shared_blocks
from megatron_hybrid.server.link.messages import CacheSizes


class PromptKeys:
    """A prompt's tokens and hashes; those of an epoch are made when they are first asked for."""

    def __init__(
        self,
        data: bytes,
        block_size: int,
        cache_salt: str,
        stored_as: str = "",
        adapter: str = "",
    ) -> None:
        """`data`: the ids as 32-bit little-endian numbers. `stored_as`: see CacheSizes. `adapter`:
        its name; "": none."""
        self.tokens: Tokens = np.frombuffer(data, dtype="<i4")
        self.length = len(self.tokens)
        self._block_size = block_size
        self._cache_salt = cache_salt
        self._stored_as = stored_as
        self.adapter = adapter
        self._by_root: dict[tuple[int, str], tuple[SequenceKeys, list[int]]] = {}

    def blocks(self) -> list[int]:
        """Hashes of all full blocks that only prompts have which begin alike, whatever weights
        there are by now."""
        return self.of(0, self.adapter)[1]

    def of(self, epoch: int, adapter_key: str = "") -> tuple[SequenceKeys, list[int]]:
        """The keys under the root of this epoch and of what stands for the adapter, and the hashes
        of all full blocks, as KV events have them."""
        known = self._by_root.get((epoch, adapter_key))
        if known is None:
            root = root_key(epoch, self._cache_salt, adapter_key, self._stored_as)
            tokens = self.tokens  # a reference to self here would be one in a circle
            keys = SequenceKeys(root, self._block_size, lambda low, high: tokens[low:high])
            keys.extend_to(self.length)
            known = keys, [wire_hash(key) for key in keys.blocks]
            self._by_root[epoch, adapter_key] = known
        return known


@dataclass(slots=True)
class Replica:
    """One replica, whose cache is cut as `sizes` says."""

    sizes: CacheSizes
    contents: CacheContents = field(default_factory=CacheContents)
    adapters: dict[str, str] = field(default_factory=dict)  # and what stands for each in keys
    prefill: int = 0  # prompt tokens that wait there to be computed
    answers: int = 0  # that have a place there and have not ended
    waiting: int = 0  # of these, those that have not begun
    total: int = 0  # tokens of all prompts that were ever placed there
    # How many prompts that wait or are computed have a block, by its hash.
    expected: Counter[int] = field(default_factory=Counter)

    def expect(self, prompt: PromptKeys) -> None:
        """This prompt waits or is computed here."""
        self.expected.update(prompt.blocks())

    def expect_no_more(self, prompt: PromptKeys) -> None:
        """It has been computed, or never will be; what is left of it is told by events."""
        for name in prompt.blocks():
            self.expected[name] -= 1
            if not self.expected[name]:
                del self.expected[name]

    def reusable(self, prompt: PromptKeys) -> int:
        """How many tokens of the prompt can be skipped here."""
        # The last token of what is only expected is always computed.
        shared = shared_blocks(prompt.blocks(), self.expected) * self.sizes.block_size
        shared = min(shared, prompt.length - 1)
        shared -= shared % self.sizes.unit
        keys, hashes = self.keys_of(prompt)
        return max(shared, self.contents.skippable(keys, prompt.length, hashes))

    def keys_of(self, prompt: PromptKeys) -> tuple[SequenceKeys, list[int]]:
        """What this replica calls the prompt's prefixes. Nothing of one whose adapter is not here
        was ever stored by its bare name."""
        key = self.adapters.get(prompt.adapter, prompt.adapter)
        return prompt.of(self.contents.epoch, key)
