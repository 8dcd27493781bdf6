"""Adapters at random, to measure with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_hybrid.models.families.registry import family_of
from megatron_hybrid.models.hybrid_model import HybridModel


def random_adapter(
    model: HybridModel, rank: int, seed: int, *, experts: bool = False, strength: float = 0.01
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Of all linear layers of a model on one rank, by PEFT's names, and its configuration.
    `strength`: about what they add, beside inputs of as many numbers of size 1."""
    generator = torch.Generator().manual_seed(seed)
    family, tensors = family_of(model.config.model_type), dict[str, Tensor]()
    for block, part, _ in model.adapted_parts(experts):
        places = family.places(model.config, block, part.role)
        place = next(place for place in places if place.index is None)  # of single experts
        module = place.name.removesuffix(".weight")
        rows, columns = part.shape
        for name, shape in (("A", (rank, columns)), ("B", (rows * place.parts, rank))):
            key = f"{module}.lora_{name}.weight"
            if key not in tensors:
                numbers = torch.randn(shape, generator=generator) / shape[1] ** 0.5
                tensors[key] = numbers.to(model.dtype)
    return tensors, {"r": rank, "lora_alpha": rank * strength}
