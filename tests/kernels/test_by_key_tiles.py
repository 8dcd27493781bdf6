"""Attention by tiles of keys: the values of attention in float64, and for each query the bits that
it has alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_hybrid.kernels.contract import AttentionShape, PagedHost
from megatron_hybrid.kernels.paged_attention import by_key_tiles, reference
from tests.kernels.attention_cases import (
    FP8,
    AttentionStep,
    attention_shape,
    attention_step,
    check_biases,
    check_bits_of_windows,
    check_sinks,
    check_windows,
    paged_sequences,
)
from tests.thorough import usually

LENGTHS = [(1, 1), (1, 5), (1, 64), (1, 65), (1, 130), (3, 3), (17, 40), (20, 129), (66, 66)]
SHAPES = usually(
    [(4, 2, 8), (1, 1, 16), (8, 1, 20), (5, 1, 64)],
    [(h, k, d) for h, k in ((1, 1), (2, 1), (4, 2), (4, 4), (8, 1), (7, 7), (6, 2), (16, 1), (5, 1))
     for d in (4, 8, 16, 20, 64, 80, 128)],
)  # fmt: skip


def attended(step: AttentionStep, shape: AttentionShape) -> torch.Tensor:
    plan = by_key_tiles.plan(step.paged, shape)
    by_key_tiles.append(step.key, step.value, step.cache, plan)
    return by_key_tiles.attend(step.query, step.cache, plan, step.bias, step.sinks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_queries_have_their_values_and_the_bits_that_they_have_alone(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    own = torch.float32 if dtype == FP8 else dtype
    shape = attention_shape(heads, kv_heads, head_dim, 4, own, kv_dtype=dtype)
    step = attention_step(LENGTHS, shape, seed=1)
    found = attended(step, shape)
    tolerance = 3e-2 if own == torch.bfloat16 else 2e-5
    torch.testing.assert_close(found.double(), step.expected, atol=tolerance, rtol=tolerance)
    plan = reference.plan(step.paged, shape)
    others = reference.attend(step.query, step.cache, plan)
    torch.testing.assert_close(found, others, atol=tolerance, rtol=tolerance)
    check_bits_alone(step, shape, found, LENGTHS)


def check_bits_alone(
    step: AttentionStep, shape: AttentionShape, found: torch.Tensor, lengths: list[tuple[int, int]]
) -> None:
    """What was found for the queries of a step is what each one by itself gives."""
    host, first = step.paged.host, 0
    for i, (queries, keys) in enumerate(lengths):
        blocks = host.kv_indices[host.kv_indptr[i] : host.kv_indptr[i + 1]]
        for j in range(0, queries, usually(5, 1)):
            count = keys - queries + j + 1  # keys that it sees
            used = blocks[: -(-count // 4)]
            table = np.asarray([[*used, 0]], dtype=np.int64)
            alone = PagedHost.of(np.array([1]), np.array([count]), table, 4)
            at = slice(first + j, first + j + 1)
            paged = paged_sequences(alone, step.paged.kv_slot[at], 1, "cpu")
            one = by_key_tiles.attend(step.query[at], step.cache, by_key_tiles.plan(paged, shape))
            assert torch.equal(one, found[at]), (i, j)
        first += queries


def test_the_bits_are_those_that_a_query_has_alone_with_several_threads() -> None:
    """A product that is alone is computed by all of them."""
    shape, lengths = attention_shape(5, 1, 64, 4), [(1, 70), (1, 5), (2, 64)]
    step = attention_step(lengths, shape, seed=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check_bits_alone(step, shape, attended(step, shape), lengths)
    finally:
        torch.set_num_threads(threads)


def test_a_token_sees_a_window() -> None:
    check_windows(by_key_tiles, decodes=7)
    check_windows(by_key_tiles, [(140, 140), (130, 300)], [8, 100])
    check_bits_of_windows(by_key_tiles, by_key_tiles.KEYS, block_size=16)


def test_scores_may_have_a_bias_by_distance() -> None:
    check_biases(by_key_tiles, LENGTHS, [(5, 20), (16, 1), (3, 100)])
    check_biases(by_key_tiles, [(140, 140), (130, 300)], [(5, 70)], heads=6, kv_heads=3)
    shape = {"block_size": 16, "relative": True}
    check_bits_of_windows(by_key_tiles, by_key_tiles.KEYS, [9, 64, 200], **shape)


def test_queries_may_have_sinks() -> None:
    check_sinks(by_key_tiles, LENGTHS)
    check_sinks(by_key_tiles, [(140, 140), (130, 300)], heads=6, kv_heads=3)
    for relative in usually((True,), (False, True)):
        shape = {"block_size": 16, "relative": relative, "sinks": True}
        check_bits_of_windows(by_key_tiles, by_key_tiles.KEYS, [9, 200], **shape)


def test_a_first_position_and_more_queries_than_are_gathered_at_once() -> None:
    shape = attention_shape(first_position=1)
    lengths = [(1, 7), (1, 66), (150, 150), (20, 90)]
    step = attention_step(lengths, shape, seed=2)
    found = attended(step, shape)
    assert found.shape[0] > 2 * by_key_tiles._QUERIES
    plan = reference.plan(step.paged, shape)
    reference.append(step.key, step.value, step.cache, plan)
    others = reference.attend(step.query, step.cache, plan)
    torch.testing.assert_close(found.nan_to_num(7.0), others.nan_to_num(7.0))
