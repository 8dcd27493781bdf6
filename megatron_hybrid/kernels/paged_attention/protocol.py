"""What kernels are called with that read a paged KV cache."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from megatron_hybrid.kernels.contract import AttentionShape, KVCache, PagedSequences
from megatron_hybrid.kernels.protocols import Plan


class RelativeBias(NamedTuple):
    """What is added to attention's scores, after their scale: each head of a token has a profile of
    biases by distance of its own, a sum of those in a bank by its weights. The score of the key
    that is d tokens before a query has weights . bank[:, d] more, from d = extent on nothing."""

    weights: Tensor  # [tokens, heads, profiles] in the queries' type, tokens may be strided
    bank: Tensor  # [profiles, extent] in the queries' type, contiguous

    @property
    def extent(self) -> int:
        """Distances that have a bias."""
        return int(self.bank.shape[1])


class PagedKernel(Protocol):
    """What reads a paged KV cache."""

    def plan(self, paged: PagedSequences, shape: AttentionShape) -> Plan:
        """Once a step; waits for nothing."""

    def most_captured(self, shape: AttentionShape, prompts: int) -> int:
        """Tokens of so many prompts up to which a step can be captured, if more than 512 are."""


class Attention(PagedKernel, Protocol):
    """Over a paged KV cache."""

    def append(self, key: Tensor, value: Tensor, cache: KVCache, plan: Plan) -> None:
        """The step's keys and values [tokens, kv_heads, head_dim] into the cache."""

    def attend(
        self,
        query: Tensor,
        cache: KVCache,
        plan: Plan,
        bias: RelativeBias | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """query [tokens, heads, head_dim], tokens may be strided -> [tokens, heads, head_dim]. The
        step's own keys and values are in the cache already. `bias`: where the shape is relative.

        `sinks` [tokens, heads] (tokens may be strided, or all be the same), where the shape has
        them: a score more for each query, after the scale and without a bias, of no key and with a
        value of zeros, which takes a part of the softmax (Xiao et al., "Efficient Streaming
        Language Models with Attention Sinks", 2023, arXiv 2309.17453)."""

    def copy_tokens(self, cache: KVCache, source: Tensor, destination: Tensor) -> None:
        """KV at the places source [tokens] to the places destination [tokens], counted like
        PagedSequences.kv_slot (any integer type). Sources may repeat; no destination is a source
        or named twice."""
