"""What all implementations of attention with an index are called with."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from megatron_hybrid.kernels.contract import AttentionShape, KVCache, PagedSequences
from megatron_hybrid.kernels.latent_attention.protocol import LatentWeights
from megatron_hybrid.kernels.protocols import Plan


class IndexNorm(NamedTuple):
    """RMS norm of index queries or groups' keys, and the rotation behind it."""

    weight: Tensor  # [dim]
    eps: float
    frequencies: Tensor  # [rotary_dim / 2] float32


class MeanPool(NamedTuple):
    """A group's key is the mean of its tokens' keys, normed, and rotated as the position of its
    first token is. Entries are keys [tokens, dim]."""

    norm: IndexNorm


class GatedPool(NamedTuple):
    """A group's key is the sum of its tokens' keys, each of their numbers weighted by a softmax
    over the group's tokens of gate + bias. Entries are keys and gates [tokens, 2 * dim]."""

    bias: Tensor  # [group, dim]


Pool = MeanPool | GatedPool


class IndexedAttention(Protocol):
    """Attention in which a query sees some groups of tokens and the tail behind the last whole
    group (IndexShape). A group's score is, summed over the heads of the index,

        weight[head] * relu(query[head] . key of the group)

    and the highest are chosen; of equal ones the earliest. (Constant factors of all scores do not
    matter.) Qwen's QSA has no weights, the indexer of DeepSeek-V3.2's DSA
    (https://arxiv.org/abs/2512.02556) makes them of the token.

    What the index keeps of a token lies beside its key and value: its entry; or, of a group's last
    token, in place of it and in its first `dim` numbers, the group's key. So whatever is done to
    the places of tokens (shared, copied, taken back) leaves whole groups with their keys, and
    others with all that their keys will need.
    """

    def plan(self, paged: PagedSequences, shape: AttentionShape, every: Plan) -> Plan:
        """Once a step. `every`: of attention to all tokens, of a shape that is the same otherwise;
        the plan has it as `every`."""

    def turn(self, query: Tensor, norm: IndexNorm, positions: Tensor) -> Tensor:
        """query [tokens, heads, dim] (tokens may be strided), normed and rotated."""

    def store(
        self, entries: Tensor, pool: Pool, positions: Tensor, cache: KVCache, plan: Plan
    ) -> None:
        """The step's entries [tokens, index_dim] (rows may be strided) into the cache, and the keys
        of those groups that they complete."""

    def select(self, query: Tensor, weights: Tensor | None, cache: KVCache, plan: Plan) -> None:
        """query [tokens, heads, dim], weights [tokens, heads] float32 (None: 1): what each token
        sees. The plan keeps it until the next call: `attend` of several layers may follow."""

    def attend(self, query: Tensor, cache: KVCache, plan: Plan) -> Tensor:
        """As Attention.attend."""

    def attend_latents(
        self, query: Tensor, weights: LatentWeights, cache: KVCache, plan: Plan
    ) -> Tensor:
        """As LatentAttention.attend."""
