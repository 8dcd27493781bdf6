"""The Triton kernel of prompts in Triton's interpreter (float32: its bfloat16 products are wrong),
on tiles that are small enough for every kind of them to occur."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.thorough import usually

if torch.cuda.is_available():
    pytest.skip("the GPU tests run the compiled kernels", allow_module_level=True)
pytest.importorskip("triton")

from megatron_hybrid.kernels.paged_attention import triton_prompts  # noqa: E402
from megatron_hybrid.kernels.paged_attention.triton import TritonAttention  # noqa: E402
from megatron_hybrid.kernels.paged_attention.triton_prompts import Tile  # noqa: E402
from tests.kernels.attention_cases import (  # noqa: E402
    FP8,
    attention_shape,
    attention_step,
    check,
    check_biases,
    check_first_position,
    check_sinks,
    check_windows,
)

LENGTHS = [(1, 9), (3, 3), (0, 5), (9, 40), (60, 64), (2, 65), (16, 16), (33, 150), (1, 200)]
SMALL = Tile(rows=16, keys=16, warps=4, stages=2, programs=3)
LARGE = Tile(rows=64, keys=32, warps=4, stages=2, programs=1)


class Prompts(TritonAttention):
    """All sequences are prompts, in tiles of this kind."""

    def __init__(self, tile: Tile) -> None:
        self._tile = tile

    def _attend(
        self, query: Any, cache: Any, plan: Any, output: Any, bias: Any, sinks: Any, splits: Any
    ) -> None:
        output.fill_(torch.nan)
        triton_prompts.attend(
            query, cache, plan.paged, plan.shape, plan.prompt_tokens, output, bias, sinks,
            self._tile,
        )  # fmt: skip


@pytest.mark.parametrize("tile", [SMALL, LARGE])
def test_all_keys_before_a_query_are_seen(tile: Tile) -> None:
    for shape in (
        attention_shape(heads=4, kv_heads=4),
        attention_shape(heads=6, kv_heads=2, block_size=64, head_dim=16),
        attention_shape(heads=3, kv_heads=1, block_size=48, head_dim=24),
        attention_shape(heads=2, kv_heads=1, block_size=32, head_dim=16, kv_dtype=FP8),
    ):
        check(Prompts(tile), LENGTHS, shape, decodes=0)


BANKS = [(5, 20), (17, 64), (16, 1), (2, 400)]  # profiles, extent


@pytest.mark.parametrize(
    ("tile", "bank"),
    usually(
        [(SMALL, BANKS[0]), (LARGE, BANKS[1])], [(t, b) for t in (SMALL, LARGE) for b in BANKS]
    ),
)
def test_scores_have_a_bias_by_distance(tile: Tile, bank: tuple[int, int]) -> None:
    """In blocks that are whole tiles, and in others; of one head a key, and of several."""
    where: Any = {"banks": [bank], "decodes": 0}
    check_biases(Prompts(tile), LENGTHS[:6], **where)
    shape = {"heads": 6, "kv_heads": 2, "head_dim": 16, "block_size": 64}
    check_biases(Prompts(tile), LENGTHS, windows=(0, 100), **shape, **where)
    fp8: Any = {"heads": 2, "kv_heads": 2, "head_dim": 16, "block_size": 32, "kv_dtype": FP8}
    check_biases(Prompts(tile), LENGTHS[2:], windows=(0, 33), **fp8, **where)


def test_no_bias_of_another_tile_is_taken() -> None:
    """One program has all of them, one after the other, in the same memory."""
    shape = attention_shape(heads=2, kv_heads=1, head_dim=16, block_size=16, relative=True)
    one = Tile(rows=16, keys=16, warps=4, stages=2, programs=1)
    check(Prompts(one), [(70, 300), (40, 40), (5, 90)], shape, decodes=0, bank=(3, 50))


def test_large_biases_in_16_bits_stay_finite() -> None:
    """Where a bias is more than float16 has, so is the largest of a row."""
    shape = attention_shape(2, 1, 16, 16, torch.float16, relative=True)
    step = attention_step([(40, 90)], shape, decodes=0)
    assert step.bias is not None
    attention, plan = Prompts(SMALL), TritonAttention().plan(step.paged, shape)
    attention.append(step.key, step.value, step.cache, plan)
    large = step.bias._replace(bank=step.bias.bank * 2e4)
    assert attention.attend(step.query, step.cache, plan, large).isfinite().all()


@pytest.mark.parametrize("tile", [SMALL, LARGE])
def test_a_token_sees_a_window(tile: Tile) -> None:
    check_windows(Prompts(tile), LENGTHS, usually([9, 64], [1, 9, 16, 64, 100]), decodes=0)


def test_queries_have_sinks() -> None:
    check_sinks(Prompts(SMALL), LENGTHS[1:6], decodes=0)


def test_the_first_positions_are_hidden() -> None:
    check_first_position(Prompts(SMALL), [(1, 3), (1, 70), (7, 7), (5, 40), (60, 100)], decodes=0)


def test_many_sequences_are_found() -> None:
    """More than are searched at a time; some without a query."""
    check(Prompts(SMALL), [(i % 4, 4 + i % 7) for i in range(140)], decodes=0)


def test_prompts_are_computed_apart_from_the_steps_decodes() -> None:
    shape = attention_shape(head_dim=16, block_size=32, relative=True, sinks=True)
    lengths = [(1, 70), (2, 40), (30, 60), (3, 3), (90, 200)]
    check(TritonAttention(), lengths, shape, decodes=2)
    plan = TritonAttention().plan(attention_step(lengths, shape, decodes=2).paged, shape)
    assert (plan.prompt_tokens, plan.decode_tokens) == (123, 3)
    assert plan.decodes is not None and plan.decodes.longest == 2


def test_tiles_are_as_large_as_there_is_work_for_all_processors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_prompts, "processors", lambda device: 132)
    device, shape = torch.device("cpu"), attention_shape(32, 8, 128, 64, torch.bfloat16)
    paying = [triton_prompts.pays(shape, tokens, device) for tokens in (0, 32, 128, 160, 8192)]
    assert paying == [False, False, False, True, True]
    rows = [triton_prompts.tile_for(shape, tokens, device).rows for tokens in (160, 512, 8192)]
    assert rows == [64, 128, 128]
    assert triton_prompts.tile_for(replace(shape, window=512), 8192, device).rows == 64
    shape = attention_shape(32, 8, 128, 64, torch.float32)
    assert triton_prompts.tile_for(shape, 8192, device).rows == 32
