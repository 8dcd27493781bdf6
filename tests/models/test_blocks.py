"""Which blocks a model's letters become."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.layers.inputs import LayerCaches
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.mlp import MLP, MLPConfig
from megatron_hybrid.layers.moe import MoE
from megatron_hybrid.layers.norm import RMSNorm
from megatron_hybrid.models.blocks import Block, MoEBlock
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.models.config import BlockForm, HybridModelConfig
from megatron_hybrid.models.hidden import Hidden
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import ParallelContext, RankGroup
from tests.thorough import A_THIRD

CONFIGS = Path(__file__).parents[2] / "configs" / "models"


@pytest.mark.parametrize(
    "name", ["granite-4.0-h-tiny", "qwen3.5-35b-a3b", "nemotron-3-nano-30b-a3b"]
)
def test_blocks_of_experts_begin_with_their_router(name: str, parallel: ParallelContext) -> None:
    with torch.device("meta"):
        config = ModelFolder.open(CONFIGS / name).config
        model = HybridModel(config, parallel, *(torch.bfloat16,) * 3)
    kinds = {(type(block), isinstance(block.mixer, MoE)) for block in model.blocks}
    assert kinds == {(Block, False), (MoEBlock, True)}


FORMS = (
    BlockForm(),
    BlockForm(norm=False, post_norm=True, multiplier=0.7),
    BlockForm(post_norm=True),
    BlockForm(from_norm=True, post_norm=True),
)
SCALED = BlockForm(from_norm=True, multiplier=1.3, stream_multiplier=3.5)
CHAINS = [
    *product(FORMS, repeat=3), *product((SCALED, FORMS[0], FORMS[3]), repeat=3),
]  # fmt: skip
SIZE, MULTIPLIER, EPS = 16, 0.6, 0.05


class Twice(RankGroup):
    """Of two ranks that have the same."""

    def __init__(self, alone: RankGroup) -> None:
        self.__dict__.update(vars(alone), size=2)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor + tensor


@A_THIRD
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("forms", CHAINS)
def test_norms_are_where_the_forms_say(
    forms: tuple[BlockForm, ...], ranks: int, parallel: ParallelContext
) -> None:
    """... behind a mixer after the ranks' parts of it are summed. Their eps is large enough to be
    noticed where a stream is kept divided."""
    config = HybridModelConfig(
        "made_up", "---", 8, SIZE, 64, EPS, torch.float32, residual_multiplier=MULTIPLIER,
        mlp=MLPConfig(24, gated=True, activation="silu"), forms=forms,
    )  # fmt: skip
    model = HybridModel(config, parallel, *(torch.float32,) * 3)
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5)
    model.after_loading()
    residual = torch.randn(5, SIZE, generator=generator)
    expected, mixed = residual.double(), None
    plans = KernelPlans(LayerCaches({}, {}, torch.empty(0)), model.kernels)
    for form, (_, block) in zip(forms, model.own_blocks(), strict=True):
        assert isinstance(block.mixer, MLP)
        if ranks == 2:
            block.ranks = Twice(block.ranks)
            whole = block.entering.ranks is None
            block.entering = block.entering._replace(ranks=None if whole else block.ranks)
        own = expected if block.norm is None else normed(expected, block.norm, EPS)
        up, down = block.mixer.up_proj.weight, block.mixer.down_proj.weight
        assert isinstance(up, Tensor) and isinstance(down, Tensor)
        gate, value = (own @ up.double().T).chunk(2, dim=1)
        own = ranks * (F.silu(gate) * value) @ down.double().T
        own = own if block.post_norm is None else normed(own, block.post_norm, EPS)
        assert (block.norm is not None, block.post_norm is not None) == (form.norm, form.post_norm)
        mixed, residual = block(mixed, residual, plans)
        if form.from_norm:
            assert block.norm is not None
            expected = form.stream_multiplier * normed(expected, block.norm, EPS)
        expected = expected + MULTIPLIER * form.multiplier * own
    assert isinstance(mixed, Tensor) and model.final_norm is not None and model.lm_head is not None
    if ranks == 2 and model.leaving.ranks is not None:
        model.leaving = model.leaving._replace(ranks=Twice(model.leaving.ranks))
    nothing: Any = None
    logits = model.logits(Hidden(residual, mixed, None), nothing, nothing)
    head = model.lm_head.weight
    assert isinstance(head, Tensor)
    expected = normed(expected, model.final_norm, EPS) @ head.double().T
    torch.testing.assert_close(logits.double(), expected, atol=1e-5, rtol=1e-5)


def normed(x: Tensor, norm: RMSNorm, eps: float) -> Tensor:
    scale = (x.square().mean(dim=1, keepdim=True) + eps).rsqrt()
    return x * scale * norm.weight.double()
