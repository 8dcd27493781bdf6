"""ModelRunner: runs a planned step on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from megatron_hybrid.errors import DeviceLostError
from megatron_hybrid.execution.batch import BatchBuilder
from megatron_hybrid.execution.cuda_graphs import CudaGraphs, GraphSize
from megatron_hybrid.execution.plan import StepPlan, StepResult, WeightsSource
from megatron_hybrid.execution.rows import RowTable
from megatron_hybrid.execution.sampler import Sampler, Sampling
from megatron_hybrid.layers.inputs import LayerCaches, StepInputs
from megatron_hybrid.layers.step import Step
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.weights import update_model
from megatron_hybrid.parallel import ParallelContext


class LaunchedStep:
    """A step on its way, or done."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling

    def result(self) -> StepResult:
        with _device_errors():
            return self._sampling.result()


class ModelRunner:
    """The model and its caches on one rank.

    Each row's last token stays on the device, where its next decode reads it. `asynchronous`
    (default: on a GPU): `launch` returns before the step is done.
    """

    def __init__(
        self,
        model: HybridModel,
        caches: LayerCaches,
        rows: RowTable,
        block_size: int,
        device: torch.device,
        parallel: ParallelContext,
        *,
        max_tokens: int = 8192,
        asynchronous: bool | None = None,
    ) -> None:
        """`max_tokens`: the most that a step computes."""
        on_gpu = device.type == "cuda"
        self.asynchronous = on_gpu if asynchronous is None else asynchronous
        self._model = model
        self._caches = caches
        self._batch_builder = BatchBuilder(rows, block_size, device, max_tokens, model.chunk_sizes)
        self._sampler = Sampler(rows, model.kernels.sampling, parallel)
        self._last_token = torch.zeros(len(rows.decoding), dtype=torch.int64, device=device)
        self._planned = torch.cuda.Event() if on_gpu else None
        self._graphs = CudaGraphs(self._prepare_dummy)
        self.replayed = {"decode": 0, "mixed": 0}  # steps, by the kind of graph that ran them

    def capture_graphs(self, sizes: Sequence[GraphSize], progress: bool = True) -> None:
        """Capture a CUDA graph of each of these sizes."""
        with torch.inference_mode(), _device_errors():
            self._graphs.capture(sizes, progress)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        with _device_errors():
            inputs, logits = self._logits(plan)
            return LaunchedStep(
                self._sampler.sample(logits, plan, inputs.sampled_rows, self._last_token)
            )

    def execute(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    @torch.inference_mode()
    def dummy_forward(self) -> None:
        nothing = StepPlan(step=0, decode_rows=np.zeros(0, dtype=np.int64))
        with _device_errors():
            size = self._graphs.choose(nothing)
            self._compute(self._batch_builder.build_dummy(size or GraphSize(1)), size)

    def update_weights(self, source: WeightsSource) -> None:
        """Overwrite the model's weights where they are; see `models.weights.update_model`."""
        with _device_errors():
            update_model(self._model, source)

    def _logits(self, plan: StepPlan) -> tuple[StepInputs, Tensor]:
        """The step's inputs, and logits [sampled rows + prompt log-probability rows, vocabulary]:
        computed, and from the cache for rows that are resumed. Behind them may be padding."""
        computed = len(plan.sampled_rows) - len(plan.resumed)
        computes = computed > 0 or len(plan.prefills) > 0
        size = self._graphs.choose(plan) if computes else None
        inputs, caches = self._batch_builder.build(plan, size), self._caches
        moves = inputs.moves
        if moves is None:
            return inputs, self._compute(inputs, size)
        if plan.copies:
            attention = self._model.kernels.attention
            for cache in caches.kv.values():
                attention.copy_tokens(cache, moves.copy_source, moves.copy_destination)
        # before the step stores its own
        resumed = caches.end_logits.index_select(0, moves.resumed_slots)
        if not computes:
            return inputs, resumed
        logits = self._compute(inputs, size)
        if len(moves.stored_slots):
            stored = logits.index_select(0, moves.stored_rows).float()
            caches.end_logits.index_copy_(0, moves.stored_slots.long(), stored)
        if not plan.resumed:
            return inputs, logits
        if size is not None:
            logits = logits[:computed]  # what follows is padding
        return inputs, torch.cat((logits[:computed], resumed, logits[computed:]))

    def _compute(self, inputs: StepInputs, size: GraphSize | None) -> Tensor:
        """Logits of inputs that were built for the graph of this size; None: without a graph."""
        step = self._plan(inputs)
        if size is None:
            return self._run(inputs, step)
        self.replayed["mixed" if size.prompts else "decode"] += 1
        return self._graphs.replay(size)

    def _prepare_dummy(self, size: GraphSize) -> Callable[[], Tensor]:
        inputs = self._batch_builder.build_dummy(size)
        step = self._plan(inputs)
        return lambda: self._run(inputs, step)

    def _plan(self, inputs: StepInputs) -> Step:
        if self._planned is None:
            return self._model.plan(inputs, self._caches)
        # Kernels' plans lie in pinned memory that is used again in every step: what the last step
        # put there must have been copied. It has been, when the step before that one is done.
        self._planned.synchronize()
        step = self._model.plan(inputs, self._caches)
        self._planned.record()
        return step

    def _run(self, inputs: StepInputs, step: Step) -> Tensor:
        """The part of a step that is captured."""
        if self.asynchronous and inputs.num_decodes:
            tokens = self._last_token.index_select(0, inputs.decode_rows)
            inputs.token_ids[: inputs.num_decodes].copy_(tokens)
        return self._model.compute(inputs, step)


@contextmanager
def _device_errors() -> Iterator[None]:
    try:
        yield
    except torch.AcceleratorError as error:
        raise DeviceLostError(f"The device failed: {error}") from error
