"""Plans written by hand, and a runner that executes them and keeps its rows up to date."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from megatron_hybrid.cache.lease import TailCopy
from megatron_hybrid.engine.sizing import ring_length
from megatron_hybrid.execution.plan import (
    MOST_STOP_IDS,
    NO_DRAFT,
    CatchUp,
    DraftPlan,
    PrefillChunk,
    ResumedRow,
    StepPlan,
    StepResult,
)
from megatron_hybrid.execution.rows import RowTable
from megatron_hybrid.execution.runner import ModelRunner
from megatron_hybrid.layers.inputs import allocate_caches
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import ParallelContext

BLOCK = 16
VOCAB = 160  # of the tiny models


def chunk(row: int, start: int, end: int, **changes: Any) -> PrefillChunk:
    """Tokens [start, end) of a row that reads the null slot and writes slot row + 1. `prompt`, if
    given, is the text whose tokens these are."""
    prompt = changes.pop("prompt", range(100, 100 + end))
    values = {
        "row": row, "owner": None, "tokens": np.asarray(prompt[start:end], dtype=np.int32),
        "start": start, "end": end, "write_from": 0, "read_slot": 0, "write_slot": row + 1,
        "checkpoints": (), "samples": True, "logprob_targets": None, "num_top_logprobs": 0,
    }  # fmt: skip
    return PrefillChunk(**(values | changes))


class Steps:
    """A model's runner with poisoned caches: what is read before it is written shows as NaN."""

    def __init__(
        self,
        model: HybridModel,
        parallel: ParallelContext,
        num_drafts: int = 0,
        write_interval: int = 1,
    ) -> None:
        device = torch.device("cpu")
        length = ring_length(num_drafts, write_interval)
        self.rows = RowTable(12, 4)
        self.caches = allocate_caches(
            model.kv_specs,
            model.state_specs,
            32,
            BLOCK,
            24,
            device,
            end_logits_vocab=VOCAB,
            num_rings=12 if length else 0,
            ring_length=length,
        )
        for kv in self.caches.kv.values():
            kv.key.fill_(torch.nan)
            kv.value.fill_(torch.nan)
        for state in self.caches.state.values():
            state.conv.fill_(torch.nan)
            state.ssm.fill_(torch.nan)
        self.caches.end_logits.fill_(torch.nan)
        self.runner = ModelRunner(
            model,
            self.caches,
            self.rows,
            BLOCK,
            device,
            parallel,
            num_drafts=num_drafts,
            write_interval=write_interval,
        )

    def row(self, row: int, blocks: list[int], *, slot: int = 0, position: int = 0) -> None:
        """A greedy request that wants log-probabilities. `position` tokens are in its cache and
        its state in `slot`, from which its first decode reads."""
        rows = self.rows
        rows.set_blocks(row, blocks)
        rows.position[row], rows.generated[row], rows.logprobs[row] = position, 0, 20
        rows.read_slot[row], rows.write_slot[row] = slot or row + 1, row + 1

    def step(
        self,
        decodes: Sequence[int] = (),
        prefills: Iterable[PrefillChunk] = (),
        resumed: Iterable[tuple[int, int]] = (),  # (row, logits slot)
        copies: Iterable[tuple[int, int, int]] = (),
        drafts: Sequence[Sequence[int]] | None = None,  # of each decode
        checkpoint: tuple[int, int] = (0, 0),  # position and slot, of the first decode
        catch_ups: Iterable[CatchUp] = (),
        writes: Sequence[bool] | None = None,  # whether each decode's state is written
    ) -> StepResult:
        plan = StepPlan(
            step=0,
            decode_rows=np.asarray(decodes, dtype=np.int64),
            prefills=list(prefills),
            resumed=[ResumedRow(row, None, slot) for row, slot in resumed],
            copies=[TailCopy(*copy) for copy in copies],
            catch_ups=list(catch_ups),
            adapters=bool(self.rows.adapter.any()),
        )
        rows, sampled, who = self.rows, plan.sampled_rows, plan.decode_rows
        if drafts is not None:
            plan.drafts = self._runs(who, drafts, checkpoint)
        if writes is not None:
            plan.writes = np.asarray(writes)
        result = self.runner.execute(plan)
        rows.position[who] += 1 + rows.accepted[who]
        rows.generated[who] += rows.accepted[who]
        rows.accepted[who] = 0 if result.accepted is None else result.accepted
        is_written = np.ones(len(who), dtype=bool) if plan.writes is None else plan.writes
        rows.unfolded[who] = np.where(is_written, 0, rows.unfolded[who] + 1)
        rows.read_slot[who[is_written]] = rows.write_slot[who[is_written]]
        for part in plan.prefills:
            rows.position[part.row] = part.end
        rows.last_token[sampled] = [tokens[-1] for tokens in result.tokens_by_row()]
        rows.generated[sampled] += 1
        return result

    def _runs(
        self, decodes: np.ndarray, drafts: Sequence[Sequence[int]], checkpoint: tuple[int, int]
    ) -> DraftPlan:
        windows = np.full((len(decodes), max(map(len, drafts))), NO_DRAFT, dtype=np.int64)
        for window, own in zip(windows, drafts, strict=True):
            window[: len(own)] = own
        num_drafts = np.asarray([len(own) for own in drafts], dtype=np.int64)
        start = self.rows.next_position(decodes) + 1
        runs = DraftPlan(num_drafts, windows, start)
        runs.checkpoint_position[0], runs.checkpoint_slot[0] = checkpoint
        if self.runner._model.mtp is not None:  # which makes the drafts
            runs.stop_ids = np.full((len(decodes), MOST_STOP_IDS), NO_DRAFT, dtype=np.int64)
        return runs
