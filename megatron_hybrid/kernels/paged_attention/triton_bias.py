"""A RelativeBias inside of attention's kernels in Triton.

Neither a bias for each query and key nor one for each query and distance is written to memory. For
a tile of queries and keys the biases of all distances that occur in it are a product of the
queries' weights and some columns of the bank; a row's are at other places of it than the next
query's:

    keys          k0 k1 k2 k3            distances in the tile, for queries at 5 and 6, keys 2 to 5
    query 5        3  2  1  0            0  1  2  3  4
    query 6        4  3  2  1               each row takes four of these five, in reverse

Tiles of few queries have a product for each of them instead, with the columns where its keys are.
Prompts in batch-invariant mode are as above; of others see triton_prompts.py.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.launching import next_power_of_2
from megatron_hybrid.kernels.paged_attention.protocol import RelativeBias

_LOG2_E = tl.constexpr(math.log2(math.e))


class BiasArguments(NamedTuple):
    """Of a kernel's launch; without a bias None and zeros, which it does not read."""

    weights: Tensor | None
    bank: Tensor | None
    stride: int  # of a token's weights
    head_stride: int
    span: int  # distances that occur in a tile, or more; a power of 2
    constants: dict[str, int]

    @classmethod
    def of(cls, bias: RelativeBias | None, rows: int, group: int, keys: int) -> BiasArguments:
        """For tiles of so many rows, of which a query has `group`, and keys."""
        if bias is None:
            return cls(None, None, 0, 0, 0, {"EXTENT": 0, "PROFILES": 0, "BLOCK_P": 0})
        profiles = bias.bank.shape[0]
        queries = (rows + group - 2) // group + 1  # a tile may begin and end inside of a query
        sizes = {
            "EXTENT": bias.extent,
            "PROFILES": profiles,
            "BLOCK_P": max(next_power_of_2(profiles), 16),  # the least of a product
        }
        span = max(next_power_of_2(queries + keys - 1), 16)
        stride, head_stride, _ = bias.weights.stride()
        return cls(bias.weights, bias.bank, stride, head_stride, span, sizes)


@triton.jit
def load_weights(
    weights, token, head, inside, stride, head_stride, PROFILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Of rows [ROWS]: [ROWS, BLOCK_P]."""
    profile = tl.arange(0, BLOCK_P)
    place = token * stride + head * head_stride
    mask = inside[:, None] & (profile < PROFILES)[None, :]
    return tl.load(weights + place[:, None] + profile[None, :], mask=mask, other=0.0)


@triton.jit
def biases(
    own, bank, query, nearest, KEYS: tl.constexpr, EXTENT: tl.constexpr, PROFILES: tl.constexpr,
    BLOCK_P: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """[ROWS, KEYS] float32, times log2(e), of rows with the weights own [ROWS, BLOCK_P], which
    belong to the query-th query of the tile [ROWS]; the first of these is at the distance `nearest`
    from the tile's last key."""
    profile, far = tl.arange(0, BLOCK_P), nearest + tl.arange(0, SPAN)
    known = (profile < PROFILES)[:, None] & ((far >= 0) & (far < EXTENT))[None, :]
    columns = tl.load(bank + profile[:, None] * EXTENT + far[None, :], mask=known, other=0.0)
    of_distances = tl.dot(own, columns, input_precision="ieee")  # [ROWS, SPAN]
    place = query[:, None] + (KEYS - 1 - tl.arange(0, KEYS))[None, :]
    return tl.gather(of_distances, place, axis=1) * _LOG2_E


@triton.jit
def biases_of_few(
    own, bank, query, nearest, QUERIES: tl.constexpr, KEYS: tl.constexpr, EXTENT: tl.constexpr,
    PROFILES: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """As of `biases`, of rows that belong to up to QUERIES queries."""
    profile = tl.arange(0, BLOCK_P)
    more = tl.zeros((own.shape[0], KEYS), tl.float32)
    for i in tl.static_range(QUERIES):
        far = nearest + i + KEYS - 1 - tl.arange(0, KEYS)
        known = (profile < PROFILES)[:, None] & ((far >= 0) & (far < EXTENT))[None, :]
        columns = tl.load(bank + profile[:, None] * EXTENT + far[None, :], mask=known, other=0.0)
        of_query = own
        if QUERIES > 1:
            of_query = tl.where((query == i)[:, None], own, 0.0)
        more = tl.dot(of_query.to(own.dtype), columns, more, input_precision="ieee")
    return more * _LOG2_E
