"""ModelRunner: runs a planned step on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from megatron_hybrid.errors import DeviceLostError
from megatron_hybrid.execution.batch import BatchBuilder
from megatron_hybrid.execution.cuda_graphs import DecodeGraphs
from megatron_hybrid.execution.plan import StepPlan, StepResult
from megatron_hybrid.execution.rows import RowTable
from megatron_hybrid.execution.sampler import Sampler, Sampling
from megatron_hybrid.layers.inputs import LayerCaches, StepInputs
from megatron_hybrid.layers.step import Step
from megatron_hybrid.models.hybrid_model import HybridModel
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
        self._batch_builder = BatchBuilder(rows, block_size, device, max_tokens)
        self._sampler = Sampler(rows, model.kernels.sampling, parallel)
        self._last_token = torch.zeros(len(rows.decoding), dtype=torch.int64, device=device)
        self._planned = torch.cuda.Event() if on_gpu else None
        self._graphs = DecodeGraphs(self._prepare_dummy)

    def capture_graphs(self, sizes: tuple[int, ...], progress: bool = True) -> None:
        """Capture a CUDA graph for each of these numbers of decodes."""
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
        with _device_errors():
            self._compute(StepPlan(step=0, decode_rows=np.zeros(0, dtype=np.int64)))

    def _logits(self, plan: StepPlan) -> tuple[StepInputs, Tensor]:
        """The step's inputs, and logits [sampled rows + prompt log-probability rows, vocabulary]:
        computed, and from the cache for rows that are resumed."""
        if plan.decodes_only:
            return self._compute(plan)
        inputs, caches = self._batch_builder.build(plan), self._caches
        moves = inputs.moves
        if moves is None:
            return inputs, self._run(inputs, self._plan(inputs))
        if plan.copies:
            attention = self._model.kernels.attention
            for cache in caches.kv.values():
                attention.copy_tokens(cache, moves.copy_source, moves.copy_destination)
        # before the step stores its own
        resumed = caches.end_logits.index_select(0, moves.resumed_slots)
        if inputs.num_tokens == 0:
            return inputs, resumed
        logits = self._run(inputs, self._plan(inputs))
        if len(moves.stored_slots):
            stored = logits.index_select(0, moves.stored_rows).float()
            caches.end_logits.index_copy_(0, moves.stored_slots.long(), stored)
        if not plan.resumed:
            return inputs, logits
        computed = len(plan.sampled_rows) - len(plan.resumed)
        return inputs, torch.cat((logits[:computed], resumed, logits[computed:]))

    def _compute(self, plan: StepPlan) -> tuple[StepInputs, Tensor]:
        """A step of nothing but decodes: by a captured graph, if there is one for so many."""
        count = len(plan.decode_rows)
        graph = self._graphs.for_decodes(count)
        padded = graph.num_decodes if graph is not None else int(count == 0)
        inputs = self._batch_builder.build(plan, padded)
        step = self._plan(inputs)
        logits = self._run(inputs, step) if graph is None else graph.replay()
        return inputs, logits[:count]

    def _prepare_dummy(self, num_decodes: int) -> Callable[[], Tensor]:
        inputs = self._batch_builder.build_dummy(num_decodes)
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
