"""RowTable: the running requests as dense host arrays, one row each.

A decode step touches no per-request Python object: it reads and writes these arrays.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_hybrid.text.grammar import AnswerMatcher


class Written(NamedTuple):
    """What a request has of tokens when it gets its row."""

    prompt: npt.NDArray[np.int32]
    answer: npt.NDArray[np.int32]


class LogitBias(NamedTuple):
    """What is added to the logits of some tokens, each named once."""

    ids: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]


class RowTable:
    """`max_requests` rows. A row's figures are valid while a request holds it."""

    def __init__(self, max_requests: int, max_blocks: int) -> None:
        n = max_requests
        self.decoding = np.zeros(n, dtype=bool)  # its prompt is computed
        # Tokens that its state includes, or what is kept for it: the last `unwritten` of them are
        # not in the slot yet. Without drafts that is the next one's position.
        self.position = np.zeros(n, dtype=np.int64)
        self.unwritten = np.zeros(n, dtype=np.int64)
        # Drafts of its last step: those that hold, and those of which nobody knows yet.
        self.pending = np.zeros(n, dtype=np.int64)
        self.unknown = np.zeros(n, dtype=np.int64)
        self.last_token = np.zeros(n, dtype=np.int64)  # the input of the next decode
        self.generated = np.zeros(n, dtype=np.int64)
        self.max_tokens = np.zeros(n, dtype=np.int64)
        self.read_slot = np.zeros(n, dtype=np.int64)
        self.write_slot = np.zeros(n, dtype=np.int64)
        self.block_table = np.zeros((n, max(max_blocks, 1)), dtype=np.int64)
        self.num_blocks = np.zeros(n, dtype=np.int64)
        self.temperature = np.zeros(n, dtype=np.float32)
        self.top_k = np.zeros(n, dtype=np.int64)
        self.top_p = np.ones(n, dtype=np.float32)
        self.min_p = np.zeros(n, dtype=np.float32)
        self.seed = np.zeros(n, dtype=np.uint64)
        self.logprobs = np.full(n, -1, dtype=np.int64)  # -1: none wanted
        self.presence_penalty = np.zeros(n, dtype=np.float32)
        self.frequency_penalty = np.zeros(n, dtype=np.float32)
        self.repetition_penalty = np.ones(n, dtype=np.float32)
        self.min_tokens = np.zeros(n, dtype=np.int64)
        self.penalised = np.zeros(n, dtype=bool)
        self.adjusted = np.zeros(n, dtype=bool)  # in every step; for `min_tokens`, in the first
        # by row, for the few that have them
        self.written: dict[int, Written] = {}  # of rows that are penalised
        self.logit_bias: dict[int, LogitBias] = {}
        self.stop_ids: dict[int, npt.NDArray[np.int64]] = {}  # of rows with `min_tokens`
        self.grammars: dict[int, AnswerMatcher] = {}
        # the lowest is taken first, as with live slots: a batch's rows and slots keep one order
        self._free = list(range(n))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free row; there must be one."""
        return heapq.heappop(self._free)

    def give_back(self, row: int) -> None:
        self.decoding[row] = False
        self.pending[row] = self.unknown[row] = self.unwritten[row] = 0
        if self.adjusted[row] or self.min_tokens[row]:
            self._forget_adjustments(row)
        heapq.heappush(self._free, row)

    def set_blocks(self, row: int, blocks: list[int]) -> None:
        self.block_table[row, : len(blocks)] = blocks
        self.num_blocks[row] = len(blocks)

    def add_block(self, row: int, block: int) -> None:
        self.block_table[row, self.num_blocks[row]] = block
        self.num_blocks[row] += 1

    def next_position(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Of rows that decode, their next tokens' positions; where nobody knows yet which drafts
        hold, the last one possible."""
        return self.position[rows] + self.pending[rows] + self.unknown[rows]

    def adjust(
        self,
        row: int,
        *,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        written: Written | None = None,
        logit_bias: LogitBias | None = None,
        min_tokens: int = 0,
        stop_ids: npt.NDArray[np.int64] | None = None,
        grammar: AnswerMatcher | None = None,
    ) -> None:
        """Let a row that was taken choose from logits that are not the model's; `give_back` ends
        it. `written`: None without penalties. See SamplingParams for the others."""
        self.presence_penalty[row] = presence_penalty
        self.frequency_penalty[row] = frequency_penalty
        self.repetition_penalty[row] = repetition_penalty
        self.penalised[row] = written is not None
        if written is not None:
            self.written[row] = written
        if logit_bias is not None:
            self.logit_bias[row] = logit_bias
        if stop_ids is not None and len(stop_ids):
            self.min_tokens[row] = min_tokens
            self.stop_ids[row] = stop_ids
        if grammar is not None:
            self.grammars[row] = grammar
        self.adjusted[row] = not (written is None and logit_bias is None and grammar is None)

    def _forget_adjustments(self, row: int) -> None:
        self.adjusted[row] = self.penalised[row] = False
        self.min_tokens[row] = 0
        for column in (self.written, self.logit_bias, self.stop_ids, self.grammars):
            column.pop(row, None)
