"""Which replica can skip how much of a prompt: what each one has cached, or will have.

Prefixes are known by the hashes of KV events. Each stands in one dictionary with a mask of the
replicas that have it (bit r for replica r), so that a question costs one look for each block of the
prompt, however many replicas there are.

A prompt that waits or is being computed counts as cached where it runs: a request that shares its
prefix is computed behind it, and then finds what it left. With recurrent layers a state is left
where the two part, floored to the grid: the scheduler looks ahead for such forks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from megatron_hybrid.cache.block_hash import SequenceKeys, Tokens, root_key
from megatron_hybrid.kv_events.messages import (
    LOGITS,
    STATES,
    BlockRemoved,
    BlockStored,
    Event,
    wire_hash,
)
from megatron_hybrid.server.link.messages import CacheSizes

Masks = dict[int, int]  # replicas, by a prefix's hash


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
        """Hashes of all full blocks."""
        return self._of(epoch)[1]

    def at(self, position: int, epoch: int) -> int:
        """The hash of the first `position` tokens."""
        return wire_hash(self._of(epoch)[0].at(position))

    def _of(self, epoch: int) -> tuple[SequenceKeys, list[int]]:
        known = self._by_epoch.get(epoch)
        if known is None:
            root = root_key(epoch, self._cache_salt)
            keys = SequenceKeys(root, self._block_size, lambda low, high: self.tokens[low:high])
            keys.extend_to(self.length)
            known = self._by_epoch[epoch] = keys, [wire_hash(key) for key in keys.blocks]
        return known


class ReplicaPrefixes:
    """What all replicas have. Their caches are cut alike, as `sizes` says."""

    def __init__(self, sizes: CacheSizes) -> None:
        self.sizes = sizes
        self.blocks: Masks = {}
        self.states: Masks = {}
        self.logits: Masks = {}  # states after which nothing need be computed
        # By the hash of the last full block before them (None: there is none): how far behind it
        # states off the blocks' ends are, and how many there are.
        self.fills: dict[int | None, dict[int, int]] = {}
        self._expected: Masks = {}
        self._expectations: dict[tuple[int, int], int] = {}  # how many prompts, by replica
        self._contents: dict[int, ReplicaContents] = {}

    def of(self, replica: int) -> ReplicaContents:
        """What this replica has; events are given to it."""
        if replica not in self._contents:
            self._contents[replica] = ReplicaContents(self, replica)
        return self._contents[replica]

    def expect(self, replica: int, prompt: PromptKeys) -> None:
        """This prompt waits or is computed there."""
        for name in prompt.blocks():
            count = self._expectations.get((name, replica), 0)
            self._expectations[name, replica] = count + 1
            if not count:
                set_bit(self._expected, name, replica)

    def expect_no_more(self, replica: int, prompt: PromptKeys) -> None:
        """It has been computed, or never will be; what is left of it is told by events."""
        for name in prompt.blocks():
            count = self._expectations.pop((name, replica)) - 1
            if count:
                self._expectations[name, replica] = count
            else:
                clear_bit(self._expected, name, replica)

    def reusable(self, prompt: PromptKeys, replicas: Sequence[int]) -> dict[int, int]:
        """How many tokens of the prompt each of these replicas could skip."""
        reusable = self._expected_to_be_reusable(prompt, replicas)
        by_epoch: dict[int, list[int]] = {}
        for replica in replicas:
            by_epoch.setdefault(self.of(replica).epoch, []).append(replica)
        for epoch, alike in by_epoch.items():
            for replica, tokens in self._cached(prompt, epoch, alike).items():
                reusable[replica] = max(reusable[replica], tokens)
        return reusable

    def _expected_to_be_reusable(
        self, prompt: PromptKeys, replicas: Sequence[int]
    ) -> dict[int, int]:
        depths = _depths(self._expected, prompt.blocks(), replicas)
        unit = max(1, self.sizes.grid if self.sizes.recurrent else self.sizes.block_size)
        # The last token is always computed.
        found = {
            replica: min(blocks * self.sizes.block_size, prompt.length - 1)
            for replica, blocks in depths.items()
        }
        return {replica: tokens - tokens % unit for replica, tokens in found.items()}

    def _cached(self, prompt: PromptKeys, epoch: int, replicas: Sequence[int]) -> dict[int, int]:
        """The deepest position with all KV before it and, with recurrent layers, a state."""
        names = prompt.blocks(epoch)
        if self.sizes.kv_blocks:
            depths = _depths(self.blocks, names, replicas)
        else:
            depths = dict.fromkeys(replicas, len(names))  # no layer needs any KV
        reusable = dict.fromkeys(replicas, 0)
        ending: dict[int, int] = {}  # replicas by their depth
        for replica, depth in depths.items():
            ending[depth] = ending.get(depth, 0) | 1 << replica
        here = 0  # those that have so many blocks, and no usable position behind them
        for count in range(max(ending, default=0), -1, -1):
            here |= ending.pop(count, 0)
            if here:
                here &= ~self._resolve(prompt, epoch, count, here, reusable)
            if not here and not ending:
                break
        return reusable

    def _resolve(
        self, prompt: PromptKeys, epoch: int, count: int, here: int, reusable: dict[int, int]
    ) -> int:
        """For replicas that have so many blocks, the last usable position behind them and before
        the next block; the mask of those that have one."""
        start = count * self.sizes.block_size
        block = prompt.blocks(epoch)[count - 1] if count else None
        resolved = 0
        for fill in sorted(self.fills.get(block, ()), reverse=True):
            position = start + fill
            if position <= prompt.length:
                having = self.logits if position == prompt.length else self.states
                found = having.get(prompt.at(position, epoch), 0) & here & ~resolved
                reusable |= dict.fromkeys(bits(found), position)
                resolved |= found
        if block is not None:
            if start == prompt.length:
                found = self.logits.get(block, 0)
            elif self.sizes.recurrent:
                found = self.states.get(block, 0)
            else:
                found = here
            found &= here & ~resolved
            reusable |= dict.fromkeys(bits(found), start)
            resolved |= found
        return resolved


class ReplicaContents:
    """One replica's part of a ReplicaPrefixes: applies its events, in their order."""

    def __init__(self, prefixes: ReplicaPrefixes, replica: int) -> None:
        self.epoch = 0  # of the weights; prefixes of another one are never found
        self._prefixes = prefixes
        self._replica = replica
        self._blocks: set[int] = set()
        self._states: dict[int, tuple[int | None, int]] = {}  # the block before, tokens behind it

    @property
    def num_blocks(self) -> int:
        """Blocks that are cached."""
        return len(self._blocks)

    def apply(self, events: Iterable[Event]) -> None:
        """Take over what has changed; O(1) a block."""
        for event in events:
            if isinstance(event, BlockStored):
                if event.group_idx == STATES:
                    self._store_state(event)
                else:
                    self._blocks.update(event.block_hashes)
                    for name in event.block_hashes:
                        set_bit(self._prefixes.blocks, name, self._replica)
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    self._remove(name, event.group_idx)
            else:
                self.clear()
                self.epoch = event.epoch

    def clear(self) -> None:
        """Nothing is there any more."""
        for name in list(self._states):
            self._remove(name, STATES)
        for name in self._blocks:
            clear_bit(self._prefixes.blocks, name, self._replica)
        self._blocks.clear()

    def _store_state(self, event: BlockStored) -> None:
        (name,) = event.block_hashes
        prefixes = self._prefixes
        fill = event.block_size % prefixes.sizes.block_size
        if name not in self._states:
            self._states[name] = event.parent_block_hash, fill
            set_bit(prefixes.states, name, self._replica)
            if fill:
                fills = prefixes.fills.setdefault(event.parent_block_hash, {})
                fills[fill] = fills.get(fill, 0) + 1
        if event.has_logits:
            set_bit(prefixes.logits, name, self._replica)
        else:
            clear_bit(prefixes.logits, name, self._replica)

    def _remove(self, name: int, group: int | None) -> None:
        prefixes = self._prefixes
        if group == LOGITS:
            clear_bit(prefixes.logits, name, self._replica)
        elif group != STATES:
            self._blocks.discard(name)
            clear_bit(prefixes.blocks, name, self._replica)
        elif name in self._states:
            parent, fill = self._states.pop(name)
            clear_bit(prefixes.states, name, self._replica)
            clear_bit(prefixes.logits, name, self._replica)
            if fill:
                fills = prefixes.fills[parent]
                fills[fill] -= 1
                if not fills[fill]:
                    del fills[fill]
                if not fills:
                    del prefixes.fills[parent]


def _depths(having: Masks, names: Sequence[int], replicas: Sequence[int]) -> dict[int, int]:
    """How many of these, from the first one on, each replica has."""
    depths = dict.fromkeys(replicas, len(names))
    left = mask_of(replicas)
    for depth, name in enumerate(names):
        found = having.get(name, 0) & left
        if found != left:
            depths |= dict.fromkeys(bits(left & ~found), depth)
            left = found
            if not left:
                break
    return depths


def set_bit(masks: Masks, name: int, replica: int) -> None:
    """This replica has the prefix."""
    masks[name] = masks.get(name, 0) | 1 << replica


def clear_bit(masks: Masks, name: int, replica: int) -> None:
    """This replica has the prefix no more."""
    mask = masks.get(name, 0) & ~(1 << replica)
    if mask:
        masks[name] = mask
    else:
        masks.pop(name, None)


def mask_of(replicas: Iterable[int]) -> int:
    """Bit r for each replica r."""
    mask = 0
    for replica in replicas:
        mask |= 1 << replica
    return mask


def bits(mask: int) -> Iterator[int]:
    """The replicas of a mask."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
