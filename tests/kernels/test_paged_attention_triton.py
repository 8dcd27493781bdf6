"""The Triton kernels in Triton's interpreter (float32: its bfloat16 products are wrong)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.thorough import A_THIRD, usually

if torch.cuda.is_available():
    pytest.skip("the GPU tests run the compiled kernels", allow_module_level=True)
pytest.importorskip("triton")

from megatron_hybrid.kernels.paged_attention import reference, triton_decode  # noqa: E402
from megatron_hybrid.kernels.paged_attention.triton import TritonAttention, gather_kv  # noqa: E402
from tests.kernels.attention_cases import (  # noqa: E402
    FP8,
    attention_shape,
    attention_step,
    check,
    check_biases,
    check_copied_tokens,
    check_first_position,
    check_gathered,
    check_masked_writes,
    check_sinks,
    check_stored_fp8,
    check_windows,
)


def test_decodes_of_different_lengths_share_a_batch() -> None:
    check(TritonAttention(), [(1, 9), (1, 1), (1, 4), (1, 200), (1, 90), (1, 5)])


class SplitAttention(TritonAttention):
    """Keys in so many parts, which a machine without a GPU has no use for."""

    def __init__(self, splits: int) -> None:
        self._splits = splits

    def attend(
        self,
        query: Any,
        cache: Any,
        plan: Any,
        bias: Any = None,
        sinks: Any = None,
        *,
        splits: int | None = None,
    ) -> Any:
        return super().attend(query, cache, plan, bias, sinks, splits=self._splits)


@A_THIRD
@pytest.mark.parametrize("splits", usually([2, 11], [2, 3, 11, 16]))
def test_keys_may_be_split(splits: int) -> None:
    """Parts without any key, and parts that only some queries see."""
    lengths = [(1, 9), (1, 1), (1, 200), (4, 35), (5, 33), (3, 3), (0, 3), (6, 100)]
    check(SplitAttention(splits), lengths, decodes=3)
    check(SplitAttention(splits), [(9, 130), (1, 70)], attention_shape(heads=20, kv_heads=1))


@pytest.mark.parametrize("splits", [1, 3])
def test_queries_may_have_sinks(splits: int) -> None:
    """Of several parts only what they come to has them. Decodes run on a kernel of their own where
    blocks are large enough."""
    attention = SplitAttention(splits)
    check_sinks(attention, [(1, 9), (1, 1), (4, 35), (40, 100), (0, 3), (2, 9)], decodes=3)
    decodes = [(1, 9), (1, 1), (1, 100), (2, 70)]
    sizes = {"head_dim": 32, "block_size": 32}
    assert triton_decode.serves(attention_shape(sinks=True, **sizes), 2)
    check_sinks(attention, decodes, decodes=4, **sizes)
    check_sinks(attention, decodes, decodes=4, kv_dtype=FP8, **sizes)


def test_sinks_may_be_the_same_for_all_tokens() -> None:
    shape = attention_shape(sinks=True)
    step = attention_step([(1, 40), (5, 9)], shape)
    attention = TritonAttention()
    plan = attention.plan(step.paged, shape)
    attention.append(step.key, step.value, step.cache, plan)
    learnt = torch.tensor([-torch.inf, 0.0, 1.5, 30.0]).expand(6, -1)
    found = attention.attend(step.query, step.cache, plan, None, learnt)
    by_torch = reference.plan(step.paged, shape)
    expected = reference.attend(step.query, step.cache, by_torch, None, learnt)
    torch.testing.assert_close(found, expected)
    none = reference.attend(step.query, step.cache, by_torch)
    torch.testing.assert_close(found[:, 0], none[:, 0])
    assert found[:, 3].abs().max() < 1e-6 < none[:, 3].abs().min()


def test_a_first_prefill_is_causal() -> None:
    check(TritonAttention(), [(10, 10)])


def test_a_continued_prefill_sees_its_past() -> None:
    check(TritonAttention(), [(5, 18)])
    check(TritonAttention(), [(100, 130)])


def test_decodes_and_prefills_of_all_lengths_mix() -> None:
    lengths = [(1, 3), (1, 70), (7, 7), (8, 8), (5, 40), (6, 33), (1, 1), (130, 131), (2, 9)]
    check(TritonAttention(), [*lengths, (8, 60)], decodes=2)


def test_a_segment_may_start_and_end_anywhere() -> None:
    block = attention_shape().block_size
    lengths = [(n, start + n) for start in range(2 * block + 1) for n in range(1, 2 * block + 2)]
    check(TritonAttention(), lengths)


def test_sequences_without_queries_are_skipped() -> None:
    check(TritonAttention(), [(2, 5), (0, 3), (4, 4)])


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (6, 3), (20, 1)])
def test_query_heads_share_key_heads(heads: int, kv_heads: int) -> None:
    shape = attention_shape(heads=heads, kv_heads=kv_heads)
    check(TritonAttention(), [(1, 6), (1, 9)], shape)
    check(TritonAttention(), [(1, 6), (1, 9), (3, 8), (5, 5)], shape)


@pytest.mark.parametrize("splits", [1, 3])
def test_the_first_positions_may_be_hidden(splits: int) -> None:
    """Where nothing is seen, the result is 0."""
    attention = SplitAttention(splits)
    check_first_position(attention, [(1, 3), (1, 70), (7, 7), (5, 40), (1, 1), (3, 100)])
    shape = attention_shape(first_position=1)
    step = attention_step([(1, 1), (1, 9)], shape)
    plan = attention.plan(step.paged, shape)
    attention.append(step.key, step.value, step.cache, plan)
    assert not attention.attend(step.query, step.cache, plan)[0].any()


@A_THIRD
@pytest.mark.parametrize("splits", [1, 3])
def test_a_token_sees_a_window(splits: int) -> None:
    """On the kernel for prompts, and on that for decodes, with 16 bits and 8."""
    lengths = [(1, 9), (1, 8), (1, 70), (3, 3), (9, 40), (60, 64), (2, 65)]
    check_windows(SplitAttention(splits), lengths, usually([9], [1, 8, 9, 64]), decodes=3)
    decodes = [(1, 9), (1, 64), (1, 65), (0, 3), (1, 150), (3, 5), (8, 70)]
    for kv_dtype, window in ((torch.float32, 40), (FP8, 64)):
        shape = {"heads": 2, "kv_heads": 1, "head_dim": 32, "block_size": 32, "kv_dtype": kv_dtype}
        check_windows(SplitAttention(splits), decodes, [window], decodes=7, **shape)


@A_THIRD
@pytest.mark.parametrize("splits", [1, 3])
def test_scores_may_have_a_bias_by_distance(splits: int) -> None:
    """Of shapes, too, whose decodes would be another kernel's."""
    lengths = [(1, 9), (1, 8), (1, 70), (3, 3), (9, 40), (60, 64), (2, 65)]
    attention = SplitAttention(splits)
    check_biases(attention, lengths, usually([(5, 20)], [(5, 20), (16, 1), (1, 64)]), decodes=3)
    shape = {"heads": 6, "kv_heads": 2, "head_dim": 32, "block_size": 32}
    check_biases(attention, [(1, 9), (1, 64), (0, 3), (3, 70)], [(17, 33)], decodes=3, **shape)


