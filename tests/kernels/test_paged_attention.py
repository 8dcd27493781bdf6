from __future__ import annotations

import pytest
import torch

from megatron_hybrid.kernels.paged_attention import reference
from tests.kernels.attention_cases import (
    FP8,
    attention_shape,
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
from tests.thorough import A_THIRD


def test_decodes_of_different_lengths_share_a_batch() -> None:
    check(reference, [(1, 9), (1, 1), (1, 4), (1, 200), (1, 90), (1, 5)])


def test_decodes_of_one_length_need_no_mask() -> None:
    check(reference, [(1, 12)] * 3)


@pytest.mark.parametrize("scattered", [True, False])
def test_one_decode_reads_consecutive_or_scattered_blocks(scattered: bool) -> None:
    check(reference, [(1, 11)], scattered=scattered)


@pytest.mark.parametrize("scattered", [True, False])
def test_a_first_prefill_is_causal(scattered: bool) -> None:
    check(reference, [(10, 10)], scattered=scattered)


def test_a_long_first_prefill_is_causal() -> None:
    check(reference, [(1, 6), (150, 150)])


def test_a_continued_prefill_sees_its_past() -> None:
    check(reference, [(5, 18)])


@pytest.mark.parametrize("scattered", [True, False])
def test_a_long_continued_prefill_is_tiled(scattered: bool) -> None:
    check(reference, [(3, 7), (1200, 1230)], scattered=scattered)


def test_decodes_and_prefills_of_all_lengths_mix() -> None:
    lengths = [(1, 3), (1, 70), (7, 7), (8, 8), (5, 40), (6, 33), (1, 1), (130, 131), (2, 9)]
    check(reference, [*lengths, (8, 60)], decodes=2)


@pytest.mark.parametrize("scattered", [True, False])
def test_a_segment_may_start_and_end_anywhere(scattered: bool) -> None:
    """At every place of a block, alone and beside all the others."""
    block = attention_shape().block_size
    lengths = [(n, start + n) for start in range(2 * block + 1) for n in range(1, 2 * block + 2)]
    check(reference, lengths, scattered=scattered)
    for one in lengths:
        check(reference, [one], scattered=scattered)


def test_sequences_without_queries_are_skipped() -> None:
    check(reference, [(2, 5), (0, 3), (4, 4)])


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (6, 3)])
def test_query_heads_share_key_heads(heads: int, kv_heads: int) -> None:
    shape = attention_shape(heads=heads, kv_heads=kv_heads)
    check(reference, [(1, 6), (1, 9), (3, 8), (5, 5)], shape)


@pytest.mark.parametrize("scattered", [True, False])
def test_the_first_positions_may_be_hidden(scattered: bool) -> None:
    lengths = [(1, 3), (1, 70), (7, 7), (5, 40), (1, 1), (130, 131), (140, 140), (600, 700)]
    check_first_position(reference, lengths, scattered=scattered)
    for one in lengths:
        check_first_position(reference, [one], scattered=scattered)


def test_a_token_sees_a_window() -> None:
    check_windows(reference, decodes=7)
    for one in [(1, 90), (140, 140), (130, 300), (1100, 1200)]:
        check_windows(reference, [one], [8, 100, 400])


@A_THIRD
@pytest.mark.parametrize("scattered", [True, False])
def test_scores_may_have_a_bias_by_distance(
    scattered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [(1, 3), (1, 70), (7, 7), (8, 8), (5, 40), (1, 1), (130, 131), (140, 140), (2, 9)]
    check_biases(reference, lengths)
    for one in [(1, 90), (7, 7), (140, 140), (600, 700)]:
        check_biases(reference, [one], [(5, 20)], heads=6, kv_heads=3)
        check(reference, [one], attention_shape(relative=True), scattered=scattered)
    monkeypatch.setattr(reference, "_BIASES", 3000)  # a few queries at a time
    check_biases(reference, lengths, [(5, 20)])
    shape = attention_shape(dtype=torch.bfloat16, relative=True)
    check(reference, [(1, 30), (7, 20), (9, 9)], shape, tolerance=6e-2)


@pytest.mark.parametrize("scattered", [True, False])
def test_queries_may_have_sinks(scattered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [(1, 3), (1, 70), (7, 7), (8, 8), (5, 40), (1, 1), (130, 131), (2, 9)]
    check_sinks(reference, lengths)
    for one in [(1, 90), (7, 7), (600, 700)]:
        check(reference, [one], attention_shape(6, 3, sinks=True), scattered=scattered)
    monkeypatch.setattr(reference, "_BIASES", 3000)  # a few queries at a time
    check_sinks(reference, lengths[:5], kv_dtype=FP8)
    shape = attention_shape(dtype=torch.bfloat16, sinks=True)
    check(reference, [(1, 30), (7, 20), (9, 9)], shape, tolerance=6e-2)


def test_bfloat16_follows_float32() -> None:
    shape = attention_shape(dtype=torch.bfloat16)
    check(reference, [(1, 30), (7, 20), (9, 9)], shape, tolerance=3e-2)


@pytest.mark.parametrize("scattered", [True, False])
def test_fp8_keys_and_values_are_attended_to_as_they_are_stored(scattered: bool) -> None:
    shape = attention_shape(kv_dtype=FP8)
    lengths = [(1, 3), (1, 70), (7, 7), (8, 8), (5, 40), (1, 1), (130, 131), (2, 9), (600, 650)]
    check(reference, lengths, shape, decodes=2, scattered=scattered)
    for one in lengths:
        check(reference, [one], shape, scattered=scattered)


def test_fp8_in_a_bfloat16_model_follows_float32() -> None:
    shape = attention_shape(dtype=torch.bfloat16, kv_dtype=FP8)
    check(reference, [(1, 30), (7, 20), (9, 9)], shape, tolerance=3e-2)


def test_fp8_saturates_and_shows_nan() -> None:
    check_stored_fp8(reference)


@pytest.mark.parametrize("dtype", [torch.float32, FP8])
def test_copied_tokens_leave_the_rest_of_a_block_alone(dtype: torch.dtype) -> None:
    check_copied_tokens(reference, dtype=dtype)


@pytest.mark.parametrize("kv_dtype", [torch.float32, FP8])
def test_masked_writes_leave_shared_blocks_alone(kv_dtype: torch.dtype) -> None:
    check_masked_writes(reference, kv_dtype=kv_dtype)


def test_keys_and_values_of_prompts_are_gathered() -> None:
    lengths = [(1, 9), (7, 7), (5, 300), (0, 6), (3, 128), (2, 2)]
    check_gathered(reference.gather_kv, lengths, attention_shape(block_size=3), decodes=1)
