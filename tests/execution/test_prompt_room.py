"""How long prompts are that have CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.limits import Shape
from megatron_hybrid import EngineConfig
from megatron_hybrid.engine.choices import prompt_room
from megatron_hybrid.execution.cuda_graphs import graph_sizes
from megatron_hybrid.execution.prompt_room import NO_LIMIT, PromptRoom, bytes_of_a_token
from megatron_hybrid.kernels.contract import AttentionShape
from megatron_hybrid.kernels.kernel_set import REFERENCE, KernelSet
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import ParallelContext
from tests.parallel.pretend import first_of, first_replica_of

MODELS = Path(__file__).parents[2] / "configs" / "models"
SHORT = 640  # prompts up to here have graphs in any case, or nearly


class Attention:
    """Captures up to so many tokens."""

    def __init__(self, most: int = 10_000) -> None:
        self._most = most

    def most_captured(self, shape: AttentionShape, prompts: int) -> int:
        assert prompts == 16 and shape.block_size == 64
        return self._most


def model(name: str, parallel: ParallelContext, ranks: int = 1) -> HybridModel:
    config = ModelFolder.open(MODELS / name).config
    with torch.device("meta"):
        types = torch.bfloat16, torch.bfloat16, torch.float32
        return HybridModel(config, first_of(parallel, ranks), *types)


def room(shapes: HybridModel, attention: Attention | None = None) -> PromptRoom:
    return PromptRoom.of(shapes, kernels(attention or Attention()), 16, 64)


def kernels(attention: Any) -> KernelSet:
    return replace(REFERENCE, attention=attention, latent_attention=attention)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("granite-4.0-h-tiny", 3000, 5000),
        ("lfm2-1.2b", 2000, 3000),
        ("qwen3.5-35b-a3b", SHORT, 1500),
        ("nemotron-h-8b", 300, SHORT),
        ("nemotron-3-nano-30b-a3b", 0, SHORT),
        ("jamba-mini-1.6", 0, SHORT),  # reading its weights takes longer than launching it
    ],
)
def test_a_model_has_room_as_far_as_it_is_computed_in_less_than_it_takes_to_launch(
    parallel: ParallelContext, name: str, least: int, most: int
) -> None:
    assert least <= room(model(name, parallel)).tokens < most


def test_a_rank_of_several_has_more_room(parallel: ParallelContext) -> None:
    alone, one_of_two = (room(model("nemotron-h-8b", parallel, ranks)) for ranks in (1, 2))
    assert one_of_two.tokens > 2 * alone.tokens and one_of_two.pairs > 1.9 * alone.pairs


def test_long_contexts_are_left_to_kernels_that_are_faster_there(parallel: ParallelContext) -> None:
    """The more attention a model has, the sooner."""
    few, many = (room(model(name, parallel)) for name in ("granite-4.0-h-tiny", "lfm2-1.2b"))
    assert few.pairs > 4 * many.pairs > 4 * 2048**2
    assert room(model("falcon-mamba-7b", parallel)).pairs == NO_LIMIT


def test_attention_may_have_less_room(parallel: ParallelContext) -> None:
    granite = model("granite-4.0-h-tiny", parallel)
    assert room(granite, Attention(700)).tokens == 700
    assert PromptRoom.of(granite, REFERENCE, 16, 64).tokens == 0
    found = graph_sizes(16, 16, 256, 8192, 0, room(granite, Attention(1100)))
    long = sorted({size.prefill_tokens for size in found if size.is_long})
    assert long == [640, 768, 1024]


@pytest.mark.parametrize("name", ["granite-4.0-h-tiny", "zamba2-2.7b", "nemotron-3-nano-30b-a3b"])
def test_the_weights_of_a_token_are_those_that_its_limits_count(
    parallel: ParallelContext, name: str
) -> None:
    """Chosen experts, and shared transformers once for every use."""
    shapes = model(name, parallel)
    assert bytes_of_a_token(shapes) == pytest.approx(2 * Shape.of(shapes, 1).a_tokens, rel=1e-3)


def test_replicas_with_all_to_all_have_none_since_that_is_not_captured(
    parallel: ParallelContext,
) -> None:
    granite = model("granite-4.0-h-tiny", parallel)
    config = EngineConfig(inference_dynamic_batching_block_size=64)

    def tokens(replicas: int, dispatcher: str = "auto") -> int:
        given = config.replace(moe_token_dispatcher_type=dispatcher)
        several = first_replica_of(parallel, replicas)
        return prompt_room(given, several, granite, kernels(Attention())).tokens

    alone = room(granite).tokens
    assert tokens(1) == tokens(1, "alltoall") == tokens(2) == tokens(2, "allgather") == alone
    assert tokens(2, "alltoall") == tokens(16) == 0
