"""Decodes with drafts, where only the device knows how far each row has come.

What is known on the host, which plans a step ahead, is how many tokens are certain of a row. How
many drafts of the last step are accepted, what the next token is and which drafts are worth a try
is worked out here, from what the last step has left; none of it waits for the device.

A sequence decodes its next token t0 and the drafts d1, d2, ... behind it; after each a token is
sampled: s0, s1, s2, ... A draft is accepted if all before it are and it is what was sampled in its
place:

    fed        t0  d1  d2  d3
    sampled    s0  s1  s2  s3        d1 = s0, d2 = s1, d3 != s2: two accepted
    emitted    s0  s1  s2            one more than accepted; s2 is the next token

Since the noise of a place depends on the request and the place alone (random_streams), tokens are
those of a run without drafts. A token that ends an answer is never a draft (who guesses sees to
that): so it is always the last one emitted, as without drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_hybrid.execution.figures import DraftFigures, StepFigures
from megatron_hybrid.execution.plan import NO_DRAFT
from megatron_hybrid.kernels.contract import Ints


class Emitted(NamedTuple):
    """What the last step added to each sequence's text."""

    tokens: Tensor  # [sequences, most]; the first `number` of each
    number: Tensor  # [sequences]


class LastSteps:
    """Of every row of the row table: what its last step has added to its text. Behind the last row
    stands one of nobody's, for padding.

    Each row has two places: one for steps with drafts, and behind those of all rows one for others,
    in which it is the row's last token alone. So a step without drafts has nothing to note.
    """

    def __init__(self, rows: int, longest: int, device: torch.device) -> None:
        """longest: the most drafts of a row in a step."""
        self.longest = longest
        self.nobody = rows
        places = 2 * (rows + 1)
        self._emitted = Emitted(
            torch.zeros((places, longest + 1), dtype=torch.int64, device=device),
            torch.ones(places, dtype=torch.int64, device=device),
        )
        # [rows]: what whoever samples writes, after steps with drafts too
        self.last_token = self._emitted.tokens[rows + 1 : 2 * rows + 1, 0]
        self._had_drafts = np.zeros(rows + 1, dtype=np.bool_)

    @property
    def window_width(self) -> int:
        """Of DraftPlan's windows at most: the step in flight adds up to longest + 1 tokens."""
        return 2 * self.longest + 1

    def places(self, rows: Ints) -> Ints:
        """Where `of` finds what the last launched steps of these rows [n] add."""
        return np.where(self._had_drafts[rows], rows, rows + self.nobody + 1)

    def of(self, places: Tensor) -> Emitted:
        """places [n]"""
        tokens, number = self._emitted
        return Emitted(tokens.index_select(0, places), number.index_select(0, places))

    def note(self, rows: Tensor, step: Emitted) -> None:
        """What rows [n], each once, got in a step with drafts."""
        for kept, new in zip(self._emitted, step, strict=True):
            kept.index_copy_(0, rows, new)

    def was_launched(self, rows: Ints, with_drafts: int) -> None:
        """A step in which so many first ones of these rows [n] may have had drafts."""
        self._had_drafts[rows[:with_drafts]] = True
        self._had_drafts[rows[with_drafts:]] = False


# Tokens that rows go on with [n], their positions [n] and what is unfolded [n] -> drafts [n, ...].
Draft = Callable[[Tensor, Tensor, Tensor], Tensor]


def take_up(
    step: StepFigures[Tensor],
    tables: DraftFigures[Tensor],
    last: LastSteps,
    block_size: int,
    draft: Draft | None = None,
) -> None:
    """Fill in what is fed, and where it goes; tables: step.decodes. The tables of blocks have room
    for the longest that a sequence may be. `draft` makes the drafts; None: they are those of the
    windows.

    In place of a guess that was shown to be wrong the next token stands once more: as a draft it is
    as good as any, and it does not end an answer.
    """
    before = last.of(tables.places.long())
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
    kv_slot = torch.where(is_token, block * block_size + positions % block_size, 0)
    ends = position + step.cu_seqlens[: len(position) + 1].diff()
    kv_length, of_windows = ends.clamp(min=1), []
    if (own := step.window) is not None:
        behind = (positions - own.first_position[sequence]).clamp(min=0)
        block = own.kv_indices[own.kv_indptr[sequence].long() + behind // block_size].long()
        places = torch.where(is_token, block * block_size + behind % block_size, 0)
        lengths = (ends - own.first_position[: len(ends)]).clamp(min=1)
        of_windows = [(own.kv_slot, places), (own.kv_length, lengths)]
    for target, values in (
        *of_windows,
        (step.token_ids, torch.where(is_token, tokens[sequence, offset], 0)),
        (step.positions, positions),
        (step.kv_slot, kv_slot),
        (step.kv_length, kv_length),
        (tables.position_now, position),
        (tables.unfolded_now, unfolded),
    ):
        target[: len(values)].copy_(values)


def verify(sampled: Tensor, fed: Tensor, cu_seqlens: Tensor, longest: int) -> Emitted:
    """What each sequence adds to its text, with its accepted drafts.

    sampled, fed [tokens] int64: after each token, and the tokens; cu_seqlens [sequences + 1];
    longest: the most drafts of a sequence.
    """
    cu_seqlens = cu_seqlens.long()
    first, end, last = cu_seqlens[:-1, None], cu_seqlens[1:, None], max(len(fed) - 1, 0)
    places = first + torch.arange(longest + 1, device=fed.device)
    tokens = sampled[places.clamp(max=last)]
    drafts = places[:, 1:]
    agrees = (drafts < end) & (tokens[:, :-1] == fed[drafts.clamp(max=last)])
    return Emitted(tokens, agrees.long().cumprod(1).sum(1) + 1)


def choose_drafts(
    windows: Tensor, window_start: Tensor, before: Emitted, position: Tensor, longest: int
) -> Tensor:
    """[sequences, longest] int64: drafts for the places behind each sequence's next token, NO_DRAFT
    where there is none.

    The host guesses without knowing what the step in flight gives: windows [sequences, W] are
    guesses from the position window_start [sequences] on, filled up with NO_DRAFT. `position`
    [sequences] is the next token's, the last of those that `before` has emitted. A guess that the
    step in flight has shown to be wrong makes what follows worthless.
    """
    width = windows.shape[1]
    steps = torch.arange(longest, device=windows.device)
    places = (position - window_start + 1)[:, None] + steps
    known = (places >= 0) & (places < width)
    drafts = torch.where(known, windows.gather(1, places.clamp(0, width - 1)), NO_DRAFT)

    back = torch.arange(before.tokens.shape[1], device=windows.device)
    # where in the window the emitted tokens stand
    places = (position - before.number + 1 - window_start)[:, None] + back
    guessed = (back < before.number[:, None]) & (places >= 0) & (places < width)
    wrong = guessed & (windows.gather(1, places.clamp(0, width - 1)) != before.tokens)
    return drafts.masked_fill(wrong.any(1, keepdim=True), NO_DRAFT)
