"""Sequences that decode in runs: what DecodeRuns is given call by call, for any kernel.

Each sequence has a text; in each call it takes its next token and drafts, of which some hold: they
are the text's. Others are not, and what they left in the ring must have no effect."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeRuns


@dataclass
class Sequence:
    """Slot 0: it has no state yet."""

    slot: int
    ring: int
    position: int
    unfolded: int = 0
    checkpoint: tuple[int, int] = (0, 0)  # position, slot


@dataclass
class Call:
    """Of one call: for each sequence its tokens, how many of its drafts hold, where it writes."""

    sequences: list[Sequence]
    lengths: list[int]
    holds: list[int]
    writes: list[int]
    padding: int = 0  # tokens, and sequences

    def runs(self, dtype: torch.dtype = torch.int64) -> DecodeRuns:
        nobody = [0] * self.padding

        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=dtype)

        return DecodeRuns(
            cu_seqlens=ints([0, *self.lengths, *nobody]).cumsum(0, dtype=dtype),
            position=ints([s.position for s in self.sequences] + nobody),
            unfolded=ints([s.unfolded for s in self.sequences] + nobody),
            read_slot=ints([s.slot for s in self.sequences] + nobody),
            write_slot=ints(self.writes + nobody),
            ring=ints([s.ring for s in self.sequences] + nobody),
            checkpoint_position=ints([s.checkpoint[0] for s in self.sequences] + nobody),
            checkpoint_slot=ints([s.checkpoint[1] for s in self.sequences] + nobody),
            most_unfolded=max(s.unfolded for s in self.sequences)
            if max(self.lengths) <= 1
            else None,
        )

    def reached(self, s: int) -> bool:
        """Whether the sequence's checkpoint is written."""
        one, folded = self.sequences[s], min(self.lengths[s], 1)
        position, slot = one.checkpoint
        return slot > 0 and one.position - one.unfolded < position <= one.position + folded

    def done(self) -> None:
        """The sequences stand where the next call begins."""
        for one, length, holds, write in zip(
            self.sequences, self.lengths, self.holds, self.writes, strict=True
        ):
            one.unfolded = holds if write > 0 else one.unfolded + min(length, 1) + holds
            one.position += min(length, 1) + holds
            one.slot = write if write > 0 else one.slot


@dataclass
class Play:
    """Random calls for `count` sequences, with rings of this length."""

    seed: int
    count: int = 4
    ring_length: int = 7
    most: int = 4  # tokens of a sequence in one call
    start: int = 0  # position of the first sequence; the others' are one more each
    sequences: list[Sequence] = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        order = list(range(self.count))
        self._random.shuffle(order)
        # Two slots each, to read one and write the other; the first has none yet.
        self.sequences = [
            Sequence(2 * i + 1 if i else 0, order[i], self.start + i) for i in range(self.count)
        ]

    @property
    def slots(self) -> int:
        """0, two a sequence, and one a sequence for checkpoints."""
        return 3 * self.count + 1

    def call(self, padding: int = 0) -> Call:
        pick = self._random
        lengths, holds, writes = [], [], []
        for i, one in enumerate(self.sequences):
            room = min(self.most, self.ring_length - one.unfolded)
            length = pick.randint(0, room)
            # without a state there is nothing to go on from but by writing one
            must = one.slot == 0 or one.unfolded + length + self.most > self.ring_length
            own = (2 * i + 1, 2 * i + 2)
            write = pick.choice(own) if must or pick.random() < 0.5 else 0
            one.checkpoint = (
                one.position + pick.randint(-self.most, self.most + 1),
                pick.choice((0, 2 * self.count + 1 + i)),
            )
            lengths.append(length)
            holds.append(pick.randint(0, max(length - 1, 0)))
            writes.append(write)
        return Call(self.sequences, lengths, holds, writes, padding)
