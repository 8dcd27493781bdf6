"""Experts on a GPU in batch-invariant mode: a token's bits are a function of its row and of the
weights, not of how many tokens there are, who else goes to the same experts, or in which order.

Every product sums its columns in order in one accumulator of float32. Tensor cores then give the
same bits in any tile (measured on H100), and so the kernels are chosen by how many rows experts
have, as in triton.py: in_order_few.py's, whose weights come by TMA; triton.py's grouped products;
triton_prompts.py's. They round alike: what goes into the second product, and what comes out of it
times the pair's weight, to the type. In float32, and of weights in other formats, one kernel has
any number of tokens. A token's experts are added up in the order of their numbers.

Nothing depends on values on the host, so that every call may be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_hybrid.kernels.experts import in_order_few, triton_prompts, triton_quantized
from megatron_hybrid.kernels.experts.in_order_routing import add_norm_route as add_norm_route
from megatron_hybrid.kernels.experts.in_order_routing import route as route
from megatron_hybrid.kernels.experts.in_order_sums import OrderedParts
from megatron_hybrid.kernels.experts.protocol import (
    ExpertWeights,
    Shared,
    SharedExpert,
    SharedResult,
)
from megatron_hybrid.kernels.experts.triton import (
    Tile,
    Tiles,
    choose_tiles,
    mix_grouped,
    plain_weight,
)
from megatron_hybrid.kernels.experts.triton import add_shared as add_shared

# --lora-experts is refused in this mode.
from megatron_hybrid.kernels.experts.triton import mix_adapted as mix_adapted
from megatron_hybrid.kernels.linear.formats import QuantizedWeight
from megatron_hybrid.kernels.linear.reference import plain_rows
from megatron_hybrid.kernels.protocols import Inputs

# Of float32, whose products are no tensor cores': any number of tokens has these tiles.
_NARROW = Tile(32, 32, warps=4, stages=2)
_IN_FLOAT32 = Tiles(16, _NARROW, _NARROW)


def takes_shared(x: Inputs, layer: ExpertWeights, shared: SharedExpert) -> bool:
    """As in Experts."""
    plain = plain_rows(x)
    # So few tokens have few pairs.
    return in_order_few.can_mix(plain, layer, 0) and in_order_few.takes_shared(plain, shared)


def mix(
    x: Inputs,
    experts: Tensor,
    weights: Tensor,
    layer: ExpertWeights,
    shared: Shared | None = None,
) -> Tensor:
    """As in Experts; `experts` must lie within [0, number of experts), or be that number where some
    are elsewhere."""
    mixed = mix_parts(x, experts, weights, layer, shared)
    return mixed if isinstance(mixed, Tensor) else mixed.sum()


def mix_parts(
    x: Inputs,
    experts: Tensor,
    weights: Tensor,
    layer: ExpertWeights,
    shared: Shared | None = None,
) -> Tensor | OrderedParts:
    """As in Experts."""
    plain = plain_rows(x).contiguous()
    if not len(plain):
        return torch.empty_like(plain)
    experts, weights = experts.contiguous(), weights.contiguous()
    if isinstance(shared, SharedExpert):
        parts, own = in_order_few.expert_parts(plain, experts, weights, layer, shared=shared)
        assert own is not None
        shared = SharedResult(own, shared.gate)
    else:
        parts = _expert_parts(x, plain, experts, weights, layer)
    ordered = OrderedParts(parts, experts, layer.down.shape[0] if layer.elsewhere else 0)
    return ordered if shared is None else ordered.and_shared(shared, plain)


def _expert_parts(
    x: Inputs, plain: Tensor, experts: Tensor, weights: Tensor, layer: ExpertWeights
) -> Tensor:
    """[pairs, width]: what each pair's expert makes of its token, times the pair's weight. Those of
    experts that are elsewhere hold anything."""
    pairs, every, dtype = experts.numel(), layer.up.shape[0] + layer.elsewhere, plain.dtype
    if isinstance(layer.up, QuantizedWeight) and _are_read_as_they_are(layer):
        # Steps are as deep for any number of pairs: what they give is added up outside of products.
        counted = pairs if dtype.itemsize == 2 else 0
        tile = triton_quantized.choose_tile(counted, every, dtype)
        return triton_quantized.mix(x, experts, weights, layer, tile).parts
    layer = layer._replace(up=plain_weight(layer.up, dtype), down=plain_weight(layer.down, dtype))
    if in_order_few.can_mix(plain, layer, pairs):
        return in_order_few.expert_parts(plain, experts, weights, layer)[0]
    if triton_prompts.can_mix(plain, layer, pairs):
        return triton_prompts.expert_parts(plain, experts, weights, layer)
    tiles = _IN_FLOAT32
    if dtype.itemsize == 2:
        tiles = choose_tiles(pairs, every, layer.gated, dtype)
    return mix_grouped(plain, experts, weights, layer, tiles).parts


def _are_read_as_they_are(layer: ExpertWeights) -> bool:
    """Whether triton_quantized.py can read the weights: in rows of 16 bytes."""
    both = (layer.up, layer.down)
    return all(isinstance(w, QuantizedWeight) and w.values.shape[-1] % 16 == 0 for w in both)
