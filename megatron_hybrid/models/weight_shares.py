"""How much of a model's weights a token goes through: all of them, but of experts, and of rows of
tables, those that it chooses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from megatron_hybrid.layers.linear import Linear
from megatron_hybrid.layers.moe import MoE
from megatron_hybrid.layers.ngram_table import NGramTable


class WeightShare(NamedTuple):
    """Some of a model's weights that every token goes through, or of `experts` the `chosen`."""

    parameters: int
    bytes: int
    experts: int = 1
    chosen: int = 1

    @property
    def a_tokens(self) -> float:
        """Parameters that one token goes through."""
        return self.parameters * self.chosen / self.experts

    def read_by(self, tokens: int) -> float:
        """Bytes that so many tokens together are expected to read."""
        return self.bytes * (1 - (1 - self.chosen / self.experts) ** tokens)


def weight_shares(root: nn.Module) -> Iterator[WeightShare]:
    """Of a module and all in it, each once; the weights need not be there."""
    routed = dict[nn.Module, MoE]()
    for module in root.modules():
        if isinstance(module, MoE):
            routed |= {module.up_proj: module, module.down_proj: module}
        own = list(module.parameters(recurse=False))
        parameters, size = sum(x.numel() for x in own), sum(x.nbytes for x in own)
        if isinstance(module, Linear):  # whose parameters may be codes and scales
            bias = 0 if module.bias is None else module.bias.numel()
            parameters = module.inputs * module.outputs + bias
            size = sum(kept for _, kept in module.kept_bytes())
        if isinstance(module, NGramTable):  # which may be no parameter
            table = module.there
            yield WeightShare(table.numel(), table.nbytes, module.rows, module.heads)
        elif module in routed:
            config = routed[module].config
            yield WeightShare(parameters, size, config.num_experts, config.experts_per_token)
        elif own:
            yield WeightShare(parameters, size)
