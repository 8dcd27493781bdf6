"""What queries, keys and values of convolved attention are made from."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class HeadTokens(NamedTuple):
    """A row a token, all heads of D numbers side by side; rows may be strided."""

    projected: Tensor  # [T, queries + keys, or more]: | q | k |, as they were projected
    taps: tuple[Tensor, ...]  # [T, queries + keys] each: what is convolved, the oldest first
    value: Tensor  # [T, keys]


class ConvolvedHeads(Protocol):
    """The end of convolved attention's projection."""

    def mix(self, tokens: HeadTokens, weight: Tensor, bias: Tensor, kv_heads: int) -> Tensor:
        """Heads of queries, of keys and of values, [T, heads + 2 * kv_heads, D]:

            y[t, h] = weight[h] (h's part of all taps) + bias[h] + mean[t, h]

        The mean of a query q and its key k is (q + k) / 2, that of a key the mean of those of its
        queries. Query head h has the key h // (heads / kv_heads). Values are what they were.

        weight [heads + kv_heads, D, taps * D], bias [heads + kv_heads, D], both contiguous.
        """
