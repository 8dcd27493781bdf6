"""Builds PrefillSegments and poisoned states for the kernel tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import PrefillSegments, chunk_bounds


@dataclass
class Segment:
    """`length` tokens from absolute position `start`; checkpoints are (position, slot)."""

    start: int
    length: int
    read: int
    write: int
    checkpoints: list[tuple[int, int]] = field(default_factory=list)


def int64(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def prefill_segments(
    segments: list[Segment], padding: int = 0, chunks: Sequence[int] = ()
) -> PrefillSegments:
    """`padding` appends that many empty sequences. `chunks`: kernel chunks to give bounds of."""
    lengths = [0] + [s.length for s in segments] + [0] * padding
    checkpoints = [(i, p, slot) for i, s in enumerate(segments) for p, slot in s.checkpoints]
    per_sequence = [len(s.checkpoints) for s in segments] + [0] * padding
    return PrefillSegments(
        cu_seqlens=int64(lengths).cumsum(0),
        start_position=int64([s.start for s in segments] + [0] * padding),
        read_slot=int64([s.read for s in segments] + [-1] * padding),
        write_slot=int64([s.write for s in segments] + [-1] * padding),
        cu_checkpoints=int64([0] + per_sequence).cumsum(0),
        checkpoint_sequence=int64([c[0] for c in checkpoints]),
        checkpoint_position=int64([c[1] for c in checkpoints]),
        checkpoint_slot=int64([c[2] for c in checkpoints]),
        sequence_of_token=torch.arange(len(lengths) - 1).repeat_interleave(int64(lengths[1:])),
        longest=max(lengths),
        cu_chunk_seqlens={
            chunk: torch.from_numpy(
                chunk_bounds(
                    np.asarray([s.start for s in segments] + [0] * padding),
                    np.asarray(lengths[1:]),
                    chunk,
                )
            )
            for chunk in chunks
        },
    )


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A state tensor in which whatever is read before it is written shows as NaN."""
    return torch.full(shape, float("nan"), dtype=dtype)
