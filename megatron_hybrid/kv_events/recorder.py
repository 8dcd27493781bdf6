"""KVEventRecorder: takes down what changes in a cache during a step."""

from __future__ import annotations

from typing import NamedTuple

from megatron_hybrid.cache.block_hash import BlockKey, SequenceKeys, Tokens
from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.kv_events.contents import stored_event
from megatron_hybrid.kv_events.messages import (
    BLOCKS,
    LOGITS,
    MEDIUM,
    STATES,
    AllBlocksCleared,
    BlockRemoved,
    Event,
    wire_hash,
)


class _Stored(NamedTuple):  # from `block_size` on as `stored_event` takes it
    keys: list[BlockKey]
    parent: BlockKey | None
    tokens: Tokens  # of these blocks; a view of the prompt where that is possible
    block_size: int
    group: int
    adapter: str
    cache_salt: str
    has_logits: bool


class _Removed(NamedTuple):
    key: BlockKey
    group: int


class _Cleared(NamedTuple):
    epoch: int


Change = _Stored | _Removed | _Cleared


class KVEventRecorder:
    """A `cache.listener.CacheListener`. Each change is O(1) and one small object; what costs more
    (token lists, hashes as numbers, encoding) is done where the changes are published."""

    def __init__(self, geometry: CacheGeometry, epoch: int = 0) -> None:
        self._geometry = geometry
        self._changes: list[Change] = [_Cleared(epoch)]  # how every stream begins

    def take(self) -> Changes | None:
        """What has changed since the last call; None for nothing."""
        if not self._changes:
            return None
        changes, self._changes = self._changes, []
        return Changes(self._geometry, changes)

    def blocks_stored(self, keys: SequenceKeys, first: int, end: int) -> None:
        """Blocks [first, end) of a sequence are there from now on."""
        size = self._geometry.block_size
        self._changes.append(
            _Stored(
                keys.blocks[first:end],
                keys.blocks[first - 1] if first else None,
                keys.tokens(first * size, end * size),
                size,
                BLOCKS,
                keys.adapter,
                keys.cache_salt,
                False,
            )
        )

    def block_removed(self, key: BlockKey) -> None:
        """A block is gone."""
        self._changes.append(_Removed(key, BLOCKS))

    def state_stored(self, keys: SequenceKeys, position: int, has_logits: bool) -> None:
        """A state after so many tokens is there, or its logits are."""
        size = self._geometry.block_size
        start = (position - 1) // size * size
        self._changes.append(
            _Stored(
                [keys.at(position)],
                keys.at(start) if start else None,
                keys.tokens(start, position),
                position - start,
                STATES,
                keys.adapter,
                keys.cache_salt,
                has_logits,
            )
        )

    def state_removed(self, key: BlockKey) -> None:
        """A state is gone."""
        self._changes.append(_Removed(key, STATES))

    def logits_removed(self, key: BlockKey) -> None:
        """A state's logits are gone; the state stays."""
        self._changes.append(_Removed(key, LOGITS))

    def cleared(self, epoch: int) -> None:
        """Nothing is there any more; `epoch`: of the weights, from now on."""
        self._changes = [_Cleared(epoch)]  # what came before does not matter any more


class Changes:
    """One step's changes."""

    def __init__(self, geometry: CacheGeometry, changes: list[Change]) -> None:
        self._geometry = geometry
        self._changes = changes

    def events(self) -> list[Event]:
        """As they go out. Blocks that go one after another go in one event."""
        events: list[Event] = []
        last: _Removed | None = None
        for change in self._changes:
            if isinstance(change, _Removed):
                if last is not None and last.group == change.group:
                    event = events[-1]
                    assert isinstance(event, BlockRemoved)
                    event.block_hashes.append(wire_hash(change.key))
                else:
                    events.append(BlockRemoved([wire_hash(change.key)], MEDIUM, change.group))
                last = change
                continue
            last = None
            events.append(
                self._cleared(change) if isinstance(change, _Cleared) else self._stored(change)
            )
        return events

    def _cleared(self, change: _Cleared) -> AllBlocksCleared:
        geometry = self._geometry
        return AllBlocksCleared(
            change.epoch, geometry.block_size, geometry.has_attention, geometry.has_recurrent
        )

    def _stored(self, change: _Stored) -> Event:
        return stored_event(
            [wire_hash(key) for key in change.keys],
            None if change.parent is None else wire_hash(change.parent),
            change.tokens.tolist(),
            *change[3:],
        )
