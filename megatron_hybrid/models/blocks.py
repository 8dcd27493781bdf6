"""Blocks: a norm and a mixer each, made from the letters of a model's pattern."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from megatron_hybrid.kernels.linear.formats import WeightFormat
from megatron_hybrid.kernels.protocols import Inputs
from megatron_hybrid.layers.attention import Attention
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.linear import allocate_linears
from megatron_hybrid.layers.mixer import LayerContext, Mixed, Mixer, added_up
from megatron_hybrid.layers.moe import MoE
from megatron_hybrid.layers.norm import RMSNorm
from megatron_hybrid.layers.parts import Parts, inner_parts, prefixed
from megatron_hybrid.layers.shared_transformer import SharedTransformer, SharedTransformerUse
from megatron_hybrid.models.config import (
    MAMBA,
    SHARED_TRANSFORMER,
    HybridModelConfig,
    undescribed,
)
from megatron_hybrid.parallel import ParallelContext, RankGroup

# Of a weight: its block, None for those outside of blocks, and its role there. None: the model's
# type.
ModelFormats = Callable[[int | None, str], WeightFormat | None]


def in_one_type(block: int | None, role: str) -> None:
    """Formats of a model that is not quantised."""


class Block(nn.Module):
    """x + residual_multiplier * mixer(norm(x)). The sum is left to the next block's norm."""

    def __init__(self, norm: RMSNorm, mixer: Mixer, ranks: RankGroup) -> None:
        """`ranks`: that have a part of the mixer each."""
        super().__init__()
        self.ranks = ranks
        self.norm = norm
        self.mixer = mixer

    @property
    def attention(self) -> Attention | None:
        """The layer that has KV; None for a block without one."""
        return self.mixer.attention

    def weight_parts(self) -> Parts:
        """Of this block alone: of a shared transformer only its own adapters."""
        return inner_parts(self)

    def forward(
        self, mixed: Mixed | None, residual: Tensor, multiplier: float, plans: KernelPlans
    ) -> tuple[Mixed, Tensor]:
        """What the mixer gives, and the residual stream with `mixed` in it, which the block before
        has not added yet (None: there is none); the sum may take `residual`'s place."""
        x, residual = self._enter(mixed, residual, multiplier, plans)
        return self.mixer(x, plans), residual

    def _enter(
        self, mixed: Mixed | None, residual: Tensor, multiplier: float, plans: KernelPlans
    ) -> tuple[Inputs, Tensor]:
        """What the mixer takes in, and the residual stream, as in `forward`."""
        if mixed is None:
            return self.norm(residual, plans.kernels), residual
        return self.norm.after_adding(
            mixed, residual, multiplier, plans.kernels, self.ranks, self.mixer.reader
        )


class MoEBlock(Block):
    """A Block of experts: where a kernel can do both, the norm is the router's first step."""

    mixer: MoE

    def forward(
        self, mixed: Mixed | None, residual: Tensor, multiplier: float, plans: KernelPlans
    ) -> tuple[Mixed, Tensor]:
        """See Block.forward."""
        alone = self.ranks.size == 1 and self.mixer.reader is None
        if isinstance(mixed, Tensor) and alone:
            router = self.mixer.router
            entered = router.after_norm(self.norm, mixed, residual, multiplier, plans)
            if entered is not None:
                return self.mixer(entered.x, plans, entered.routes), entered.residual
        return super().forward(mixed, residual, multiplier, plans)


class SharedTransformerBlock(Block):
    """x + mixer(norm(x + transformer(x))): the transformer's result is no part of the sum."""

    def __init__(
        self, norm: RMSNorm, mixer: Mixer, ranks: RankGroup, transformer: SharedTransformerUse
    ) -> None:
        super().__init__(norm, mixer, ranks)
        self.transformer = transformer

    @property
    def attention(self) -> Attention:
        """The shared transformer's."""
        return self.transformer.shared.self_attn

    def _enter(
        self, mixed: Mixed | None, residual: Tensor, multiplier: float, plans: KernelPlans
    ) -> tuple[Inputs, Tensor]:
        """See Block._enter."""
        if mixed is not None:
            residual = residual + multiplier * self.ranks.all_reduce(added_up(mixed))
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
    shared: dict[int, SharedTransformer] = field(default_factory=dict)

    def norm(self) -> RMSNorm:
        """One of the model's norms, with weights still to be read."""
        config = self.config
        return RMSNorm(config.hidden_size, config.norm_eps, self.dtype, config.zero_centered_norm)

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
        )

    def block(self, index: int, letter: str | None = None) -> Block:
        """Block `index` of the whole model, or behind it one of this kind. Raises
        ConfigurationError for a letter that the configuration does not describe."""
        config, context = self.config, self.context(index)
        letter = config.pattern[index] if letter is None else letter
        if letter != SHARED_TRANSFORMER:
            mixer = config.layer(letter).mixer(context)
            kind = MoEBlock if isinstance(mixer, MoE) else Block
            block = kind(self.norm(), mixer, self.parallel.tensor)
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
        mixer = config.layer(MAMBA).mixer(context)
        block = SharedTransformerBlock(self.norm(), mixer, self.parallel.tensor, use)
        allocate_linears(block.weight_parts(), partial(self.formats, index))
        return block