@pytest.mark.parametrize(("splits", "kv_dtype"), [(3, torch.float32), (1, FP8)])
def test_decodes_in_large_blocks_have_a_bias(splits: int, kv_dtype: torch.dtype) -> None:
    """Of one query, of drafts, and of more than their kernel takes."""
    shape = {"heads": 2, "kv_heads": 1, "head_dim": 32, "block_size": 64, "kv_dtype": kv_dtype}
    attention = SplitAttention(splits)
    of = attention_shape(relative=True, head_dim=32, block_size=64)
    assert triton_decode.serves(of, 8) and not triton_decode.serves(of, 9)
    for lengths in ([(1, 64), (1, 9), (1, 230)], [(3, 70), (5, 200), (1, 65)], [(9, 200)]):
        where = {"decodes": len(lengths), "windows": (0, 100)}
        check_biases(attention, lengths, [(3, 70)], **where, **shape)


@pytest.mark.parametrize(("head_dim", "block_size"), [(16, 1), (24, 3), (80, 16)])
def test_heads_and_blocks_of_any_size(head_dim: int, block_size: int) -> None:
    shape = attention_shape(head_dim=head_dim, block_size=block_size)
    check(TritonAttention(), [(1, 6), (40, 50), (5, 5)], shape)


def test_fp8_keys_and_values_are_attended_to_as_they_are_stored() -> None:
    shape = attention_shape(kv_dtype=FP8)
    lengths = [(1, 3), (1, 70), (7, 7), (8, 8), (5, 40), (1, 1), (130, 131), (2, 9)]
    check(TritonAttention(), lengths, shape, decodes=2)
    check(SplitAttention(3), lengths, shape, decodes=2)


