"""Which blocks a model's letters become."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_hybrid.layers.moe import MoE
from megatron_hybrid.models.blocks import Block, MoEBlock
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import ParallelContext

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
