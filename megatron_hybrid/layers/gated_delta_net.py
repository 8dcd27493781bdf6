"""The gated delta net: projection, short convolution of q, k and v, gated delta rule, gated norm of
each head, projection (Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.kernels.protocols import DeltaRuleConstants, DeltaRuleTokens, Inputs
from megatron_hybrid.kernels.replay_protocol import Replays
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.mixer import LayerContext, parameter
from megatron_hybrid.layers.parts import (
    Parts,
    Rows,
    fused,
    row_parallel,
    sections,
    shard,
    whole,
)
from megatron_hybrid.layers.recurrent import RecurrentMixer


@dataclass(frozen=True)
class GatedDeltaNetConfig:
    """Each key head serves value_heads / key_heads value heads that follow one another.

    `interleaved`: the checkpoint's projections go from key head to key head (in_proj_qkvz,
    in_proj_ba: Qwen3-Next), not from q to k to v to z (Qwen3.5). `separate`: there q, k and v have
    a projection and a convolution each (Olmo-Hybrid). `beta_scale`: see DeltaRuleConstants.
    `gate_activation`: of the gate of what comes out, silu or sigmoid.
    """

    key_heads: int
    value_heads: int
    key_dim: int  # of a head
    value_dim: int
    conv_width: int
    kernel_chunk: int = 64
    interleaved: bool = False
    separate: bool = False
    beta_scale: float = 1.0
    norm_eps: float | None = None  # None: that of the model's other norms
    gate_activation: str = "silu"

    def mixer(self, context: LayerContext) -> GatedDeltaNet:
        """As in LayerConfig."""
        return GatedDeltaNet(self, context)


class GatedDeltaNet(RecurrentMixer):
    """Key heads are split over the ranks, and the value heads with them.

    A rank's rows of the input projection, and its channels of the convolution:

        | q | k | v | z | b | a |          | q | k | v |
    """

    kind = "gated_delta_net"
    takes_chunk_bounds = True

    def __init__(self, config: GatedDeltaNetConfig, context: LayerContext) -> None:
        context.spread(config.value_heads, "value heads", config.key_heads, "key heads")
        key_heads = context.share(config.key_heads, "key heads of its gated delta nets")
        value_heads = config.value_heads // context.parallel.size
        keys, values = key_heads * config.key_dim, value_heads * config.value_dim
        k, v = (key_heads, config.key_dim), (value_heads, config.value_dim)
        super().__init__(
            context,
            [keys, keys, values],
            config.conv_width,
            bias=False,
            state=(*v, config.key_dim),
            inputs=(k, v, (value_heads,), (value_heads,)),  # k, v, a, b
            kernel_chunk=config.kernel_chunk,
        )
        self.config = config
        self.key_heads, self.value_heads = key_heads, value_heads
        self.in_sections = [sum(self.conv_sections), values, value_heads, value_heads]
        self.in_proj = context.to_rows(sum(self.in_sections), bias=False)
        self.out_proj = context.to_hidden(values, bias=False)
        self.dt_bias = parameter((value_heads,), torch.float32)
        self.A_log = parameter((value_heads,), torch.float32)
        self.eps = context.eps if config.norm_eps is None else config.norm_eps
        self.norm_weight = parameter((config.value_dim,), context.dtype)  # of every head
        self.A: Tensor  # [value heads] float32, negative; see after_loading
        self.norm_weights: Tensor  # [value heads * value_dim]

    def kernel(self, kernels: KernelSet | Replays) -> Any:
        return kernels.gated_delta_rule

    def weight_parts(self) -> Parts:
        rank, config = self.parallel.rank, self.config
        keys, values = config.key_heads * config.key_dim, config.value_heads * config.value_dim
        local_keys, _, local_values = self.conv_sections
        starts = [rank * local_keys, keys + rank * local_keys, 2 * keys + rank * local_values]
        total = 2 * keys + values
        rows = self._interleaved() if config.interleaved else self._side_by_side(starts, total)
        if config.separate:
            own = [self._own_rows(name) for name in "qkv"]
            rows[:3] = [one._replace(role=f"in_proj_{one.role}") for one in own]
        yield from fused(rows, self.in_proj)
        if config.separate:
            convolved = [one._replace(role=f"{one.role}_conv1d") for one in own]
            yield from sections("weight", convolved, self.conv_weight[:, None])
        else:
            yield from self.conv_parts("conv1d", starts, total)
        yield shard("dt_bias", self.dt_bias, 0, rank, config.value_heads)
        yield shard("A_log", self.A_log, 0, rank, config.value_heads)
        yield whole("norm.weight", self.norm_weight)
        yield from row_parallel("out_proj", self.out_proj)

    def _side_by_side(self, starts: list[int], total: int) -> list[Rows]:
        ranks, sections = self.parallel, zip(self.conv_sections, starts, strict=True)
        rows = [Rows("in_proj_qkv", count, start, total) for count, start in sections]
        for name, count in zip("zba", self.in_sections[1:], strict=True):
            rows.append(Rows(f"in_proj_{name}", count, ranks.rank * count, ranks.size * count))
        return rows

    def _own_rows(self, name: str) -> Rows:
        """This rank's of q, k or v, which are each by themselves in the checkpoint."""
        count = self.conv_sections["qkv".index(name)]
        return Rows(name, count, self.parallel.rank * count, self.parallel.size * count)

    def _interleaved(self) -> list[Rows]:
        """A key head's rows: q, k, v of its value heads, z of them; and b, a of them."""
        config, heads = self.config, self.key_heads
        each = config.value_heads // config.key_heads
        rows = []
        for name, counts in (
            ("qkvz", [config.key_dim, config.key_dim, *[each * config.value_dim] * 2]),
            ("ba", [each, each]),
        ):
            per_head = sum(counts)
            for before, count in zip(accumulate([0, *counts]), counts, strict=False):
                for head in range(self.parallel.rank * heads, (self.parallel.rank + 1) * heads):
                    start, total = head * per_head + before, config.key_heads * per_head
                    rows.append(Rows(f"in_proj_{name}", count, start, total))
        return rows

    def after_loading(self) -> None:
        super().after_loading()
        self.derive("A", -self.A_log.exp())
        self.derive("norm_weights", self.norm_weight.repeat(self.value_heads))

    def forward(self, x: Inputs, plans: KernelPlans) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; reads and writes the sequences' states."""
        config, kernels = self.config, plans.kernels
        qkv, z, b, a = self.in_proj.split(x, self.in_sections, kernels)
        q, k, v = self.convolve(qkv, plans).split(self.conv_sections, dim=1)
        q, k = (values.unflatten(1, (self.key_heads, config.key_dim)) for values in (q, k))
        v = v.unflatten(1, (self.value_heads, config.value_dim))
        tokens = DeltaRuleTokens(q, k, v, a, b)
        constants = DeltaRuleConstants(
            self.A, self.dt_bias, self.rounding_seed(plans), config.beta_scale
        )
        y = self.scan(tokens, constants, plans).flatten(1)
        weights, reader = self.norm_weights, self.out_proj.reader
        normed = kernels.norm.gated_rms_norm(
            y, z, weights, config.value_dim, self.eps, True, reader, config.gate_activation
        )
        return self.out_proj(normed, kernels)
