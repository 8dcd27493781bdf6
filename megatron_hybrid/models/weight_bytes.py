"""What a model's weights take."""

from __future__ import annotations

from collections import Counter

from torch import nn

from megatron_hybrid.layers.linear import Linear
from megatron_hybrid.layers.ngram_table import NGramTable


def weight_bytes(model: nn.Module) -> dict[str, int]:
    """Of one rank, by the format that they are kept in."""
    found = Counter[str]()
    for layer in model.modules():
        if isinstance(layer, Linear | NGramTable):
            kept = list(layer.kept_bytes())
        else:
            own = layer.parameters(recurse=False)
            kept = [(str(weight.dtype), weight.nbytes) for weight in own]
        for name, size in kept:
            found[name.removeprefix("torch.")] += size
    return dict(found)
