"""Residual streams (Zhu et al., "Hyper-Connections", 2024, arXiv 2409.19606): a block reads a
mixture of several streams, and its result goes into all of them.

Whole on every rank: between blocks the streams of a token, [tokens, streams * hidden], lie one
behind the other where other models have one residual.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.kernels.streams.protocol import StreamWeights
from megatron_hybrid.layers.mixer import Deriving, LayerContext, parameter
from megatron_hybrid.layers.norm import RMSNorm, StreamsNorm
from megatron_hybrid.layers.parts import Parts, prefixed, whole


class Connection(Deriving):
    """Of one block with the streams."""

    def weight_parts(self) -> Parts:
        """Which every rank holds whole."""
        raise NotImplementedError

    def plain_weights(self) -> list[Tensor]:
        """Of its products."""
        raise NotImplementedError

    def enter(self, streams: Tensor, kernels: KernelSet) -> tuple[Tensor, Any]:
        """[tokens, streams * hidden] -> what the block takes in, [tokens, hidden], and what `leave`
        needs of it."""
        raise NotImplementedError

    def leave(self, streams: Tensor, x: Tensor, weights: Any, kernels: KernelSet) -> Tensor:
        """The streams [tokens, streams * hidden] with the block's result x [tokens, hidden], which
        may take their place."""
        raise NotImplementedError


class StreamsHead(nn.Module):
    """What is behind the last block."""

    def weight_parts(self) -> Parts:
        """Which every rank holds whole."""
        raise NotImplementedError

    def plain_weights(self) -> list[Tensor]:
        """Of its products."""
        return []

    def forward(self, streams: Tensor, kernels: KernelSet) -> Tensor:
        """[rows, streams * hidden] -> [rows, hidden], normed."""
        raise NotImplementedError


class StreamsConfig(Protocol):
    """How many streams a model has, all of which are its embeddings in the beginning, and how they
    are connected. `has_norms`: blocks have the usual norm besides."""

    @property
    def count(self) -> int:
        """Streams."""

    @property
    def has_norms(self) -> bool:
        """Whether blocks, and the head, have the model's norms."""

    def connection(self, context: LayerContext) -> Connection:
        """A block's, with weights still to be read."""

    def head(self, context: LayerContext, norm: RMSNorm) -> StreamsHead:
        """The model's. `norm`: for those that have norms."""


@dataclass(frozen=True)
class GatedStreamsConfig:
    """Streams with gates for each number, of low rank (Qwen4): see GatedConnection."""

    count: int
    rank: int
    has_norms: ClassVar[bool] = False

    def connection(self, context: LayerContext) -> GatedConnection:
        """As in StreamsConfig."""
        return GatedConnection(self, context)

    def head(self, context: LayerContext, norm: RMSNorm) -> GatedHead:
        """As in StreamsConfig."""
        return GatedHead(self, context)


class _Gates(nn.Module):
    """mean over streams of sigmoid(up silu(down normed / streams)) * normed, and more rows of the
    first product."""

    def __init__(self, config: GatedStreamsConfig, context: LayerContext, more: int = 0) -> None:
        super().__init__()
        self.config = config
        width = config.count * context.hidden_size
        self.norm = StreamsNorm(
            config.count, context.hidden_size, context.eps, context.dtype, zero_centered=True
        )
        self.down = parameter((config.rank + more, width), context.dtype)
        self.up = parameter((width, config.rank), context.dtype)

    def weight_parts(self) -> Parts:
        """Without the rows behind `down`."""
        yield from prefixed("norm", self.norm.weight_parts())
        down = whole("down.weight", self.down[: self.config.rank])
        yield replace(down, multiplier=1 / self.config.count)
        yield whole("up.weight", self.up)

    def forward(self, streams: Tensor, kernels: KernelSet) -> tuple[Tensor, Tensor]:
        """[tokens, streams * hidden] -> [tokens, hidden], [tokens, more]"""
        normed = self.norm(streams, kernels)
        low = kernels.linear.multiply(normed.flatten(1), self.down)
        rank = self.config.rank
        activated = kernels.activation.activate(low[:, :rank], "silu", False)
        gates = kernels.linear.multiply(activated, self.up)
        return kernels.streams.gated_mean(gates.view_as(normed), normed), low[:, rank:]


