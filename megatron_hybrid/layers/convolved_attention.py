"""Compressed convolutional attention (Figliolia et al., 2025, arXiv 2510.04476), as ZAYA has it:
queries and keys go through two short convolutions, and half of the values come from the token
before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_hybrid.kernels.convolved_heads.protocol import HeadTokens
from megatron_hybrid.kernels.protocols import HeadNorms, Inputs, Reader
from megatron_hybrid.layers.attention import AttentionConfig, GroupedQueryAttention
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.mixer import LayerContext, parameter
from megatron_hybrid.layers.parts import (
    Parts,
    Rows,
    fused,
    prefixed,
    row_parallel,
    sections,
    shard,
)
from megatron_hybrid.layers.recurrent import RecurrentMixer


@dataclass(frozen=True)
class ConvolvedAttentionConfig:
    """`depthwise_width`, `grouped_width`: taps of the two convolutions. `attention`: heads, their
    positions, biases, the window."""

    attention: AttentionConfig
    depthwise_width: int = 2
    grouped_width: int = 2

    def mixer(self, context: LayerContext) -> ConvolvedAttention:
        """As in LayerConfig."""
        return ConvolvedAttention(self, context)


class ConvolvedProjection(RecurrentMixer):
    """Queries and keys u, and values, from which attention goes on:

        d[t] = sum over k of w[:, k] * u[t - (W0 - 1) + k]                depthwise
        y[t] = b + sum over k of G[k] d[t - (W1 - 1) + k]                 G: a matrix a head
        y + means                                                         of u: see ConvolvedHeads
        v[t]   the first channels of all heads from t, the others from t - 1

    Before a sequence u is 0, and the depthwise convolution gives its bias: so that this is 0 too,
    the bias is a part of b, times all taps of G. A value from before the first token is a bias,
    too: all values get theirs behind the delay.

    All history is the window of convolutions of one width, channel by channel, of which G's taps
    and the delay of values have ones and zeros for weights:

        | q | k | v | d (W1 - 1 times: each one token later than the last) |
    """

    kind = "convolved_attention"

    def __init__(self, config: ConvolvedAttentionConfig, context: LayerContext) -> None:
        attention = config.attention
        self.heads = context.share(attention.num_heads, "attention heads")
        self.kv_heads = context.share(attention.num_kv_heads, "KV heads with convolved queries")
        queries, keys = self.heads * attention.head_dim, self.kv_heads * attention.head_dim
        self.sections, self.convolved = [queries, keys, keys], queries + keys
        super().__init__(
            context,
            [*self.sections, *[queries, keys] * (config.grouped_width - 1)],
            max(config.depthwise_width, 2),
            bias=True,
        )
        self.config = config
        self.proj = context.to_rows(sum(self.sections), attention.qkv_bias)
        if self.proj.bias is not None:  # values have theirs behind their delay
            self.proj.bias.zero_()
        if self.conv_bias is not None:
            self.conv_bias.zero_()
        shape = self.convolved, config.grouped_width, attention.head_dim
        self.depthwise_bias = parameter((self.convolved,), context.dtype)
        self.grouped = parameter(shape, context.dtype)  # of a head's channels | older | newer |
        self.grouped_bias = parameter((self.convolved,), context.dtype)
        self.bias: Tensor  # [heads + KV heads, head_dim]; see after_loading

    @property
    def reader(self) -> Reader | None:
        return self.proj.reader

    @property
    def state_runs(self) -> tuple[list[tuple[int, int]], int]:
        rank, ranks, runs, start = self.parallel.rank, self.parallel.size, [], 0
        for size in self.conv_sections:
            runs.append((start + rank * size, size))
            start += ranks * size
        return runs, start

    def weight_parts(self) -> Parts:
        rank, ranks, (queries, keys, _) = self.parallel.rank, self.parallel.size, self.sections
        total = ranks * self.convolved
        q = Rows("q_proj", queries, rank * queries, ranks * queries)
        k = Rows("k_proj", keys, rank * keys, ranks * keys)
        values = [row for row in self._value_rows() if row.size]
        yield from fused([q, k, *values], self.proj)
        if self.conv_bias is not None and self.proj.bias is not None:
            yield from sections("bias", values, self.conv_bias[self.convolved :][:keys])
        for name, weight, bias in (
            ("conv_qk_depthwise", self._depthwise[:, None], self.depthwise_bias),
            ("conv_qk_grouped", self.grouped.mT, self.grouped_bias),
        ):
            rows = [
                Rows(name, queries, rank * queries, total),
                Rows(name, keys, ranks * queries + rank * keys, total),
            ]
            yield from sections("weight", rows, weight)
            yield from sections("bias", rows, bias)

    def _value_rows(self) -> Iterator[Rows]:
        """Of this rank's values those that come from their own token and from the one before: all
        ranks' values are the ones, and then the others."""
        keys, half = self.sections[2], self.sections[2] * self.parallel.size // 2
        start, stop = self.parallel.rank * keys, (self.parallel.rank + 1) * keys
        for name, first in (("v_proj_current", 0), ("v_proj_delayed", half)):
            own, end = max(start, first), min(stop, first + half)
            yield Rows(name, max(end - own, 0), own - first, half, has_bias=False)

    @property
    def matrices(self) -> Tensor:
        """[heads + KV heads, head_dim, taps * head_dim] of the grouped convolution."""
        return self.grouped.flatten(1).unflatten(0, (-1, self.config.attention.head_dim))

    @property
    def _depthwise(self) -> Tensor:
        """[channels, taps]: of the convolution's weights those that a checkpoint has."""
        return self.conv_weight[: self.convolved, -self.config.depthwise_width :]

    def after_loading(self) -> None:
        (current, _), delayed = self._value_rows(), self.convolved
        with torch.no_grad():
            taps = self.conv_weight
            taps[:delayed, : -self.config.depthwise_width] = 0
            taps[delayed:] = 0
            taps[delayed : delayed + current.size, -1] = 1
            taps[delayed + current.size :, -2] = 1  # from the token before
        super().after_loading()
        heads = self.depthwise_bias.float().unflatten(0, (-1, self.config.attention.head_dim))
        grouped = self.grouped.float().sum(1).unflatten(0, heads.shape)
        bias = (grouped @ heads[:, :, None]).flatten() + self.grouped_bias.float()
        self.derive("bias", bias.to(self.grouped.dtype).view(heads.shape))

    def forward(self, x: Inputs, plans: KernelPlans) -> Tensor:
        """[tokens, hidden] -> [tokens, heads + 2 * KV heads, head_dim], still to be normed and
        turned; reads and writes the sequences' states."""
        kernels, convolved = plans.kernels, self.convolved
        projected = self.proj(x, kernels)
        first, end = sum(self.sections), len(self.conv_weight)
        mixed = self.convolve(projected, plans, silu=False, channels=slice(first))
        newest, value = mixed.split([convolved, self.sections[2]], dim=1)
        taps = [newest]
        for start in range(first, end, convolved):
            channels = slice(start, start + convolved)
            taps.insert(0, self.convolve(taps[0], plans, silu=False, channels=channels))
        tokens = HeadTokens(projected, tuple(taps), value)
        mix = kernels.convolved_heads.mix
        return mix(tokens, self.matrices, self.bias, self.kv_heads)


