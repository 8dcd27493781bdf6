"""What kernels are told of a step of prompts alone, from empty caches, which leaves no states."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import (
    PagedHost,
    PagedSequences,
    PrefillSegments,
    chunk_bounds,
)
from megatron_hybrid.training.formulas import Sequences


class WholeSequences(NamedTuple):
    """Of packed sequences."""

    positions: Tensor  # [T]
    paged: PagedSequences
    prefill: PrefillSegments
    num_blocks: int  # of KV caches, of which block 0 is nobody's

    @classmethod
    def of(
        cls, sequences: Sequences, block_size: int, chunks: Iterable[int] = ()
    ) -> WholeSequences:
        """`chunks`: of kernels that read cu_chunk_seqlens."""
        device = sequences.positions.device
        lengths = np.asarray(sequences.lengths)

        def numbers(values: Any) -> Tensor:
            return indices(values, device)

        counts = -(-lengths // block_size)
        first = 1 + np.cumsum(counts) - counts
        table = first[:, None] + np.arange(counts.max())
        host = PagedHost.of(lengths, lengths, table, block_size)
        positions = np.concatenate([np.arange(length) for length in lengths])
        nothing, zeros = numbers([]), numbers(np.zeros(len(lengths)))
        paged = PagedSequences(
            cu_seqlens=numbers(host.cu_seqlens),
            kv_length=numbers(lengths),
            kv_indptr=numbers(host.kv_indptr),
            kv_indices=numbers(host.kv_indices),
            last_block_length=numbers(host.last_block_length),
            kv_slot=numbers(np.repeat(first * block_size, lengths) + positions),
            num_decodes=0,
            host=host,
        )
        prefill = PrefillSegments(
            cu_seqlens=paged.cu_seqlens,
            start_position=zeros,
            read_slot=zeros,
            write_slot=zeros,
            cu_checkpoints=numbers(np.zeros(len(lengths) + 1)),
            checkpoint_sequence=nothing,
            checkpoint_position=nothing,
            checkpoint_slot=nothing,
            sequence_of_token=sequences.sequence.to(zeros.dtype),
            longest=int(lengths.max()),
            ring=numbers(np.arange(len(lengths))),
            cu_chunk_seqlens={
                chunk: numbers(chunk_bounds(np.zeros_like(lengths), lengths, chunk))
                for chunk in chunks
            },
        )
        return cls(numbers(positions), paged, prefill, int(1 + counts.sum()))


def indices(values: Any, device: torch.device) -> Tensor:
    """In the type that kernels of the device take."""
    kind = torch.int64 if device.type == "cpu" else torch.int32
    return torch.as_tensor(np.asarray(values), dtype=kind, device=device)
