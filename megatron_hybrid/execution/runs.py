"""Decodes with drafts, where only the device knows how far each row has come.

What is known on the host, which plans a step ahead, is how many tokens a row's state includes. How
many drafts of the last step hold, what the next token is and which drafts are worth a try is worked
out here, from what the last step has left; none of it waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_hybrid.execution.plan import NO_DRAFT
from megatron_hybrid.execution.verification import (
    Emitted,
    choose_drafts,
    count_accepted,
    emitted,
)


class LastSteps:
    """Of every row of the row table: what its last step has added to its text."""

    def __init__(self, rows: int, longest: int, device: torch.device) -> None:
        """longest: the most drafts of a row in a step."""
        self.longest = longest
        self.emitted = Emitted(
            torch.zeros((rows, longest + 1), dtype=torch.int64, device=device),
            torch.ones(rows, dtype=torch.int64, device=device),
        )

    def of(self, rows: Tensor) -> Emitted:
        """rows [n]"""
        tokens, number = self.emitted
        return Emitted(tokens.index_select(0, rows), number.index_select(0, rows))

    def note(self, rows: Tensor, step: Emitted) -> None:
        """rows [n], each once."""
        for kept, new in zip(self.emitted, step, strict=True):
            kept.index_copy_(0, rows, new)

    def note_single(self, rows: Tensor, tokens: Tensor) -> None:
        """These rows [n] got one token [n] each."""
        self.emitted.tokens[:, 0].index_copy_(0, rows, tokens)
        self.emitted.number.index_fill_(0, rows, 1)


class RunTables(NamedTuple):
    """What the host says of a step's runs, on the device. n rows decode, T tokens in all."""

    rows: Tensor  # [n] of the row table
    certain: Tensor  # [n] tokens that the state includes
    cu_seqlens: Tensor  # [n + 1]
    sequence: Tensor  # [T] that each token belongs to
    offset: Tensor  # [T] 0: the next token; 1, 2, ...: a draft
    window_start: Tensor  # [n]
    windows: Tensor  # [n, width]: see RunsPlan


class Runs(NamedTuple):
    """The tokens of a step's runs."""

    fed: Tensor  # [T]
    position: Tensor  # [T]
    first_position: Tensor  # [n] of each row's next token
    pending: Tensor  # [n] drafts of the last step that hold


def take_up(tables: RunTables, last: LastSteps) -> Runs:
    """What is fed, and where. In place of a guess that was shown to be wrong the next token stands
    once more: as a draft it is as good as any, and it does not end an answer."""
    before = last.of(tables.rows.long())
    pending = before.number - 1
    position = tables.certain.long() + pending
    sequence, offset = tables.sequence.long(), tables.offset.long()
    tokens = before.tokens.gather(1, pending[:, None])
    if tables.windows.shape[1]:
        windows, start = tables.windows.long(), tables.window_start.long()
        drafts = choose_drafts(windows, start, before, position, last.longest)
        tokens = torch.cat((tokens, torch.where(drafts == NO_DRAFT, tokens, drafts)), dim=1)
    return Runs(tokens[sequence, offset], position[sequence] + offset, position, pending)


def place_kv(
    runs: Runs, tables: RunTables, kv_indptr: Tensor, kv_indices: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """PagedSequences' kv_slot [T] and kv_length [n]. Its tables have room for the longest that a
    sequence may be."""
    first_block = kv_indptr[tables.sequence.long()].long()
    block = kv_indices[first_block + runs.position // block_size].long()
    kv_slot = block * block_size + runs.position % block_size
    return kv_slot, runs.first_position + tables.cu_seqlens.diff()


def verify(sampled: Tensor, fed: Tensor, cu_seqlens: Tensor, longest: int) -> Emitted:
    """What each sequence adds to its text. sampled, fed [T]: after each token, and the tokens;
    cu_seqlens [n + 1]; longest: the most drafts of a sequence."""
    cu_seqlens = cu_seqlens.long()
    accepted = count_accepted(sampled, fed, cu_seqlens, longest)
    return emitted(sampled, cu_seqlens, accepted, longest)
