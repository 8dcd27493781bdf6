"""Inkling 2's attention: a bias by distance, and a sink for each head of a token; queries and keys,
and what biases are mixed by, are no longer than a constant; gates; short convolutions of keys, of
values and of the result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megatron_hybrid.kernels.contract import AttentionShape
from megatron_hybrid.kernels.linear.reference import plain_rows
from megatron_hybrid.kernels.paged_attention.protocol import RelativeBias
from megatron_hybrid.kernels.protocols import Inputs
from megatron_hybrid.layers.attention import GroupedQueryAttention
from megatron_hybrid.layers.convolutions import Convolutions, DynamicConvolutions, of_hidden
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.linear import Linear
from megatron_hybrid.layers.mixer import LayerContext, parameter
from megatron_hybrid.layers.parts import Parts, Rows, fused, row_parallel, shard, whole
from megatron_hybrid.layers.relative_attention import RelativeAttentionConfig


@dataclass(frozen=True)
class SinkAttentionConfig(RelativeAttentionConfig):
    """Sizes of one layer. `longest`: of queries and keys; `longest_mixing`: of the weights of the
    bank's profiles. `dynamic`: queries, keys and values have an input of their own each, [tokens, 3
    * hidden] together, and the convolutions of keys and values are DynamicConvolutions."""

    longest: float = 22.627416997969522
    longest_mixing: float = 8.0
    dynamic: bool = False

    @property
    def conv_scales(self) -> tuple[float, float]:
        """Of convolutions, and of dynamic ones: as if all taps and x itself were of one size."""
        return (self.conv_width + 1) ** -0.5, (2 * self.conv_width + 1) ** -0.5

    def mixer(self, context: LayerContext) -> SinkAttention:
        """As in LayerConfig."""
        return SinkAttention(self, context)


class SinkAttention(GroupedQueryAttention):
    """As RelativeAttention its result is the sum, on every rank: the BlockForm says `whole`."""

    config: SinkAttentionConfig
    key_role = "k_proj.weight"

    def __init__(self, config: SinkAttentionConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        self.projections = nn.ModuleList(
            context.to_rows(sum(row.size for row in rows), bias=False) for rows in self._rows()
        )
        self.bank = parameter((config.profiles, config.extent), context.dtype)
        self.q_scale = parameter((self.heads, config.head_dim), context.dtype)
        self.r_scale = parameter((self.heads, config.profiles), context.dtype)
        self.eps = context.eps
        self.ones: Tensor  # [head_dim]; see after_loading
        keys, values = self._kv()
        kv = [keys._replace(role="k_sconv"), values._replace(role="v_sconv")]
        width, (scale, kv_scale) = config.conv_width, config.conv_scales
        self.convolutions: Convolutions | DynamicConvolutions
        if config.dynamic:
            self.convolutions = DynamicConvolutions(
                context, width, kv, config.head_dim, scale, kv_scale
            )
        else:
            self.convolutions = Convolutions(context, width, [*kv, of_hidden(context)], scale)

    @property
    def recurrent(self) -> Convolutions:
        return self.convolutions

    def shape(self, block_size: int) -> AttentionShape:
        return replace(super().shape(block_size), relative=True, sinks=True)

    def _kv(self) -> list[Rows]:
        config = self.config
        first = self.parallel.rank * config.num_kv_heads // self.parallel.size
        return [self._of_heads(f"{name}_proj", config.head_dim, first) for name in "kv"]

    def _of_heads(self, role: str, each: int, first_kv: int | None = None) -> Rows:
        """`each` rows of every head, or KV head, of which this rank has those from `first_kv`."""
        if first_kv is None:
            count, first, total = self.heads, self.parallel.rank * self.heads, self.config.num_heads
        else:
            count, first, total = self.kv_heads, first_kv, self.config.num_kv_heads
        return Rows(role, count * each, first * each, total * each)

    def _rows(self) -> list[list[Rows]]:
        """Of each input's projection."""
        config, (key, value) = self.config, self._kv()
        sizes = {"q_proj": config.head_dim, "r_proj": config.profiles, "g_proj": config.head_dim}
        of_queries = [self._of_heads(*row) for row in {**sizes, "sink_proj": 1}.items()]
        if not config.dynamic:
            return [[*of_queries, key, value]]
        first = key.start // config.head_dim
        taps = [self._of_heads(f"{x}_sconv.weight_proj", config.conv_width, first) for x in "kv"]
        return [of_queries, [key, taps[0]], [value, taps[1]]]

    def weight_parts(self) -> Parts:
        rank, total = self.parallel.rank, self.config.num_heads
        for rows, layer in zip(self._rows(), self.projections, strict=True):
            assert isinstance(layer, Linear)
            yield from fused(rows, layer)
        yield from row_parallel("o_proj", self.o_proj)
        yield shard("q_scale", self.q_scale, 0, rank, total)
        yield shard("r_scale", self.r_scale, 0, rank, total)
        yield whole("bank", self.bank)
        yield from self.convolutions.weight_parts()

    def after_loading(self) -> None:
        """What values are normed with."""
        self.derive("ones", torch.ones_like(self.q_scale[0]))

    def _projected(self, x: Inputs, plans: KernelPlans) -> Iterator[Tensor]:
        """In the order of their rows."""
        inputs = plain_rows(x).chunk(len(self.projections), dim=1)
        for own, rows, layer in zip(inputs, self._rows(), self.projections, strict=True):
            sizes = [row.size for row in rows]
            yield from layer(own.contiguous(), plans.kernels).split(sizes, dim=1)

    def forward(self, x: Inputs, plans: KernelPlans) -> Tensor:
        """[tokens, inputs * hidden] -> [tokens, hidden]; writes the tokens' keys and values, reads
        and writes the sequences' windows."""
        config, kernels, paged = self.config, plans.kernels, plans.attention[self.kind]
        query, mixing, gate, sinks, *of_kv = self._projected(x, plans)
        self._append(of_kv, plans)
        clip, by_head = kernels.norm.l2_clip, (self.heads, -1)
        query = clip(query.unflatten(1, by_head), self.q_scale, config.longest)
        mixing = clip(mixing.unflatten(1, by_head), self.r_scale, config.longest_mixing)
        if config.log_scaling is not None:
            assert plans.positions is not None
            factor = config.log_scaling.of(plans.positions)[:, None, None]
            query, mixing = ((y * factor).to(y.dtype) for y in (query, mixing))
        bias = RelativeBias(mixing, self.bank)
        cache = self._cache(plans, self.layer)
        out = kernels.attention.attend(query, cache, paged, bias, sinks).flatten(1)
        gated = kernels.activation.gate(out, gate, "sigmoid", self.o_proj.reader)
        total = self.parallel.all_reduce(self.o_proj(gated, kernels))
        return self.convolutions.add(total, plans, "sconv")

    def store(self, x: Tensor, plans: KernelPlans) -> None:
        """As in CachedAttention."""
        _, _, _, _, *of_kv = self._projected(x, plans)
        self._append(of_kv, plans)

    def _append(self, projected: list[Tensor], plans: KernelPlans) -> None:
        """Of keys and values, as projected, and their taps where these are dynamic: what is cached
        of them, into the cache."""
        convolutions, norm = self.convolutions, plans.kernels.norm
        if isinstance(convolutions, DynamicConvolutions):
            key, of_key, value, of_value = projected
            taps = torch.cat((of_key, of_value), dim=1).float()
            taps = taps.unflatten(1, (-1, self.config.conv_width))
            kv = convolutions.of_kv(torch.cat((key, value), dim=1), taps, plans)
        else:
            kv = convolutions.add(torch.cat(projected, dim=1), plans, "k_sconv", "v_sconv")
        key, value = kv.unflatten(1, (2 * self.kv_heads, -1)).chunk(2, dim=1)
        key = norm.l2_clip(key, None, self.config.longest)
        value = norm.rms_norm(value, self.ones, self.eps)
        cache, paged = self._cache(plans, self.layer), plans.attention[self.kind]
        plans.kernels.attention.append(key, value, cache, paged)
