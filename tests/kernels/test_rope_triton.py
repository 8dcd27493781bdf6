"""The kernel between a projection and attention, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch

if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    pytest.skip("for machines with triton and without CUDA", allow_module_level=True)
from megatron_hybrid.kernels.norm import triton as norm  # noqa: E402
from megatron_hybrid.kernels.paged_attention.triton import TritonAttention  # noqa: E402
from megatron_hybrid.kernels.protocols import HeadNorms  # noqa: E402
from megatron_hybrid.kernels.rope import triton as rope  # noqa: E402
from tests.kernels.attention_cases import (  # noqa: E402
    FP8,
    assert_same,
    attention_shape,
    attention_step,
)
from tests.kernels.norm_cases import EPS  # noqa: E402
from tests.kernels.rope_cases import (  # noqa: E402
    LENGTHS,
    check_batches,
    check_prepare,
    check_turn,
    projected,
)
from tests.thorough import A_THIRD

F32, BF16 = torch.float32, torch.bfloat16


pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("rotary_dim", [0, 6, 16])
@pytest.mark.parametrize("norm_dtype", [None, F32])
@pytest.mark.parametrize("queries", [True, False])
def test_norms_and_rotations(
    queries: bool, norm_dtype: torch.dtype | None, rotary_dim: int
) -> None:
    shape = attention_shape(head_dim=16)
    check_prepare(rope, TritonAttention(), shape, rotary_dim, norm_dtype, queries=queries)


@pytest.mark.parametrize(("rotary_dim", "norm_dtype"), [(0, None), (0, F32), (6, None), (16, F32)])
def test_what_a_layer_without_a_cache_takes(
    norm_dtype: torch.dtype | None, rotary_dim: int
) -> None:
    """Programs with some heads past the last one, too."""
    for heads, dim in ((3, 16), (5, 700)):
        check_turn(rope, heads, dim, rotary_dim, norm_dtype)
    check_turn(rope, 3, 16, rotary_dim, norm_dtype, dtype=BF16, tolerance=0.1)


@A_THIRD
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 3, 24), (5, 1, 256), (3, 3, 1100)])
@pytest.mark.parametrize("kv_dtype", [F32, FP8])
def test_heads_of_any_number_and_size(
    kv_dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    """Programs with heads of all kinds, and with some past the last one."""
    shape = attention_shape(heads, kv_heads, head_dim, kv_dtype=kv_dtype)
    check_prepare(rope, TritonAttention(), shape, head_dim // 2, F32)


@pytest.mark.parametrize("norm_dtype", [BF16, F32])
@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
def test_bfloat16(kv_dtype: torch.dtype, norm_dtype: torch.dtype) -> None:
    shape = attention_shape(head_dim=16, dtype=BF16, kv_dtype=kv_dtype)
    check_prepare(rope, TritonAttention(), shape, 8, norm_dtype, tolerance=0.1)


def test_a_tokens_bits_are_the_same_in_every_batch() -> None:
    check_batches(rope, TritonAttention(), attention_shape(head_dim=16, dtype=BF16), 8)


def test_a_norm_is_rounded_before_the_rotation_and_that_once() -> None:
    """In float16, which the interpreter rounds to the nearest."""
    shape = attention_shape(head_dim=16, dtype=torch.float16)
    step = attention_step(LENGTHS, shape)
    tokens, weight = len(step.query), torch.randn(16)
    qkv = projected(tokens, shape.heads + 2 * shape.kv_heads, 16, torch.float16, "cpu")
    table = rope.plan(torch.arange(tokens), torch.rand(4), torch.float16)
    normed = norm.rms_norm(qkv, weight, EPS, torch.float16)[:, : shape.heads].float()
    cosine, sine = table[:, None].chunk(2, dim=2)
    x, y = normed[..., :4], normed[..., 4:8]
    parts = x * cosine - y * sine, y * cosine + x * sine, normed[..., 8:]
    plan = TritonAttention().plan(step.paged, shape)
    found = rope.prepare(qkv, HeadNorms(weight, weight, EPS), table, step.cache, plan)
    assert torch.equal(found, torch.cat(parts, dim=2).half())


@pytest.mark.parametrize(("tokens", "half"), [(1, 32), (5, 3), (200, 64), (3, 300)])
def test_angles_are_those_of_the_positions(tokens: int, half: int) -> None:
    frequencies = torch.rand(half, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(tokens) * 1009 + 260_000
    table = rope.plan(positions, frequencies, BF16)
    angles = (positions[:, None].float() * frequencies).double()  # rounded as angles are
    torch.testing.assert_close(table.double(), torch.cat((angles.cos(), angles.sin()), dim=1))


def test_no_tokens() -> None:
    shape = attention_shape()
    step = attention_step(LENGTHS, shape)
    plan = TritonAttention().plan(replace(step.paged, kv_slot=step.paged.kv_slot[:0]), shape)
    before = step.cache.key.clone()
    rotation = rope.plan(torch.arange(0), torch.rand(2), F32)
    found = rope.prepare(torch.empty(0, 8, 8), None, rotation, step.cache, plan)
    assert found.shape == (0, 4, 8)
    assert_same(step.cache.key, before)
