"""Models that divide their logits by a constant (Granite, Falcon-H1) have it in a weight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron_hybrid.kernels.linear.formats import QuantizedWeight, WeightFormat
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import ParallelContext
from tests.models.conftest import TinyModel

Tiny = Callable[[str], TinyModel]


@pytest.mark.parametrize("family", ["granite_moe_hybrid", "falcon_h1"])
@pytest.mark.parametrize("quantised", [False, True])
def test_norm_and_head_together_divide_once(
    tiny: Tiny, parallel: ParallelContext, family: str, quantised: bool
) -> None:
    """The norm, or a quantised head, whose inputs' scale is meant for undivided ones."""
    config = ModelFolder.open(tiny(family).folder).config
    format = WeightFormat("float8_e4m3fn") if quantised else None
    bf16 = torch.bfloat16
    model = HybridModel(
        config, parallel, bf16, bf16, torch.float32,
        formats=lambda block, role: format if role == "lm_head" else None,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    given = {}
    for _, part in model.weight_parts():
        if part.role in ("final_norm", "lm_head"):
            given[part.role] = torch.randn(part.shape, generator=generator).to(bf16)
            part.put(given[part.role])
    norm = model.final_norm.weight.double()
    divided = given["final_norm"].double() / config.logits_divisor
    if model.lm_head is None or not quantised:  # the embedding is a head too
        assert torch.allclose(norm, divided, rtol=1e-6, atol=0)
        assert model.lm_head is None or torch.equal(model.lm_head.weight, given["lm_head"])
        return
    assert torch.equal(norm, given["final_norm"].double())
    head = model.lm_head.weight
    assert isinstance(head, QuantizedWeight)
    expected = given["lm_head"].double() / config.logits_divisor
    assert torch.allclose(head.dequantize().double(), expected, rtol=2**-4, atol=1e-3)
