"""Experts with weights in float4_e2m1 for few pairs an expert (kernels/linear/fp4_few.cu): up to
FEW_TOKENS pair by pair, otherwise in blocks of pairs that share an expert."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_hybrid.kernels import cuda
from megatron_hybrid.kernels.experts.pairs import FEW_TOKENS
from megatron_hybrid.kernels.experts.protocol import ExpertWeights
from megatron_hybrid.kernels.experts.sums import PairParts
from megatron_hybrid.kernels.linear.formats import QuantizedWeight
from megatron_hybrid.kernels.linear.fp4_few import INPUTS, SOURCE, fits, launch

MOST_EXPERTS = 1024
# Pairs that an expert has on average up to which these kernels are the fastest.
FEW_PAIRS = 8


def can_mix(layer: ExpertWeights, pairs: int, dtype: torch.dtype) -> bool:
    """Whether these kernels are for so many pairs and the layer's weights."""
    num_experts = layer.up.shape[0]
    few = pairs <= FEW_PAIRS * (num_experts + layer.elsewhere) and num_experts <= MOST_EXPERTS
    whole = layer.down.shape[-1] % 16 == 0  # 16 rows of `up` are all gates or none
    few = few and layer.activation in ("silu", "relu2")
    return few and whole and fits(layer.up, dtype) and fits(layer.down, dtype)


def mix(x: Tensor, experts: Tensor, weights: Tensor, layer: ExpertWeights) -> Tensor | PairParts:
    """mix_parts as in Experts, of `experts` and so on as triton.mix has them; x bfloat16."""
    up, down = layer.up, layer.down
    assert isinstance(up, QuantizedWeight) and isinstance(down, QuantizedWeight)
    (tokens, chosen), (num_experts, width, inner) = experts.shape, down.shape
    pairs, partial = tokens * chosen, layer.elsewhere > 0
    experts = experts.int()
    slots = None if tokens <= FEW_TOKENS else group(experts, num_experts)
    blocks = pairs if slots is None else _most_blocks(pairs, num_experts)
    hidden = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    launch(
        "UP", x, up, hidden, blocks=blocks, experts=experts, slots=slots, chosen=chosen,
        activation=layer.activation, gated=layer.gated,
    )  # fmt: skip
    parts = torch.empty(pairs, width, device=x.device)
    y = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    launch(
        "DOWN", hidden, down, y, blocks=blocks, experts=experts, slots=slots, chosen=chosen,
        shares=weights, parts=parts,
    )  # fmt: skip
    if slots is None:
        return y
    return PairParts(parts, experts, num_experts if partial else 0, dtype=x.dtype)


def group(experts: Tensor, num_experts: int) -> Tensor:
    """experts [tokens, chosen] int32 -> the source's slots. How many there is room for depends on
    shapes only."""
    pairs = experts.numel()
    blocks = _most_blocks(pairs, num_experts)
    slots = torch.empty(blocks * (INPUTS + 1) + 1, dtype=torch.int32, device=experts.device)
    kernel = cuda.kernel(SOURCE, "group", 0, experts.device)
    kernel.launch(1, 1024, experts, slots, pairs, num_experts, blocks)
    return slots


def _most_blocks(pairs: int, num_experts: int) -> int:
    return min(pairs, pairs // INPUTS + num_experts)
