"""Drafts against what the model makes of them, without waiting for the device.

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

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_hybrid.execution.plan import NO_DRAFT


def count_accepted(sampled: Tensor, fed: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """[sequences]: how many drafts of each are accepted.

    sampled, fed [tokens] int64; cu_seqlens [sequences + 1]; longest: the most drafts of a sequence.
    """
    first, end = cu_seqlens[:-1, None], cu_seqlens[1:, None]
    place = first + torch.arange(longest, device=fed.device)  # of a token before a draft
    is_before_draft = place + 1 < end
    last = max(len(fed) - 1, 0)
    chosen = sampled[place.clamp(max=last)]
    agrees = is_before_draft & (chosen == fed[(place + 1).clamp(max=last)])
    return agrees.long().cumprod(1).sum(1)


class Emitted(NamedTuple):
    """What the last step added to each sequence's text."""

    tokens: Tensor  # [sequences, most]; the first `number` of each
    number: Tensor  # [sequences]


def emitted(sampled: Tensor, cu_seqlens: Tensor, accepted: Tensor, longest: int) -> Emitted:
    """sampled [tokens], accepted [sequences] of `count_accepted`; longest: the most drafts."""
    places = cu_seqlens[:-1, None] + torch.arange(longest + 1, device=sampled.device)
    return Emitted(sampled[places.clamp(max=max(len(sampled) - 1, 0))], accepted + 1)


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
