"""The one place that knows about block, grid and slot arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

GIB = 2**30
# Checkpoints that a step stores in the middle of prompts, at most, where cached states are packed:
# each takes the memory of a live state until it is.
STAGED_SLOTS = 8

Position = TypeVar("Position", int, npt.NDArray[np.int64])


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """Sizes of one engine's caches, derived once at start.

    Positions count tokens from the start of a sequence. Block 0 is the dummy block and slot 0
    the null slot; both exist besides the counts below.
    """

    block_size: int  # tokens
    kernel_chunk: int  # tokens; 1 for a model without recurrent layers
    num_blocks: int  # KV blocks that can be allocated; 0 for a model without attention
    max_requests: int  # live slots
    # what the budget for recurrent states pays for; without such layers a slot holds only the
    # logits at the end of a prompt
    num_cached_slots: int
    bytes_per_block: int
    bytes_per_state: int  # one slot in all recurrent layers; 0 without such layers
    bytes_per_logits: int = 0  # that go with each slot
    stored_as: str = ""  # the type of keys and values: part of every key, like the weights' epoch
    # one cached slot in all recurrent layers, where it is smaller than a live one; None: it is not
    bytes_per_packed_state: int | None = None
    # Tokens: states are those after a multiple of it. 1: after any number. Above 1, in
    # batch-invariant mode, it is the kernel chunk.
    granule: int = 1
    # Tokens that a token sees in layers with a sliding window, itself included; 0: no such layers.
    # Their keys and values lie in window blocks of as many tokens as the others: see windows.py.
    window: int = 0
    num_window_blocks: int = 0
    bytes_per_window_block: int = 0
    # What is held of a window begins at a multiple of so many tokens, itself one of the block size.
    # 0: the block size. In batch-invariant mode a tile of keys begins there.
    window_alignment: int = 0
    most_ahead: int = 1  # tokens behind its state for which a decode has places, its next included

    @property
    def bytes_per_slot(self) -> int:
        """A live state and the logits that may go with it."""
        return self.bytes_per_state + self.bytes_per_logits

    @property
    def bytes_per_cached_slot(self) -> int:
        """The same of a cached state, and the blocks of sliding windows that it keeps."""
        packed = self.bytes_per_packed_state
        own = self.bytes_per_slot if packed is None else packed + self.bytes_per_logits
        return own + self.window_of_state * self.bytes_per_window_block

    @property
    def has_attention(self) -> bool:
        """Whether there is any KV of all tokens."""
        return self.bytes_per_block > 0

    @property
    def has_window(self) -> bool:
        """Whether there is KV of the last tokens alone."""
        return self.window > 0

    @property
    def has_blocks(self) -> bool:
        """Whether there is any KV at all."""
        return self.has_attention or self.has_window

    @property
    def needs_state(self) -> bool:
        """Whether a prefix can be gone on from only where a state is kept, of recurrent layers or
        of sliding windows."""
        return self.has_recurrent or self.has_window

    @property
    def has_recurrent(self) -> bool:
        """Whether there is any state of recurrent layers."""
        return self.bytes_per_state > 0

    @property
    def grid(self) -> int:
        """Positions where a state may be captured inside a chunk are multiples of this."""
        return math.lcm(self.block_size, self.kernel_chunk)

    @property
    def packs_states(self) -> bool:
        """Whether cached states are of a type of their own, in slots of their own."""
        return self.bytes_per_packed_state is not None

    @property
    def num_full_slots(self) -> int:
        """The first slots, of which kernels read and write whole states, where those behind them
        are packed; 0 where none are."""
        return self.max_requests + self.num_staged_slots if self.packs_states else 0

    @property
    def num_staged_slots(self) -> int:
        """The last of them, for checkpoints until they are packed; no part of the state pool."""
        return min(STAGED_SLOTS, self.max_requests) if self.packs_states else 0

    @property
    def num_slots(self) -> int:
        """Slots of the state pool, live and cached ones together."""
        return self.num_cached_slots + (self.max_requests if self.needs_state else 0)

    def is_packed(self, slot: int) -> bool:
        """Whether the state in a slot is packed."""
        return 0 < self.num_full_slots < slot

    @property
    def smallest_reusable_prefix(self) -> int:
        """Tokens that prompts have to share to share anything, exact ends aside."""
        return self.grid if self.needs_state else self.block_size

    @property
    def longest_sequence(self) -> int | None:
        """The most tokens of one sequence whose KV fits: the last one is never fed. None: any
        number, without attention."""
        return self.num_blocks * self.block_size + 1 if self.has_attention else None

    def floor_grid(self, position: int) -> int:
        """The last position on the grid that is not behind this one."""
        return position - position % self.grid

    def floor_granule(self, position: Position) -> Position:
        """The last position that a state can be of and that is not behind this one."""
        return position - position % self.granule

    def first_in_window(self, position: Position) -> Position:
        """The number of the first block of a sequence that is read from `position` on, or behind
        the last state before it."""
        seen = self.floor_granule(position) - self.window + 1
        seen *= seen > 0
        return (seen - seen % self._window_step) // self.block_size

    @property
    def window_quota(self) -> int:
        """Window blocks that a request holds at most, beside those of a chunk of its prompt."""
        tokens = self.window - 1 + self.granule - 1 + self.most_ahead  # from the first that is seen
        return (tokens + self._window_step - 2) // self.block_size + 1

    @property
    def window_of_state(self) -> int:
        """Window blocks that a cached state keeps at most."""
        tokens = max(self.window - 1, 1)  # a block that is not full stays, whoever reads it
        return (tokens + self._window_step - 2) // self.block_size + 1 if self.window else 0

    @property
    def _window_step(self) -> int:
        return self.window_alignment or self.block_size

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens; 0 in a model without attention to all of them."""
        return -(-tokens // self.block_size) if self.has_attention else 0


def slots_for_budget(gigabytes: float, bytes_per_state: int) -> int:
    """How many states a budget pays for; 0 for a budget of 0 or less."""
    if gigabytes <= 0 or bytes_per_state == 0:
        return 0
    return math.floor(gigabytes * GIB / bytes_per_state)
