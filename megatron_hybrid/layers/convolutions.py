"""Short convolutions beside what a layer does otherwise (Inkling): x + conv(x), channel by channel,
of its keys and values, and of what it gives; of keys and values also by taps that a token gives
(Inkling 2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_hybrid.kernels.linear.reference import plain_rows
from megatron_hybrid.kernels.protocols import ConvConstants, Inputs, Reader
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.mixer import LayerConfig, LayerContext, Mixer, added_up, parameter
from megatron_hybrid.layers.parts import Parts, Rows, section, sections
from megatron_hybrid.layers.recurrent import RecurrentMixer


class Convolutions(RecurrentMixer):
    """Those of one layer, one behind another: its state is the windows of all of them. Weights are
    in float32, as checkpoints have them; x is one more time the last tap, and what comes out is
    multiplied by a constant."""

    kind = "convolutions"

    def __init__(
        self, context: LayerContext, width: int, rows: list[Rows], scale: float = 1.0
    ) -> None:
        """`rows`: of each its name, and this rank's channels of all. `scale`: the constant."""
        super().__init__(context, [one.size for one in rows], width)
        self.conv_weight = parameter(tuple(self.conv_weight.shape), torch.float32)
        self._rows, self._scale = rows, scale
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
        self.derive("taps", taps.mul_(self._scale))

    def conv_constants(self, silu: bool = False) -> ConvConstants:
        return ConvConstants(self.taps, None, silu)

    def add(self, x: Tensor, plans: KernelPlans, first: str, last: str | None = None) -> Tensor:
        """(x + conv(x)) * scale of the channels [tokens, channels] of one of them, or of all from
        `first` to `last`; reads and writes the sequences' windows."""
        channels = slice(self._channels[first].start, self._channels[last or first].stop)
        return self.convolve(x, plans, silu=False, channels=channels)

    def forward(self, x: Inputs, plans: KernelPlans) -> Tensor:
        """Have the windows take up unfolded tokens, of sequences that have no others: of x
        [tokens, hidden] all tokens are padding."""
        nothing = plain_rows(x).new_zeros((x.shape[0], sum(self.conv_sections)))
        return self.convolve(nothing, plans, silu=False)


class DynamicConvolutions(Convolutions):
    """Of keys and values, whose taps are the sum of static ones and of some that a token gives, the
    same for a whole head:

        y[t] = (x[t] + sum over lags of (static[lag] + dynamic[t, lag]) * x[t - lag]) * kv_scale

    and of what the layer gives, as others. The tokens x[t - lag] come from convolutions of one tap,
    a set of channels for each lag but 0:

        | keys and values, lag 1 | keys and values, lag 2 | ... | what the layer gives |
    """

    def __init__(
        self,
        context: LayerContext,
        width: int,
        kv: list[Rows],
        head_dim: int,
        scale: float,
        kv_scale: float,
    ) -> None:
        """`kv`: of the convolutions of keys and of values their names, and this rank's channels."""
        rows = [one._replace(role=f"delayed_{one.role}") for one in kv]
        super().__init__(context, width, [*rows * (width - 1), of_hidden(context)], scale)
        self._kv, self._kv_scale, self.head_dim = kv, kv_scale, head_dim
        self.kv_size = sum(one.size for one in kv)
        self.static = parameter((width, self.kv_size), context.dtype)

    @property
    def state_runs(self) -> tuple[list[tuple[int, int]], int]:
        runs, start = [], 0
        for one in self._rows:
            runs.append((start + one.start, one.size))
            start += one.total
        return runs, start

    def weight_parts(self) -> Parts:
        first = 0
        for role, size, start, total, *_ in self._kv:
            own = self.static[:, first : first + size]
            yield section(f"{role}.static_weight", own, 1, start, total)
            first += size
        own = self.conv_weight[self._delayed.stop :, None]
        yield from sections("weight", self._rows[-1:], own)

    @property
    def _delayed(self) -> slice:
        return slice((len(self.static) - 1) * self.kv_size)

    def after_loading(self) -> None:
        super().after_loading()
        delays = torch.eye(len(self.static), device=self.taps.device).flip(1)[1:]  # [lag - 1, tap]
        self.conv_weight[self._delayed] = delays.repeat_interleave(self.kv_size, dim=0)
        self.taps[self._delayed] = self.conv_weight[self._delayed]

    def of_kv(self, kv: Tensor, dynamic: Tensor, plans: KernelPlans) -> Tensor:
        """Keys and values [tokens, channels], taps [tokens, heads of both, width] -> the same as
        the first; reads and writes the sequences' windows."""
        lags = len(self.static) - 1
        delayed = self.convolve(kv.repeat(1, lags), plans, silu=False, channels=self._delayed)
        tokens = [x.unflatten(1, (-1, self.head_dim)) for x in (kv, *delayed.chunk(lags, dim=1))]
        static = self.static.float().unflatten(1, (-1, self.head_dim))
        total = tokens[0].float()
        for lag, x in enumerate(tokens):
            total = total + x * (static[lag] + dynamic[:, :, lag, None])
        return total.mul_(self._kv_scale).to(kv.dtype).flatten(1)


def of_hidden(context: LayerContext) -> Rows:
    """The convolution of what a layer gives, which is whole on every rank."""
    return Rows("sconv", context.hidden_size, 0, context.hidden_size)


@dataclass(frozen=True)
class ConvolvedConfig:
    """A layer whose results go through a convolution. `conv_scale`: of Convolutions."""

    inner: LayerConfig
    conv_width: int
    conv_scale: float = 1.0

    def mixer(self, context: LayerContext) -> Convolved:
        """As in LayerConfig."""
        return Convolved(self, context)


class Convolved(Mixer):
    """Unlike other mixers' its result is the sum, on every rank: the BlockForm says `whole`."""

    def __init__(self, config: ConvolvedConfig, context: LayerContext) -> None:
        super().__init__()
        self.parallel = context.parallel
        self.inner = config.inner.mixer(context)
        rows = [of_hidden(context)]
        self.convolutions = Convolutions(context, config.conv_width, rows, config.conv_scale)

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
