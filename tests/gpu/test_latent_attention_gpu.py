"""Latent attention's kernels on a GPU against float64, and their bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_hybrid.kernels.contract import AttentionShape
from tests.kernels.attention_cases import Lengths, padded_sequences
from tests.kernels.latent_cases import (
    FP8,
    LatentStep,
    attended,
    check,
    check_bits,
    check_first_position,
    check_masked_writes,
    expected,
    latent_shape,
    latent_step,
)

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytestmark = pytest.mark.gpu

from megatron_hybrid.kernels.latent_attention.triton import TritonLatentAttention  # noqa: E402
from megatron_hybrid.kernels.paged_attention.triton_by_split import Tile  # noqa: E402
from megatron_hybrid.kernels.rope import triton as rope  # noqa: E402

BF16 = torch.bfloat16
MIXED: Lengths = [
    (1, 1), (1, 70), (1, 3000), (1, 64), (7, 7), (300, 2000), (1, 65), (640, 640), (2, 900),
]  # fmt: skip
SIZES = {"nope": 128, "v_dim": 128, "device": "cuda"}
BOTH = pytest.mark.parametrize("batch_invariant", [False, True])
SHAPES = pytest.mark.parametrize(
    "shape",
    [
        latent_shape(32, 512, 64, 64, BF16),
        latent_shape(16, 512, 64, 16, torch.float16),
        latent_shape(5, 512, 64, 400, BF16),
        latent_shape(128, 512, 64, 64, BF16),
        latent_shape(12, 320, 32, 48, BF16),
        latent_shape(32, 512, 64, 64, BF16, kv_dtype=FP8),
        latent_shape(8, 512, 64, 16, torch.float16, kv_dtype=FP8),
    ],
    ids=str,
)


@BOTH
@SHAPES
def test_decodes_and_prompts_mix(shape: AttentionShape, batch_invariant: bool) -> None:
    attention = TritonLatentAttention(batch_invariant)
    check(attention, rope, MIXED, shape, tolerance=4e-2, decodes=4, **SIZES)
    check(attention, rope, [(1, 9000), (1, 1)], shape, tolerance=4e-2, **SIZES)
    short: Lengths = [(1, 1024), (1, 300), (7, 300), (40, 2000), (3, 3)]
    check(attention, rope, short, shape, tolerance=4e-2, decodes=2, **SIZES)
    check(attention, rope, [(4, 900), (3, 70)], shape, tolerance=4e-2, decodes=2, **SIZES)
    many: Lengths = [*[(1, 900 + 37 * i) for i in range(10)], (5, 300), (3, 3)]
    check(attention, rope, many, shape, tolerance=4e-2, decodes=len(many), **SIZES)


@BOTH
def test_float32(batch_invariant: bool) -> None:
    attention = TritonLatentAttention(batch_invariant)
    shape = latent_shape(8, 512, 64, 16)
    check(attention, rope, MIXED, shape, tolerance=2e-4, decodes=4, **SIZES)


@BOTH
def test_partial_results_may_find_no_room(batch_invariant: bool) -> None:
    shape = latent_shape(32, 512, 64, 64, BF16)
    for size in (0, 1 << 20):
        attention = TritonLatentAttention(batch_invariant, workspace_bytes=size)
        lengths = [(1, 3000), (1, 600), (1, 5000)]
        check(attention, rope, lengths, shape, tolerance=4e-2, **SIZES)


@BOTH
def test_what_is_not_seen_and_not_written(batch_invariant: bool) -> None:
    attention = TritonLatentAttention(batch_invariant)
    check_masked_writes(attention, rope, "cuda")
    lengths = [(1, 3), (1, 700), (7, 7), (50, 400)]
    check_first_position(attention, rope, lengths, device="cuda", tolerance=1e-4)


@SHAPES
def test_bits_depend_on_the_sequence_alone(shape: AttentionShape) -> None:
    """Whatever the tiles."""

    def attention(rows: int = 16, **options: Any) -> TritonLatentAttention:
        tile = Tile(min(rows, 32), 8, 2)
        return TritonLatentAttention(True, prompts=tile, **options)

    check_bits(attention, rope, shape, [1300, 700], "cuda")

    def usual(rows: int = 0, **options: Any) -> TritonLatentAttention:
        return TritonLatentAttention(True, **options)

    check_bits(usual, rope, shape, [600, 90], "cuda")


@BOTH
@pytest.mark.parametrize("longest_run", [0, 5])
def test_a_graph_reads_each_steps_lengths(batch_invariant: bool, longest_run: int) -> None:
    """Captured with a step of little, replayed with others."""
    shape, blocks = latent_shape(32, 512, 64, 64, BF16), 400
    attention = TritonLatentAttention(batch_invariant)
    runs = longest_run or 1

    def made(lengths: Lengths, decodes: int, seed: int) -> LatentStep:
        step = latent_step(lengths, shape, decodes=decodes, seed=seed, **SIZES)
        room = torch.full((blocks, *step.cache.key.shape[1:]), torch.nan, device="cuda")
        key = room.to(shape.kv_dtype)
        key[: len(step.cache.key)] = step.cache.key
        return replace(step, cache=replace(step.cache, key=key, value=key[..., :512]))

    def padded(step: LatentStep) -> tuple[LatentStep, int]:
        decodes = 8
        paged, spread = padded_sequences(step.paged, decodes, 3, 700, blocks, longest_run)
        query, latent = (spread(x, 0.0) for x in (step.query, step.latent))
        positions = spread(step.positions, 0)
        filled = replace(step, paged=paged, query=query, latent=latent, positions=positions)
        return filled, decodes - step.paged.num_decodes

    static, _ = padded(made([(1, 1), (3, 3)], 1, 0))
    attended(attention, rope, static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attended(attention, rope, static)
    for seed, lengths in enumerate(
        ([(runs, 3000), (1, 70), (500, 900)], [(1, 9000), (runs, 65), (1, 2), (30, 30), (4, 700)])
    ):
        step = made(lengths, 2, seed + 1)
        _, _, result = expected(step, True, True)
        full, more = padded(step)
        for name in ("cu_seqlens", "kv_length", "kv_indptr", "kv_indices", "kv_slot"):
            getattr(static.paged, name).copy_(getattr(full.paged, name))
        for name in ("query", "latent", "positions"):
            getattr(static, name).copy_(getattr(full, name))
        static.cache.key.copy_(full.cache.key)
        static.norm.weight.copy_(full.norm.weight)
        static.weights.both.copy_(full.weights.both)
        graph.replay()
        middle = int(step.paged.host.cu_seqlens[2])
        found = torch.cat((out[:middle], out[middle + more : len(result) + more])).double()
        torch.testing.assert_close(found, result, atol=4e-2, rtol=4e-2)
