"""Embeddings of the n-grams that end at a token, which are added to the residual streams in the
middle of a model (Qwen4's per-layer embeddings)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.kernels.linear.reference import plain_rows
from megatron_hybrid.kernels.protocols import Inputs
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.mixer import LayerContext
from megatron_hybrid.layers.ngram_hash import ID_BYTES, NGramHashes
from megatron_hybrid.layers.ngram_table import NGramTable
from megatron_hybrid.layers.norm import StreamsNorm
from megatron_hybrid.layers.parts import Parts, Rows, fused, prefixed, whole
from megatron_hybrid.layers.recurrent import RecurrentMixer


@dataclass(frozen=True)
class NGramEmbeddingConfig:
    """`blocks`: all such blocks of the model; `hashes`: those of the first one, from which the
    others' follow. `rows_multiple`: of the table's rows, the last of which are not used. `shards`:
    of the table in a checkpoint."""

    blocks: tuple[int, ...]
    hashes: NGramHashes
    streams: int
    embedding_size: int
    conv_width: int
    rows_multiple: int
    shards: int

    def hashes_of(self, block: int) -> NGramHashes:
        """Of one of the blocks."""
        return replace(self.hashes, index=self.blocks.index(block))

    def table_rows(self, block: int) -> int:
        """Of the table of one of the blocks."""
        return -(-sum(self.hashes_of(block).rows) // self.rows_multiple) * self.rows_multiple

    def mixer(self, context: LayerContext) -> NGramEmbedding:
        """As in LayerConfig."""
        return NGramEmbedding(self, context)


class NGramEmbedding(RecurrentMixer):
    """x = gate_i value + silu(conv(norm(gate_i value))) for each stream i, with the gates
    sigmoid(signed sqrt(norm(key_i) . norm(stream_i) / sqrt(hidden))), and keys and a value from the
    n-grams' embeddings. But for the table, whole on every rank.

    Its state is a window: of the convolution's inputs, and of the tokens' ids, a convolution of
    which with taps of 1 and 0 gives each token those before it.
    """

    kind = "ngram_embedding"

    def __init__(self, config: NGramEmbeddingConfig, context: LayerContext) -> None:
        """Raises ConfigurationError for sizes that do not fit."""
        hashes = config.hashes_of(context.layer)
        heads = (hashes.size - 1) * hashes.heads
        if hashes.vocab_size > 256**ID_BYTES:
            raise ConfigurationError(
                f"The vocabulary has {hashes.vocab_size} tokens; embeddings of n-grams are "
                f"supported for {256**ID_BYTES} at most."
            )
        channels = config.streams * context.hidden_size
        behind = max((config.conv_width - 1) * hashes.size, hashes.size - 1)
        super().__init__(context, [channels, ID_BYTES * (hashes.size - 1)], behind + 1)
        self.config, self.hashes = config, hashes
        self.channels, self.hidden = channels, context.hidden_size
        self.input_size = channels
        numbers = config.embedding_size // heads
        rows = config.table_rows(context.layer)
        self.table = NGramTable(rows, numbers, heads, config.shards, context)
        self.projection = context.to_rows(
            channels + context.hidden_size, bias=False, inputs=config.embedding_size
        )
        self.norm_key, self.norm_query, self.norm_conv = (
            StreamsNorm(
                config.streams, context.hidden_size, context.eps, context.dtype, zero_centered=True
            )
            for _ in range(3)
        )
        self.multipliers: Tensor  # int64, of hashes; see after_loading
        self.rows: Tensor
        self.starts: Tensor

    @cached_property
    def _taps(self) -> slice:
        """Of the convolution's width, those that are weights."""
        last = self.conv_weight.shape[1] - 1
        step = self.hashes.size
        return slice(last - (self.config.conv_width - 1) * step, None, step)

    def weight_parts(self) -> Parts:
        yield from prefixed("table", self.table.weight_parts())
        sizes = ("key_proj", self.channels), ("value_proj", self.hidden)
        yield from fused([Rows(role, size, 0, size) for role, size in sizes], self.projection)
        for name in ("norm_key", "norm_query", "norm_conv"):
            yield from prefixed(name, getattr(self, name).weight_parts())
        taps = self.conv_weight[: self.channels, None, self._taps]
        yield whole("short_conv.weight", taps)

    def after_loading(self) -> None:
        """Taps between those of the convolution are zero; those of ids, one and zeros."""
        taps = self.conv_weight[: self.channels, self._taps].clone()
        self.conv_weight.zero_()
        self.conv_weight[: self.channels, self._taps] = taps
        for lag in range(1, self.hashes.size):
            first = self.channels + ID_BYTES * (lag - 1)
            self.conv_weight[first : first + ID_BYTES, -1 - lag] = 1
        super().after_loading()
        constants = self.hashes.constants(self.conv_weight.device)
        for name, value in zip(("multipliers", "rows", "starts"), constants, strict=True):
            self.derive(name, value)

    def forward(self, x: Inputs, plans: KernelPlans) -> Tensor:
        """The streams [tokens, streams * hidden] -> what is to be added to them, whole; reads and
        writes the sequences' windows."""
        kernels, streams, token_ids = plans.kernels, plain_rows(x), plans.token_ids
        assert token_ids is not None
        key, value = self.projection(self._embeddings(token_ids, streams, plans), kernels).split(
            [self.channels, self.hidden], dim=1
        )
        gated = kernels.streams.keyed(
            self.norm_key(key, kernels), self.norm_query(streams, kernels), value
        )
        normed = self.norm_conv(gated.flatten(1), kernels).flatten(1)
        convolved = self.convolve(normed, plans, channels=slice(self.channels))
        return convolved.add_(gated.flatten(1))

    def _embeddings(self, token_ids: Tensor, like: Tensor, plans: KernelPlans) -> Tensor:
        """[tokens] -> [tokens, embedding_size]"""
        hashes = self.hashes
        own = hashes.as_bytes(token_ids, like.dtype).repeat(1, hashes.size - 1)
        before = self.convolve(own, plans, silu=False, channels=slice(self.channels, None))
        places = hashes.places(token_ids, before, (self.multipliers, self.rows, self.starts))
        return self.table(places)
