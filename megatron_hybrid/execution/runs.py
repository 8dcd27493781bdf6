"""Decodes with drafts, where only the device knows how far each row has come.

What is known on the host, which plans a step ahead, is how many tokens are certain of a row. How
many drafts of the last step are accepted, what the next token is and which drafts are worth a try
is worked out here, from what the last step has left; none of it waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_hybrid.execution.figures import DraftFigures, StepFigures
from megatron_hybrid.execution.plan import NO_DRAFT
from megatron_hybrid.execution.verification import (
    Emitted,
    choose_drafts,
    count_accepted,
    emitted,
)


class LastSteps:
    """Of every row of the row table: what its last step has added to its text. Behind the last row
    stands one of nobody's, for padding."""

    def __init__(self, rows: int, longest: int, device: torch.device) -> None:
        """longest: the most drafts of a row in a step."""
        self.longest = longest
        self.nobody = rows
        self.emitted = Emitted(
            torch.zeros((rows + 1, longest + 1), dtype=torch.int64, device=device),
            torch.ones(rows + 1, dtype=torch.int64, device=device),
        )

    @property
    def window_width(self) -> int:
        """Of DraftPlan's windows at most: the step in flight adds up to longest + 1 tokens."""
        return 2 * self.longest + 1

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


class Runs(NamedTuple):
    """What the device works out of a step's runs."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    kv_slot: Tensor  # [T], as in PagedSequences
    kv_length: Tensor  # [n], as there
    position: Tensor  # [n], as in DecodeRuns
    unfolded: Tensor  # [n], as there


# Tokens that rows go on with [n], their positions [n] and what is unfolded [n] -> drafts [n, ...].
Draft = Callable[[Tensor, Tensor, Tensor], Tensor]


def take_up(
    step: StepFigures[Tensor],
    tables: DraftFigures[Tensor],
    last: LastSteps,
    block_size: int,
    draft: Draft | None = None,
) -> Runs:
    """What is fed, and where it goes; tables: step.decodes. The tables of blocks have room for the
    longest that a sequence may be. `draft` makes the drafts; None: they are those of the windows.

    In place of a guess that was shown to be wrong the next token stands once more: as a draft it is
    as good as any, and it does not end an answer.
    """
    before = last.of(tables.rows.long())
    accepted = before.number - 1
    position = tables.certain.long() + accepted
    unfolded = accepted + tables.unfolded.long()
    token = before.tokens.gather(1, accepted[:, None])
    if draft is None:
        windows, start = tables.windows.long(), tables.window_start.long()
        drafts = choose_drafts(windows, start, before, position, last.longest)
        drafts = torch.where(drafts == NO_DRAFT, token, drafts)
    else:
        drafts = draft(token.squeeze(1), position, unfolded)
    tokens = torch.cat((token, drafts), dim=1)

    is_token = tables.sequence >= 0
    sequence, offset = tables.sequence.long().clamp(min=0), tables.offset.long()
    positions = torch.where(is_token, position[sequence] + offset, 0)
    first = step.kv_indptr[sequence].long()
    block = step.kv_indices[first + positions // block_size].long()
    return Runs(
        token_ids=torch.where(is_token, tokens[sequence, offset], 0),
        positions=positions,
        kv_slot=torch.where(is_token, block * block_size + positions % block_size, 0),
        kv_length=(position + step.cu_seqlens[: len(position) + 1].diff()).clamp(min=1),
        position=position,
        unfolded=unfolded,
    )


def verify(sampled: Tensor, fed: Tensor, cu_seqlens: Tensor, longest: int) -> Emitted:
    """What each sequence adds to its text. sampled, fed [T]: after each token, and the tokens;
    cu_seqlens [n + 1]; longest: the most drafts of a sequence."""
    cu_seqlens = cu_seqlens.long()
    accepted = count_accepted(sampled, fed, cu_seqlens, longest)
    return emitted(sampled, cu_seqlens, accepted, longest)
