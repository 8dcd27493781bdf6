"""Which kernel prompts run on, and where gathered keys lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_hybrid.kernels.contract import AttentionShape, PagedHost
from megatron_hybrid.kernels.paged_attention import prompts
from megatron_hybrid.kernels.paged_attention.prompts import (
    TILE,
    GatheredLayout,
    PromptKernel,
    choose,
    estimate,
    gathered_bytes,
)
from tests.kernels.attention_cases import Lengths, attention_shape

SMS = 132
SHAPES = [
    attention_shape(16, 2, 256, 64, torch.bfloat16),
    attention_shape(32, 8, 128, 64, torch.bfloat16),
    attention_shape(32, 8, 64, 64, torch.bfloat16),
]
A_LOT = 1 << 40


def chosen(shape: AttentionShape, lengths: Lengths, room: int = A_LOT) -> PromptKernel:
    queries, keys = np.array(lengths, dtype=np.int32).T
    return choose(queries, keys, shape, SMS, room)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_long_prompts_are_gathered(shape: AttentionShape) -> None:
    for past in (0, 300, 8192, 65536):
        assert chosen(shape, [(8192, 8192 + past)]) is PromptKernel.GATHERED
    assert chosen(shape, [(2048, 2048)] * 4) is PromptKernel.GATHERED


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_few_tokens_on_a_long_prefix_split_their_keys(shape: AttentionShape) -> None:
    for count in (1, 4):
        assert chosen(shape, [(16, 16 + 65536)] * count) is PromptKernel.FA2


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_has_no_room_stays_in_its_blocks(shape: AttentionShape) -> None:
    lengths = [(8192, 65000), (100, 129), (0, 70)]
    needed = (-(-65000 // TILE) + 2) * TILE * 2 * shape.kv_heads * shape.head_dim * 2
    assert gathered_bytes(*np.array(lengths).T, shape) == needed
    assert chosen(shape, lengths, room=needed) is PromptKernel.GATHERED
    assert chosen(shape, lengths, room=needed - 1) is PromptKernel.FA3


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_more_queries_never_take_less(shape: AttentionShape) -> None:
    """On the same past."""
    before = dict.fromkeys(PromptKernel, 0.0)
    for queries in range(1, 3000, 37):
        now = estimate(np.array([queries]), np.array([queries + 500]), shape, SMS)
        assert all(now[kernel] >= before[kernel] for kernel in PromptKernel)
        before = now


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_of_a_sequence_are_summed(shape: AttentionShape) -> None:
    """Against a loop over them, with as many sequences as keep all multiprocessors busy."""
    lengths = [(1, 70), (128, 128), (129, 129), (700, 5000), (192, 193), (1000, 1000), (0, 5)] * 9
    rows = 192 if shape.head_dim == 64 else 128
    seen = 0
    for queries, keys in lengths:
        for first in range(0, queries, rows):
            seen += min(keys, keys - queries + first + rows) + prompts._KEYS_OF_A_TILE
    operations = seen * rows * shape.heads * shape.head_dim * 4
    rate = prompts._RATES[shape.head_dim].fa3
    expected = operations / (rate * 1e12 * SMS) * 1e6
    found = estimate(*np.array(lengths).T, shape, SMS)[PromptKernel.FA3]
    assert found == pytest.approx(expected)


def test_estimates_are_near_what_was_measured() -> None:
    """On an H100, microseconds a layer: FlashAttention 3 on blocks, and gathered."""
    measured = {
        (0, 1, 8192, 8192): (1238, 811 + 10),
        (0, 1, 8192, 65536): (17581, 12273 + 104),
        (0, 4, 2048, 2048): (415, 269 + 10),
        (1, 1, 8192, 8192): (1060, 843 + 24),
        (1, 1, 8192, 65536): (16178, 12967 + 195),
        (1, 2, 4096, 4096): (653, 532 + 24),
    }
    for (shape, count, queries, keys), (in_blocks, gathered) in measured.items():
        found = estimate(np.full(count, queries), np.full(count, keys), SHAPES[shape], SMS)
        assert found[PromptKernel.FA3] == pytest.approx(in_blocks, rel=0.2)
        assert found[PromptKernel.GATHERED] == pytest.approx(gathered, rel=0.2)


def test_a_sequence_begins_at_a_tile_of_its_own() -> None:
    lengths = [(1, 9), (7, 7), (5, 300), (0, 6), (3, 128)]
    queries, keys = np.array(lengths).T
    host = PagedHost.of(queries, keys, np.zeros((5, 75), dtype=np.int64), 4)
    layout = GatheredLayout.of(host, 1)
    assert layout.query_indptr.tolist() == [0, 7, 7, 12, 12, 12, 12, 15, 15]
    assert layout.kv_indptr.tolist() == [0, 7, 128, 428, 512, 512, 512, 640, 640]
    assert layout.sequence.tolist() == [1, 2, 2, 2, 4]
    assert layout.position.tolist() == [0, 0, 128, 256, 0]
    assert layout.rows == 640
    assert all(part.dtype == np.int32 for part in layout)
