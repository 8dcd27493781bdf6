"""CacheContents: what events say that a replica's cache holds."""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from megatron_hybrid.cache.block_hash import SequenceKeys
from megatron_hybrid.cache.changes import BLOCKS, DEVICE, LOGITS, STATES
from megatron_hybrid.cache.tail_index import Fills, is_usable
from megatron_hybrid.kv_events.messages import (
    AllBlocksCleared,
    BlockStored,
    Event,
    stored_event,
    wire_hash,
)

BLOCKS_AN_EVENT = 64  # of a snapshot


class Stored(NamedTuple):
    """One block, or one position at which a sequence can be continued."""

    parent: int | None  # hash of the full block before it
    size: int  # tokens
    tokens: array[int] | None  # [size]; None where they are not kept
    adapter: str | None
    cache_salt: str | None
    has_logits: bool


class Held:
    """What one memory holds. It has all that its own blocks and states need."""

    def __init__(self) -> None:
        self.blocks: dict[int, Stored] = {}  # by hash; parents come before their children
        self.states: dict[int, Stored] = {}  # positions to go on from, besides every block's end
        # of states inside blocks: their places behind the last full one
        self.fills: Fills[int | None] = Fills()

    def store(self, event: BlockStored, block_size: int, *, keeps_tokens: bool) -> None:
        """O(1) for each block, as everything here."""
        group = self._group(event.group_idx)
        size, parent, tokens = event.block_size, event.parent_block_hash, None
        for index, name in enumerate(event.block_hashes):
            if keeps_tokens:
                tokens = array("i", event.token_ids[index * size : (index + 1) * size])
            if group is self.states and name not in group and size < block_size:
                self.fills.add(parent, size)
            group[name] = Stored(
                parent, size, tokens, event.lora_name, event.cache_salt, event.has_logits
            )
            parent = name

    def remove(self, name: int, group_idx: int | None, block_size: int) -> None:
        """A block, a state or its logits."""
        if group_idx == LOGITS:
            if name in self.states:
                self.states[name] = self.states[name]._replace(has_logits=False)
            return
        group = self._group(group_idx)
        stored = group.pop(name, None)
        if stored is not None and group is self.states and stored.size < block_size:
            self.fills.remove(stored.parent, stored.size)

    def _group(self, group_idx: int | None) -> dict[int, Stored]:
        return self.states if group_idx == STATES else self.blocks


class CacheContents:
    """Applies events in their order.

    keeps_tokens: whether `snapshot` is wanted, which needs them (4 bytes a token).
    """

    def __init__(self, *, keeps_tokens: bool = False) -> None:
        self.epoch = 0
        self.block_size = 0  # tokens; 0 while nothing is known
        self.has_attention = True
        self.has_recurrent = False
        self.stored_as = ""
        self.held: dict[str, Held] = {DEVICE: Held()}  # by medium
        self._keeps_tokens = keeps_tokens

    @property
    def blocks(self) -> dict[int, Stored]:
        """Of the device, by hash."""
        return self.held[DEVICE].blocks

    @property
    def states(self) -> dict[int, Stored]:
        """Of the device, by hash."""
        return self.held[DEVICE].states

    def apply(self, events: Iterable[Event]) -> None:
        """Take over what has changed."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._clear(event)
                continue
            medium = event.medium or DEVICE
            held = self.held.get(medium)
            if held is None:
                held = self.held[medium] = Held()
            if isinstance(event, BlockStored):
                held.store(event, self.block_size, keeps_tokens=self._keeps_tokens)
            else:
                for name in event.block_hashes:
                    held.remove(name, event.group_idx, self.block_size)

    def skippable(
        self, keys: SequenceKeys, length: int, hashes: Sequence[int] | None = None
    ) -> int:
        """Tokens that a prompt of `length` tokens would not have to compute, whichever memory they
        are in: the same figure as `PrefixStore.match` finds. `keys` are those under the root of
        this `epoch` and `stored_as`; `hashes`: of the prompt's full blocks, where they are known
        already."""
        if not self.block_size:
            return 0
        if hashes is None:
            keys.extend_to(length)
            hashes = [wire_hash(key) for key in keys.blocks[: length // self.block_size]]
        return max(self._skippable(held, keys, length, hashes) for held in self.held.values())

    def _skippable(self, held: Held, keys: SequenceKeys, length: int, hashes: Sequence[int]) -> int:
        full = shared_blocks(hashes, held.blocks) if self.has_attention else len(hashes)
        ends = held.fills.ends(
            None, hashes[:full], self.block_size, lambda end: wire_hash(keys.at(end)), length
        )
        for end, name in ends:
            state = None if name is None else held.states.get(name)
            if state is None and end % self.block_size:
                continue
            if is_usable(state, end, length, needs_state=self.has_recurrent):
                return end
        return 0

    def snapshot(self) -> Iterator[list[Event]]:
        """Everything, as events in portions of bounded size; applied in order, they say the same
        again. Only with `keeps_tokens`."""
        kinds = self.has_attention, self.has_recurrent
        yield [AllBlocksCleared(self.epoch, self.block_size, *kinds, self.stored_as)]
        for medium, held in self.held.items():
            run: list[tuple[int, Stored]] = []
            for name, block in held.blocks.items():
                if run and not (_follows(*run[-1], block) and len(run) < BLOCKS_AN_EVENT):
                    yield [_event(run, BLOCKS, medium)]
                    run = []
                run.append((name, block))
            if run:
                yield [_event(run, BLOCKS, medium)]
            states = iter(held.states.items())
            while some := list(islice(states, BLOCKS_AN_EVENT)):
                yield [_event([item], STATES, medium) for item in some]

    def _clear(self, event: AllBlocksCleared) -> None:
        self.held = {DEVICE: Held()}
        self.epoch, self.block_size = event.epoch, event.block_size
        self.has_attention, self.has_recurrent = event.has_attention, event.has_recurrent
        self.stored_as = event.stored_as


def shared_blocks(hashes: Sequence[int], having: Container[int]) -> int:
    """How many of these, from the first one on, are there."""
    return next((i for i, name in enumerate(hashes) if name not in having), len(hashes))


def _follows(name: int, block: Stored, next_block: Stored) -> bool:
    """Whether a block continues the one before it in one event."""
    return next_block.parent == name and next_block.size == block.size


def _event(run: list[tuple[int, Stored]], group: int, medium: str) -> BlockStored:
    first = run[0][1]
    tokens: list[int] = []
    for _, block in run:
        assert block.tokens is not None, "a snapshot needs keeps_tokens=True"
        tokens += block.tokens
    return stored_event(
        [name for name, _ in run], first.parent, tokens, first.size, group, *first[3:], medium
    )
