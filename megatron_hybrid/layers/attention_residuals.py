"""Attention residuals (Inkling 2): a block reads an average of what the model had after each run of
layers, by weights of a query that it learnt, and adds to the last of these.

Each run of layers has a residual stream, and one more has what goes in, the normed embeddings:

    stream       0            1                 2
              embeddings   layers 0 to B-1   layers B to 2B-1 ...

What a block reads are the streams that have begun. The first attention of a run begins a new one,
which is what it gives; the others add to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.layers.mixer import LayerContext, parameter
from megatron_hybrid.layers.norm import RMSNorm
from megatron_hybrid.layers.parts import Part, Parts, prefixed, whole
from megatron_hybrid.layers.streams import Connection, StreamsHead

_SOURCE_EPS = 1e-6  # of norms of streams, whatever others have


@dataclass(frozen=True)
class AttentionResidualsConfig:
    """`inputs`: of every block how many different ones its mixer takes, side by side: blocks 2i and
    2i + 1 are layer i. `run`: layers that share a stream."""

    inputs: tuple[int, ...]
    run: int
    has_norms: ClassVar[bool] = False

    @property
    def count(self) -> int:
        """As in StreamsConfig."""
        return -(-len(self.inputs) // (2 * self.run)) + 1

    def connection(self, context: LayerContext) -> AveragedConnection:
        """As in StreamsConfig."""
        return AveragedConnection(self, context)

    def head(self, context: LayerContext, norm: RMSNorm) -> AveragedHead:
        """As in StreamsConfig."""
        return AveragedHead(self, context, norm)


class AveragedConnection(Connection):
    """See the top of the file. Norms of what goes in are a part of it."""

    def __init__(self, config: AttentionResidualsConfig, context: LayerContext) -> None:
        super().__init__()
        layer, behind = divmod(context.layer, 2)
        self.count, self.eps, size = config.count, context.eps, context.hidden_size
        self.sources = 2 + layer // config.run if behind else 1 - (-layer // config.run)
        self.begins = not behind and layer % config.run == 0
        inputs = config.inputs[context.layer]
        self.norms = parameter((inputs, size), context.dtype)
        self.query = self.embedding_norm = None
        if context.layer:
            self.query = parameter((inputs, size), torch.float32)
        else:  # there is but one stream, and it is the embeddings still to be normed
            self.embedding_norm = RMSNorm(size, context.eps, context.dtype)

    def weight_parts(self) -> Parts:
        """As in Connection."""
        names = ("norm",) if len(self.norms) == 1 else ("q_norm", "k_norm", "v_norm")
        for name, norm in zip(names, self.norms, strict=True):
            yield whole(f"{name}.weight", norm)
        if self.query is not None:
            yield _query(self.query)
        if self.embedding_norm is not None:
            yield from prefixed("embedding_norm", self.embedding_norm.weight_parts())

    def plain_weights(self) -> list[Tensor]:
        """As in Connection."""
        return []

    def enter(self, streams: Tensor, kernels: KernelSet) -> tuple[Tensor, Tensor | None]:
        """As in Connection."""
        each = streams.unflatten(1, (self.count, -1))
        if self.embedding_norm is not None:
            embeddings = self.embedding_norm(each[:, 0], kernels)
            several = embeddings[:, None].expand(-1, len(self.norms), -1)
            return kernels.norm.rms_norm(several, self.norms, self.eps).flatten(1), embeddings
        assert self.query is not None
        sources = each[:, : self.sources]
        x = kernels.streams.attended(sources, self.query, self.norms, _SOURCE_EPS, self.eps)
        return x.flatten(1), None

    def leave(
        self, streams: Tensor, x: Tensor, weights: Tensor | None, kernels: KernelSet
    ) -> Tensor:
        """As in Connection."""
        each = streams.unflatten(1, (self.count, -1))
        if weights is not None:
            each[:, 0] = weights
        if self.begins:
            each[:, self.sources] = x
        else:
            each[:, self.sources - 1] += x
        return streams


class AveragedHead(StreamsHead):
    """The norm of an average of all streams."""

    def __init__(
        self, config: AttentionResidualsConfig, context: LayerContext, norm: RMSNorm
    ) -> None:
        super().__init__()
        self.count, self.norm = config.count, norm
        self.query = parameter((1, context.hidden_size), torch.float32)

    def weight_parts(self) -> Parts:
        """As in StreamsHead."""
        yield from self.norm.weight_parts()
        yield _query(self.query)

    def forward(self, streams: Tensor, kernels: KernelSet) -> Tensor:
        """As in StreamsHead."""
        each = streams.unflatten(1, (self.count, -1))
        weight, eps = self.norm.weight[None], self.norm.eps
        return kernels.streams.attended(each, self.query, weight, _SOURCE_EPS, eps)[:, 0]


def _query(query: Tensor) -> Part:
    """One has no dimension of its own in a checkpoint."""
    return whole("query", query[0] if len(query) == 1 else query)
