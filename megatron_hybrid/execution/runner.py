"""ModelRunner: runs a planned step on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_hybrid.errors import DeviceLostError
from megatron_hybrid.execution.batch import BatchBuilder
from megatron_hybrid.execution.plan import StepPlan, StepResult
from megatron_hybrid.execution.rows import RowTable
from megatron_hybrid.execution.sampler import sample
from megatron_hybrid.kernels import paged_attention
from megatron_hybrid.layers.inputs import LayerCaches
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import ParallelContext


class ModelRunner:
    """The model, its caches and the host buffers of one rank."""

    def __init__(
        self,
        model: HybridModel,
        caches: LayerCaches,
        rows: RowTable,
        block_size: int,
        device: torch.device,
        parallel: ParallelContext,
    ) -> None:
        self._model = model
        self._caches = caches
        self._rows = rows
        self._parallel = parallel
        self._batch_builder = BatchBuilder(rows, block_size, device)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        try:
            return self._agree(sample(self._logits(plan), plan, self._rows))
        except torch.AcceleratorError as error:
            raise DeviceLostError(f"The device failed: {error}") from error

    def _logits(self, plan: StepPlan) -> Tensor:
        """[sampled rows + prompt log-probability rows, vocabulary]: computed, and from the cache
        for rows that are resumed."""
        inputs, caches = self._batch_builder.build(plan), self._caches
        moves = inputs.moves
        if moves is None:
            return self._model.forward(inputs, caches)
        if plan.copies:
            for cache in caches.kv.values():
                paged_attention.copy_tokens(cache, moves.copy_source, moves.copy_destination)
        # before the step stores its own
        resumed = caches.end_logits.index_select(0, moves.resumed_slots)
        if inputs.num_tokens == 0:
            return resumed
        logits = self._model.forward(inputs, caches)
        if len(moves.stored_slots):
            stored = logits.index_select(0, moves.stored_rows)
            caches.end_logits.index_copy_(0, moves.stored_slots, stored)
        if not plan.resumed:
            return logits
        computed = len(plan.sampled_rows) - len(plan.resumed)
        return torch.cat((logits[:computed], resumed, logits[computed:]))

    def _agree(self, result: StepResult) -> StepResult:
        """Rank 0's tokens on every rank: the logits are equal, but only one may decide."""
        if self._parallel.size == 1:
            return result
        tokens = torch.from_numpy(result.tokens).to(self._parallel.device)
        return result._replace(tokens=self._parallel.broadcast(tokens).cpu().numpy())

    @torch.inference_mode()
    def dummy_forward(self) -> None:
        self._model.forward(self._batch_builder.build_dummy(), self._caches)
