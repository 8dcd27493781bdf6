"""Attention with a bias by distance, and with sinks, on a GPU: kernels against float64, of the
Inklings' sizes, and their bits in batch-invariant mode.

    python -m pytest -m gpu -s tests/gpu/test_relative_attention_gpu.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron_hybrid.kernels.contract import AttentionShape, PagedHost
from megatron_hybrid.kernels.paged_attention.protocol import RelativeBias
from tests.kernels.attention_cases import (
    AttentionStep,
    attention_shape,
    attention_step,
    check,
    check_begins_behind,
    check_sinks,
    paged_sequences,
)

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
LENGTHS = [
    (1, 1), (1, 70), (1, 3000), (1, 64), (3, 900), (7, 7), (300, 2000), (1, 65), (640, 640),
    (130, 1300), (2, 900),
]  # fmt: skip
# A GPU's heads of Inkling-Small on eight, on one, and of Inkling; others, with heads in threes.
SIZES = [(4, 1, 128), (32, 8, 128), (64, 16, 128), (9, 3, 64), (6, 6, 24)]


def make(name: str) -> Any:
    if name == "by split":
        from megatron_hybrid.kernels.paged_attention.triton_by_split import SplitAttention

        return SplitAttention()
    from tests.gpu.test_attention_gpu import make as others

    return others(name)


@pytest.mark.parametrize("name", ["flashinfer", "triton", "by split"])
@pytest.mark.parametrize(("window", "bank"), [(0, (16, 1024)), (512, (16, 512)), (64, (5, 64))])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SIZES)
@pytest.mark.parametrize("kv_dtype", [BF16, torch.float8_e4m3fn])
def test_scores_have_a_bias_by_distance(
    name: str,
    window: int,
    bank: tuple[int, int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    kv_dtype: torch.dtype,
) -> None:
    """Decodes, prompts and both. flashinfer's has none, so that ours run there."""
    attention = make(name)
    shape = attention_shape(
        heads, kv_heads, head_dim, 64, BF16, kv_dtype=kv_dtype, window=window, relative=True
    )
    where = {"device": "cuda", "tolerance": 6e-2, "bank": bank}
    for lengths, decodes in ((LENGTHS, 4), (LENGTHS[:4], 4), (LENGTHS[4:], 0)):
        check(attention, lengths, shape, decodes=decodes, **where)
        if window:
            check_begins_behind(attention, lengths, shape, decodes=decodes, **where)


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("window", [0, 512])
@pytest.mark.parametrize("kv_dtype", [BF16, torch.float8_e4m3fn])
def test_prompts_have_tiles_of_two_sizes(rows: int, window: int, kv_dtype: torch.dtype) -> None:
    """A few programs go through all tiles, and write over what they have made for others."""
    from megatron_hybrid.kernels.paged_attention import triton_prompts
    from megatron_hybrid.kernels.paged_attention.triton import TritonAttention

    shape = attention_shape(
        32, 8, 128, 64, BF16, kv_dtype=kv_dtype, window=window, relative=True, sinks=True
    )
    lengths = [(300, 2000), (640, 640), (1, 70), (0, 9), (129, 1300)]
    where = {"decodes": 0, "device": "cuda", "bank": (16, window or 1024)}
    step = attention_step(lengths, shape, **where)
    attention, tokens = TritonAttention(), len(step.query)
    plan = attention.plan(step.paged, shape)
    attention.append(step.key, step.value, step.cache, plan)
    tile = triton_prompts.Tile(rows, keys=64, warps=rows // 16, stages=2, programs=1)
    for _ in range(3):
        out = torch.full_like(step.query, torch.nan)
        triton_prompts.attend(
            step.query, step.cache, step.paged, shape, tokens, out, step.bias, step.sinks, tile
        )
        torch.testing.assert_close(out.double(), step.expected, atol=6e-2, rtol=6e-2)


@pytest.mark.parametrize("name", ["triton", "by split"])
def test_in_float32(name: str) -> None:
    shape = attention_shape(8, 2, 64, 16, relative=True)
    check(make(name), LENGTHS, shape, decodes=4, device="cuda", tolerance=2e-4, bank=(16, 300))


@pytest.mark.parametrize("name", ["flashinfer", "triton", "by split"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(48, 8), (6, 1)])
def test_queries_may_have_sinks(name: str, heads: int, kv_heads: int) -> None:
    """With a bias and without, windows and decodes alone too. flashinfer's have none, so that ours
    run there."""
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": 128, "block_size": 64, "dtype": BF16}
    where = {"device": "cuda", "tolerance": 6e-2}
    for lengths, decodes in ((LENGTHS, 4), (LENGTHS[:4], 4)):
        check_sinks(make(name), lengths, decodes=decodes, **where, **sizes)


@pytest.mark.parametrize("window", [0, 512])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (32, 8), (9, 3)])
def test_bits_of_a_query_do_not_depend_on_the_others(
    heads: int, kv_heads: int, window: int
) -> None:
    """Alone as a decode, in a chunk of its prompt, in all of it."""
    shape = attention_shape(
        heads, kv_heads, 128, 64, BF16, window=window, relative=True, sinks=True
    )
    step = attention_step([(1, 700), (900, 1500), (5, 2100)], shape, decodes=1, device="cuda")
    whole = attended(step, shape)
    host, cu = step.paged.host, step.paged.host.cu_seqlens.tolist()
    some = (0, [0]), (1, [1]), (1, [450]), (1, list(range(300, 500))), (2, [903])
    for sequence, places in some:
        blocks = host.kv_indices[host.kv_indptr[sequence] : host.kv_indptr[sequence + 1]]
        keys = int(host.kv_length[sequence]) - (cu[sequence + 1] - 1 - places[-1])
        counts = np.array([len(places)]), np.array([keys])
        alone = PagedHost.of(*counts, blocks[None], shape.block_size)
        for decodes in {0, int(len(places) == 1)}:
            paged = paged_sequences(alone, step.paged.kv_slot[places], decodes, "cuda")
            assert step.bias is not None and step.sinks is not None
            bias = RelativeBias(step.bias.weights[places], step.bias.bank)
            one = AttentionStep(
                paged, step.query[places], step.key[places], step.value[places], step.cache,
                step.expected[places], bias, step.sinks[places],
            )  # fmt: skip
            assert torch.equal(attended(one, shape), whole[places]), (sequence, places[0], decodes)


def attended(step: AttentionStep, shape: AttentionShape) -> torch.Tensor:
    attention = make("by split")
    plan = attention.plan(step.paged, shape)
    attention.append(step.key, step.value, step.cache, plan)
    found: torch.Tensor = attention.attend(step.query, step.cache, plan, step.bias, step.sinks)
    return found
