"""Models with several residual streams against transformers' modules of their connections."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen4ExpTextConfig
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextHyperConnection
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextGatedResidual

from megatron_hybrid.layers.inputs import LayerCaches
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.mlp import MLP, MLPConfig
from megatron_hybrid.layers.streams import (
    BalancedConnection,
    BalancedStreamsConfig,
    GatedConnection,
    GatedHead,
    GatedStreamsConfig,
    MeanHead,
    StreamsConfig,
)
from megatron_hybrid.models.blocks import StreamsBlock
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.hidden import Hidden
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import ParallelContext
from tests.models.test_blocks import Twice, normed

SIZE, RANK, EPS = 16, 5, 0.05  # eps: large enough to be noticed
NOTHING: Any = None


def made(streams: StreamsConfig, parallel: ParallelContext, ranks: int) -> HybridModel:
    """A model of MLPs with random weights, as one of so many ranks that have the same."""
    config = HybridModelConfig(
        "made_up", "---", 8, SIZE, 64, EPS, torch.float32,
        mlp=MLPConfig(24, gated=True, activation="silu"), streams=streams,
    )  # fmt: skip
    model = HybridModel(config, parallel, *(torch.float32,) * 3)
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5)
    model.after_loading()
    if ranks == 2:
        for _, block in model.own_blocks():
            block.ranks = Twice(block.ranks)
    return model


def computed(model: HybridModel, streams: Tensor) -> tuple[list[Tensor], Tensor]:
    """The streams behind each block, and the logits."""
    plans, behind = KernelPlans(LayerCaches({}, {}, torch.empty(0)), model.kernels), []
    for _, block in model.own_blocks():
        mixed, streams = block(None, streams, plans)
        assert mixed is None
        behind.append(streams)
    return behind, model.logits(Hidden(streams, None, None), NOTHING, NOTHING)


def of_mlp(block: StreamsBlock, x: Tensor, ranks: int) -> Tensor:
    assert isinstance(block.mixer, MLP)
    up, down = block.mixer.up_proj.weight, block.mixer.down_proj.weight
    assert isinstance(up, Tensor) and isinstance(down, Tensor)
    gate, value = (x @ up.T).chunk(2, dim=-1)
    return ranks * (F.silu(gate) * value) @ down.T


def theirs_with(gates: Any, count: int, combine: bool) -> nn.Module:
    """transformers' module with our weights, which are kept divided and around one."""
    config = Qwen4ExpTextConfig(
        hidden_size=SIZE, hc_count=count, hc_lowrank=RANK, rms_norm_eps=EPS, num_hidden_layers=1
    )
    theirs = Qwen4ExpTextGatedResidual(config, use_combine=combine)
    theirs.hc_norm.weight.data = gates.norm.weight - 1
    theirs.input_mix_weight_down.weight.data = count * gates.down[:RANK]
    theirs.input_mix_weight_up.weight.data = gates.up
    if combine:
        theirs.block_inject_weight.weight.data = count * gates.down[RANK:]
    return theirs


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("count", [2, 3, 4])
@torch.no_grad()
def test_gated_streams(count: int, ranks: int, parallel: ParallelContext) -> None:
    model = made(GatedStreamsConfig(count, RANK), parallel, ranks)
    streams = torch.randn(1, 5, count * SIZE, generator=torch.Generator().manual_seed(1))
    behind, logits = computed(model, streams[0].clone())
    for (_, block), ours in zip(model.own_blocks(), behind, strict=True):
        assert isinstance(block, StreamsBlock) and isinstance(block.streams, GatedConnection)
        x, residual, weights = theirs_with(block.streams.gates, count, True)(streams)
        added = of_mlp(block, x, ranks).unsqueeze(-2) * weights.unsqueeze(-1)
        streams = residual + added.flatten(-2)
        torch.testing.assert_close(ours, streams[0], atol=1e-5, rtol=1e-5)
    assert isinstance(model.final_norm, GatedHead) and model.lm_head is not None
    last = theirs_with(model.final_norm.gates, count, False)(streams)[0]
    torch.testing.assert_close(logits, last @ model.lm_head.weight.T, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("count", "iterations"), [(2, 1), (3, 7), (4, 20)])
@torch.no_grad()
def test_balanced_streams(
    count: int, iterations: int, ranks: int, parallel: ParallelContext
) -> None:
    streams_config = BalancedStreamsConfig(count, iterations, 1e-2)
    model = made(streams_config, parallel, ranks)
    config = Glm5NextTextConfig(
        hidden_size=SIZE, hc_mult=count, hc_sinkhorn_iters=iterations, hc_eps=1e-2,
        rms_norm_eps=EPS,
    )  # fmt: skip
    streams = torch.randn(1, 5, count, SIZE, generator=torch.Generator().manual_seed(1))
    behind, logits = computed(model, streams[0].flatten(1))
    for (_, block), ours in zip(model.own_blocks(), behind, strict=True):
        assert isinstance(block, StreamsBlock) and isinstance(block.streams, BalancedConnection)
        theirs = Glm5NextTextHyperConnection(config)
        theirs.load_state_dict(block.streams.state_dict())
        after, mixing, x = theirs(streams)
        assert block.norm is not None
        own = of_mlp(block, normed(x[0], block.norm, EPS).float(), ranks)
        streams = after.unsqueeze(-1) * own[None].unsqueeze(-2) + torch.matmul(
            mixing.transpose(-1, -2), streams
        )
        torch.testing.assert_close(ours, streams[0].flatten(1), atol=1e-5, rtol=1e-5)
    assert isinstance(model.final_norm, MeanHead) and model.lm_head is not None
    last = normed(streams[0].mean(1), model.final_norm.norm, EPS).float()
    torch.testing.assert_close(logits, last @ model.lm_head.weight.T, atol=1e-5, rtol=1e-5)
