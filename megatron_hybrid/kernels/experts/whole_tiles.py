"""reference.py on products of whole tiles: see linear/whole_tiles.py. What a token's experts give
is added up in the order of their numbers."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from megatron_hybrid.kernels.experts import reference
from megatron_hybrid.kernels.experts.protocol import ExpertAdapters, ExpertWeights
from megatron_hybrid.kernels.experts.reference import add_norm_route, takes_shared
from megatron_hybrid.kernels.linear.whole_tiles import multiply
from megatron_hybrid.kernels.lora import whole_tiles as lora_by_tiles
from megatron_hybrid.kernels.protocols import Inputs

__all__ = [
    "add_norm_route", "add_shared", "mix", "mix_adapted", "mix_parts", "route", "takes_shared",
]  # fmt: skip

route = partial(reference.route, product=multiply)
mix = mix_parts = partial(reference.mix, product=multiply)


def mix_adapted(
    x: Inputs,
    experts: Tensor,
    weights: Tensor,
    layer: ExpertWeights,
    adapters: ExpertAdapters,
) -> Tensor:
    """As in Experts."""
    return mix(x, experts, weights, layer, adapters=adapters, add=lora_by_tiles.add)


add_shared = partial(reference.add_shared, product=multiply)
