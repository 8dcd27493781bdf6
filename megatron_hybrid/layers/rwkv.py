"""RWKV-4's two mixers (Peng et al., "RWKV", 2023, arXiv 2305.13048): time mixing, whose values are
weighted by their age, and channel mixing, an MLP with a gate. Both see each token beside the one
before it, which is what a convolution of width 2 keeps in its window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_hybrid.kernels.channel_scans import WKVConstants, WKVTokens
from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.kernels.linear.reference import plain_rows
from megatron_hybrid.kernels.protocols import Inputs
from megatron_hybrid.kernels.replay_protocol import Replays
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.mixer import LayerContext, parameter
from megatron_hybrid.layers.parts import Parts, Rows, fused, row_parallel, shard, whole
from megatron_hybrid.layers.recurrent import RecurrentMixer


@dataclass(frozen=True)
class TimeMixConfig:
    """Of one layer of time mixing."""

    channels: int

    def mixer(self, context: LayerContext) -> TimeMix:
        """As in LayerConfig."""
        return TimeMix(self, context)


@dataclass(frozen=True)
class ChannelMixConfig:
    """Of one layer of channel mixing."""

    intermediate_size: int

    def mixer(self, context: LayerContext) -> ChannelMix:
        """As in LayerConfig."""
        return ChannelMix(self, context)


class _Shifting(RecurrentMixer):
    """Whose inputs are mixtures of a token and the one before it, by `mixes`' weights: channel by
    channel, on every rank."""

    mixes: tuple[str, ...]

    def __init__(self, context: LayerContext, **recurrence: Any) -> None:
        super().__init__(context, [context.hidden_size], 2, False, **recurrence)
        for name in self.mixes:
            setattr(self, f"time_mix_{name}", parameter((1, 1, context.hidden_size), context.dtype))

    def _mix_parts(self) -> Parts:
        for name in self.mixes:
            yield whole(f"time_mix_{name}", getattr(self, f"time_mix_{name}"))

    def after_loading(self) -> None:
        self.conv_weight[:, 0], self.conv_weight[:, 1] = 1, 0
        super().after_loading()

    def _mixed(self, x: Inputs, plans: KernelPlans) -> list[Tensor]:
        """x [tokens, hidden] -> the mixtures, [tokens, hidden] each."""
        own = plain_rows(x)
        before = self.convolve(own, plans, silu=False)
        weights = (getattr(self, f"time_mix_{name}")[0] for name in self.mixes)
        return [own * weight + before * (1 - weight) for weight in weights]


class TimeMix(_Shifting):
    """Channels are split over the ranks, but for the windows."""

    kind = "time_mix"
    mixes = ("key", "value", "receptance")

    def __init__(self, config: TimeMixConfig, context: LayerContext) -> None:
        channels = context.share(config.channels, "channels of time mixing")
        inputs = ((channels,), (channels,))  # k, v
        super().__init__(context, state=(channels, 2), inputs=inputs, kernel_chunk=16)
        self.channels, self.total = channels, config.channels
        for name in self.mixes:
            setattr(self, name, context.to_rows(channels, bias=False))
        self.output = context.to_hidden(channels, bias=False)
        self.time_decay = parameter((channels,), torch.float32)
        self.time_first = parameter((channels,), torch.float32)
        self.decay: Tensor  # [channels] float32, negative; see after_loading

    def kernel(self, kernels: KernelSet | Replays) -> Any:
        return kernels.wkv

    def weight_parts(self) -> Parts:
        rank, total = self.parallel.rank, self.total
        yield from self._mix_parts()
        for name in self.mixes:
            role = "time_key" if name == "key" else name  # not ChannelMix's: it is an exponent
            rows = [Rows(role, self.channels, rank * self.channels, total)]
            yield from fused(rows, getattr(self, name))
        yield from row_parallel("output", self.output)
        yield shard("time_decay", self.time_decay, 0, rank, total)
        yield shard("time_first", self.time_first, 0, rank, total)

    def after_loading(self) -> None:
        super().after_loading()
        self.derive("decay", -self.time_decay.exp())

    def forward(self, x: Inputs, plans: KernelPlans) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; reads and writes the sequences' states."""
        kernels = plans.kernels
        inputs = zip(self.mixes, self._mixed(x, plans), strict=True)
        k, v, receptance = (getattr(self, name)(one, kernels) for name, one in inputs)
        constants = WKVConstants(self.decay, self.time_first, self.rounding_seed(plans))
        y = self.scan(WKVTokens(k, v), constants, plans)
        gated = kernels.activation.gate(y, receptance, "sigmoid", self.output.reader)
        return self.output(gated, kernels)


class ChannelMix(_Shifting):
    """sigmoid(receptance) * value(relu(key)^2). The receptance is whole on every rank: it is a
    factor of each rank's part of the sum."""

    kind = "channel_mix"
    mixes = ("key", "receptance")

    def __init__(self, config: ChannelMixConfig, context: LayerContext) -> None:
        super().__init__(context)
        self.size = context.share(config.intermediate_size, "channels inside an MLP")
        self.total, self.hidden = config.intermediate_size, context.hidden_size
        self.key = context.to_rows(self.size, bias=False)
        self.receptance = context.to_rows(context.hidden_size, bias=False)
        self.value = context.to_hidden(self.size, bias=False)

    def weight_parts(self) -> Parts:
        yield from self._mix_parts()
        rows = Rows("key", self.size, self.parallel.rank * self.size, self.total)
        yield from fused([rows], self.key)
        yield from fused([Rows("receptance", self.hidden, 0, self.hidden)], self.receptance)
        yield from row_parallel("value", self.value)

    def forward(self, x: Inputs, plans: KernelPlans) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; reads and writes the sequences' windows."""
        kernels, reader = plans.kernels, self.value.reader
        key, receptance = self._mixed(x, plans)
        y = self.value(self.key.activated(key, "relu2", False, reader, kernels), kernels)
        gated = kernels.activation.gate(y, self.receptance(receptance, kernels), "sigmoid")
        return plain_rows(gated)
