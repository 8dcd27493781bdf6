"""LFM2's gated short convolution: projection to B, C and x, C * conv(B * x), projection. Its state
is the convolution's window alone."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.layers.inputs import StateSpec
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.mixer import LayerContext
from megatron_hybrid.layers.parts import Parts, section, shard, whole
from megatron_hybrid.layers.recurrent import RecurrentMixer
from megatron_hybrid.parallel import ColumnParallelLinear, RowParallelLinear


@dataclass(frozen=True)
class ShortConvConfig:
    """Sizes of one short convolution (LFM2)."""

    conv_width: int
    bias: bool = False  # of the convolution and the projections


class ShortConv(RecurrentMixer):
    """Channels are split over the ranks. A rank's rows of the input projection: | B | C | x |."""

    kind = "short_conv"

    def __init__(self, config: ShortConvConfig, context: LayerContext) -> None:
        parallel, hidden = context.parallel, context.hidden_size
        if hidden % parallel.size:
            raise ConfigurationError(
                f"--tensor-model-parallel-size {parallel.size} does not divide the model's "
                f"{hidden} channels."
            )
        super().__init__(context, [hidden // parallel.size], config.conv_width, config.bias)
        self.channels = hidden // parallel.size
        self.in_proj = ColumnParallelLinear(
            hidden, 3 * hidden, bias=config.bias, dtype=context.dtype, parallel=parallel
        )
        self.out_proj = RowParallelLinear(
            hidden, hidden, bias=config.bias, dtype=context.dtype, parallel=parallel, sums=False
        )
        self.spec = StateSpec(
            conv_shape=(self.channels, config.conv_width - 1),
            conv_dtype=context.conv_states_dtype,
            ssm_shape=(0,),
            ssm_dtype=context.ssm_states_dtype,
            kernel_chunk=1,
            inputs_dtype=context.dtype,
        )

    def weight_parts(self) -> Parts:
        rank, total = self.parallel.rank, self.channels * self.parallel.size
        for kind, weight in (("weight", self.in_proj.weight), ("bias", self.in_proj.bias)):
            if weight is not None:
                for third, rows in enumerate(weight.chunk(3)):
                    start = third * total + rank * self.channels
                    yield section(f"in_proj.{kind}", rows, 0, start, 3 * total)
        yield from self.conv_parts("conv", [rank * self.channels], total)
        yield shard("out_proj.weight", self.out_proj.weight, 1, rank, total)
        if self.out_proj.bias is not None:
            yield whole("out_proj.bias", self.out_proj.bias)

    def forward(self, x: Tensor, plans: KernelPlans) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; reads and writes the sequences' states."""
        b, c, x = self.in_proj(x).chunk(3, dim=1)
        return self.out_proj(self.convolve(b * x, plans, silu=False).mul_(c))
