"""ModelRunner: runs a planned step on the device."""

from __future__ import annotations

import torch

from megatron_hybrid.errors import DeviceLostError
from megatron_hybrid.execution.batch import BatchBuilder
from megatron_hybrid.execution.plan import StepPlan, StepResult
from megatron_hybrid.execution.rows import RowTable
from megatron_hybrid.execution.sampler import sample
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
            logits = self._model.forward(self._batch_builder.build(plan), self._caches)
            return self._agree(sample(logits, plan, self._rows))
        except torch.AcceleratorError as error:
            raise DeviceLostError(f"The device failed: {error}") from error

    def _agree(self, result: StepResult) -> StepResult:
        """Rank 0's tokens on every rank: the logits are equal, but only one may decide."""
        if self._parallel.size == 1:
            return result
        tokens = torch.from_numpy(result.tokens).to(self._parallel.device)
        return result._replace(tokens=self._parallel.broadcast(tokens).cpu().numpy())

    @torch.inference_mode()
    def dummy_forward(self) -> None:
        self._model.forward(self._batch_builder.build_dummy(), self._caches)
