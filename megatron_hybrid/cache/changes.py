"""CacheChanges: what has changed of what `PrefixStore` can find, taken down as it happens.

A state here is a position at which a sequence can be continued: in a model with recurrent layers a
cached state, in one without a tail, or the logits at a prompt's end.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_hybrid.cache.block_hash import BlockKey, SequenceKeys, Tokens
from megatron_hybrid.cache.geometry import CacheGeometry

# Kinds of what comes and goes. LOGITS only goes: a sequence can still be continued there.
BLOCKS, STATES, LOGITS = range(3)
# Where: in the memory that is computed from, whatever the device is, or in slower memory behind it.
# Each has everything that its own blocks and states need.
DEVICE, HOST = "GPU", "CPU"


class Stored(NamedTuple):
    """Consecutive full blocks of a sequence can be found, or (STATES) one position of it."""

    keys: list[BlockKey]
    parent: BlockKey | None  # of the full block before them; None at a sequence's beginning
    tokens: Tokens  # of these blocks; a view of the prompt where that is possible
    size: int  # tokens in each
    kind: int
    adapter: str
    cache_salt: str
    has_logits: bool = False  # those of the last token are there, too
    medium: str = DEVICE


class Removed(NamedTuple):
    """It can't be found any more. A block's children went before it; a state goes also when its KV
    is what went."""

    key: BlockKey
    kind: int
    medium: str = DEVICE


class Cleared(NamedTuple):
    """Nothing can be found any more. `epoch`: what later keys depend on."""

    epoch: int
    geometry: CacheGeometry


Change = Stored | Removed | Cleared


class CacheChanges:
    """Each change is O(1) and one small object; what costs more (token lists, hashes as numbers,
    encoding) is done where the changes are published."""

    def __init__(self, geometry: CacheGeometry, epoch: int = 0) -> None:
        self._geometry, self._medium = geometry, DEVICE
        self._changes: list[Change] = [Cleared(epoch, geometry)]  # how every stream begins

    def of_host(self) -> CacheChanges:
        """The same for what is found in memory of the host: taken with these, in one order."""
        return _HostChanges(self._geometry, self._changes)

    def take(self) -> list[Change]:
        """What has changed since the last call, in the order in which it happened."""
        changes = self._changes.copy()
        self._changes.clear()
        return changes

    def blocks_stored(self, keys: SequenceKeys, first: int, end: int) -> None:
        """The full blocks [first, end) of a sequence can be found; they could not before."""
        size = self._geometry.block_size
        self._store(keys, keys.blocks[first:end], first * size, end * size, size, BLOCKS)

    def state_stored(self, keys: SequenceKeys, position: int, has_logits: bool) -> None:
        """A sequence can be continued after `position` tokens. Told again when the logits of the
        last of them (`has_logits`) come later."""
        start = (position - 1) // self._geometry.block_size * self._geometry.block_size
        name = [keys.at(position)]
        self._store(keys, name, start, position, position - start, STATES, has_logits)

    def removed(self, key: BlockKey, kind: int) -> None:
        """A block, a state, or only its logits, can't be found any more."""
        self._changes.append(Removed(key, kind, self._medium))

    def cleared(self, epoch: int) -> None:
        """Nothing can be found any more."""
        self._changes[:] = [Cleared(epoch, self._geometry)]  # what came before is void

    def _store(
        self,
        keys: SequenceKeys,
        names: list[BlockKey],
        start: int,
        end: int,
        size: int,
        kind: int,
        has_logits: bool = False,
    ) -> None:
        parent = keys.at(start) if start else None
        tokens, salt = keys.tokens(start, end), keys.cache_salt
        self._changes.append(
            Stored(names, parent, tokens, size, kind, keys.adapter, salt, has_logits, self._medium)
        )


class _HostChanges(CacheChanges):
    def __init__(self, geometry: CacheGeometry, changes: list[Change]) -> None:
        self._geometry, self._medium, self._changes = geometry, HOST, changes

    def cleared(self, epoch: int) -> None:
        """With the device's."""
