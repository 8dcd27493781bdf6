"""What all implementations of latent attention are called with."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from megatron_hybrid.kernels.contract import KVCache
from megatron_hybrid.kernels.paged_attention.protocol import PagedKernel
from megatron_hybrid.kernels.protocols import Plan


class LatentNorm(NamedTuple):
    """RMS norm of a latent."""

    weight: Tensor  # [value_dim]
    eps: float


class LatentWeights(NamedTuple):
    """What this rank's heads make of a latent: keys' weights and values', head by head as
    checkpoints have them."""

    both: Tensor  # [heads, nope + v_dim, value_dim], contiguous
    nope: int

    @property
    def key(self) -> Tensor:
        """[heads, nope, value_dim]: of a head's key what is not rotated is key @ latent."""
        return self.both[:, : self.nope]

    @property
    def value(self) -> Tensor:
        """[heads, v_dim, value_dim]: its value is value @ latent."""
        return self.both[:, self.nope :]


class LatentAttention(PagedKernel, Protocol):
    """Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", arXiv 2405.04434, 2.1) over a paged
    cache. Its shape has one KV head, whose key is a token's latent and behind it what positions
    rotate, head_dim numbers, and whose value is the latent, value_dim numbers: as all heads see it
    once their part of the keys' weights is multiplied with the queries instead (there, "absorbed").
    """

    def prepare(
        self,
        query: Tensor,
        latent: Tensor,
        norm: LatentNorm,
        rotation: Plan,
        interleaved: bool,
        cache: KVCache,
        plan: Plan,
    ) -> Tensor:
        """The step's latents [tokens, head_dim], as they were projected, into the cache: normed,
        and their last numbers, like those of the queries [tokens, heads, nope + rotated], rotated
        by a Rope's plan (None: by nothing). Gives the queries, which may be overwritten. Tokens and
        heads may be strided.

        interleaved: numbers 2 i and 2 i + 1 turn together, otherwise i and i + rotated / 2.
        """

    def attend(self, query: Tensor, weights: LatentWeights, cache: KVCache, plan: Plan) -> Tensor:
        """query [tokens, heads, nope + rotated], prepared -> [tokens, heads, v_dim]. The step's own
        latents are in the cache already."""
