"""One model for all families: a stack of blocks read off a pattern."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.kernels.kernel_set import REFERENCE
from megatron_hybrid.layers.attention import Attention
from megatron_hybrid.layers.gated_delta_net import GatedDeltaNet
from megatron_hybrid.layers.inputs import KVSpec, LayerCaches, LockstepSize, StateSpec, StepInputs
from megatron_hybrid.layers.mamba1 import Mamba1
from megatron_hybrid.layers.mamba2 import Mamba2
from megatron_hybrid.layers.mixer import LayerContext, Mixer
from megatron_hybrid.layers.mlp import MLP
from megatron_hybrid.layers.moe import MoE
from megatron_hybrid.layers.norm import RMSNorm
from megatron_hybrid.layers.parts import Parts, WeightPart, prefixed, section
from megatron_hybrid.layers.rope import inverse_frequencies
from megatron_hybrid.layers.shared_transformer import SharedTransformer, SharedTransformerUse
from megatron_hybrid.layers.short_conv import ShortConv
from megatron_hybrid.layers.side_by_side import SideBySide
from megatron_hybrid.layers.step import Step
from megatron_hybrid.models.config import (
    ATTENTION,
    GATED_DELTA_NET,
    MAMBA,
    MAMBA1,
    SHARED_TRANSFORMER,
    SHORT_CONV,
    SIDE_BY_SIDE,
    HybridModelConfig,
)
from megatron_hybrid.parallel import (
    ColumnParallelLinear,
    ParallelContext,
    VocabParallelEmbedding,
)


class Block(nn.Module):
    """x + residual_multiplier * mixer(norm(x)). The sum is left to the next block's norm."""

    def __init__(self, norm: RMSNorm, mixer: Mixer) -> None:
        super().__init__()
        self.norm = norm
        self.mixer = mixer

    @property
    def attention(self) -> Attention | None:
        return self.mixer.attention

    def weight_parts(self) -> Parts:
        yield from prefixed("norm", self.norm.weight_parts())
        yield from prefixed("mixer", self.mixer.weight_parts())

    def enter(
        self, mixed: Tensor | None, residual: Tensor, multiplier: float, step: Step
    ) -> tuple[Tensor, Tensor]:
        """What the mixer takes in, and the residual stream with `mixed`, which the last block has
        not added yet, in it."""
        if mixed is None:
            return self.norm(residual, step.kernels), residual
        return self.norm.after_adding(mixed, residual, multiplier, step.kernels)


class SharedTransformerBlock(Block):
    """x + mixer(norm(x + transformer(x))): the transformer's result is no part of the sum."""

    def __init__(self, norm: RMSNorm, mixer: Mixer, transformer: SharedTransformerUse) -> None:
        super().__init__(norm, mixer)
        self.transformer = transformer

    @property
    def attention(self) -> Attention:
        return self.transformer.shared.self_attn

    def weight_parts(self) -> Parts:
        yield from super().weight_parts()
        yield from prefixed("transformer", self.transformer.weight_parts())

    def enter(
        self, mixed: Tensor | None, residual: Tensor, multiplier: float, step: Step
    ) -> tuple[Tensor, Tensor]:
        if mixed is not None:
            residual = residual + multiplier * mixed
        return self.norm(residual + self.transformer(residual, step), step.kernels), residual


