"""What all implementations of residual streams are called with. Streams are [tokens, streams,
hidden] in the model's type, contiguous unless it is said; sums are in float32."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class StreamWeights(NamedTuple):
    """A token's weights in float32: of its streams where they become a block's input, of the
    block's result in each stream, and of stream i in the new stream j."""

    before: Tensor  # [tokens, streams]
    after: Tensor  # [tokens, streams]
    mixing: Tensor  # [tokens, streams, streams]


class Streams(Protocol):
    """Sums over the streams of each token."""

    def gated_mean(self, gates: Tensor, streams: Tensor) -> Tensor:
        """mean over i of sigmoid(gates_i) * streams_i: both [tokens, streams, hidden] -> [tokens,
        hidden]."""

    def weighted(self, streams: Tensor, weights: Tensor) -> Tensor:
        """sum over i of weights_i * streams_i: weights [tokens, streams] float32 -> [tokens,
        hidden]."""

    def injected(self, streams: Tensor, x: Tensor, gates: Tensor) -> Tensor:
        """streams_i + 2 * sigmoid(gates_i) * x: x [tokens, hidden], gates [tokens, streams] (rows
        may be strided) -> as the streams, whose place the result may take."""

    def mixed(self, streams: Tensor, x: Tensor, weights: StreamWeights) -> Tensor:
        """after_j * x + sum over i of mixing_ij * streams_i: x [tokens, hidden] -> as the streams,
        whose place the result may take."""

    def attended(
        self, streams: Tensor, queries: Tensor, weights: Tensor, source_eps: float, eps: float
    ) -> Tensor:
        """With n_i = stream i / rms (of source_eps), the RMS norm (of eps, with weights_j) of sum
        over i of softmax_i(query_j . n_i / sqrt(hidden)) n_i, for each j: streams [tokens, streams,
        hidden] (tokens may be strided), queries [count, hidden] float32, weights [count, hidden] ->
        [tokens, count, hidden] in the weights' type."""

    def keyed(self, key: Tensor, query: Tensor, value: Tensor) -> Tensor:
        """sigmoid(s(key_i . query_i / sqrt(hidden))) * value for each stream i, where s(a) is
        sign(a) * sqrt(|a|), of at least 1e-6: key and query [tokens, streams, hidden], value
        [tokens, hidden] (rows may be strided) -> [tokens, streams, hidden]."""

    def balanced(self, logits: Tensor, streams: int, iterations: int, eps: float) -> StreamWeights:
        """The weights of manifold-constrained hyper-connections (Xie et al., "mHC", arXiv
        2512.24880): logits [tokens, (2 + streams) * streams] float32, those of `before`, `after`
        and `mixing` one behind the other -> sigmoid + eps; 2 * sigmoid; and softmax over j, + eps,
        of which columns and rows are divided by their sums + eps in turn (Sinkhorn and Knopp,
        1967): `iterations` times the columns."""
