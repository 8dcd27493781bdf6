"""The head of a model for multi-token prediction: from what the model makes of a text and the token
after it, it predicts the next one; and from its own output and that token, the one after.

Gloeckle et al., "Better & Faster Large Language Models via Multi-token Prediction", 2024; in this
form, with the embedding and the lm_head of the model itself: DeepSeek-V3, 2024.

Position p of its KV cache holds the pair (hidden state behind token p - 1, token p), which depends
on no token after p: so it is cached and shared together with the model's own. Position 0 has no
pair and is not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.kernels.contract import AttentionShape
from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.kernels.linear.reference import plain_rows
from megatron_hybrid.layers.cached_attention import CachedAttention
from megatron_hybrid.layers.delay import Delay
from megatron_hybrid.layers.inputs import KVSpec, StateSpec
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.mixer import parameter
from megatron_hybrid.layers.parts import Part, prefixed, whole
from megatron_hybrid.models.blocks import Block, BlockBuilder


class MTPHead(nn.Module):
    """norm(blocks(fc [norm(embedding of the token) | norm(hidden state before it)])).

    Its blocks are counted on from the model's last one; the first of them, an attention layer, and
    the hidden states' way from one token to the next have their caches under that number.
    """

    def __init__(self, builder: BlockBuilder) -> None:
        """Raises ConfigurationError for a head that is not supported."""
        super().__init__()
        config = builder.config
        assert config.mtp is not None
        if config.mtp.unsupported:
            raise ConfigurationError(config.mtp.unsupported)
        assert config.stream_divisor(len(config.pattern)) == 1.0 and config.streams is None
        self.config = config
        self.first = len(config.pattern)
        self.embedding_norm, self.hidden_norm = builder.norm(), builder.norm()
        self.fc = parameter((config.hidden_size, 2 * config.hidden_size), builder.dtype)
        self.delay = Delay(builder.context(self.first))
        self.blocks = nn.ModuleList(
            builder.block(self.first + i, letter) for i, letter in enumerate(config.mtp.pattern)
        )
        self.final_norm = builder.norm()
        self.leaving = builder.addend(self.first + len(self.blocks))  # of the last block

    @property
    def attention(self) -> CachedAttention:
        """Of its first block, the only one with KV."""
        layer = self._block(0).attention
        assert layer is not None
        return layer

    @property
    def kv_specs(self) -> dict[int, KVSpec]:
        """What the caches hold of its KV, by the number of its first block."""
        return {self.first: self.attention.kv_spec()}

    @property
    def state_specs(self) -> dict[int, StateSpec]:
        """The same, of the hidden state that waits for its next token."""
        return {self.first: self.delay.spec}

    def shape(self, block_size: int) -> AttentionShape:
        """Of its attention, in which position 0 is not seen."""
        return replace(self.attention.shape(block_size), first_position=1)

    def weight_parts(self) -> Iterator[tuple[int, Part]]:
        """(block, part): what is in no block counts to the first or the last one."""
        last = self.first + len(self.blocks) - 1
        for part in prefixed("mtp.embedding_norm", self.embedding_norm.weight_parts()):
            yield self.first, part
        for part in prefixed("mtp.hidden_norm", self.hidden_norm.weight_parts()):
            yield self.first, part
        yield self.first, whole("mtp.fc.weight", self.fc)
        for i in range(len(self.blocks)):
            for part in self._block(i).weight_parts():
                yield self.first + i, part
        for part in prefixed("mtp.final_norm", self.final_norm.weight_parts()):
            yield last, part

    def store(self, embeddings: Tensor, hidden: Tensor, plans: KernelPlans) -> None:
        """Write the KV of a step's tokens: embeddings [tokens, hidden], and hidden [tokens, hidden]
        states behind each of them. What the head makes of them is of no use here."""
        x = self._join(embeddings, self.delay(hidden, plans), plans.kernels)
        norm = self._block(0).norm
        assert norm is not None
        self.attention.store(norm(x, plans.kernels), plans)

    def forward(self, embeddings: Tensor, hidden: Tensor, plans: KernelPlans) -> Tensor:
        """embeddings [rows, hidden] of tokens, hidden [rows, hidden] states before them -> [rows,
        hidden], which the lm_head takes, and the next pass as its hidden states; writes the rows'
        KV."""
        config, mixed = self.config, None
        residual = self._join(embeddings, hidden, plans.kernels)
        if config.residual_in_fp32:
            residual = residual.float()
        for i in range(len(self.blocks)):
            mixed, residual = self._block(i)(mixed, residual, plans)
        assert mixed is not None
        multiplier, ranks = self.leaving
        normed, _ = self.final_norm.after_adding(mixed, residual, multiplier, plans.kernels, ranks)
        return plain_rows(normed)

    def _join(self, embeddings: Tensor, hidden: Tensor, kernels: KernelSet) -> Tensor:
        normed = self.embedding_norm(embeddings, kernels), self.hidden_norm(hidden, kernels)
        return kernels.linear.multiply(torch.cat(normed, dim=1), self.fc)

    def _block(self, index: int) -> Block:
        block = self.blocks[index]
        assert isinstance(block, Block)
        return block