@A_THIRD
@pytest.mark.parametrize(
    ("block_size", "splits", "kv_dtype"),
    [(64, 3, FP8), (32, 3, torch.float32)] + usually([], [(32, 1, FP8), (64, 1, torch.float32)]),
)
def test_decodes_in_large_blocks_have_a_kernel_of_their_own(
    block_size: int, splits: int, kv_dtype: torch.dtype
) -> None:
    """Around the ends of blocks and of tiles, beside a sequence without queries; with drafts."""
    shape = attention_shape(6, 3, 32, block_size, kv_dtype=kv_dtype)
    attention = SplitAttention(splits)
    assert triton_decode.serves(shape, 32) and not triton_decode.serves(shape, 33)
    decodes = [(1, 9), (1, 1), (1, 63), (1, 64), (1, 65), (0, 3), (1, 200), (1, 129)]
    check(attention, decodes, shape)
    check(attention, [(3, 5), (1, 31), (8, 70), (0, 9), (5, 100), (4, 4)], shape, decodes=6)
    check(attention, [(1, 70), (11, 70), (19, 50)], shape, decodes=3)


@pytest.mark.parametrize("splits", [1, 3])
def test_a_decodes_first_positions_may_be_hidden(splits: int) -> None:
    shape = attention_shape(4, 2, 32, 32, kv_dtype=FP8, first_position=1)
    check(SplitAttention(splits), [(1, 3), (1, 70), (2, 41)], shape)
    step = attention_step([(1, 1), (1, 9)], shape)
    plan = SplitAttention(splits).plan(step.paged, shape)
    SplitAttention(splits).append(step.key, step.value, step.cache, plan)
    out = SplitAttention(splits).attend(step.query, step.cache, plan)
    assert not out[0].any() and out[1].any()


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float16, 1e4), (torch.bfloat16, 1e-30), (torch.bfloat16, 1.0), (torch.bfloat16, 1e30)],
)
def test_queries_of_16_bits_stay_in_range(dtype: torch.dtype, size: float) -> None:
    """Beside FP8 keys they are multiplied as float16, whose largest number is 65504."""
    shape = attention_shape(4, 2, 32, 32, dtype=dtype, kv_dtype=FP8)
    step = attention_step([(1, 40), (2, 70)], shape)
    step = replace(step, query=(step.query.float() * size).to(dtype))
    attention = SplitAttention(2)
    plan = attention.plan(step.paged, shape)
    attention.append(step.key, step.value, step.cache, plan)
    found = attention.attend(step.query, step.cache, plan)
    precise = replace(shape, dtype=torch.float32)
    plan = reference.plan(step.paged, precise)
    expected = reference.attend(step.query.float(), step.cache, plan)
    torch.testing.assert_close(found.float(), expected, atol=5e-3, rtol=5e-3)


def test_fp8_saturates_and_shows_nan() -> None:
    check_stored_fp8(TritonAttention())


def test_parts_without_numbers_are_joined_to_none() -> None:
    """A NaN in one part of the keys is not taken for a part that sees none."""
    shape = attention_shape(4, 2, 32, 32, kv_dtype=FP8)
    step = attention_step([(1, 100)], shape)
    attention = SplitAttention(4)
    plan = attention.plan(step.paged, shape)
    step.key[0] = torch.nan
    attention.append(step.key, step.value, step.cache, plan)
    assert attention.attend(step.query, step.cache, plan).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, FP8])
def test_copied_tokens_leave_the_rest_of_a_block_alone(dtype: torch.dtype) -> None:
    check_copied_tokens(TritonAttention(), dtype=dtype)


@pytest.mark.parametrize("kv_dtype", [torch.float32, FP8])
def test_masked_writes_leave_shared_blocks_alone(kv_dtype: torch.dtype) -> None:
    check_masked_writes(TritonAttention(), kv_dtype=kv_dtype)


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "block_size", "dtype"),
    [(2, 8, 4, torch.float32), (3, 64, 48, torch.float16), (1, 256, 64, torch.bfloat16)],
)
def test_keys_and_values_of_prompts_are_gathered(
    kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    """Behind decodes, from partly filled blocks, around the ends of tiles."""
    shape = attention_shape(kv_heads, kv_heads, head_dim, block_size, dtype)
    lengths = [(1, 9), (1, 70), (7, 7), (5, 300), (0, 6), (3, 128), (2, 129), (9, 127), (2, 2)]
    check_gathered(gather_kv, lengths, shape, decodes=2)
    check_gathered(gather_kv, lengths[2:3], shape, decodes=0)
    check_gathered(gather_kv, [(1, 9), (0, 6)], shape, decodes=1)  # nothing


def test_a_program_gathers_one_row_where_rows_are_wide() -> None:
    shape = attention_shape(65, 65, 64, 16)
    check_gathered(gather_kv, [(3, 5), (2, 2)], shape, decodes=0)
