"""What changes a row's logits before a token is chosen: penalties, biases, bans, grammars, and
tokens that have to come.

Penalties need the tokens that a row has written, and a step is launched before the last one's are
known on the host: so they are counted on the device, in the order of the steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_hybrid.execution.device import upload
from megatron_hybrid.execution.plan import StepPlan
from megatron_hybrid.execution.rows import BEFORE, NOTHING, BadWords, RowTable
from megatron_hybrid.kernels.sampling.protocol import Sampling

_MOST = 32767  # of an int16
# What a bad word's last token loses: more than logits differ by, and not infinite, so that a row of
# which nothing else is left still chooses.
_BAN = 1e6


class LogitAdjustments:
    """Of the rows that ask for them; the others cost nothing."""

    def __init__(self, rows: RowTable, kernels: Sampling) -> None:
        """`kernels`: KernelSet.sampling."""
        self._rows = rows
        self._kernels = kernels
        self._written: _Written | None = None  # made when the first penalty comes
        self._bad_words: _BadWords | None = None  # made when the first ones come

    def among(self, sampled: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where in `sampled` [rows] the rows stand whose logits are adjusted now."""
        rows = self._rows
        short = rows.generated[sampled] < rows.min_tokens[sampled]
        return (rows.adjusted[sampled] | short).nonzero()[0]

    def apply(self, logits: Tensor, who: npt.NDArray[np.int64], plan: StepPlan) -> None:
        """Adjust float32 logits [rows, vocabulary] of the table's rows `who` [rows] in place."""
        penalised = np.flatnonzero(self._rows.penalised[who])
        if len(penalised):
            self._penalise(logits, who, penalised, plan)
        self._add_biases(logits, who)
        if self._rows.bad_words:
            self._ban_words(logits, who, plan)
        if self._rows.allowed_ids:
            self._keep_to_allowed(logits, who)
        self._ban_ends(logits, who)
        self._keep_to_grammars(logits, who)
        if self._rows.forced:
            self._force(logits, who)

    def ask_grammars(self, who: npt.NDArray[np.int64]) -> None:
        """What `apply` asks of these rows' grammars, on a rank without logits: one that fails ends
        its answer, and all ranks have to know of it."""
        for row in who.tolist():
            if row in self._rows.grammars:
                self._allowed(row)

    def note(self, sampled: npt.NDArray[np.int64], tokens: Tensor) -> None:
        """The rows `sampled` [rows] have got these tokens [rows]."""
        penalised = np.flatnonzero(self._rows.penalised[sampled])
        if len(penalised):
            assert self._written is not None
            at, who = upload(np.stack([penalised, sampled[penalised]]), tokens.device)
            self._written.count(who, tokens.index_select(0, at))
        if self._bad_words is not None:
            self._bad_words.note(sampled, tokens)

    def _penalise(
        self,
        logits: Tensor,
        who: npt.NDArray[np.int64],
        penalised: npt.NDArray[np.int64],
        plan: StepPlan,
    ) -> None:
        rows, device = self._rows, logits.device
        if self._written is None:
            self._written = _Written(len(rows.penalised), logits.shape[1], device)
        for row in {one.row for one in plan.ended}.intersection(rows.written):
            self._written.start(row, *rows.written[row], rows.repetition_penalty[row] != 1)
        penalised_rows = who[penalised]
        at, row_ids = upload(np.stack([penalised, penalised_rows]), device)
        columns = rows.repetition_penalty, rows.frequency_penalty, rows.presence_penalty
        penalties = upload(np.stack([column[penalised_rows] for column in columns]), device)
        counts = self._written.counts.index_select(0, row_ids)
        in_prompt = self._written.in_prompt.index_select(0, row_ids)
        changed = self._kernels.penalise(logits.index_select(0, at), counts, in_prompt, *penalties)
        logits.index_copy_(0, at, changed)

    def _add_biases(self, logits: Tensor, who: npt.NDArray[np.int64]) -> None:
        biases = self._rows.logit_bias
        having = [(i, biases[row]) for i, row in enumerate(who.tolist()) if row in biases]
        if having:
            places = _places(((i, ids) for i, (ids, _) in having), logits.shape[1])
            values = upload(np.concatenate([values for _, (_, values) in having]), logits.device)
            flat, at = logits.view(-1), upload(places, logits.device)
            flat.index_copy_(0, at, flat.index_select(0, at) + values)

    def _ban_words(self, logits: Tensor, who: npt.NDArray[np.int64], plan: StepPlan) -> None:
        """Not the last token of a bad word whose others the answer ends with."""
        words = self._rows.bad_words
        if self._bad_words is None:
            self._bad_words = _BadWords(words, len(self._rows.penalised), logits.device)
        for row in {one.row for one in plan.ended}.intersection(words):
            self._bad_words.start(row)
        having = [(i, row) for i, row in enumerate(who.tolist()) if row in words]
        if having:
            self._bad_words.ban(logits, having)

    def _keep_to_allowed(self, logits: Tensor, who: npt.NDArray[np.int64]) -> None:
        """Nothing but a row's allowed ids; before its min_tokens none that ends it."""
        rows = self._rows
        short = rows.generated[who] < rows.min_tokens[who]
        having = [
            (i, rows.allowed_ids[row][int(is_short)])
            for i, (row, is_short) in enumerate(zip(who.tolist(), short.tolist(), strict=True))
            if row in rows.allowed_ids
        ]
        if having:
            at = upload(np.asarray([i for i, _ in having]), logits.device)
            places = upload(_places(having, logits.shape[1]), logits.device)
            flat = logits.view(-1)
            kept = flat.index_select(0, places)
            logits.index_fill_(0, at, -torch.inf)
            flat.index_copy_(0, places, kept)

    def _ban_ends(self, logits: Tensor, who: npt.NDArray[np.int64]) -> None:
        """No end before a row's min_tokens. Grammars and allowed ids see to it themselves."""
        rows = self._rows
        short = np.flatnonzero(rows.generated[who] < rows.min_tokens[who])
        banned = [
            (i, rows.stop_ids[row])
            for i, row in zip(short.tolist(), who[short].tolist(), strict=True)
            if row not in rows.grammars and row not in rows.allowed_ids
        ]
        if banned:
            places = upload(_places(banned, logits.shape[1]), logits.device)
            logits.view(-1).index_fill_(0, places, -torch.inf)

    def _keep_to_grammars(self, logits: Tensor, who: npt.NDArray[np.int64]) -> None:
        rows, vocabulary = self._rows, logits.shape[1]
        having = [(i, row) for i, row in enumerate(who.tolist()) if row in rows.grammars]
        if not having:
            return
        masks = [self._allowed(row)[: -(-vocabulary // 8)] for _, row in having]
        at = upload(np.asarray([i for i, _ in having]), logits.device)
        bits = upload(np.stack(masks), logits.device)  # [rows, vocabulary / 8], the lowest first
        shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
        banned = ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, :vocabulary] == 0
        logits.index_copy_(0, at, logits.index_select(0, at).masked_fill_(banned, -torch.inf))

    def _force(self, logits: Tensor, who: npt.NDArray[np.int64]) -> None:
        """Nothing but the token that has to come, whatever the others say."""
        forced, width = self._rows.forced, logits.shape[1]
        having = [
            (i, i * width + forced[row]) for i, row in enumerate(who.tolist()) if row in forced
        ]
        if having:
            at, places = upload(np.asarray(having, dtype=np.int64).T, logits.device)
            logits.index_fill_(0, at, -torch.inf)
            logits.view(-1).index_fill_(0, places, 0.0)

    def _allowed(self, row: int) -> npt.NDArray[np.uint8]:
        """See AnswerMatcher."""
        rows = self._rows
        short = rows.generated[row] < rows.min_tokens[row]
        return rows.grammars[row].allowed(rows.stop_ids[row] if short else None)


class _Written:
    """On the device: how often each row has written each token, and which ones its prompt holds."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        # [rows, vocabulary]
        self.counts = torch.zeros((rows, vocabulary), dtype=torch.int16, device=device)
        self.in_prompt = torch.zeros((rows, vocabulary), dtype=torch.bool, device=device)

    def start(
        self,
        row: int,
        prompt: npt.NDArray[np.int32],
        answer: npt.NDArray[np.int32],
        needs_prompt: bool,
    ) -> None:
        """A row has a new owner, who has written `answer` so far."""
        device = self.counts.device
        self.counts[row].zero_()
        self.in_prompt[row].zero_()
        if needs_prompt:
            self.in_prompt[row].index_fill_(0, upload(prompt, device).long(), True)
        if len(answer):
            ids, counts = np.unique(answer, return_counts=True)
            at, count = upload(np.stack([ids, counts.clip(max=_MOST)]), device)
            self.counts[row].index_copy_(0, at.long(), count.to(torch.int16))

    def count(self, who: Tensor, tokens: Tensor) -> None:
        """Rows `who` [rows], each once, wrote these tokens [rows]."""
        places = who * self.counts.shape[1] + tokens
        flat = self.counts.view(-1)
        count = flat.index_select(0, places)
        flat.index_copy_(0, places, count + (count < _MOST))


class _BadWords:
    """On the device: the words of the rows that have some, and each row's last tokens, since the
    host does not know the last step's when the next one is launched."""

    def __init__(self, words: dict[int, BadWords], rows: int, device: torch.device) -> None:
        """words: of the table, by row."""
        self._words = words
        self._recent = torch.full((rows, BEFORE), NOTHING, dtype=torch.int32, device=device)
        # Of the rows that have begun: before [words, BEFORE] and last [words], see BadWords.
        self._begun: dict[int, tuple[Tensor, Tensor]] = {}

    def start(self, row: int) -> None:
        """A row has a new owner."""
        device = self._recent.device
        for gone in self._begun.keys() - self._words.keys():
            del self._begun[gone]
        before, last, recent = self._words[row]
        self._recent[row].copy_(upload(recent, device))
        self._begun[row] = upload(before, device), upload(last, device)

    def ban(self, logits: Tensor, having: Sequence[tuple[int, int]]) -> None:
        """having: where rows stand in the logits [rows, vocabulary], and which these are."""
        parts = [self._begun[row] for _, row in having]
        counts = [len(last) for _, last in parts]
        figures = np.repeat(np.asarray(having, dtype=np.int64), counts, axis=0).T
        at, who = upload(figures, logits.device)  # of each word
        before = torch.cat([before for before, _ in parts])
        last = torch.cat([last for _, last in parts])
        matches = (before == NOTHING) | (before == self._recent.index_select(0, who))
        lost = matches.all(dim=1) * -_BAN
        # Words may share their last token: what a token loses is added up, in any order the same.
        logits.view(-1).index_add_(0, at * logits.shape[1] + last, lost)

    def note(self, sampled: npt.NDArray[np.int64], tokens: Tensor) -> None:
        """The rows `sampled` [rows] have got these tokens [rows]."""
        having = [(i, row) for i, row in enumerate(sampled.tolist()) if row in self._words]
        if having:
            at, who = upload(np.asarray(having, dtype=np.int64).T, tokens.device)
            old = self._recent.index_select(0, who)[:, 1:]
            new = tokens.index_select(0, at).to(torch.int32)[:, None]
            self._recent.index_copy_(0, who, torch.cat((old, new), dim=1))


def _places(
    parts: Iterable[tuple[int, npt.NDArray[np.int64]]], vocabulary: int
) -> npt.NDArray[np.int64]:
    """(row, token ids) of several rows as places in flat logits."""
    return np.concatenate([row * vocabulary + ids for row, ids in parts])
