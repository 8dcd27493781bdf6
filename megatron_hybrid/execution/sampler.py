"""Logits -> tokens, with log-probabilities where they are wanted.

A token is drawn by inverting the cumulative distribution at one uniform number, which depends on
the request's seed and progress alone: see random_streams.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_hybrid.execution.plan import StepPlan, StepResult
from megatron_hybrid.execution.random_streams import uniform
from megatron_hybrid.execution.rows import RowTable
from megatron_hybrid.request import TokenLogprob


class _Filters(NamedTuple):
    temperature: Tensor  # [rows, 1]
    top_k: Tensor  # [rows, 1]; 0 or less: off
    top_p: Tensor  # [rows, 1]
    min_p: Tensor  # [rows, 1]


def sample(logits: Tensor, plan: StepPlan, rows: RowTable) -> StepResult:
    """Choose a token for every sampled row of the plan.

    logits: [sampled rows + prompt log-probability rows, vocabulary] float32.
    """
    sampled = plan.sampled_rows
    count = len(sampled)
    tokens = torch.argmax(logits[:count], dim=-1)
    drawn = np.flatnonzero(rows.temperature[sampled] > 0)
    if len(drawn):
        at = torch.from_numpy(drawn).to(logits.device)
        tokens[at] = _draw(logits[at], sampled[drawn], rows)
    chosen = tokens.cpu().numpy()
    return StepResult(
        tokens=chosen,
        logprobs=_logprobs(logits[:count], chosen, sampled, rows),
        prompt_logprobs=_prompt_logprobs(logits[count:], plan),
    )


def _draw(logits: Tensor, sampled: npt.NDArray[np.int64], rows: RowTable) -> Tensor:
    """One token per row of logits [rows, vocabulary]."""

    def column(values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(logits.device)[:, None]

    filters = _Filters(
        temperature=column(rows.temperature[sampled]),
        top_k=column(rows.top_k[sampled]),
        top_p=column(rows.top_p[sampled]),
        min_p=column(rows.min_p[sampled]),
    )
    probability, order = _filtered(logits, filters)  # most likely first
    point = column(uniform(rows.seed[sampled], rows.generated[sampled]))
    cumulative = probability.double().cumsum(-1)
    # scaled to the sum, so that rounding can't point past the last kept token
    rank = torch.searchsorted(cumulative, point * cumulative[:, -1:], right=True)
    last = (probability > 0).sum(-1, keepdim=True) - 1
    return order.gather(1, torch.minimum(rank, last)).squeeze(1)


def _filtered(logits: Tensor, filters: _Filters) -> tuple[Tensor, Tensor]:
    """Unnormalised probabilities after temperature, top-k, top-p and min-p, in falling order,
    and the tokens that they belong to. The most likely token always stays."""
    # stable: equal logits keep the order of their ids on every device
    ordered, order = torch.sort(
        logits / filters.temperature.clamp(min=1e-5), dim=-1, descending=True, stable=True
    )
    rank = torch.arange(logits.shape[-1], device=logits.device)
    top_k = torch.where(filters.top_k > 0, filters.top_k, logits.shape[-1])
    probability = torch.softmax(ordered.masked_fill(rank >= top_k, -torch.inf), dim=-1)
    before = probability.cumsum(-1) - probability  # mass of the more likely ones
    keep = (before < filters.top_p) & (probability >= filters.min_p * probability[:, :1])
    keep[:, 0] = True
    return probability * keep, order


def _logprobs(
    logits: Tensor, tokens: npt.NDArray[np.int64], sampled: npt.NDArray[np.int64], rows: RowTable
) -> dict[int, TokenLogprob]:
    """Of the model's own distribution, before temperature and filters."""
    wanted = np.flatnonzero(rows.logprobs[sampled] >= 0)
    if not len(wanted):
        return {}
    at = torch.from_numpy(wanted).to(logits.device)
    counts = rows.logprobs[sampled[wanted]]
    entries = token_logprobs(logits[at], tokens[wanted], counts)
    return dict(zip(sampled[wanted].tolist(), entries, strict=True))


def _prompt_logprobs(logits: Tensor, plan: StepPlan) -> dict[int, list[TokenLogprob]]:
    found: dict[int, list[TokenLogprob]] = {}
    offset = 0
    for chunk in plan.prefills:
        if chunk.logprob_targets is not None:
            count = len(chunk.logprob_targets)
            tops = np.full(count, chunk.num_top_logprobs)
            part = logits[offset : offset + count]
            found[chunk.row] = token_logprobs(part, chunk.logprob_targets, tops)
            offset += count
    return found


def token_logprobs(
    logits: Tensor, tokens: npt.NDArray[np.integer], num_top: npt.NDArray[np.int64]
) -> list[TokenLogprob]:
    """Log-probability of `tokens` [rows] under logits [rows, vocabulary], with the `num_top` [rows]
    most likely tokens of each row."""
    if len(tokens) == 0:
        return []
    logprobs = torch.log_softmax(logits, dim=-1)
    index = torch.from_numpy(tokens.astype(np.int64)).to(logits.device)
    own = logprobs.gather(1, index[:, None]).squeeze(1).tolist()
    values, ids = logprobs.topk(min(int(num_top.max()), logits.shape[-1]), dim=-1)
    rows = zip(tokens.tolist(), own, ids.tolist(), values.tolist(), num_top.tolist(), strict=True)
    return [
        TokenLogprob(token, logprob, tuple(zip(top_ids[:count], top_values[:count], strict=True)))
        for token, logprob, top_ids, top_values, count in rows
    ]
