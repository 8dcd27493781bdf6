"""What one running request holds of the cache, and what it is about to leave there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_hybrid.cache.block_hash import SequenceKeys
from megatron_hybrid.cache.cached_state import CachedState
from megatron_hybrid.cache.checkpoint_placement import PlannedCheckpoint
from megatron_hybrid.cache.state_pool import NULL_SLOT


class StepCheckpoint(NamedTuple):
    """A checkpoint that the coming step writes. Its key is filled in when it is published."""

    state: CachedState
    slot: int
    staged: int = 0  # a packed one's: where a kernel leaves it and goes on behind it

    @property
    def written(self) -> int:
        """The slot that a kernel writes when it passes the position."""
        return self.staged or self.slot

    @property
    def position(self) -> int:
        """How many tokens the state has seen."""
        return self.state.position


class TailCopy(NamedTuple):
    """KV of the first tokens of a block that is to be copied before the step writes any."""

    source: int
    destination: int
    num_tokens: int


class StateMove(NamedTuple):
    """A state that is packed or unpacked before the step, from slot to slot."""

    source: int
    destination: int


class Pin(NamedTuple):
    """Keeps a published state and its KV until a request that waited for it was tried."""

    slot: int
    blocks: list[int]
    window: tuple[int, ...] = ()  # window blocks


@dataclass(slots=True)
class WindowTable:
    """Blocks of layers with a sliding window that a request has: of its sequence those from number
    `first` on. Only Windows changes it."""

    first: int
    blocks: list[int] = field(default_factory=list)
    source: int = 0  # held beside them, until the state that it is kept with was read; 0: none
    copy: TailCopy | None = None  # pending, from there

    @property
    def end(self) -> int:
        """The number of the block behind the last one."""
        return self.first + len(self.blocks)


@dataclass(slots=True)
class Lease:
    """Only HybridCache changes it."""

    keys: SequenceKeys
    blocks: list[int]  # its block table
    num_shared: int  # leading blocks that were found in the cache and must not be written
    skip: int  # tokens that it did not have to compute
    read_slot: int  # where its state is read next
    write_slot: int  # where its state is written next
    checkpoints: list[PlannedCheckpoint]  # not captured yet, ascending
    version: int  # of the cache at admission; with an older one it publishes nothing
    deepest: CachedState | None = None  # the last state that it read or left
    fork: CachedState | None = None  # the last of those that others share
    turn: int = 0  # how often its conversation has gone on from a cached answer
    pause: int = 0  # steps before it did
    copy: TailCopy | None = None  # pending; its source is referenced
    forks: list[PlannedCheckpoint] = field(default_factory=list)  # for requests that wait
    lost_tokens: dict[str, int] = field(default_factory=dict)  # matched, computed again; by cause
    num_published: int = 0  # blocks, the shared ones included
    pinned: bool = False  # read_slot is a cached slot
    reads_own: bool = False  # that holds what this request has left itself
    decode_state: CachedState | None = None  # its newest decode checkpoint
    used: list[CachedState] = field(default_factory=list)  # only under ref_zero
    window: WindowTable | None = None  # None: no layer has a sliding window

    def planned(self, position: int) -> list[PlannedCheckpoint]:
        """Checkpoints strictly above `position` that are still to be captured, ascending."""
        if not self.forks:
            return [c for c in self.checkpoints if c.position > position]
        merged = {c.position: c for c in self.forks} | {c.position: c for c in self.checkpoints}
        return [merged[p] for p in sorted(merged) if p > position]


def held_by(
    leases: Sequence[Lease], pins: Sequence[Pin], reserved: Iterable[int]
) -> tuple[list[Sequence[int]], list[int], list[int]]:
    """Tables of referenced blocks, owned slots and pinned ones, with multiplicity. `reserved`:
    slots of checkpoints that are to be written."""
    tables: list[Sequence[int]] = [lease.blocks for lease in leases]
    tables += [pin.blocks for pin in pins]
    tables += [[lease.copy.source] for lease in leases if lease.copy is not None]
    owned = [lease.write_slot for lease in leases if lease.write_slot != NULL_SLOT]
    pinned = [lease.read_slot for lease in leases if lease.pinned]
    pinned += [pin.slot for pin in pins if pin.slot != NULL_SLOT]
    return tables, [*owned, *reserved], pinned