class HybridModel(nn.Module):
    """`kv_specs` and `state_specs` say, by layer index, what this rank's caches have to hold."""

    frequencies: Tensor | None  # of the rotary embedding

    def __init__(
        self,
        config: HybridModelConfig,
        parallel: ParallelContext,
        dtype: torch.dtype,
        conv_states_dtype: torch.dtype,
        ssm_states_dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.config = config
        self.parallel = parallel
        self.dtype = dtype
        self.kernels = REFERENCE
        tensor = parallel.tensor
        padded_vocab = -(-config.vocab_size // tensor.size) * tensor.size
        self.embedding = VocabParallelEmbedding(
            padded_vocab, config.hidden_size, dtype=dtype, parallel=tensor
        )
        self.blocks = nn.ModuleList()
        shared: list[SharedTransformer] = []
        for layer, letter in enumerate(config.pattern):
            context = LayerContext(
                config.hidden_size,
                config.norm_eps,
                layer,
                dtype,
                tensor,
                parallel.experts,
                conv_states_dtype,
                ssm_states_dtype,
            )
            self.blocks.append(self._block(letter, context, shared))
        self.final_norm = self._norm()
        self.lm_head: ColumnParallelLinear | None = None
        if not config.tie_word_embeddings:
            self.lm_head = ColumnParallelLinear(
                config.hidden_size, padded_vocab, bias=False, dtype=dtype, parallel=tensor
            )
        frequencies = None if config.rope is None else inverse_frequencies(config.rope)
        self.register_buffer("frequencies", frequencies, persistent=False)

        attentions = {i: block.attention for i, block in enumerate(self._blocks())}
        recurrents = {i: block.mixer.recurrent for i, block in enumerate(self._blocks())}
        self.kv_specs: dict[int, KVSpec] = {
            i: layer.kv_spec() for i, layer in attentions.items() if layer is not None
        }
        self.state_specs: dict[int, StateSpec] = {
            i: layer.spec for i, layer in recurrents.items() if layer is not None
        }
        # One of each kind, for what all layers of the kind have in common.
        self._attention = next(filter(None, attentions.values()), None)
        self._recurrent = {layer.kind: layer for layer in filter(None, recurrents.values())}
        # Past this block tokens do not see each other any more.
        self._last_mixing = max([*self.kv_specs, *self.state_specs], default=-1)

    def _norm(self) -> RMSNorm:
        config = self.config
        return RMSNorm(config.hidden_size, config.norm_eps, self.dtype, config.zero_centered_norm)

    def _block(self, letter: str, context: LayerContext, shared: list[SharedTransformer]) -> Block:
        """`shared`: the shared blocks so far."""
        config = self.config
        if letter != SHARED_TRANSFORMER:
            return Block(self._norm(), self._mixer(letter, context))
        if config.shared_transformer is None:
            raise self._undescribed(letter)
        # Each in turn: 1 2 3 1 2 3 ...
        before = config.pattern[: context.layer].count(SHARED_TRANSFORMER)
        index = before % config.shared_transformer.num_blocks
        is_first = index == len(shared)
        if is_first:
            shared.append(SharedTransformer(config.shared_transformer, context))
        use = SharedTransformerUse(config.shared_transformer, shared[index], is_first, context)
        return SharedTransformerBlock(self._norm(), self._mixer(MAMBA, context), use)

    def _mixer(self, letter: str, context: LayerContext) -> Mixer:
        config = self.config
        if letter == MAMBA and config.mamba is not None:
            return Mamba2(config.mamba, context)
        if letter == MAMBA1 and config.mamba1 is not None:
            return Mamba1(config.mamba1, context)
        if letter == GATED_DELTA_NET and config.gated_delta_net is not None:
            return GatedDeltaNet(config.gated_delta_net, context)
        if letter == SHORT_CONV and config.short_conv is not None:
            return ShortConv(config.short_conv, context)
        if letter == SIDE_BY_SIDE and config.attention is not None and config.mamba is not None:
            return SideBySide(config.attention, config.mamba, context)
        if letter == ATTENTION and config.attention is not None:
            return Attention(config.attention, context)
        if letter == "-" and config.mlp is not None:
            return MLP(config.mlp, context)
        if letter == "E" and config.moe is not None:
            return MoE(config.moe, context)
        raise self._undescribed(letter)

    def _undescribed(self, letter: str) -> ConfigurationError:
        return ConfigurationError(f"The model does not describe its layers of kind {letter!r}.")

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Kernel chunks whose bounds the model's kernels read (PrefillSegments)."""
        layers = self._recurrent.values()
        return tuple(sorted({x.spec.kernel_chunk for x in layers if x.takes_chunk_bounds}))

    @torch.no_grad()
    def after_loading(self) -> None:
        """To be called when the weights are in place: lets every layer prepare what it needs."""
        for module in self.modules():
            prepare = getattr(module, "after_loading", None)
            if prepare is not None and module is not self:
                prepare()

    def _blocks(self) -> Iterator[Block]:
        for block in self.blocks:
            assert isinstance(block, Block)
            yield block

    def weight_parts(self) -> Iterator[tuple[int | None, WeightPart]]:
        """(block, part) for every weight of this rank; block None for those outside of blocks,
        whose roles are embedding, final_norm and lm_head."""
        yield None, self._vocabulary_part("embedding", self.embedding.weight)
        for index, block in enumerate(self._blocks()):
            for part in block.weight_parts():
                yield index, part
        for part in self.final_norm.weight_parts():
            yield None, replace(part, role="final_norm")
        if self.lm_head is not None:
            yield None, self._vocabulary_part("lm_head", self.lm_head.weight)

    def _vocabulary_part(self, role: str, weight: Tensor) -> WeightPart:
        """The last ranks' rows past the vocabulary are padding, set to zero here."""
        rows, vocab = weight.shape[0], self.config.vocab_size
        start = min(self.parallel.tensor.rank * rows, vocab)
        real = min(rows, vocab - start)
        weight[real:].zero_()
        return section(role, weight[:real], 0, start, vocab)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, caches: LayerCaches) -> Tensor:
        """Run one step; writes the caches. Returns logits [rows, vocab_size] of the tokens in
        `inputs.logits_index`, in the weights' dtype, the same on every rank."""
        return self.compute(inputs, self.plan(inputs, caches))

    @torch.inference_mode()
    def compute(self, inputs: StepInputs, step: Step) -> Tensor:
        """`forward` after `plan`: only this part is captured in a CUDA graph."""
        config, kernels = self.config, self.kernels
        if self.frequencies is not None and self._attention is not None:
            rotation = kernels.rope.plan(inputs.positions, self.frequencies, self.dtype)
            step = replace(step, rotation=rotation)
        size = inputs.lockstep or LockstepSize(inputs.num_tokens, len(inputs.logits_index))
        step = replace(step, most_tokens=size.tokens, all_to_all=size.all_to_all)
        residual = self.embedding(inputs.token_ids)  # [tokens, hidden]
        if config.embedding_multiplier != 1.0:
            residual = residual * config.embedding_multiplier
        if config.shared_transformer is not None:
            step = replace(step, embeddings=residual)
        if config.residual_in_fp32:
            residual = residual.float()
        mixed: Tensor | None = None  # the last block's output, not added yet
        for index, block in enumerate(self._blocks()):
            x, residual = block.enter(mixed, residual, config.residual_multiplier, step)
            mixed = block.mixer(x, step)
            if index == self._last_mixing:
                mixed = mixed.index_select(0, inputs.logits_index)
                residual = residual.index_select(0, inputs.logits_index)
                step = replace(step, most_tokens=size.rows)
        if self._last_mixing < 0:
            residual = residual.index_select(0, inputs.logits_index)
            mixed = None if mixed is None else mixed.index_select(0, inputs.logits_index)
        if mixed is None:
            hidden = self.final_norm(residual, kernels)
        else:
            hidden, _ = self.final_norm.after_adding(
                mixed, residual, config.residual_multiplier, kernels
            )
        head = self.embedding.weight if self.lm_head is None else self.lm_head.weight
        logits = F.linear(hidden, head)
        if self.config.logits_divisor != 1.0:
            logits = logits.float() / self.config.logits_divisor
        logits = self.parallel.tensor.all_gather(logits)
        return logits[:, : self.config.vocab_size]

    def plan(self, inputs: StepInputs, caches: LayerCaches) -> Step:
        """What kernels work out on the host once a step, for all layers."""
        kernels = self.kernels
        plans: dict[str, Any] = {}
        if self._attention is not None:
            block_size = next(iter(caches.kv.values())).key.shape[1]
            shape = self._attention.shape(block_size)
            plans["attention"] = kernels.attention.plan(inputs.paged, shape)
        plans["recurrent"] = {
            kind: layer.plan(inputs.num_decodes, inputs.decode, inputs.prefill, kernels)
            for kind, layer in self._recurrent.items()
        }
        return Step(caches, kernels, **plans)
