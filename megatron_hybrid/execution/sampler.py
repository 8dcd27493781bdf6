"""Logits -> tokens, with log-probabilities where they are wanted.

A token is drawn by inverting the cumulative distribution at one uniform number, which depends on
the request's seed and progress alone: see random_streams. Nothing here waits for the device until
the result is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_hybrid.execution.logit_adjustments import LogitAdjustments
from megatron_hybrid.execution.plan import StepPlan, StepResult
from megatron_hybrid.execution.random_streams import uniform
from megatron_hybrid.execution.rows import RowTable
from megatron_hybrid.execution.transfer import download, upload
from megatron_hybrid.parallel import ParallelContext
from megatron_hybrid.request import TokenLogprob


class Sampler:
    """Chooses a token for every sampled row of a plan."""

    def __init__(
        self, rows: RowTable, kernels: Any, parallel: ParallelContext, vocab_size: int = 0
    ) -> None:
        """`kernels`: KernelSet.sampling. `vocab_size`: for stages of a pipeline without logits."""
        self._rows = rows
        self._kernels = kernels
        self._parallel = parallel
        self._vocab_size = vocab_size
        self._has_logits = parallel.pipeline.is_last
        # The logits are equal on every rank that has them, but only one may decide.
        self._ranks, self._decider = parallel.tensor, 0
        if parallel.pipeline.size > 1:
            self._ranks = parallel.replica
            self._decider = parallel.tensor.size * (parallel.pipeline.size - 1)
        self._adjustments = LogitAdjustments(rows, kernels)

    def sample(
        self, logits: Tensor, plan: StepPlan, sampled_rows: Tensor, last_token: Tensor
    ) -> Sampling:
        """logits [sampled rows + prompt log-probability rows, vocabulary] in any float type;
        sampled_rows: the plan's, on the device; last_token [rows] int64 gets the tokens."""
        rows, sampled = self._rows, plan.sampled_rows
        count = len(sampled)
        adjusted = self._adjustments.among(sampled)
        if self._has_logits:
            tokens = self._choose(logits[:count], plan, adjusted)
        else:
            tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
        tokens = self._spread(tokens)
        if self._has_logits and len(adjusted):
            self._adjustments.note(sampled, tokens)
        last_token.index_copy_(0, sampled_rows.long(), tokens)
        wanted = np.flatnonzero(rows.logprobs[sampled] >= 0)
        own = prompt = None
        if len(wanted):
            at = upload(wanted, logits.device)
            own = self._logprobs(logits[at], tokens[at], rows.logprobs[sampled[wanted]])
        asking = [(c, c.logprob_targets) for c in plan.prefills if c.logprob_targets is not None]
        if asking:
            targets = np.concatenate([targets for _, targets in asking]).astype(np.int64)
            tops = np.repeat([c.num_top_logprobs for c, _ in asking], [len(t) for _, t in asking])
            prompt = self._logprobs(logits[count:], upload(targets, logits.device), tops)
        return Sampling(
            tokens=download(tokens),
            own=own,
            own_rows=sampled[wanted],
            prompt=prompt,
            prompt_rows=[(c.row, len(targets)) for c, targets in asking],
            done=_done(logits.device),
        )

    def _spread(self, values: Tensor) -> Tensor:
        """Those of the rank that decides, on every rank of the replica."""
        if values.numel() == 0:
            return values  # a stage that goes on with a prompt need not wait for the later ones
        return self._ranks.broadcast(values, self._decider)

    def _logprobs(self, logits: Tensor, tokens: Tensor, counts: npt.NDArray[np.int64]) -> _Logprobs:
        """Of `tokens` [rows] under logits [rows, vocabulary], which the last stage of a pipeline
        hands to the others."""
        # no row: a prompt's one token, alone in its chunk
        vocabulary = logits.shape[1] if self._has_logits else self._vocab_size
        most = min(int(counts.max(initial=0)), vocabulary)
        if self._has_logits:
            figures = _log_probabilities(logits, tokens, most)
        else:
            shape = (len(tokens), 1 + 2 * most)
            figures = torch.empty(shape, dtype=torch.int32, device=logits.device)
        if self._parallel.pipeline.size > 1:
            figures = self._spread(figures)
        return _Logprobs(download(tokens), download(figures), counts)

    def _choose(self, logits: Tensor, plan: StepPlan, adjusted: npt.NDArray[np.int64]) -> Tensor:
        """A token [sampled rows] for each row of logits [sampled rows, vocabulary]; `adjusted`:
        places of rows whose logits are changed first."""
        rows, sampled = self._rows, plan.sampled_rows
        tokens = torch.argmax(logits, dim=-1)
        drawn = rows.temperature[sampled] > 0
        drawn[adjusted] = False  # on their own, below
        if drawn.any():
            self._draw(logits, tokens, sampled, np.flatnonzero(drawn))
        if len(adjusted):
            self._choose_adjusted(logits, tokens, plan, adjusted)
        return tokens

    def _choose_adjusted(
        self, logits: Tensor, tokens: Tensor, plan: StepPlan, adjusted: npt.NDArray[np.int64]
    ) -> None:
        """Replace the tokens of the rows whose logits are adjusted: of a copy, since reported
        log-probabilities are the model's."""
        who, index = plan.sampled_rows[adjusted], upload(adjusted, logits.device)
        own = logits.index_select(0, index).float()
        self._adjustments.apply(own, who, plan)
        chosen = torch.argmax(own, dim=-1)
        drawn = np.flatnonzero(self._rows.temperature[who] > 0)
        if len(drawn):
            self._draw(own, chosen, who, drawn)
        tokens.index_copy_(0, index, chosen)

    def _draw(
        self,
        logits: Tensor,
        tokens: Tensor,
        sampled: npt.NDArray[np.int64],
        drawn: npt.NDArray[np.int64],
    ) -> None:
        """Replace the tokens of the rows that are not greedy."""
        rows, who = self._rows, sampled[drawn]
        top_k, top_p, min_p = rows.top_k[who], rows.top_p[who], rows.min_p[who]
        point = uniform(rows.seed[who], rows.generated[who])
        figures = np.stack([drawn, rows.temperature[who], top_k, top_p, min_p, point])
        at, temperature, k, p, least, where = upload(figures, logits.device)
        index = at.long()
        chosen = self._kernels.draw(
            logits.index_select(0, index),
            temperature.float(),
            k.int(),
            p.float(),
            least.float(),
            where,
            uses_top_k=bool((top_k > 0).any()),
            uses_top_p=bool((top_p < 1).any()),
            uses_min_p=bool((min_p > 0).any()),
        )
        tokens.index_copy_(0, index, chosen)


