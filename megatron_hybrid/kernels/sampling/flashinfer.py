"""Sampling on a GPU: flashinfer finds what top-k and top-p keep, Triton kernels draw; the calls are
those of reference.py.

Whatever is drawn from is computed from the logits again: flashinfer's masks are used, its
renormalised probabilities are not, because some of its sums depend on the size of the batch. Where
the last token that a filter keeps has equals, flashinfer keeps them all.
"""

from __future__ import annotations

import flashinfer
import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.protocols import Filters
from megatron_hybrid.kernels.sampling import reference

penalise = reference.penalise

# flashinfer's top-p is exact from this size on
_LEAST_VOCABULARY = 2048


def draw(logits: Tensor, filters: Filters, point: Tensor) -> Tensor:
    """As in Sampling."""
    vocabulary = logits.shape[1]
    if vocabulary < _LEAST_VOCABULARY:
        return reference.draw(logits, filters, point)
    temperature, top_k, top_p, min_p, uses_top_k, uses_top_p, uses_min_p = filters
    temperature = temperature.clamp(min=1e-5)
    logits = logits.contiguous()
    if uses_top_k:
        most = torch.where(top_k > 0, top_k, vocabulary).int()
        logits = flashinfer.sampling.top_k_mask_logits(logits, most)
    largest = logits.amax(-1).float()
    kept = None
    if uses_top_p:
        weights = (logits - largest[:, None]).div_(temperature[:, None]).exp_()
        # It keeps a share of their sum, whatever that is; with a share of 2 it keeps all, while
        # with 1 rounding might drop the least likely ones.
        share = torch.where(top_p < 1, top_p, 2.0)
        kept = flashinfer.sampling.top_p_renorm_probs(weights, share, is_deterministic=True)
    return invert(logits, largest, temperature, kept, min_p if uses_min_p else None, point)


def invert(
    logits: Tensor,
    largest: Tensor,
    temperature: Tensor,
    kept: Tensor | None,
    min_p: Tensor | None,
    point: Tensor,
    block: int = 4096,
    num_warps: int = 8,
) -> Tensor:
    """reference.invert of weights exp((logits - largest) / temperature), 0 where `kept`
    [rows, vocabulary] is 0 and below min_p [rows]: logits [rows, vocabulary] contiguous, the
    others [rows], point float64 -> [rows] int64."""
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, block)
    sums = torch.empty((rows, blocks), dtype=torch.float64, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    weights = (
        logits, largest, temperature,
        logits if kept is None else kept, largest if min_p is None else min_p,
    )  # fmt: skip
    flags = {"KEPT": kept is not None, "MIN_P": min_p is not None, "BLOCK": block}
    if rows:
        _sums_kernel[(rows, blocks)](*weights, sums, vocabulary, **flags, num_warps=num_warps)
        _pick_kernel[(rows,)](
            *weights, sums, point, tokens, vocabulary, blocks,
            **flags, BLOCKS=triton.next_power_of_2(blocks), num_warps=num_warps,
        )  # fmt: skip
    return tokens


@triton.jit
def _weights(
    logits, largest, temperature, kept, min_p, row, token, vocabulary,
    KEPT: tl.constexpr, MIN_P: tl.constexpr,
):  # fmt: skip
    at = row.to(tl.int64) * vocabulary + token
    inside = token < vocabulary
    x = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    weights = tl.exp((x - tl.load(largest + row)) / tl.load(temperature + row))
    if MIN_P:
        weights = tl.where(weights >= tl.load(min_p + row), weights, 0.0)
    if KEPT:
        weights = tl.where(tl.load(kept + at, mask=inside, other=0.0) > 0, weights, 0.0)
    return weights.to(tl.float64)


@triton.jit
def _sums_kernel(
    logits, largest, temperature, kept, min_p, sums, vocabulary,
    KEPT: tl.constexpr, MIN_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    weights = _weights(
        logits, largest, temperature, kept, min_p, row, token, vocabulary, KEPT, MIN_P
    )
    tl.store(sums + row * tl.num_programs(1) + block, tl.sum(weights, 0))


@triton.jit
def _find(weights, at, before, target):
    """The first of `at` where the sum of `weights` from `before` on exceeds target; never one of
    weight 0, even where the rounding of a parallel sum would choose it."""
    above = (before + tl.cumsum(weights, 0) > target) & (weights > 0)
    first = tl.min(tl.where(above, at, 2147483647), 0)
    last = tl.max(tl.where(weights > 0, at, 0), 0)
    return tl.minimum(first, last)


@triton.jit
def _pick_kernel(
    logits, largest, temperature, kept, min_p, sums, point, tokens, vocabulary, blocks,
    KEPT: tl.constexpr, MIN_P: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at = tl.arange(0, BLOCKS)
    block_sums = tl.load(sums + row * blocks + at, mask=at < blocks, other=0.0)
    target = tl.load(point + row) * tl.sum(block_sums, 0)
    block = _find(block_sums, at, 0.0, target)
    before = tl.sum(tl.where(at < block, block_sums, 0.0), 0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    weights = _weights(
        logits, largest, temperature, kept, min_p, row, token, vocabulary, KEPT, MIN_P
    )
    tl.store(tokens + row, _find(weights, token, before, target).to(tl.int64))
