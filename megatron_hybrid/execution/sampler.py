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

from megatron_hybrid.execution.device import (
    device_errors,
    download,
    record,
    upload,
    upload_together,
)
from megatron_hybrid.execution.logit_adjustments import LogitAdjustments
from megatron_hybrid.execution.plan import Launched, StepPlan, StepResult
from megatron_hybrid.execution.random_streams import uniform, uniform_on_device
from megatron_hybrid.execution.rows import RowTable
from megatron_hybrid.execution.runs import LastSteps, verify
from megatron_hybrid.kernels.contract import DecodeRuns
from megatron_hybrid.kernels.sampling import protocol
from megatron_hybrid.layers.inputs import StepInputs
from megatron_hybrid.parallel import ParallelContext
from megatron_hybrid.request import TokenLogprob

Ints = npt.NDArray[np.int64]

_LOGPROBS_AT_ONCE = 2**27  # of float32: half a gigabyte


class Sampler:
    """Chooses a token for every sampled row of a plan."""

    def __init__(
        self,
        rows: RowTable,
        kernels: protocol.Sampling,
        parallel: ParallelContext,
        vocab_size: int = 0,
        last_steps: LastSteps | None = None,
    ) -> None:
        """`kernels`: KernelSet.sampling. `vocab_size`: for stages of a pipeline without logits.
        `last_steps`: where decodes have drafts."""
        self._rows = rows
        self._last_steps = last_steps
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
        self._indexed: bytes | None = None  # the rows of the last index
        self._last_index = torch.empty(0, dtype=torch.int64)

    def sample(
        self,
        logits: Tensor,
        plan: StepPlan,
        sampled_rows: Tensor,
        last_token: Tensor,
        inputs: StepInputs | None = None,
    ) -> Sampling:
        """logits [sampled tokens + prompt log-probability rows, vocabulary] in any float type;
        sampled_rows: the plan's, on the device; last_token [rows] int64 gets the tokens. `inputs`
        of the step: where decodes have drafts."""
        table, sampled, drafts = self._rows, plan.sampled_rows, plan.drafts
        rows, per_row = sampled, None  # of each token; tokens
        if drafts is not None:
            per_row = np.ones(len(sampled), dtype=np.int64)
            per_row[: len(drafts.num_drafts)] += drafts.num_drafts
            rows = np.repeat(sampled, per_row)
        count = len(rows)
        adjusted = self._adjustments.among(rows)
        if self._has_logits:
            tokens = self._choose(logits[:count], plan, rows, adjusted, inputs)
        else:
            self._adjustments.ask_grammars(rows[adjusted])
            tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
        tokens = self._spread(tokens)
        if self._has_logits and len(adjusted):
            self._adjustments.note(rows, tokens)
        sampled_rows, newest, accepted = self._index(sampled, sampled_rows), tokens, None
        if drafts is not None:
            assert inputs is not None
            newest, accepted = self._verify(tokens, sampled_rows, drafts.num_drafts, inputs)
        if self._last_steps is not None:
            self._last_steps.was_launched(sampled, 0 if drafts is None else len(drafts.num_drafts))
        last_token.index_copy_(0, sampled_rows, newest)
        wanted = (table.logprobs[rows] >= 0).nonzero()[0]
        own = prompt = None
        if len(wanted):
            theirs, chosen = logits[:count], tokens
            if len(wanted) < count:
                at = upload(wanted, logits.device)
                theirs, chosen = logits[at], tokens[at]
            who = rows[wanted]
            own = self._logprobs(self._tempered(theirs, who), chosen, table.logprobs[who], who)
        asking = [(c, c.logprob_targets) for c in plan.prefills if c.logprob_targets is not None]
        if asking:
            targets = np.concatenate([targets for _, targets in asking]).astype(np.int64)
            lengths = [len(targets) for _, targets in asking]
            asked = np.asarray([(c.num_top_logprobs, c.row) for c, _ in asking])
            tops, whose = np.repeat(asked, lengths, axis=0).T
            prompt = self._logprobs(logits[count:], upload(targets, logits.device), tops, whose)
        tokens, accepted = download(tokens), None if accepted is None else download(accepted)
        done = None
        if logits.is_cuda:
            done = torch.cuda.Event()
            record(done, logits.device)  # behind all that goes to the host
        return Sampling(tokens, per_row, accepted, own, wanted, prompt, done)

    def _index(self, sampled: Ints, on_device: Tensor) -> Tensor:
        """Sampled rows as an index, which is kept while they are the same."""
        if on_device.dtype == torch.int64:
            return on_device
        key = sampled.tobytes()
        if key != self._indexed:
            self._indexed, self._last_index = key, on_device.long()
        return self._last_index

    def _verify(
        self,
        tokens: Tensor,
        sampled_rows: Tensor,
        drafts: Ints,
        inputs: StepInputs,
    ) -> tuple[Tensor, Tensor]:
        """tokens: of decodes with so many drafts [decodes], then of rows that get one each. Each
        row's last new token [sampled rows], and how many drafts are accepted [decodes]."""
        last, decode = self._last_steps, inputs.decode
        assert last is not None and isinstance(decode, DecodeRuns)
        # what is behind them may be padding
        decodes, fed = len(drafts), len(drafts) + int(drafts.sum())
        cu_seqlens = decode.cu_seqlens[: decodes + 1]
        step = verify(tokens[:fed], inputs.token_ids[:fed].long(), cu_seqlens, last.longest)
        accepted = step.number - 1
        last.note(sampled_rows[:decodes], step)
        new = step.tokens.gather(1, accepted[:, None]).squeeze(1)
        return torch.cat((new, tokens[fed:])), accepted

    def _spread(self, values: Tensor) -> Tensor:
        """Those of the rank that decides, on every rank of the replica."""
        if values.numel() == 0:
            return values  # a stage that goes on with a prompt need not wait for the later ones
        return self._ranks.broadcast(values, self._decider)

    def _logprobs(self, logits: Tensor, tokens: Tensor, counts: Ints, rows: Ints) -> _Logprobs:
        """Of `tokens` [n] under logits [n, vocabulary], which the last stage of a pipeline hands to
        the others; counts, rows [n]: see _Logprobs."""
        # no row: a prompt's one token, alone in its chunk
        vocabulary = logits.shape[1] if self._has_logits else self._vocab_size
        most = min(int(counts.max(initial=0)), vocabulary)
        if self._has_logits:
            some = max(1, _LOGPROBS_AT_ONCE // vocabulary)  # prompts may have thousands
            parts = [
                _likeliest(self._kernels.log_softmax(part), own, most)
                for part, own in zip(logits.split(some), tokens.split(some), strict=True)
            ]
            figures = torch.cat(parts)
        else:
            shape = (len(tokens), 1 + 2 * most)
            figures = torch.empty(shape, dtype=torch.int32, device=logits.device)
        if self._parallel.pipeline.size > 1:
            figures = self._spread(figures)
        return _Logprobs(download(tokens), download(figures), counts, rows)

    def _tempered(self, logits: Tensor, rows: Ints) -> Tensor:
        """logits [n, vocabulary] of rows [n], divided by the temperatures of those that want their
        log-probabilities so."""
        temperature = self._rows.temperature[rows]
        is_one = ~self._rows.tempered[rows] | (temperature == 0)
        divisor = np.where(is_one, np.float32(1), temperature)
        if (divisor == 1).all():
            return logits
        return logits / upload(divisor, logits.device)[:, None]

    def _choose(
        self,
        logits: Tensor,
        plan: StepPlan,
        rows: Ints,
        adjusted: Ints,
        inputs: StepInputs | None,
    ) -> Tensor:
        """A token [n] for each row of logits [n, vocabulary]; rows [n]: of the table;
        adjusted: places of those whose logits are changed first."""
        drawn = self._rows.temperature[rows] > 0
        drawn[adjusted] = False  # on their own, below
        places, point = drawn.nonzero()[0], None
        if len(places) and inputs is not None:
            point = self._points(rows, places, plan, inputs)
        tokens = self._choose_some(logits, rows, places, point)
        if len(adjusted):
            self._choose_adjusted(logits, tokens, plan, rows, adjusted)
        return tokens

    def _choose_adjusted(
        self,
        logits: Tensor,
        tokens: Tensor,
        plan: StepPlan,
        rows: Ints,
        adjusted: Ints,
    ) -> None:
        """Replace the tokens of the rows whose logits are adjusted: of a copy, since reported
        log-probabilities are the model's. Such rows have no drafts."""
        who, index = rows[adjusted], upload(adjusted, logits.device)
        own = logits.index_select(0, index).float()
        self._adjustments.apply(own, who, plan)
        drawn = np.flatnonzero(self._rows.temperature[who] > 0)
        tokens.index_copy_(0, index, self._choose_some(own, who, drawn))

    def _points(
        self,
        rows: Ints,
        places: Ints,
        plan: StepPlan,
        inputs: StepInputs,
    ) -> Tensor:
        """The random numbers of some of a step's sampled tokens. Those of runs are as far in their
        answers as the fed tokens' positions say."""
        table, decoded = self._rows, len(plan.decode_rows) + plan.num_drafts
        who, is_run = rows[places], places < decoded
        before = table.generated[who] - np.where(is_run, table.position[who], 0)
        seed = table.seed[who].view("i8")
        figures = np.stack([np.where(is_run, places, 0), is_run, before, seed])
        at, has_position, start, seeds = upload(figures, inputs.positions.device)
        position = inputs.positions.index_select(0, at) * has_position
        return uniform_on_device(seeds, start + position)

    def _choose_some(
        self, logits: Tensor, rows: Ints, drawn: Ints, point: Tensor | None = None
    ) -> Tensor:
        """A token [n] for each row of logits [n, vocabulary], the most likely one but where they
        are `drawn` (places). rows [n]: of the table; point: as for _draw."""
        if 0 < len(drawn) == len(rows):  # the logits need not be copied
            tokens, _ = self._draw(logits, rows, drawn, point)
            return tokens
        tokens = self._kernels.argmax(logits)
        if len(drawn):
            chosen, index = self._draw(logits, rows, drawn, point)
            tokens.index_copy_(0, index, chosen)
        return tokens

    def _draw(
        self, logits: Tensor, sampled: Ints, drawn: Ints, point: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Tokens of the places `drawn`, and those on the device. `point` [drawn]: where the host
        does not know which tokens of their answers these are."""
        rows, who = self._rows, sampled[drawn]
        top_k, top_p, min_p = rows.top_k[who], rows.top_p[who], rows.min_p[who]
        here = uniform(rows.seed[who], rows.generated[who])
        figures = here, drawn, rows.temperature[who], top_k.astype(np.int32), top_p, min_p
        where, index, temperature, k, p, least = upload_together(figures, logits.device)
        where = where if point is None else point
        uses = bool((top_k > 0).any()), bool((top_p < 1).any()), bool((min_p > 0).any())
        filters = protocol.Filters(temperature, k, p, least, *uses)
        if len(drawn) < len(sampled):
            logits = logits.index_select(0, index)
        return self._kernels.draw(logits, filters, where), index


@dataclass(slots=True)
class Sampling(Launched):
    """The tokens of a step on their way to the host."""

    tokens: Tensor  # one or several of each sampled row
    per_row: Ints | None  # how many; None: nothing has drafts
    accepted: Tensor | None  # [decodes] drafts; None: as above
    own: _Logprobs | None
    own_places: Ints  # among the tokens
    prompt: _Logprobs | None
    done: torch.cuda.Event | None  # None: on a CPU

    @device_errors
    def result(self) -> StepResult:
        if self.done is not None:
            self.done.synchronize()
        tokens, accepted, is_new = self.tokens.numpy(), None, None
        if self.accepted is not None:
            assert self.per_row is not None
            accepted = self.accepted.numpy()
            emitted = np.ones(len(self.per_row), dtype=np.int64)
            emitted[: len(accepted)] += accepted
            first = np.cumsum(self.per_row) - self.per_row
            place = np.arange(len(tokens)) - np.repeat(first, self.per_row)
            is_new = place < np.repeat(emitted, self.per_row)
        own: dict[int, list[Any]] = {}  # see StepResult
        if (of_tokens := self.own) is not None:
            if is_new is not None:
                of_tokens = of_tokens.only(is_new[self.own_places])
            own = of_tokens.by_row() if of_tokens.counts.any() else of_tokens.numbers_by_row()
        prompt = {} if self.prompt is None else self.prompt.by_row()
        return StepResult(tokens if is_new is None else tokens[is_new], own, prompt, accepted)


@dataclass(slots=True)
class _Logprobs:
    """Log-probabilities of the model's own distribution, before temperature and filters."""

    tokens: Tensor  # [n]
    figures: Tensor  # [n, 1 + 2 * most]: see _likeliest
    counts: Ints  # [n]: how many of the likeliest are wanted
    rows: Ints  # [n]: of the table

    def only(self, wanted: npt.NDArray[np.bool_]) -> _Logprobs:
        """Those of the n that are `wanted` [n]; after the step is done."""
        at = torch.from_numpy(wanted)
        return _Logprobs(self.tokens[at], self.figures[at], self.counts[wanted], self.rows[wanted])

    def by_row(self) -> dict[int, list[TokenLogprob]]:
        """After the step is done, in their order."""
        most = self.figures.shape[1] // 2
        values, ids = self.figures.split([1 + most, most], dim=1)
        every = zip(
            self.rows.tolist(), self.tokens.tolist(), values.view(torch.float32).tolist(),
            ids.tolist(), self.counts.tolist(), strict=True,
        )  # fmt: skip
        found: dict[int, list[TokenLogprob]] = {}
        for row, token, (own, *top), likeliest, count in every:
            tops = tuple(zip(likeliest[:count], top[:count], strict=True))
            found.setdefault(row, []).append(TokenLogprob(token, own, tops))
        return found

    def numbers_by_row(self) -> dict[int, list[float]]:
        """Where only the tokens' own are wanted. An object for each would cost the host as much as
        all the rest of its step."""
        found: dict[int, list[float]] = {}
        own = self.figures.view(torch.float32).squeeze(1).tolist()
        for row, logprob in zip(self.rows.tolist(), own, strict=True):
            found.setdefault(row, []).append(logprob)
        return found


def _likeliest(logprobs: Tensor, tokens: Tensor, most: int) -> Tensor:
    """Of logprobs [rows, vocabulary] the bits of those of `tokens` [rows] and of the `most`
    likeliest, and those ones' ids: [rows, 1 + 2 * most] int32."""
    own = logprobs.gather(1, tokens[:, None])
    if not most:
        return own.view(torch.int32)
    values, ids = logprobs.topk(most, dim=-1)
    return torch.cat((torch.cat((own, values), dim=1).view(torch.int32), ids.int()), dim=1)
