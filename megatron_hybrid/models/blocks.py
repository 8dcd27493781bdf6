"""Blocks: a mixer each and a norm before it, behind it, or both, made from the letters of a model's
pattern."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_hybrid.kernels.linear.formats import WeightFormat
from megatron_hybrid.kernels.linear.reference import plain_rows
from megatron_hybrid.kernels.protocols import Inputs
from megatron_hybrid.layers.cached_attention import CachedAttention
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.layer_norm import LayerNorm
from megatron_hybrid.layers.linear import allocate_linears
from megatron_hybrid.layers.mixer import LayerContext, Mixed, Mixer, added_up
from megatron_hybrid.layers.moe import MoE
from megatron_hybrid.layers.ngram_embedding import NGramEmbedding
from megatron_hybrid.layers.norm import RMSNorm
from megatron_hybrid.layers.parts import Parts, inner_parts, prefixed
from megatron_hybrid.layers.residual_scaling import ChannelScale, ResidualScaling
from megatron_hybrid.layers.shared_transformer import SharedTransformer, SharedTransformerUse
from megatron_hybrid.layers.streams import Connection, StreamsHead
from megatron_hybrid.models.config import (
    SHARED_TRANSFORMER,
    BlockForm,
    HybridModelConfig,
    undescribed,
)
from megatron_hybrid.parallel import ParallelContext, RankGroup

# Of a weight: its block, None for those outside of blocks, and its role there. None: the model's
# type.
ModelFormats = Callable[[int | None, str], WeightFormat | None]


def in_one_type(block: int | None, role: str) -> None:
    """Formats of a model that is not quantised."""


class Addend(NamedTuple):
    """How what a block gives is added to the residual stream, which is left to whoever follows."""

    multiplier: float
    ranks: RankGroup | None  # that have a part of it each; None: every rank has all of it

    def to(self, residual: Tensor, mixed: Mixed) -> Tensor:
        """[tokens, hidden], as RMSNorm.after_adding, without a norm."""
        total = added_up(mixed)
        if self.ranks is not None:
            total = self.ranks.all_reduce(total)
        return torch.add(residual, total, alpha=self.multiplier)


class Block(nn.Module):
    """x + residual_multiplier * mixer(norm(x)), or as its BlockForm says. The sum is left to the
    next block's norm."""

    def __init__(
        self,
        norm: RMSNorm | None,
        mixer: Mixer,
        ranks: RankGroup,
        entering: Addend,
        post_norm: RMSNorm | None = None,
        from_norm: bool = False,
        scaling: ResidualScaling | None = None,
    ) -> None:
        """`ranks`: that have a part of the mixer each. `entering`: of the block before."""
        super().__init__()
        self.from_norm = from_norm
        self.ranks = ranks
        self.entering = entering
        self.norm = norm
        self.mixer = mixer
        self.post_norm = post_norm
        self.scaling = scaling

    @property
    def attention(self) -> CachedAttention | None:
        """The layer that has KV; None for a block without one."""
        return self.mixer.attention

    def weight_parts(self) -> Parts:
        """Of this block alone: of a shared transformer only its own adapters."""
        return inner_parts(self)

    def forward(
        self, mixed: Mixed | None, residual: Tensor, plans: KernelPlans
    ) -> tuple[Mixed | None, Tensor]:
        """What is to be added to the residual stream next, and the stream with `mixed` in it, which
        the block before has not added yet (None: there is none); the sum may take `residual`'s
        place."""
        x, residual = self._enter(mixed, residual, plans)
        return self._leave(self.mixer(x, plans), plans), self._stream(x, residual)

    def _enter(
        self, mixed: Mixed | None, residual: Tensor, plans: KernelPlans
    ) -> tuple[Inputs, Tensor]:
        """What the mixer takes in, and the residual stream, as in `forward`."""
        if self.norm is None:
            if mixed is not None:
                residual = self.entering.to(residual, mixed)
            assert self.post_norm is not None
            return residual.to(self.post_norm.dtype), residual
        if mixed is None:
            return self.norm(residual, plans.kernels), residual
        (multiplier, ranks), reader = self.entering, self.mixer.reader
        if reader is not None and self.from_norm:
            reader = reader._replace(plain=True)
        return self.norm.after_adding(mixed, residual, multiplier, plans.kernels, ranks, reader)

    def _stream(self, x: Inputs, residual: Tensor) -> Tensor:
        """What the mixer's result is to be added to, of what `_enter` gives."""
        if self.scaling is not None:
            return self.scaling.stream(residual)
        return plain_rows(x).to(residual.dtype) if self.from_norm else residual

    def _leave(self, mixed: Mixed, plans: KernelPlans) -> Mixed:
        """What the mixer gives, normed or scaled where that is to be: its parts are summed
        before."""
        if self.post_norm is None and self.scaling is None:
            return mixed
        total = self.ranks.all_reduce(added_up(mixed))
        if self.scaling is not None:
            return self.scaling.mixed(total)
        assert self.post_norm is not None
        return self.post_norm(total, plans.kernels)


