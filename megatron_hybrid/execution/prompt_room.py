"""Up to which length prompts are worth a CUDA graph.

Without a graph a step takes as long as its launches from Python or as the device computes it,
whichever is longer; with one only the latter, but for padding, and attention that is slower on long
contexts. So there is something to gain where the device is the faster of the two: by small models,
by ranks that have a small part of one, and by few tokens.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.layers.ngram_table import TABLES
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.weight_shares import weight_shares

NO_LIMIT = 2**62

# Seconds that launching a block takes, with its share of the step: 0.24 (Nemotron-H) to 0.5
# (Qwen3.5-MoE) ms beside an H200.
_LAUNCHES = 0.33e-3
# Bytes a second of weights that are read once, and bytes of a token's weights, which is as many
# operations in 16 bits: of an H200, whose products are faster and whose other kernels are not in
# it. (Weights in 8 bits are multiplied twice as fast.)
_READ, _MULTIPLIED = 4.2e12, 500e12
# The part of the launches' time that attention may take, and its operations a second.
_ATTENTION, _ATTENDED = 0.25, 300e12


class PromptRoom(NamedTuple):
    """Of the largest graphs with prompts."""

    tokens: int = 0
    pairs: int = NO_LIMIT  # of a prompt's token and one that it may see

    @classmethod
    def of(
        cls, model: HybridModel, kernels: KernelSet, prompts: int, block_size: int
    ) -> PromptRoom:
        """Of one rank's part of a model, whose weights need not be there; for steps of up to so
        many prompts. `kernels`: that it runs on."""
        launches = _LAUNCHES * len(model.blocks)
        read = sum(size for kind, size in model.weight_bytes().items() if TABLES not in kind)
        left = launches - read / _READ
        tokens = max(0, int(left * _MULTIPLIED / max(bytes_of_a_token(model), 1)))
        kinds = model.attention_kinds
        shapes = {kind: layer.shape(block_size) for kind, layer in kinds.items()}
        layers = Counter(a.kind for _, block in model.own_blocks() if (a := block.attention))
        operations = sum(  # of a pair
            4 * layers[kind] * shape.heads * shape.head_dim for kind, shape in shapes.items()
        )
        if not shapes:
            return cls(tokens)
        captured = (own.most_captured(kernels, block_size, prompts) for own in kinds.values())
        return cls(
            min(tokens, *captured),
            int(_ATTENTION * launches * _ATTENDED / max(operations, 1)),
        )


def bytes_of_a_token(model: HybridModel) -> float:
    """Of this rank's weights in blocks, those that the products of one token read."""
    return sum(one.read_by(1) for block in model.blocks for one in weight_shares(block))


NO_ROOM = PromptRoom()