@dataclass(slots=True)
class Sampling:
    """The tokens of a step on their way to the host."""

    tokens: Tensor
    own: _Logprobs | None
    own_rows: npt.NDArray[np.int64]
    prompt: _Logprobs | None
    prompt_rows: list[tuple[int, int]]  # (row, positions)
    done: torch.cuda.Event | None

    def result(self) -> StepResult:
        """Wait for the step."""
        if self.done is not None:
            self.done.synchronize()
        logprobs = {}
        if self.own is not None:
            logprobs = dict(zip(self.own_rows.tolist(), self.own.entries(), strict=True))
        prompt_logprobs = {}
        if self.prompt is not None:
            entries = self.prompt.entries()
            for row, count in self.prompt_rows:
                prompt_logprobs[row], entries = entries[:count], entries[count:]
        return StepResult(self.tokens.numpy(), logprobs, prompt_logprobs)


@dataclass(slots=True)
class _Logprobs:
    """Log-probabilities of the model's own distribution, before temperature and filters."""

    tokens: Tensor  # [rows]
    figures: Tensor  # [rows, 1 + 2 * most]: see _log_probabilities
    counts: npt.NDArray[np.int64]  # [rows]: how many of the likeliest each row wants

    def entries(self) -> list[TokenLogprob]:
        """After the step is done."""
        most = self.figures.shape[1] // 2
        values, ids = self.figures.split([1 + most, most], dim=1)
        rows = zip(
            self.tokens.tolist(), values.view(torch.float32).tolist(), ids.tolist(),
            self.counts.tolist(), strict=True,
        )  # fmt: skip
        return [
            TokenLogprob(token, own, tuple(zip(ids[:count], top[:count], strict=True)))
            for token, (own, *top), ids, count in rows
        ]


def _log_probabilities(logits: Tensor, tokens: Tensor, most: int) -> Tensor:
    """[rows, 1 + 2 * most] int32: the bits of the log-probability of `tokens` [rows] and of the
    `most` likeliest, and those ones' ids."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(1, tokens[:, None])
    values, ids = logprobs.topk(most, dim=-1)
    return torch.cat((torch.cat((own, values), dim=1).view(torch.int32), ids.int()), dim=1)


def _done(device: torch.device) -> torch.cuda.Event | None:
    """An event at this point of the device's work."""
    if device.type == "cpu":
        return None
    event = torch.cuda.Event()
    event.record()
    return event
