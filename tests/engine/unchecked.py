"""An engine whose runner computes and checks nothing: for decisions about more tokens than the
symbolic one can follow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bench.computed import Computed
from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.engine.context import DynamicInferenceContext
from megatron_hybrid.engine.engine import DynamicInferenceEngine
from megatron_hybrid.execution.plan import (
    CatchUp,
    StepDemand,
    StepPlan,
    StepResult,
    WeightsSource,
)

VOCAB = 1000


class UncheckedRunner:
    """All tokens are 1."""

    asynchronous = False

    def launch(self, plan: StepPlan, agreed: StepDemand | None = None) -> Computed:
        return Computed(StepResult(np.ones(len(plan.sampled_rows), dtype=np.int64), {}, {}))

    def dummy_forward(self, agreed: StepDemand | None = None) -> None:
        pass

    def capture_next(self) -> bool:
        return False

    def catch_up(self, catch_ups: Sequence[CatchUp]) -> None:
        pass

    def update_weights(self, source: WeightsSource) -> frozenset[str]:
        return frozenset()

    def load_adapter(self, slot: int | None, source: WeightsSource, config: object) -> str:
        return ""


def make_engine(
    *,
    block_size: int = 16,
    kernel_chunk: int = 16,
    max_requests: int = 32,
    max_tokens: int = 8192,
    max_seq_length: int = 200_000,
) -> DynamicInferenceEngine:
    """A hybrid model's, with a large cache."""
    geometry = CacheGeometry(
        block_size=block_size,
        kernel_chunk=kernel_chunk,
        num_blocks=4_000_000 // block_size,
        max_requests=max_requests,
        num_cached_slots=4000,
        bytes_per_block=1,
        bytes_per_state=1,
    )
    context = DynamicInferenceContext(
        geometry, max_tokens=max_tokens, max_seq_length=max_seq_length
    )
    return DynamicInferenceEngine(context, UncheckedRunner(), vocab_size=VOCAB)


def random_tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()
