"""Which replica can skip how much of a prompt: what each one has cached, or will have.

A prompt that waits or is being computed counts as cached where it runs: a request that shares its
prefix is computed behind it, and then finds what it left. With recurrent layers a state is left
where the two part, floored to the grid: the scheduler looks ahead for such forks.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from megatron_hybrid.cache.block_hash import SequenceKeys, Tokens, root_key
from megatron_hybrid.kv_events import CacheContents, wire_hash
from megatron_hybrid.kv_events.contents import shared_blocks
from megatron_hybrid.server.link.messages import CacheSizes


class PromptKeys:
    """A prompt's tokens and hashes; those of an epoch are made when they are first asked for."""

    def __init__(self, data: bytes, block_size: int, cache_salt: str) -> None:
        """`data`: the ids as 32-bit little-endian numbers."""
        self.tokens: Tokens = np.frombuffer(data, dtype="<i4")
        self.length = len(self.tokens)
        self._block_size = block_size
        self._cache_salt = cache_salt
        self._by_epoch: dict[int, tuple[SequenceKeys, list[int]]] = {}

    def blocks(self, epoch: int = 0) -> list[int]:
        """Hashes of all full blocks, as KV events have them."""
        return self.of(epoch)[1]

    def of(self, epoch: int) -> tuple[SequenceKeys, list[int]]:
        """The keys under this epoch's root, and the hashes of all full blocks."""
        known = self._by_epoch.get(epoch)
        if known is None:
            root = root_key(epoch, self._cache_salt)
            keys = SequenceKeys(root, self._block_size, lambda low, high: self.tokens[low:high])
            keys.extend_to(self.length)
            known = self._by_epoch[epoch] = keys, [wire_hash(key) for key in keys.blocks]
        return known


class ReplicaPrefixes:
    """What all replicas have, by their numbers. Their caches are cut alike, as `sizes` says."""

    def __init__(self, sizes: CacheSizes) -> None:
        self.sizes = sizes
        self.cached: defaultdict[int, CacheContents] = defaultdict(CacheContents)
        # How many prompts that wait or are computed have a block, by its hash.
        self.expected: defaultdict[int, Counter[int]] = defaultdict(Counter)

    def expect(self, replica: int, prompt: PromptKeys) -> None:
        """This prompt waits or is computed there."""
        self.expected[replica].update(prompt.blocks())

    def expect_no_more(self, replica: int, prompt: PromptKeys) -> None:
        """It has been computed, or never will be; what is left of it is told by events."""
        expected = self.expected[replica]
        for name in prompt.blocks():
            expected[name] -= 1
            if not expected[name]:
                del expected[name]

    def reusable(self, prompt: PromptKeys, replica: int) -> int:
        """How many tokens of the prompt this replica could skip."""
        contents = self.cached[replica]
        # The last token of what is only expected is always computed.
        shared = shared_blocks(prompt.blocks(), self.expected[replica]) * self.sizes.block_size
        shared = min(shared, prompt.length - 1)
        shared -= shared % self.sizes.unit
        keys, hashes = prompt.of(contents.epoch)
        return max(shared, contents.skippable(keys, prompt.length, hashes))
