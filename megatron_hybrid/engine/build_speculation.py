"""EngineConfig -> what chooses drafts."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hybrid.config import EngineConfig
from megatron_hybrid.engine.context import DynamicInferenceContext
from megatron_hybrid.engine.draft_policy import DraftPolicy
from megatron_hybrid.engine.prompt_lookup import PromptLookup
from megatron_hybrid.engine.speculation import Speculation
from megatron_hybrid.engine.step_costs import MeasuredCosts, StepTimer
from megatron_hybrid.execution.cuda_graphs import GraphSize
from megatron_hybrid.parallel import ParallelContext


def build_speculation(
    config: EngineConfig,
    context: DynamicInferenceContext,
    parallel: ParallelContext,
    sizes: Sequence[GraphSize],
    *,
    has_head: bool,
) -> Speculation | None:
    """None where no drafts are wanted. sizes: of the steps that have a CUDA graph. has_head: the
    model makes the drafts."""
    drafts, lookup = config.num_speculative_tokens, None
    if not drafts:
        return None
    if not has_head:
        lookup = PromptLookup(
            context.geometry.max_requests,
            context.max_seq_length,
            shares=config.prompt_lookup_shares_texts,
        )
    if parallel.device.type != "cuda":
        return Speculation(context.rows, lookup, drafts)
    replica = parallel.replica
    policy = DraftPolicy(MeasuredCosts(sizes, drafts, has_head), has_head)
    timer = StepTimer(agree=replica.maxima if replica.size > 1 else None)
    return Speculation(context.rows, lookup, drafts, policy, timer)
