"""ModelRunner: runs a planned step on the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from megatron_hybrid.execution.batch import BatchBuilder
from megatron_hybrid.execution.capture_schedule import CaptureSchedule
from megatron_hybrid.execution.cuda_graphs import CudaGraphs, GraphSize
from megatron_hybrid.execution.device import device_errors, record, upload
from megatron_hybrid.execution.head_drafts import HeadDrafter
from megatron_hybrid.execution.pipeline import PipelineStage
from megatron_hybrid.execution.plan import (
    CatchUp,
    Runner,
    StepDemand,
    StepPlan,
    StepResult,
    WeightsSource,
)
from megatron_hybrid.execution.rows import RowTable
from megatron_hybrid.execution.runs import LastSteps
from megatron_hybrid.execution.sampler import Sampler, Sampling
from megatron_hybrid.kernels.compile_ahead import compiling_ahead
from megatron_hybrid.kernels.contract import DecodeRuns
from megatron_hybrid.layers.inputs import LayerCaches, LockstepSize, StepInputs
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.models.adapters.loading import load_adapter
from megatron_hybrid.models.checkpoints.updates import ModelUpdates
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import ParallelContext

logger = logging.getLogger(__name__)


class ModelRunner(Runner):
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
        all_to_all_from: int | None = None,
        num_drafts: int = 0,
        write_interval: int = 1,
        window_quota: int = 0,
    ) -> None:
        """`max_tokens`: the most that a step computes. `num_drafts`: the most of a row in a step,
        which the model's MTPHead makes where it has one. `write_interval`: tokens from one write of
        a row's states to the next. For both the caches have rings. `all_to_all_from`: where
        replicas share experts, the tokens of the largest one's step from which on they are reached
        by all-to-all, outside of CUDA graphs; None: never. `window_quota`: of CacheGeometry."""
        on_gpu = device.type == "cuda"
        self.asynchronous = on_gpu if asynchronous is None else asynchronous
        self._model = model
        self._updates = ModelUpdates(model)
        self._caches = caches
        last_steps = LastSteps(len(rows.decoding), num_drafts, device) if num_drafts else None
        has_head = num_drafts > 0 and model.mtp is not None
        head = HeadDrafter(model, caches, block_size) if has_head else None
        self._batch_builder = BatchBuilder(
            rows,
            block_size,
            device,
            max_tokens,
            model.chunk_sizes,
            last_steps,
            write_interval,
            head,
            as_runs=bool(caches.rings),
            window_quota=window_quota,
        )
        self._stage = PipelineStage(model, device, max_tokens + len(rows.decoding))
        self._sampler = Sampler(
            rows,
            model.kernels.sampling,
            parallel,
            vocab_size=model.config.vocab_size,
            last_steps=last_steps,
        )
        last_token = torch.zeros(len(rows.decoding), dtype=torch.int64, device=device)
        self._last_token = last_token if last_steps is None else last_steps.last_token
        self._planned = torch.cuda.Event() if on_gpu else None
        self._graphs = CudaGraphs()
        self._uncaptured = CaptureSchedule()
        self._is_alone = parallel.lockstep.size == 1
        parallel.clear_first(self._graphs)
        self.replayed = {"decode": 0, "mixed": 0}  # steps, by the kind of graph that ran them
        self._all_to_all_from = all_to_all_from

    @device_errors
    @torch.inference_mode()
    def compile_kernels(self, sizes: Iterable[GraphSize]) -> None:
        """Those that steps of these sizes launch, side by side; nothing is computed."""
        with compiling_ahead(self._last_token.device):
            for size in sizes:
                self._prepare_dummy(size)()

    @device_errors
    @torch.inference_mode()
    def capture_graphs(
        self, sizes: Sequence[GraphSize], first: int | None = None, progress: bool = True
    ) -> None:
        """Capture a CUDA graph of each of these sizes; now of the `first` ones in the order of a
        CaptureSchedule (None: of all), of the others between steps and in `capture_next`."""
        self._uncaptured = CaptureSchedule(sizes)
        if (learn := self._model.kernels.learn) is not None:
            counts = sorted({n for size in sizes for n in (size.tokens, size.rows)})
            learn(self._model.plain_weights(), counts)
        count = len(sizes) if first is None else min(first, len(sizes))
        for _ in tqdm(range(count), desc="capturing CUDA graphs", disable=not progress):
            if (size := self._uncaptured.next()) is not None:
                self._graphs.capture(size, self._prepare_dummy(size))

    @device_errors
    @torch.inference_mode()
    def capture_next(self) -> bool:
        return self._capture_later(self._uncaptured.next())

    @device_errors
    @torch.inference_mode()
    def launch(self, plan: StepPlan, agreed: StepDemand | None = None) -> Sampling:
        if plan.catch_ups:
            self.catch_up(plan.catch_ups)
        inputs, logits = self._logits(plan, agreed)
        runs = None if plan.drafts is None else inputs
        launched = self._sampler.sample(logits, plan, inputs.sampled_rows, self._last_token, runs)
        # while the device computes
        if self._uncaptured:
            self._was_launched(agreed or StepDemand.of(plan))
        return launched

    def execute(self, plan: StepPlan) -> StepResult:
        """`launch`, and wait for the result."""
        return self.launch(plan).result()

    @device_errors
    @torch.inference_mode()
    def dummy_forward(self, agreed: StepDemand | None = None) -> None:
        self._compute_nothing(agreed or StepDemand(decodes=1))
        if agreed is not None:
            self._was_launched(agreed)

    @device_errors
    @torch.inference_mode()
    def catch_up(self, catch_ups: Sequence[CatchUp]) -> None:
        # only states change: what is done is that of the recurrent layers, for no token
        device = self._last_token.device
        dtype = np.int64 if device.type == "cpu" else np.int32
        columns = upload(np.asarray(catch_ups, dtype=dtype).T, device)
        row, position, unfolded, slot, *checkpoint = columns
        cu_seqlens = position.new_zeros(len(catch_ups) + 1)
        runs = DecodeRuns(cu_seqlens, position, unfolded, slot, slot, row, *checkpoint)
        self._model.fold(runs, self._caches)

    @device_errors
    def update_weights(self, source: WeightsSource) -> frozenset[str]:
        left_out = self._updates.update(source)
        self._model.kernels.linear.weights_changed()
        if self._last_token.is_cuda:  # who has sent them may write over what was copied
            torch.cuda.synchronize(self._last_token.device)
        return left_out

    @device_errors
    @torch.inference_mode()
    def load_adapter(
        self, slot: int | None, source: WeightsSource, config: Mapping[str, Any] | None
    ) -> str:
        return load_adapter(self._model, slot, source, config)

    def _was_launched(self, demand: StepDemand) -> None:
        """A step of all ranks, or none, was."""
        if demand.tokens:
            self._uncaptured.note(demand)
            self._capture_later(self._uncaptured.due())

    def _capture_later(self, size: GraphSize | None) -> bool:
        if size is None:
            return False
        try:
            self._graphs.capture(size, self._prepare_dummy(size))
        except torch.AcceleratorError:
            raise
        except Exception:
            if not self._is_alone:  # others may wait in a collective
                raise
            logger.exception("No CUDA graph could be captured of %s; steps do without.", size)
            self._uncaptured.give_up()
        return True

    def _logits(self, plan: StepPlan, agreed: StepDemand | None) -> tuple[StepInputs, Tensor]:
        """The step's inputs, and logits [sampled rows + prompt log-probability rows, vocabulary]:
        computed, and from the cache for rows that are resumed. Behind them may be padding."""
        demand = StepDemand.of(plan)
        computed = len(plan.sampled_rows) + plan.num_drafts - len(plan.resumed)
        computes = demand.tokens > 0
        if agreed is not None:
            if agreed.tokens and not computes:
                self._compute_nothing(agreed)
            demand = agreed
        size = self._graphs.choose(demand) if computes else None
        inputs, caches = self._batch_builder.build(plan, size), self._caches
        if computes and size is None:
            inputs = self._together(inputs, agreed)
        moves = inputs.moves
        if moves is None:
            return inputs, self._compute(inputs, size)
        for states in caches.packed:
            packing = self._model.kernels.packing
            if plan.packs:
                packing.pack(states, moves.packed_from, moves.packed_to)
            if plan.unpacks:
                packing.unpack(states, moves.unpacked_from, moves.unpacked_to)
        if plan.copies:
            attention = self._model.kernels.attention
            for cache in caches.caches_of(windowed=False):
                attention.copy_tokens(cache, moves.copy_source, moves.copy_destination)
            caches.copy_routed(moves.copy_source, moves.copy_destination)
        for cache in caches.caches_of(windowed=True) if plan.window_copies else ():
            places = moves.window_source, moves.window_destination
            self._model.kernels.attention.copy_tokens(cache, *places)
        # Before the step stores its own; in the type that they were stored from, as the others are:
        # beside float32 all logits of the step would become that, and draws add up as their type
        # is loaded.
        resumed = caches.end_logits.index_select(0, moves.resumed_slots).to(self._model.dtype)
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

    def _together(self, inputs: StepInputs, agreed: StepDemand | None) -> StepInputs:
        """With what the lockstep group needs to know of a step without a graph."""
        if agreed is None:
            return inputs
        threshold = self._all_to_all_from
        all_to_all = threshold is not None and agreed.tokens >= threshold
        # a replica with nothing to do computes one token all the same
        size = LockstepSize(max(agreed.tokens, 1), max(agreed.rows, 1), all_to_all)
        return replace(inputs, lockstep=size)

    def _compute_nothing(self, demand: StepDemand) -> None:
        """The model's part in a step of others."""
        size = self._graphs.choose(demand)
        inputs = self._batch_builder.build_dummy(size or GraphSize(1))
        self._compute(inputs if size else self._together(inputs, demand), size)

    def _compute(self, inputs: StepInputs, size: GraphSize | None) -> Tensor:
        """Logits of inputs that were built for the graph of this size; None: without a graph."""
        plans = self._plan(inputs)
        self._stage.receive(inputs)
        if size is None:
            logits = self._run(inputs, plans)
        else:
            self.replayed["mixed" if size.prompts else "decode"] += 1
            logits = self._graphs.replay(size)
        self._stage.send(inputs)
        return logits

    def _prepare_dummy(self, size: GraphSize) -> Callable[[], Tensor]:
        inputs = self._batch_builder.build_dummy(size)
        plans = self._plan(inputs)
        return lambda: self._run(inputs, plans)

    def _plan(self, inputs: StepInputs) -> KernelPlans:
        if self._planned is None:
            return self._model.plan(inputs, self._caches)
        # Kernels' plans lie in pinned memory that is used again in every step: what the last step
        # put there must have been copied. It has been, when the step before that one is done.
        self._planned.synchronize()
        step = self._model.plan(inputs, self._caches)
        record(self._planned, self._last_token.device)
        return step

    def _run(self, inputs: StepInputs, plans: KernelPlans) -> Tensor:
        """The part of a step that is captured."""
        if inputs.take_up is not None:
            inputs.take_up()
        elif self.asynchronous and inputs.num_decodes and not inputs.num_drafts:
            tokens = self._last_token.index_select(0, inputs.decode_rows)
            inputs.token_ids[: inputs.num_decodes].copy_(tokens)
        return self._stage.compute(inputs, plans)
