"""The gated delta net: projection, short convolution of q, k and v, gated delta rule, gated norm of
each head, projection (Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.kernels.kernel_set import KernelSet, Scan
from megatron_hybrid.kernels.protocols import DeltaRuleConstants, DeltaRuleTokens
from megatron_hybrid.layers.inputs import StateSpec
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.mixer import LayerContext, parameter
from megatron_hybrid.layers.parts import Parts, section, shard, whole
from megatron_hybrid.layers.recurrent import RecurrentMixer
from megatron_hybrid.parallel import ColumnParallelLinear, RowParallelLinear


@dataclass(frozen=True)
class GatedDeltaNetConfig:
    """Each key head serves value_heads / key_heads value heads that follow one another.

    `interleaved`: the checkpoint's projections go from key head to key head (in_proj_qkvz,
    in_proj_ba: Qwen3-Next), not from q to k to v to z (Qwen3.5).
    """

    key_heads: int
    value_heads: int
    key_dim: int  # of a head
    value_dim: int
    conv_width: int
    kernel_chunk: int = 64
    interleaved: bool = False


class GatedDeltaNet(RecurrentMixer):
    """Key heads are split over the ranks, and the value heads with them.

    A rank's rows of the input projection, and its channels of the convolution:

        | q | k | v | z | b | a |          | q | k | v |
    """

    kind = "gated_delta_net"
    takes_chunk_bounds = True

    def __init__(self, config: GatedDeltaNetConfig, context: LayerContext) -> None:
        parallel, dtype, ranks = context.parallel, context.dtype, context.parallel.size
        if config.key_heads % ranks:
            raise ConfigurationError(
                f"--tensor-model-parallel-size {ranks} does not divide the model's "
                f"{config.key_heads} key heads of its gated delta nets."
            )
        key_heads, value_heads = config.key_heads // ranks, config.value_heads // ranks
        keys, values = key_heads * config.key_dim, value_heads * config.value_dim
        super().__init__(context, [keys, keys, values], config.conv_width, bias=False)
        self.config = config
        self.key_heads, self.value_heads = key_heads, value_heads
        self.in_sections = [sum(self.conv_sections), values, value_heads, value_heads]
        self.in_proj = ColumnParallelLinear(
            context.hidden_size,
            sum(self.in_sections) * ranks,
            bias=False,
            dtype=dtype,
            parallel=parallel,
        )
        self.out_proj = RowParallelLinear(
            values * ranks,
            context.hidden_size,
            bias=False,
            dtype=dtype,
            parallel=parallel,
            sums=False,
        )
        self.dt_bias = parameter((value_heads,), torch.float32)
        self.A_log = parameter((value_heads,), torch.float32)
        self.eps = context.eps
        self.norm_weight = parameter((config.value_dim,), dtype)  # of every head
        self.A: Tensor  # [value heads] float32, negative; see after_loading
        self.norm_weights: Tensor  # [value heads * value_dim]
        self.spec = StateSpec(
            conv_shape=(sum(self.conv_sections), config.conv_width - 1),
            conv_dtype=context.conv_states_dtype,
            ssm_shape=(value_heads, config.value_dim, config.key_dim),
            ssm_dtype=context.ssm_states_dtype,
            kernel_chunk=config.kernel_chunk,
            inputs_shapes=(
                (key_heads, config.key_dim),
                (value_heads, config.value_dim),
                (value_heads,),
                (value_heads,),
            ),  # k, v, a, b
            inputs_dtype=context.dtype,
        )

    def kernel(self, kernels: KernelSet) -> Scan[DeltaRuleTokens, DeltaRuleConstants]:
        return kernels.gated_delta_rule

    def weight_parts(self) -> Parts:
        rank, config = self.parallel.rank, self.config
        keys, values = config.key_heads * config.key_dim, config.value_heads * config.value_dim
        local_keys, _, local_values = self.conv_sections
        starts = [rank * local_keys, keys + rank * local_keys, 2 * keys + rank * local_values]
        yield from self._interleaved() if config.interleaved else self._side_by_side(starts)
        yield from self.conv_parts("conv1d", starts, 2 * keys + values)
        yield shard("dt_bias", self.dt_bias, 0, rank, config.value_heads)
        yield shard("A_log", self.A_log, 0, rank, config.value_heads)
        yield whole("norm.weight", self.norm_weight)
        yield shard("out_proj.weight", self.out_proj.weight, 1, rank, values)

    def _side_by_side(self, starts: list[int]) -> Parts:
        rank, config = self.parallel.rank, self.config
        qkv, z, b, a = self.in_proj.weight.split(self.in_sections)
        values = config.value_heads * config.value_dim
        total = 2 * config.key_heads * config.key_dim + values
        for rows, start in zip(qkv.split(self.conv_sections), starts, strict=True):
            yield section("in_proj_qkv.weight", rows, 0, start, total)
        yield shard("in_proj_z.weight", z, 0, rank, values)
        yield shard("in_proj_b.weight", b, 0, rank, config.value_heads)
        yield shard("in_proj_a.weight", a, 0, rank, config.value_heads)

    def _interleaved(self) -> Parts:
        """A key head's rows: q, k, v of its value heads, z of them; and b, a of them."""
        config, first = self.config, self.parallel.rank * self.key_heads
        qkv, z, b, a = self.in_proj.weight.split(self.in_sections)
        by_head = [v.chunk(self.key_heads) for v in (*qkv.split(self.conv_sections), z)]
        for name, groups in (
            ("in_proj_qkvz.weight", by_head),
            ("in_proj_ba.weight", [v.chunk(self.key_heads) for v in (b, a)]),
        ):
            per_head = sum(rows[0].shape[0] for rows in groups)
            for head in range(self.key_heads):
                start = (first + head) * per_head
                for rows in groups:
                    yield section(name, rows[head], 0, start, config.key_heads * per_head)
                    start += rows[head].shape[0]

    def after_loading(self) -> None:
        super().after_loading()
        self.derive("A", -self.A_log.exp())
        self.derive("norm_weights", self.norm_weight.repeat(self.value_heads))

    def forward(self, x: Tensor, plans: KernelPlans) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; reads and writes the sequences' states."""
        config = self.config
        qkv, z, b, a = self.in_proj(x).split(self.in_sections, dim=1)
        q, k, v = self.convolve(qkv, plans).split(self.conv_sections, dim=1)
        q, k = (values.unflatten(1, (self.key_heads, config.key_dim)) for values in (q, k))
        v = v.unflatten(1, (self.value_heads, config.value_dim))
        tokens = DeltaRuleTokens(q, k, v, a, b)
        constants = DeltaRuleConstants(self.A, self.dt_bias)
        y = self.scan(plans.kernels.gated_delta_rule, tokens, constants, plans)
        y = plans.kernels.norm.gated_rms_norm(
            y.flatten(1), z, self.norm_weights, config.value_dim, self.eps, norm_first=True
        )
        return self.out_proj(y)