class ConvolvedAttention(GroupedQueryAttention):
    """Attention over what a ConvolvedProjection gives. Queries and keys have the length
    sqrt(head_dim), keys times a learned temperature for each head: queries are multiplied by it
    instead, which is the same."""

    key_role = "qkv_proj.k_proj.weight"

    def __init__(self, config: ConvolvedAttentionConfig, context: LayerContext) -> None:
        super().__init__(config.attention, context)
        self.qkv_proj = ConvolvedProjection(config, context)
        self.temperature = parameter((self.kv_heads,), torch.float32)
        # Shorter ones are left shorter, as where transformers divides by no less than eps.
        self.eps = torch.finfo(context.dtype).eps ** 2 / config.attention.head_dim
        self.ones: Tensor  # [head_dim]
        self.temperatures: Tensor  # [heads, 1]

    @property
    def recurrent(self) -> RecurrentMixer:
        return self.qkv_proj

    @property
    def reader(self) -> Reader | None:
        return self.qkv_proj.reader

    def weight_parts(self) -> Parts:
        ranks = self.parallel
        yield from prefixed("qkv_proj", self.qkv_proj.weight_parts())
        yield shard("qk_norm.temp", self.temperature, 0, ranks.rank, self.config.num_kv_heads)
        yield from row_parallel("o_proj", self.o_proj)

    def plain_weights(self) -> Iterator[Tensor]:
        """What tokens are multiplied with besides linear layers' weights, of heads one's."""
        yield self.qkv_proj.matrices[0]

    def after_loading(self) -> None:
        """What is made from the weights."""
        each = self.temperature.repeat_interleave(self.heads // self.kv_heads)
        self.derive("temperatures", each[:, None].to(self.dtype))
        self.derive("ones", each.new_ones(self.config.head_dim, dtype=self.dtype))

    def forward(self, x: Inputs, plans: KernelPlans) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; writes the tokens' keys and values, reads and
        writes the sequences' states."""
        kernels, cache = plans.kernels, self._cache(plans, self.layer)
        query = self._prepare(self.qkv_proj(x, plans), plans)
        out = kernels.attention.attend(query, cache, plans.attention[self.kind])
        return self.o_proj(out.flatten(1), kernels)

    def store(self, x: Tensor, plans: KernelPlans) -> None:
        """As in CachedAttention."""
        self._prepare(self.qkv_proj(x, plans), plans)

    def _prepare(self, qkv: Tensor, plans: KernelPlans) -> Tensor:
        """What the projection gives -> queries [tokens, heads, head_dim]; keys and values go into
        the cache."""
        norms = HeadNorms(self.ones, self.ones, self.eps)
        query = plans.kernels.rope.prepare(
            qkv,
            norms,
            plans.rotation.get(self.kind),
            self._cache(plans, self.layer),
            plans.attention[self.kind],
        )
        return query * self.temperatures
