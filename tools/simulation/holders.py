"""Which of many replicas hold a prefix: one lookup for each of its blocks, whatever their number.

By the key of a block or a state there is a bitset, in which bit k stands for replica k. A block's
parents come before it and go after it, so the replicas that hold block i of a prompt are among
those that hold block i - 1, and a prompt is looked up by one "and" a block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_hybrid.cache.block_hash import BlockKey, SequenceKeys
from megatron_hybrid.cache.changes import BLOCKS, LOGITS, Change, Cleared, Removed, Stored
from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.cache.tail_index import Fills

Bitset = int
# Replicas, apart, that hold as many tokens of a prompt; those that hold none are left out.
Groups = list[tuple[int, Bitset]]
FEW = 4  # replicas that are set one by one, which takes less time than an operation on all


class Holders(dict[BlockKey, Bitset]):
    """Replicas by what they hold."""

    def put(self, key: BlockKey, replica: int) -> bool:
        """Whether that is new of this replica."""
        held = self.get(key, 0)
        self[key] = held | 1 << replica
        return not held >> replica & 1

    def drop(self, key: BlockKey, replica: int) -> bool:
        """Whether the replica held it."""
        held = self.get(key, 0)
        if not held >> replica & 1:
            return False
        held ^= 1 << replica
        if held:
            self[key] = held
        else:
            del self[key]
        return True

    def along(self, keys: Sequence[BlockKey]) -> list[Bitset]:
        """Who holds the first block of a prompt, the first two, ...; up to the last that anyone
        holds."""
        held, known = -1, []
        for key in keys:
            held &= self.get(key, 0)
            if not held:
                break
            known.append(held)
        return known


class Contents:
    """What the caches of hybrid models' replicas hold, as their events say: for each of them the
    same as `CacheContents` of the coordinator."""

    def __init__(self, geometry: CacheGeometry, replicas: int) -> None:
        assert geometry.has_attention and geometry.has_recurrent
        self._block_size = geometry.block_size
        self._all: Bitset = (1 << replicas) - 1
        self._blocks = Holders()
        self._states = Holders()
        self._logits = Holders()  # states that have their logits
        self._tails: dict[BlockKey, tuple[BlockKey | None, int]] = {}  # of states inside blocks
        self._fills: Fills[BlockKey | None] = Fills()
        self.num_blocks: npt.NDArray[np.int64] = np.zeros(replicas, np.int64)  # of each replica

    def apply(self, replica: int, changes: Sequence[Change]) -> None:
        """Take over what has changed."""
        for change in changes:
            if isinstance(change, Stored):
                self._store(replica, change)
            elif isinstance(change, Removed):
                self._remove(replica, change.key, change.kind)
            else:
                assert isinstance(
                    change, Cleared
                )  # which begins a replica's stream, empty as it is

    def lose(self, replica: int) -> None:
        """It is gone, with all that it held."""
        for kind, holders in enumerate((self._blocks, self._states)):
            for key in [key for key, held in holders.items() if held >> replica & 1]:
                self._remove(replica, key, kind)

    def blocks(self, keys: SequenceKeys) -> Groups:
        """Tokens of a prompt in KV blocks that replicas hold, with states or without."""
        return levels(self._blocks.along(keys.blocks), self._block_size)

    def skippable(self, keys: SequenceKeys, length: int) -> Groups:
        """Tokens of a prompt of `length` tokens that replicas would not have to compute."""
        groups: Groups = []
        known, left = self._blocks.along(keys.blocks), self._all
        blocks, size = keys.blocks[: len(known)], self._block_size
        for end, key in self._fills.ends(None, blocks, size, keys.at, length):
            if key is None or not left:
                break
            held = (self._logits if end == length else self._states).get(key, 0) & left
            if end >= size:
                held &= known[end // size - 1]
            if held:
                groups.append((end, held))
                left &= ~held
        return groups

    def _store(self, replica: int, stored: Stored) -> None:
        if stored.kind == BLOCKS:
            self.num_blocks[replica] += sum(self._blocks.put(key, replica) for key in stored.keys)
            return
        (key,) = stored.keys
        if self._states.put(key, replica) and stored.size < self._block_size:
            self._tails[key] = stored.parent, stored.size
            self._fills.add(stored.parent, stored.size)
        (self._logits.put if stored.has_logits else self._logits.drop)(key, replica)

    def _remove(self, replica: int, key: BlockKey, kind: int) -> None:
        if kind == BLOCKS:
            self.num_blocks[replica] -= self._blocks.drop(key, replica)
            return
        self._logits.drop(key, replica)
        if kind != LOGITS and self._states.drop(key, replica) and key in self._tails:
            self._fills.remove(*self._tails[key])
            if key not in self._states:
                del self._tails[key]


class Underway:
    """The blocks of requests that wait or run on each replica. Several may share a block."""

    def __init__(self, block_size: int, replicas: int) -> None:
        self._block_size = block_size
        self._holders = Holders()
        self._counts: list[Counter[BlockKey]] = [Counter() for _ in range(replicas)]
        self.num_blocks: npt.NDArray[np.int64] = np.zeros(replicas, np.int64)  # of each replica

    def begin(self, replica: int, keys: Sequence[BlockKey]) -> None:
        """A request with these blocks is there."""
        self._counts[replica].update(keys)
        self.num_blocks[replica] += sum(self._holders.put(key, replica) for key in keys)

    def end(self, replica: int, keys: Sequence[BlockKey]) -> None:
        """It is there no more."""
        counts = self._counts[replica]
        for key in keys:
            counts[key] -= 1
            if not counts[key]:
                del counts[key]
                self._holders.drop(key, replica)
        self.num_blocks[replica] = len(counts)

    def blocks(self, keys: SequenceKeys) -> Groups:
        """Tokens of a prompt in blocks that a request on a replica has, too."""
        return levels(self._holders.along(keys.blocks), self._block_size)


def levels(known: Sequence[Bitset], block_size: int) -> Groups:
    """`Holders.along`, as groups."""
    deeper, groups = 0, []
    for count in range(len(known), 0, -1):
        if held := known[count - 1] & ~deeper:
            groups.append((count * block_size, held))
            deeper = known[count - 1]
    return groups


def raise_to(values: npt.NDArray[np.float64], value: float, replicas: Bitset) -> None:
    """Raise the values of these replicas that are less."""
    if replicas.bit_count() <= FEW:
        while replicas:
            index = replicas.bit_length() - 1
            values[index] = max(values[index], value)
            replicas ^= 1 << index
    else:
        data = np.frombuffer(replicas.to_bytes(-(-len(values) // 8), "little"), np.uint8)
        chosen = np.unpackbits(data, count=len(values), bitorder="little").view(np.bool_)
        np.maximum(values, value, out=values, where=chosen)