class MoEBlock(Block):
    """A Block of experts: where a kernel can do both, the norm is the router's first step."""

    mixer: MoE

    def forward(
        self, mixed: Mixed | None, residual: Tensor, plans: KernelPlans
    ) -> tuple[Mixed | None, Tensor]:
        """See Block.forward."""
        norm, (multiplier, ranks) = self.norm, self.entering
        alone = (ranks is None or ranks.size == 1) and self.mixer.reader is None
        if isinstance(mixed, Tensor) and norm is not None and alone:
            router = self.mixer.router
            entered = router.after_norm(norm, mixed, residual, multiplier, plans)
            if entered is not None:
                given = self._leave(self.mixer(entered.x, plans, entered.routes), plans)
                return given, self._stream(entered.x, entered.residual)
        return super().forward(mixed, residual, plans)


class FirstBlock(Block):
    """The first Block of a model whose embeddings go through a norm, or scales, of their own."""

    embedding_norm: RMSNorm | ChannelScale

    def _enter(
        self, mixed: Mixed | None, residual: Tensor, plans: KernelPlans
    ) -> tuple[Inputs, Tensor]:
        """See Block._enter."""
        residual = self.embedding_norm(residual, plans.kernels).to(residual.dtype)
        return super()._enter(mixed, residual, plans)


class StreamsBlock(Block):
    """A Block on several residual streams, between which nothing is left to be added."""

    def __init__(
        self,
        norm: RMSNorm | None,
        mixer: Mixer,
        ranks: RankGroup,
        entering: Addend,
        connection: Connection,
        whole: bool,
    ) -> None:
        """`whole`: as of BlockForm."""
        super().__init__(norm, mixer, ranks, entering)
        self.streams, self.whole = connection, whole

    def forward(
        self, mixed: Mixed | None, residual: Tensor, plans: KernelPlans
    ) -> tuple[None, Tensor]:
        """See Block.forward: residual [tokens, streams * hidden], and no `mixed`."""
        assert mixed is None
        x, weights = self.streams.enter(residual, plans.kernels)
        if self.norm is not None:
            x = self.norm(x, plans.kernels)
        given = added_up(self.mixer(x, plans))
        if not self.whole:
            given = self.ranks.all_reduce(given)
        return None, self.streams.leave(residual, given, weights, plans.kernels)


class AddedToStreams(Block):
    """What a mixer that reads all residual streams adds to them, the same on every rank."""

    mixer: NGramEmbedding

    def forward(
        self, mixed: Mixed | None, residual: Tensor, plans: KernelPlans
    ) -> tuple[None, Tensor]:
        """See StreamsBlock.forward."""
        return None, residual + self.mixer(residual, plans)


class SharedTransformerBlock(Block):
    """x + mixer(norm(x + transformer(x))): the transformer's result is no part of the sum."""

    norm: RMSNorm

    def __init__(
        self,
        norm: RMSNorm,
        mixer: Mixer,
        ranks: RankGroup,
        entering: Addend,
        transformer: SharedTransformerUse,
    ) -> None:
        super().__init__(norm, mixer, ranks, entering)
        self.transformer = transformer

    @property
    def attention(self) -> CachedAttention:
        """The shared transformer's."""
        return self.transformer.shared.self_attn

    def _enter(
        self, mixed: Mixed | None, residual: Tensor, plans: KernelPlans
    ) -> tuple[Inputs, Tensor]:
        """See Block._enter."""
        if mixed is not None:
            residual = self.entering.to(residual, mixed)
        return self.norm(residual + self.transformer(residual, plans), plans.kernels), residual


def uses_of_shared(config: HybridModelConfig, block: int) -> list[int]:
    """The blocks that use the same shared transformer as this one, which they take in turn:
    1 2 3 1 2 3 ..."""
    assert config.shared_transformer is not None
    uses = [i for i, letter in enumerate(config.pattern) if letter == SHARED_TRANSFORMER]
    count = config.shared_transformer.num_blocks
    return uses[uses.index(block) % count :: count]