class GatedConnection(Connection):
    """What goes in is the streams' mean, normed and gated; what comes out is added to each, times
    2 * sigmoid(inject normed / streams)."""

    def __init__(self, config: GatedStreamsConfig, context: LayerContext) -> None:
        super().__init__()
        self.config = config
        self.gates = _Gates(config, context, config.count)

    def weight_parts(self) -> Parts:
        """As in Connection."""
        yield from self.gates.weight_parts()
        inject = whole("inject.weight", self.gates.down[self.config.rank :])
        yield replace(inject, multiplier=1 / self.config.count)

    def plain_weights(self) -> list[Tensor]:
        """As in Connection."""
        return [self.gates.down, self.gates.up]

    def enter(self, streams: Tensor, kernels: KernelSet) -> tuple[Tensor, Tensor]:
        """As in Connection."""
        x, gates = self.gates(streams, kernels)
        return x, gates

    def leave(self, streams: Tensor, x: Tensor, weights: Tensor, kernels: KernelSet) -> Tensor:
        """As in Connection."""
        each = streams.unflatten(1, (self.config.count, -1))
        return kernels.streams.injected(each, x, weights).flatten(1)


class GatedHead(StreamsHead):
    """What a block would take in."""

    def __init__(self, config: GatedStreamsConfig, context: LayerContext) -> None:
        super().__init__()
        self.gates = _Gates(config, context)

    def weight_parts(self) -> Parts:
        """As in StreamsHead."""
        yield from self.gates.weight_parts()

    def plain_weights(self) -> list[Tensor]:
        """As in StreamsHead."""
        return [self.gates.down, self.gates.up]

    def forward(self, streams: Tensor, kernels: KernelSet) -> Tensor:
        """As in StreamsHead."""
        x: Tensor = self.gates(streams, kernels)[0]
        return x


@dataclass(frozen=True)
class BalancedStreamsConfig:
    """Manifold-constrained hyper-connections (Xie et al., "mHC", 2025, arXiv 2512.24880), which mix
    the streams by matrices whose rows and columns sum to one: see Streams.balanced."""

    count: int
    iterations: int
    eps: float
    has_norms: ClassVar[bool] = True

    def connection(self, context: LayerContext) -> BalancedConnection:
        """As in StreamsConfig."""
        return BalancedConnection(self, context)

    def head(self, context: LayerContext, norm: RMSNorm) -> MeanHead:
        """As in StreamsConfig."""
        return MeanHead(self, norm)


class BalancedConnection(Connection):
    """Its weights are in float32. The logits are fn (streams / rms(streams)) * scale + base: three
    scales, of what goes in, what comes out, and the mixing."""

    def __init__(self, config: BalancedStreamsConfig, context: LayerContext) -> None:
        super().__init__()
        self.config, self.eps = config, context.eps
        width, count = config.count * context.hidden_size, config.count
        logits = (2 + count) * count
        self.fn = parameter((logits, width), torch.float32)
        self.base = parameter((logits,), torch.float32)
        self.scale = parameter((3,), torch.float32)
        self.ones: Tensor  # [width]; see after_loading
        self.scales: Tensor  # [logits]

    def weight_parts(self) -> Parts:
        """As in Connection."""
        yield whole("fn", self.fn)
        yield whole("base", self.base)
        yield whole("scale", self.scale)

    def plain_weights(self) -> list[Tensor]:
        """As in Connection."""
        return [self.fn]

    def after_loading(self) -> None:
        """What is made from the weights: each logit's scale."""
        count = self.config.count
        each = zip(self.scale, (count, count, count * count), strict=True)
        self.derive("scales", torch.cat([scale.expand(size) for scale, size in each]))
        self.derive("ones", torch.ones_like(self.fn[0]))

    def enter(self, streams: Tensor, kernels: KernelSet) -> tuple[Tensor, StreamWeights]:
        """As in Connection."""
        config = self.config
        normed = kernels.norm.rms_norm(streams, self.ones, self.eps, torch.float32)
        logits = torch.addcmul(self.base, kernels.linear.multiply(normed, self.fn), self.scales)
        weights = kernels.streams.balanced(logits, config.count, config.iterations, config.eps)
        each = streams.unflatten(1, (config.count, -1))
        return kernels.streams.weighted(each, weights.before), weights

    def leave(
        self, streams: Tensor, x: Tensor, weights: StreamWeights, kernels: KernelSet
    ) -> Tensor:
        """As in Connection."""
        each = streams.unflatten(1, (self.config.count, -1))
        return kernels.streams.mixed(each, x, weights).flatten(1)


class MeanHead(StreamsHead):
    """The norm of the streams' mean."""

    def __init__(self, config: BalancedStreamsConfig, norm: RMSNorm) -> None:
        super().__init__()
        self.count, self.norm = config.count, norm

    def weight_parts(self) -> Parts:
        """As in StreamsHead."""
        yield from self.norm.weight_parts()

    def forward(self, streams: Tensor, kernels: KernelSet) -> Tensor:
        """As in StreamsHead."""
        mean = streams.unflatten(1, (self.count, -1)).mean(dim=1)
        return self.norm(mean, kernels)
