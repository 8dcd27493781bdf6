"""LFM2's gated short convolution: projection to B, C and x, C * conv(B * x), projection. Its state
is the convolution's window alone."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_hybrid.kernels.protocols import Gates, Inputs
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.mixer import LayerContext
from megatron_hybrid.layers.parts import Parts, Rows, fused, row_parallel
from megatron_hybrid.layers.recurrent import RecurrentMixer


@dataclass(frozen=True)
class ShortConvConfig:
    """Sizes of one short convolution (LFM2)."""

    conv_width: int
    bias: bool = False  # of the convolution and the projections

    def mixer(self, context: LayerContext) -> ShortConv:
        """As in LayerConfig."""
        return ShortConv(self, context)


class ShortConv(RecurrentMixer):
    """Channels are split over the ranks. A rank's rows of the input projection: | B | C | x |."""

    kind = "short_conv"

    def __init__(self, config: ShortConvConfig, context: LayerContext) -> None:
        channels = context.share(context.hidden_size, "channels")
        super().__init__(context, [channels], config.conv_width, config.bias)
        self.channels = channels
        self.in_proj = context.to_rows(3 * channels, config.bias)
        self.out_proj = context.to_hidden(channels, config.bias)

    def weight_parts(self) -> Parts:
        first, total = self.parallel.rank * self.channels, self.parallel.size * self.channels
        thirds = [
            Rows("in_proj", self.channels, third * total + first, 3 * total) for third in range(3)
        ]
        yield from fused(thirds, self.in_proj)
        yield from self.conv_parts("conv", [first], total)
        yield from row_parallel("out_proj", self.out_proj)

    def forward(self, x: Inputs, plans: KernelPlans) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; reads and writes the sequences' states."""
        kernels, sections = plans.kernels, [self.channels] * 3
        b, c, x = self.in_proj.split(x, sections, kernels)
        reader = self.out_proj.reader
        if reader is None:
            y = self.convolve(x, plans, silu=False, gates=Gates(before=b, after=c))
            return self.out_proj(y, kernels)
        # The kernel of gates alone rounds its result for a reader.
        y = self.convolve(x, plans, silu=False, gates=Gates(before=b))
        return self.out_proj(kernels.activation.gate(y, c, "none", reader), kernels)