@dataclass(frozen=True)
class BlockBuilder:
    """Makes blocks of one model. Those that share a transformer are given the same one: `shared`
    has them, by the block that uses each first in the whole model. `formats`: of the weights of
    linear layers."""

    config: HybridModelConfig
    parallel: ParallelContext
    dtype: torch.dtype
    conv_states_dtype: torch.dtype
    ssm_states_dtype: torch.dtype
    kv_dtype: torch.dtype
    formats: ModelFormats = in_one_type
    replay_chunk: int | None = None  # of LayerContext
    tables_on_host: bool = False  # of LayerContext
    shared: dict[int, SharedTransformer] = field(default_factory=dict)

    def norm(self, index: int = 0) -> RMSNorm:
        """One of the model's norms, with weights still to be read: of the residual stream in front
        of block `index`, or of other things."""
        config = self.config
        eps = config.norm_eps_before(index)
        if config.layer_norm:
            return LayerNorm(config.hidden_size, eps, self.dtype)
        return RMSNorm(config.hidden_size, eps, self.dtype, config.zero_centered_norm)

    def head_norm(self) -> RMSNorm | StreamsHead:
        """What is between the last block and the head."""
        norm, streams = self.norm(len(self.config.pattern)), self.config.streams
        if streams is None:
            return norm
        assert self.config.logits_divisor == 1.0
        return streams.head(self.context(len(self.config.pattern)), norm)

    def addend(self, index: int) -> Addend:
        """What is to be added in front of block `index`."""
        config = self.config
        form = config.form(index - 1) if index else BlockForm()
        multiplier = config.residual_multiplier * form.multiplier / config.stream_divisor(index)
        is_whole = form.post_norm or form.scaled or form.whole
        return Addend(multiplier, None if is_whole else self.parallel.tensor)

    def context(self, index: int) -> LayerContext:
        """For a layer whose caches have this number."""
        return LayerContext(
            self.config.hidden_size,
            self.config.norm_eps,
            index,
            self.dtype,
            self.parallel.tensor,
            self.parallel.experts,
            self.conv_states_dtype,
            self.ssm_states_dtype,
            self.kv_dtype,
            self.replay_chunk,
            self.tables_on_host,
        )

    def _on_streams(
        self,
        norm: RMSNorm | None,
        mixer: Mixer,
        ranks: RankGroup,
        entering: Addend,
        context: LayerContext,
    ) -> Block:
        """A block of a model with several residual streams."""
        streams = self.config.streams
        assert streams is not None
        if isinstance(mixer, NGramEmbedding):
            return AddedToStreams(None, mixer, ranks, entering)
        norm, whole = norm if streams.has_norms else None, self.config.form(context.layer).whole
        return StreamsBlock(norm, mixer, ranks, entering, streams.connection(context), whole)

    def block(self, index: int, letter: str | None = None) -> Block:
        """Block `index` of the whole model, or behind it one of this kind. Raises
        ConfigurationError for a letter that the configuration does not describe."""
        config, context = self.config, self.context(index)
        letter = config.pattern[index] if letter is None else letter
        ranks, entering = self.parallel.tensor, self.addend(index)
        if letter != SHARED_TRANSFORMER:
            mixer, form = config.layer(letter).mixer(context), config.form(index)
            assert form.norm or config.stream_divisor(index) == 1.0
            norm = self.norm(index) if form.norm else None
            post_norm = self.norm() if form.post_norm else None
            scaling = ResidualScaling(config.hidden_size, self.dtype) if form.scaled else None
            around = post_norm, form.from_norm, scaling
            kind = MoEBlock if isinstance(mixer, MoE) else Block
            if config.streams is not None:
                block: Block = self._on_streams(norm, mixer, ranks, entering, context)
            elif index == 0 and (config.embedding_norm or config.embedding_scale):
                entry = FirstBlock(norm, mixer, ranks, entering, *around)
                entry.embedding_norm = (
                    ChannelScale(config.hidden_size, self.dtype)
                    if config.embedding_scale
                    else self.norm()
                )
                block = entry
            else:
                block = kind(norm, mixer, ranks, entering, *around)
            allocate_linears(block.weight_parts(), partial(self.formats, index))
            return block
        shared = config.shared_transformer
        if shared is None:
            raise undescribed(letter)
        uses = uses_of_shared(config, index)
        first = uses[0]
        if first not in self.shared:
            made = self.shared[first] = SharedTransformer(shared, context)
            parts = prefixed("transformer", made.weight_parts())
            allocate_linears(parts, partial(self.formats, first))
        own = uses.index(index)
        use = SharedTransformerUse(shared, self.shared[first], context, own, len(uses))
        mixer = config.layer(shared.mixer).mixer(context)
        block = SharedTransformerBlock(self.norm(), mixer, ranks, entering, use)
        allocate_linears(block.weight_parts(), partial(self.formats, index))
        return block
