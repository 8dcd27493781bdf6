"""Inkling's attention: no positions, but a bias by distance, which each head of a token mixes from
a bank of them; short convolutions of keys, of values and of the result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import AttentionShape, KVCache
from megatron_hybrid.kernels.paged_attention.protocol import RelativeBias
from megatron_hybrid.kernels.protocols import Inputs
from megatron_hybrid.layers.attention import (
    Attention,
    AttentionConfig,
    GroupedQueryAttention,
)
from megatron_hybrid.layers.convolutions import Convolutions, of_hidden
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.mixer import LayerContext, parameter
from megatron_hybrid.layers.parts import Parts, Rows, whole


class LogScaling(NamedTuple):
    """Scores of the token at position p are multiplied by 1 + alpha log((p + 1) / floor), from
    where that is more than 1 on."""

    floor: int
    alpha: float

    def of(self, positions: Tensor) -> Tensor:
        """[tokens] -> [tokens] float32."""
        behind = (positions + (1 - self.floor)).clamp(min=0).float() / self.floor
        return torch.log1p(behind) * self.alpha + 1


@dataclass(frozen=True)
class RelativeAttentionConfig(AttentionConfig):
    """Sizes of one layer. `profiles`, `extent`: of the bank (see RelativeBias)."""

    profiles: int = 16
    extent: int = 1024
    log_scaling: LogScaling | None = None
    conv_width: int = 4

    def mixer(self, context: LayerContext) -> GroupedQueryAttention:
        """As in LayerConfig."""
        return RelativeAttention(self, context)


class RelativeAttention(Attention):
    """Unlike other mixers' its result is the sum, on every rank: the BlockForm says `whole`. The
    bank is whole on every rank, and so are the windows of the result's convolution; those of keys
    and values are where these are."""

    config: RelativeAttentionConfig

    def __init__(self, config: RelativeAttentionConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        self.bank = parameter((config.profiles, config.extent), context.dtype)
        keys, values = (
            rows._replace(role=f"{name}_sconv") for name, rows in zip("kv", self._kv(), strict=True)
        )
        convolved = [keys, values, of_hidden(context)]
        self.convolutions = Convolutions(context, config.conv_width, convolved)

    @property
    def recurrent(self) -> Convolutions:
        return self.convolutions

    def shape(self, block_size: int) -> AttentionShape:
        return replace(super().shape(block_size), relative=True)

    def _beside(self) -> list[Rows]:
        """The weights of profiles."""
        config: RelativeAttentionConfig = self.config
        rows = self.heads * config.profiles
        first, total = self.parallel.rank * rows, config.num_heads * config.profiles
        return [Rows("r_proj", rows, first, total)]

    def weight_parts(self) -> Parts:
        yield from super().weight_parts()
        yield whole("bank", self.bank)
        yield from self.convolutions.weight_parts()

    def forward(self, x: Inputs, plans: KernelPlans) -> Tensor:
        total = self.parallel.all_reduce(super().forward(x, plans))
        return self.convolutions.add(total, plans, "sconv")

    def attend(self, projected: Tensor, plans: KernelPlans, layer: int) -> Tensor:
        kernels, cache = plans.kernels, self._cache(plans, layer)
        qkv, weights = projected.split(self.qkv_sections, dim=1)
        query = self._prepare(qkv, plans, cache)
        weights = weights.unflatten(1, (self.heads, -1))
        scaling = self.config.log_scaling
        if scaling is not None:  # of both addends of a score
            assert plans.positions is not None
            factor = scaling.of(plans.positions)[:, None, None]
            query, weights = ((x * factor).to(x.dtype) for x in (query, weights))
        bias = RelativeBias(weights, self.bank)
        out = kernels.attention.attend(query, cache, plans.attention[self.kind], bias)
        return self.o_proj(out.flatten(1), kernels)

    def _prepare(self, qkv: Tensor, plans: KernelPlans, cache: KVCache) -> Tensor:
        """As in Attention; what goes on is keys and values behind their convolutions."""
        query, kv = qkv.tensor_split([qkv.shape[1] - 2 * self.kv_heads * self.config.head_dim], 1)
        convolved = self.convolutions.add(kv, plans, "k_sconv", "v_sconv")
        return super()._prepare(torch.cat((query, convolved), dim=1), plans, cache)
