"""Short convolutions beside what a layer does otherwise (Inkling): x + conv(x), channel by channel,
of its keys and values, and of what it gives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_hybrid.kernels.linear.reference import plain_rows
from megatron_hybrid.kernels.protocols import ConvConstants, Inputs, Reader
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.mixer import LayerConfig, LayerContext, Mixer, added_up, parameter
from megatron_hybrid.layers.parts import Parts, Rows, sections
from megatron_hybrid.layers.recurrent import RecurrentMixer


class Convolutions(RecurrentMixer):
    """Those of one layer, one behind another: its state is the windows of all of them. Weights are
    in float32, as checkpoints have them; x is one more time the last tap."""

    kind = "convolutions"

    def __init__(self, context: LayerContext, width: int, rows: list[Rows]) -> None:
        """`rows`: of each its name, and this rank's channels of all."""
        super().__init__(context, [one.size for one in rows], width)
        self.conv_weight = parameter(tuple(self.conv_weight.shape), torch.float32)
        self._rows = rows
        self._channels = dict[str, slice]()
        first = 0
        for one in rows:
            self._channels[one.role] = slice(first, first + one.size)
            first += one.size
        self.taps: Tensor  # [channels, width] float32; see after_loading

    def weight_parts(self) -> Parts:
        yield from sections("weight", self._rows, self.conv_weight[:, None])

    def after_loading(self) -> None:
        super().after_loading()
        taps = self.conv_weight.clone()  # channels lie as they lie there
        taps[:, -1] += 1
        self.derive("taps", taps)

    def conv_constants(self, silu: bool = False) -> ConvConstants:
        return ConvConstants(self.taps, None, silu)

    def add(self, x: Tensor, plans: KernelPlans, first: str, last: str | None = None) -> Tensor:
        """x + conv(x) of the channels [tokens, channels] of one of them, or of all from `first` to
        `last`; reads and writes the sequences' windows."""
        channels = slice(self._channels[first].start, self._channels[last or first].stop)
        return self.convolve(x, plans, silu=False, channels=channels)

    def forward(self, x: Inputs, plans: KernelPlans) -> Tensor:
        """Have the windows take up unfolded tokens, of sequences that have no others: of x
        [tokens, hidden] all tokens are padding."""
        nothing = plain_rows(x).new_zeros((x.shape[0], sum(self.conv_sections)))
        return self.convolve(nothing, plans, silu=False)


def of_hidden(context: LayerContext) -> Rows:
    """The convolution of what a layer gives, which is whole on every rank."""
    return Rows("sconv", context.hidden_size, 0, context.hidden_size)


@dataclass(frozen=True)
class ConvolvedConfig:
    """A layer whose results go through a convolution."""

    inner: LayerConfig
    conv_width: int

    def mixer(self, context: LayerContext) -> Convolved:
        """As in LayerConfig."""
        return Convolved(self, context)


class Convolved(Mixer):
    """Unlike other mixers' its result is the sum, on every rank: the BlockForm says `whole`."""

    def __init__(self, config: ConvolvedConfig, context: LayerContext) -> None:
        super().__init__()
        self.parallel = context.parallel
        self.inner = config.inner.mixer(context)
        self.convolutions = Convolutions(context, config.conv_width, [of_hidden(context)])

    @property
    def recurrent(self) -> Convolutions:
        return self.convolutions

    @property
    def reader(self) -> Reader | None:
        return self.inner.reader

    def weight_parts(self) -> Parts:
        yield from self.inner.weight_parts()
        yield from self.convolutions.weight_parts()

    def forward(self, x: Inputs, plans: KernelPlans) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; reads and writes the sequences' windows."""
        total = self.parallel.all_reduce(added_up(self.inner(x, plans)))
        return self.convolutions.add(total, plans, "sconv")
