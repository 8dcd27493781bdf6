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
from megatron_hybrid.layers.inputs import KVSpec, LayerCaches, StateSpec, StepInputs
from megatron_hybrid.layers.mamba2 import Mamba2
from megatron_hybrid.layers.mlp import MLP
from megatron_hybrid.layers.moe import MoE
from megatron_hybrid.layers.norm import RMSNorm
from megatron_hybrid.layers.parts import WeightPart, section
from megatron_hybrid.layers.rope import inverse_frequencies
from megatron_hybrid.layers.step import Step
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.parallel import (
    ColumnParallelLinear,
    ParallelContext,
    VocabParallelEmbedding,
)


class Block(nn.Module):
    """x + residual_multiplier * mixer(norm(x)). The sum is left to the next block's norm."""

    def __init__(self, norm: RMSNorm, mixer: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.mixer = mixer


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
        ranks = parallel.size
        padded_vocab = -(-config.vocab_size // ranks) * ranks
        self.embedding = VocabParallelEmbedding(
            padded_vocab, config.hidden_size, dtype=dtype, parallel=parallel
        )
        self.blocks = nn.ModuleList()
        for layer, letter in enumerate(config.pattern):
            norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
            mixer = self._mixer(letter, layer, conv_states_dtype, ssm_states_dtype)
            self.blocks.append(Block(norm, mixer))
        self.final_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.lm_head: ColumnParallelLinear | None = None
        if not config.tie_word_embeddings:
            self.lm_head = ColumnParallelLinear(
                config.hidden_size, padded_vocab, bias=False, dtype=dtype, parallel=parallel
            )
        frequencies = None if config.rope is None else inverse_frequencies(config.rope)
        self.register_buffer("frequencies", frequencies, persistent=False)

        mixers = [block.mixer for block in self._blocks()]
        self.kv_specs: dict[int, KVSpec] = {
            i: mixer.kv_spec() for i, mixer in enumerate(mixers) if isinstance(mixer, Attention)
        }
        self.state_specs: dict[int, StateSpec] = {
            i: mixer.state_spec() for i, mixer in enumerate(mixers) if isinstance(mixer, Mamba2)
        }
        self._mamba = next((m for m in mixers if isinstance(m, Mamba2)), None)
        self._attention = next((m for m in mixers if isinstance(m, Attention)), None)
        # Past this block tokens do not see each other any more.
        self._last_mixing = max([*self.kv_specs, *self.state_specs], default=-1)

    def _mixer(
        self, letter: str, layer: int, conv_dtype: torch.dtype, ssm_dtype: torch.dtype
    ) -> nn.Module:
        config, hidden, eps = self.config, self.config.hidden_size, self.config.norm_eps
        dtype, parallel = self.dtype, self.parallel
        if letter == "M" and config.mamba is not None:
            return Mamba2(config.mamba, hidden, eps, layer, dtype, parallel, conv_dtype, ssm_dtype)
        if letter == "*" and config.attention is not None:
            return Attention(config.attention, hidden, eps, layer, dtype, parallel)
        if letter == "-" and config.mlp is not None:
            return MLP(config.mlp, hidden, dtype, parallel)
        if letter == "E" and config.moe is not None:
            return MoE(config.moe, hidden, dtype, parallel)
        raise ConfigurationError(f"The model does not describe its layers of kind {letter!r}.")

    def after_loading(self) -> None:
        """To be called when the weights are in place."""
        for block in self._blocks():
            if isinstance(block.mixer, Mamba2):
                block.mixer.after_loading()

    def _blocks(self) -> Iterator[Block]:
        for block in self.blocks:
            assert isinstance(block, Block)
            yield block

    def weight_parts(self) -> Iterator[tuple[int | None, WeightPart]]:
        """(block, part) for every weight of this rank; block None for those outside of blocks,
        whose roles are embedding, final_norm and lm_head."""
        yield None, self._vocabulary_part("embedding", self.embedding.weight)
        for index, block in enumerate(self._blocks()):
            for part in block.norm.weight_parts():
                yield index, WeightPart("norm.weight", part.shape, part.source, part.target)
            for part in block.mixer.weight_parts():  # type: ignore[operator]
                yield index, WeightPart(f"mixer.{part.role}", part.shape, part.source, part.target)
        for part in self.final_norm.weight_parts():
            yield None, WeightPart("final_norm", part.shape, part.source, part.target)
        if self.lm_head is not None:
            yield None, self._vocabulary_part("lm_head", self.lm_head.weight)

    def _vocabulary_part(self, role: str, weight: Tensor) -> WeightPart:
        """The last ranks' rows past the vocabulary are padding, set to zero here."""
        rows, vocab = weight.shape[0], self.config.vocab_size
        start = min(self.parallel.rank * rows, vocab)
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
        residual = self.embedding(inputs.token_ids)  # [tokens, hidden]
        if config.embedding_multiplier != 1.0:
            residual = residual * config.embedding_multiplier
        if config.residual_in_fp32:
            residual = residual.float()
        mixed: Tensor | None = None  # the last block's output, not added yet
        for index, block in enumerate(self._blocks()):
            if mixed is None:
                x = block.norm(residual, kernels)
            else:
                x, residual = block.norm.after_adding(
                    mixed, residual, config.residual_multiplier, kernels
                )
            mixed = block.mixer(x, step)
            if index == self._last_mixing:
                mixed = mixed.index_select(0, inputs.logits_index)
                residual = residual.index_select(0, inputs.logits_index)
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
        logits = self.parallel.all_gather(logits)
        return logits[:, : self.config.vocab_size]

    def plan(self, inputs: StepInputs, caches: LayerCaches) -> Step:
        """What kernels work out on the host once a step, for all layers."""
        kernels = self.kernels
        plans: dict[str, Any] = {}
        if self._attention is not None:
            block_size = next(iter(caches.kv.values())).key.shape[1]
            shape = self._attention.shape(block_size)
            plans["attention"] = kernels.attention.plan(inputs.paged, shape)
        if self._mamba is not None:
            config = self._mamba.config
            if inputs.decode is not None:
                plans["decode"] = kernels.plan_decode(inputs.decode)
            if inputs.prefill is not None:
                plans["conv"] = kernels.conv.plan(inputs.prefill, config.conv_width)
                plans["scan"] = kernels.scan.plan(inputs.prefill, config.kernel_chunk)
        return Step(caches, kernels, inputs.num_decodes, **plans)
