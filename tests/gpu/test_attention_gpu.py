"""Attention and rotary kernels on a GPU against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_hybrid.kernels.contract import AttentionShape, KVCache, PagedHost
from tests.kernels.attention_cases import (
    AttentionStep,
    attention_shape,
    attention_step,
    check,
    check_copied_tokens,
    check_masked_writes,
    paged_sequences,
)
from tests.kernels.test_rope import rotated

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
MIXED = [(1, 1), (1, 70), (1, 3000), (1, 64), (7, 7), (300, 2000), (1, 65), (640, 640), (2, 900)]


def make(name: str) -> Any:
    if name == "triton":
        from megatron_hybrid.kernels.paged_attention.triton import TritonAttention

        return TritonAttention()
    pytest.importorskip("flashinfer")
    from megatron_hybrid.kernels.paged_attention.flashinfer import FlashInferAttention

    return FlashInferAttention()


@pytest.fixture(params=["flashinfer", "triton"])
def attention(request: pytest.FixtureRequest) -> Any:
    return make(request.param)


@pytest.mark.parametrize(
    "shape",
    [
        attention_shape(32, 8, 128, 64, BF16),
        attention_shape(12, 4, 128, 16, BF16),
        attention_shape(32, 2, 128, 400, BF16),
        attention_shape(16, 4, 64, 16, BF16),
        attention_shape(8, 1, 256, 48, BF16),
    ],
    ids=str,
)
def test_real_shapes(attention: Any, shape: AttentionShape) -> None:
    kinds: list[tuple[list[tuple[int, int]], int]] = [
        (MIXED, 4),
        (MIXED[:4], 4),
        (MIXED[4:], 0),
        ([(0, 30), (5, 9)], 0),
        ([(1, 9000)], 1),
    ]
    for lengths, decodes in kinds:  # one after the other: plans replace one another
        check(attention, lengths, shape, decodes=decodes, device="cuda", tolerance=2e-2)


@pytest.mark.parametrize("head_dim", [8, 80, 128, 256])
def test_float32_and_odd_heads_run_on_triton(attention: Any, head_dim: int) -> None:
    shape = attention_shape(8, 2, head_dim, 16)
    check(attention, MIXED, shape, decodes=4, device="cuda", tolerance=1e-4)
    if head_dim == 80:
        shape = attention_shape(8, 2, head_dim, 16, BF16)
        check(attention, MIXED, shape, decodes=4, device="cuda", tolerance=2e-2)


def test_masked_writes_and_copies(attention: Any) -> None:
    check_masked_writes(attention, "cuda")
    check_copied_tokens(attention, "cuda")


def padded(step: AttentionStep, rows: int) -> AttentionStep:
    """The step's decodes filled up to `rows`: padded ones read and write the first place of
    block 0."""
    host, n = step.paged.host, len(step.paged.kv_length)
    extra = np.ones(rows - n, dtype=np.int32)
    host = PagedHost(
        np.arange(rows + 1, dtype=np.int32),
        np.concatenate([host.kv_length, extra]),
        np.concatenate([host.kv_indptr, host.kv_indptr[-1] + extra.cumsum(dtype=np.int32)]),
        np.concatenate([host.kv_indices, 0 * extra]),
        np.concatenate([host.last_block_length, extra]),
    )
    kv_slot = torch.cat((step.paged.kv_slot, step.paged.kv_slot.new_zeros(rows - n)))
    filler = torch.randn_like(step.query[:1])
    query = torch.cat((step.query, filler.expand(rows - n, -1, -1)))
    key, value = (
        torch.cat((x, filler[:, : x.shape[1]].expand(rows - n, -1, -1)))
        for x in (step.key, step.value)
    )
    paged = paged_sequences(host, kv_slot, rows, "cuda")
    return AttentionStep(paged, query, key, value, step.cache, step.expected)


@pytest.mark.parametrize("shape", [attention_shape(32, 8, 128, 64, BF16)], ids=str)
def test_a_graph_is_planned_anew_for_every_replay(attention: Any, shape: AttentionShape) -> None:
    sizes, blocks = (1, 8, 32), 3000
    generator = np.random.default_rng(0)
    empty = torch.zeros((blocks, 64, shape.kv_heads, shape.head_dim), dtype=BF16, device="cuda")
    cache = KVCache(empty, empty.clone())
    graphs: dict[int, tuple[AttentionStep, torch.cuda.CUDAGraph, torch.Tensor]] = {}
    for turn in range(4):
        for size in sizes:
            rows = size if turn == 0 else int(generator.integers(1, size + 1))
            longest = (10, 3000, 70, 1)[turn]
            lengths = [(1, int(n)) for n in generator.integers(1, longest + 1, rows)]
            step = padded(attention_step(lengths, shape, device="cuda", seed=turn), size)
            cache.key[: len(step.cache.key)] = step.cache.key
            cache.value[: len(step.cache.value)] = step.cache.value
            if size not in graphs:
                graphs[size] = capture(attention, shape, step, cache)
            static, graph, out = graphs[size]
            update(static, step)
            attention.plan(static.paged, shape)
            out.zero_()
            graph.replay()
            torch.cuda.synchronize()
            torch.testing.assert_close(
                out[:rows].double(), step.expected, atol=2e-2, rtol=2e-2, msg=f"{turn} {size}"
            )
    # outside of graphs the same object goes on
    check(attention, MIXED, shape, decodes=4, device="cuda", tolerance=2e-2)


def capture(
    attention: Any, shape: AttentionShape, step: AttentionStep, cache: KVCache
) -> tuple[AttentionStep, torch.cuda.CUDAGraph, torch.Tensor]:
    indices = torch.zeros(len(cache.key), dtype=torch.int32, device="cuda")
    indices[: len(step.paged.kv_indices)] = step.paged.kv_indices
    paged = replace(step.paged, kv_indices=indices, static=True)
    static = replace(step, paged=paged, cache=cache)

    def run() -> torch.Tensor:
        attention.append(static.key, static.value, cache, plan)
        return attention.attend(static.query, cache, plan)

    plan = attention.plan(paged, shape)
    run()
    torch.cuda.synchronize()
    plan = attention.plan(paged, shape)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return static, graph, out


def update(static: AttentionStep, step: AttentionStep) -> None:
    """The figures of `step` into the tensors that a graph reads."""
    new, old = step.paged, static.paged
    for name in ("cu_seqlens", "kv_length", "kv_indptr", "last_block_length", "kv_slot"):
        getattr(old, name).copy_(getattr(new, name))
    old.kv_indices[: len(new.kv_indices)] = new.kv_indices
    static.query.copy_(step.query)
    static.key.copy_(step.key)
    static.value.copy_(step.value)
    static.paged = replace(old, host=new.host)


@pytest.mark.parametrize("rotary_dim", [64, 128])
@pytest.mark.parametrize("tokens", [1, 37, 5000])
def test_rotation(rotary_dim: int, tokens: int) -> None:
    pytest.importorskip("flashinfer")
    from megatron_hybrid.kernels.rope import flashinfer

    generator = torch.Generator("cuda").manual_seed(0)
    positions = torch.randint(0, 30000, (tokens,), generator=generator, device="cuda").int()
    # no base reproduces these: they are scaled as a model's may be
    frequencies = 5e5 ** -(torch.arange(0, rotary_dim, 2, device="cuda") / rotary_dim)
    frequencies[rotary_dim // 4 :] /= 8
    for dtype, tolerance in ((BF16, 3e-2), (torch.float32, 1e-4)):
        plan = flashinfer.plan(positions, frequencies, dtype)
        for heads in (40, 9, 1):
            projection = torch.randn(
                (tokens, heads + 8, 128), generator=generator, device="cuda"
            ).to(dtype)
            rest = projection[:, heads:].clone()
            expected = rotated(projection[:, :heads], positions, frequencies)
            out = flashinfer.rotate(projection[:, :heads], plan)
            # one head alone runs on the reference, which rounds more often
            limit = tolerance if heads > 1 else 2 * tolerance
            torch.testing.assert_close(out.double(), expected, atol=limit, rtol=limit)
            assert torch.equal(projection[:, heads:], rest)
