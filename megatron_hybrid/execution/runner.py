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
        inputs = self._batch_builder.build(plan)
        try:
            logits = self._model.forward(inputs, self._caches)
        except torch.AcceleratorError as error:
            raise DeviceLostError(f"The device failed: {error}") from error
        result = sample(logits, plan, self._rows)
        if self._parallel.size > 1:
            # every rank has the same logits, but only one may decide what they mean
            tokens = torch.from_numpy(result.tokens).to(logits.device)
            self._parallel.broadcast(tokens)
            result = result._replace(tokens=tokens.cpu().numpy())
        return result

    @torch.inference_mode()
    def dummy_forward(self) -> None:
        self._model.forward(self._batch_builder.build_dummy(), self._caches)
