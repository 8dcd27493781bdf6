"""Attention and rotary kernels on a GPU against float64."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from megatron_hybrid.execution.cuda_graphs import GraphSize
from megatron_hybrid.kernels.contract import AttentionShape, KVCache, PagedHost
from megatron_hybrid.kernels.paged_attention.prompts import PromptKernel
from tests.kernels.attention_cases import (
    FP8,
    AttentionStep,
    Lengths,
    attention_shape,
    attention_step,
    check,
    check_copied_tokens,
    check_gathered,
    check_masked_writes,
    check_stored_fp8,
    paged_sequences,
    poisoned_cache,
)
from tests.kernels.rope_cases import check_batches, check_prepare, check_turn

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

    # "3 own": up to three sequences' decodes on our kernel, so that steps take turns
    return FlashInferAttention(most_own=3 if name == "3 own" else 0)


@pytest.fixture(params=["flashinfer", "3 own", "triton"])
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
        attention_shape(32, 8, 128, 64, BF16, kv_dtype=FP8),
        attention_shape(32, 2, 128, 64, BF16, kv_dtype=FP8),
        attention_shape(12, 4, 128, 16, BF16, kv_dtype=FP8),
        attention_shape(16, 4, 64, 32, BF16, kv_dtype=FP8),
        attention_shape(16, 2, 256, 64, BF16, kv_dtype=FP8),
        attention_shape(16, 4, 64, 64, torch.float16, kv_dtype=FP8),
        attention_shape(16, 4, 128, 64, BF16, window=256),
        attention_shape(16, 4, 128, 64, BF16, kv_dtype=FP8, window=100),
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


class Forced:
    """Prompts on one of flashinfer's kernels, whatever they are."""

    def __init__(self, kernel: PromptKernel) -> None:
        pytest.importorskip("flashinfer")
        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("only Hopper has a choice")
        from megatron_hybrid.kernels.paged_attention.flashinfer import FlashInferAttention

        self.chosen: list[int] = []  # sequences each time
        self.kernel = kernel
        self.attention = FlashInferAttention(choose=self.choose)

    def choose(self, queries: Any, keys: Any, *_: Any) -> PromptKernel:
        self.chosen.append(len(queries))
        return self.kernel


def need_a_choice(shape: AttentionShape) -> None:
    from megatron_hybrid.kernels.paged_attention import flashinfer

    if not all(flashinfer._has_kernels(backend, shape) for backend in ("fa2", "fa3")):
        pytest.skip("flashinfer's kernels for this type are not there")


@pytest.fixture(params=list(PromptKernel), ids=lambda kernel: kernel.name)
def forced(request: pytest.FixtureRequest) -> Forced:
    return Forced(request.param)


PROMPTS: list[tuple[Lengths, int]] = [
    ([(600, 600)], 0),
    ([(5, 9)], 0),
    ([(1, 9000)], 0),
    ([(1, 70), (1, 1), (300, 300), (1, 64), (129, 2000), (64, 127), (640, 5000), (2, 900)], 2),
    ([(128, 128)] * 40, 0),
    ([(0, 30), (5, 9), (0, 300), (200, 401)], 0),
    ([(1, 3000), (33, 65)], 1),
]


@pytest.mark.parametrize(
    "shape",
    [
        attention_shape(16, 2, 256, 64, BF16),
        attention_shape(32, 8, 128, 64, BF16),
        attention_shape(32, 8, 64, 64, BF16),
        attention_shape(12, 4, 128, 16, torch.float16),
        attention_shape(8, 1, 256, 48, BF16),
    ],
    ids=str,
)
def test_prompts_on_each_kernel(forced: Forced, shape: AttentionShape) -> None:
    """One after the other: plans replace one another, and what is gathered lies where that of the
    step before lay. Places of the cache where no token is are NaN."""
    need_a_choice(shape)
    for lengths, decodes in PROMPTS:
        check(forced.attention, lengths, shape, decodes=decodes, device="cuda", tolerance=2e-2)
    assert forced.chosen == [len(lengths) - decodes for lengths, decodes in PROMPTS]


def test_a_sequences_nan_is_its_own(forced: Forced) -> None:
    """Kernels read whole tiles: what lies behind a sequence's end must not be another one's."""
    for shape in (attention_shape(16, 2, 256, 64, BF16), attention_shape(32, 8, 64, 16, BF16)):
        lengths = [(70, 100), (300, 1000), (5, 9), (64, 64)]
        step = attention_step(lengths, shape, decodes=0, device="cuda")
        ends = np.cumsum([queries for queries, _ in lengths])
        step.value[ends[0] : ends[1]] = torch.nan
        step.key[ends[2] :] = torch.nan
        plan = forced.attention.plan(step.paged, shape)
        forced.attention.append(step.key, step.value, step.cache, plan)
        found = forced.attention.attend(step.query, step.cache, plan).double()
        for begin, end in ((0, ends[0]), (ends[1], ends[2])):
            expected = step.expected[begin:end]
            torch.testing.assert_close(found[begin:end], expected, atol=2e-2, rtol=2e-2)
        assert found[ends[0] : ends[1]].isnan().all() and found[ends[2] :].isnan().all()


def test_nothing_behind_what_is_gathered_is_read_or_written() -> None:
    """NaN in all of the workspace, which is what the layer before may have left there."""
    forced = Forced(PromptKernel.GATHERED)
    shape = attention_shape(16, 2, 256, 64, BF16)
    need_a_choice(shape)
    step = attention_step([(70, 100), (300, 1000)], shape, decodes=0, device="cuda")
    plan = forced.attention.plan(step.paged, shape)
    forced.attention.append(step.key, step.value, step.cache, plan)
    workspace = forced.attention._wrappers[shape]._workspace
    workspace.fill_(255)
    found = forced.attention.attend(step.query, step.cache, plan)
    torch.testing.assert_close(found.double(), step.expected, atol=2e-2, rtol=2e-2)
    rows = 128 + 1024
    assert len(plan.prefill.key) == rows
    assert (workspace[rows * 2 * 2 * 256 * 2 :] == 255).all()


def test_a_step_without_room_is_not_gathered() -> None:
    pytest.importorskip("flashinfer")
    from megatron_hybrid.kernels.paged_attention.flashinfer import FlashInferAttention

    shape = attention_shape(16, 2, 256, 64, BF16)
    attention = FlashInferAttention(workspace_bytes=16 << 20)  # 8,192 tokens
    for lengths in ([(8000, 8192)], [(8000, 8193)], [(8000, 8000)]):
        check(attention, lengths, shape, decodes=0, device="cuda", tolerance=2e-2)


@pytest.mark.parametrize("kv_heads", [2, 3])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_keys_and_values_of_prompts_are_gathered(head_dim: int, kv_heads: int) -> None:
    from megatron_hybrid.kernels.paged_attention.triton import gather_kv

    lengths = [(1, 9), (1, 70), (7, 7), (5, 3000), (0, 6), (3, 128), (2, 129), (9, 127), (2, 2)]
    for block_size, dtype in ((16, BF16), (48, torch.float16), (400, torch.float32)):
        shape = attention_shape(kv_heads, kv_heads, head_dim, block_size, dtype)
        check_gathered(gather_kv, lengths, shape, 2, "cuda")


@pytest.mark.parametrize("head_dim", [8, 80, 128, 256])
def test_float32_and_odd_heads_run_on_triton(attention: Any, head_dim: int) -> None:
    shape = attention_shape(8, 2, head_dim, 16)
    check(attention, MIXED, shape, decodes=4, device="cuda", tolerance=1e-4)
    in_fp8 = attention_shape(8, 2, head_dim, 64, kv_dtype=FP8)
    check(attention, MIXED, in_fp8, decodes=4, device="cuda", tolerance=1e-4)
    if head_dim == 80:
        shape = attention_shape(8, 2, head_dim, 16, BF16)
        check(attention, MIXED, shape, decodes=4, device="cuda", tolerance=2e-2)


@pytest.mark.parametrize("kv_dtype", [torch.float32, FP8])
def test_masked_writes_and_copies(attention: Any, kv_dtype: torch.dtype) -> None:
    check_masked_writes(attention, "cuda", kv_dtype)
    check_copied_tokens(attention, "cuda", kv_dtype)


def test_fp8_saturates_and_shows_nan(attention: Any) -> None:
    check_stored_fp8(attention, "cuda")


@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
@pytest.mark.parametrize("queries", [1, 3, 8, 16])
@pytest.mark.parametrize("splits", [1, 2, 7, 64])
def test_decodes_in_parts_of_the_keys(queries: int, splits: int, kv_dtype: torch.dtype) -> None:
    """By the kernel for few queries a sequence."""
    from megatron_hybrid.kernels.paged_attention import triton_decode

    shape = attention_shape(32, 8, 128, 64, BF16, kv_dtype=kv_dtype)
    assert triton_decode.serves(shape, queries)
    keys = (queries, 63, 64, 65, 127, 128, 1000, 8192)
    step = attention_step([(queries, n) for n in keys], shape, decodes=len(keys), device="cuda")
    attention = make("triton")
    plan = attention.plan(step.paged, shape)
    attention.append(step.key, step.value, step.cache, plan)
    found = attention.attend(step.query, step.cache, plan, splits=splits)
    torch.testing.assert_close(found.double(), step.expected, atol=2e-2, rtol=2e-2)
    again = attention.attend(step.query, step.cache, plan, splits=splits)
    assert torch.equal(found, again)


def padded(step: AttentionStep, size: GraphSize) -> AttentionStep:
    """The step filled up to `size`: padded decodes read and write the first place of block 0,
    padded prompts have no queries, and padded tokens, which are NaN, belong to nobody."""
    host, n = step.paged.host, step.paged.num_decodes
    first, end = size.decodes, size.decodes + len(step.query) - n  # of the prompts' tokens

    def filled(values: Iterable[Any], decode: Any, prompt: Any) -> list[Any]:
        values = list(values)
        decodes = values[:n] + [decode] * (size.decodes - n)
        return decodes + values[n:] + [prompt] * (size.rows - len(decodes) - len(values[n:]))

    def spread(x: torch.Tensor, filler: float) -> torch.Tensor:
        out = x.new_full((size.tokens, *x.shape[1:]), filler)
        out[n:first] = 0
        out[:n], out[first:end] = x[:n], x[n:]
        return out

    blocks = filled((host.kv_indices[i:j] for i, j in pairwise(host.kv_indptr)), [0], [0])
    figures = (
        np.cumsum([0, *filled(np.diff(host.cu_seqlens), 1, 0)]),
        filled(host.kv_length, 1, 1),
        np.cumsum([0, *map(len, blocks)]),
        np.concatenate(blocks),
        filled(host.last_block_length, 1, 1),
    )
    paged = paged_sequences(
        PagedHost(*(np.asarray(values, dtype=np.int32) for values in figures)),
        spread(step.paged.kv_slot, 0),
        size.decodes,
        "cuda",
    )
    query, key, value = (spread(x, torch.nan) for x in (step.query, step.key, step.value))
    return AttentionStep(paged, query, key, value, step.cache, step.expected)


def nothing(shape: AttentionShape, cache: KVCache) -> AttentionStep:
    """A step of no sequences."""
    zero, none = np.zeros(1, dtype=np.int32), np.zeros(0, dtype=np.int32)
    slots = torch.zeros(0, dtype=torch.int32)
    paged = paged_sequences(PagedHost(zero, none, zero, none, none), slots, 0, "cuda")
    query = torch.zeros((0, shape.heads, shape.head_dim), dtype=shape.dtype, device="cuda")
    key = query[:, : shape.kv_heads]
    return AttentionStep(paged, query, key, key.clone(), cache, query)


def random_lengths(
    size: GraphSize, longest: int, generator: np.random.Generator, full: bool
) -> tuple[Lengths, int]:
    """Of decodes, and of prompts with a past, and the number of the former; `full`: all that there
    is room for."""
    least = 0 if size.prompts else 1
    decodes = size.decodes if full else int(generator.integers(least, size.decodes + 1))
    prompts = size.prompts if full else int(generator.integers(1 - least, size.prompts + 1))
    lengths = [(1, int(keys)) for keys in generator.integers(1, longest + 1, decodes)]
    left = size.prefill_tokens
    for others in reversed(range(prompts)):
        most = left - others
        queries = most if full and others == 0 else int(generator.integers(1, most + 1))
        lengths.append((queries, queries + int(generator.integers(0, longest))))
        left -= queries
    return lengths, decodes


SIZES = [
    GraphSize(1),
    GraphSize(8),
    GraphSize(32),
    GraphSize(0, 16, 16),
    GraphSize(8, 64, 4),
    GraphSize(32, 16, 1),
    GraphSize(4, 256, 16),
    GraphSize(0, 512, 3),
    GraphSize(8, 1024, 16),
    GraphSize(0, 2048, 3),
]


@pytest.mark.parametrize(
    "shape",
    [
        attention_shape(32, 8, 128, 64, BF16),
        attention_shape(32, 2, 128, 400, BF16),
        attention_shape(32, 8, 128, 64, BF16, kv_dtype=FP8),
        attention_shape(16, 4, 128, 64, BF16, window=256),
    ],
    ids=str,
)
def test_a_graph_is_planned_anew_for_every_replay(attention: Any, shape: AttentionShape) -> None:
    """All are captured first, from steps of nothing but padding, as an engine does."""
    blocks, generator = 3000, np.random.default_rng(0)
    cache = poisoned_cache(shape, blocks, "cuda")
    empty = nothing(shape, cache)
    most = max(attention.most_captured(shape, 16), 512)
    sizes = [size for size in SIZES if size.prefill_tokens <= most]
    graphs = {size: capture(attention, shape, padded(empty, size), cache) for size in sizes}
    for turn, longest in enumerate((10, 3000, 70, 1, 500, 9000)):
        for size in sizes:
            most = min(longest, 2000 * shape.block_size // size.rows)
            lengths, n = random_lengths(size, most, generator, full=turn % 2 == 1)
            step = attention_step(lengths, shape, decodes=n, device="cuda", seed=turn)
            cache.key[: len(step.cache.key)] = step.cache.key
            cache.value[: len(step.cache.value)] = step.cache.value
            tokens = len(step.query) - n
            static, graph, out = graphs[size]
            update(static, padded(step, size))
            attention.plan(static.paged, shape)
            out.zero_()
            graph.replay()
            torch.cuda.synchronize()
            found = torch.cat((out[:n], out[size.decodes : size.decodes + tokens]))
            torch.testing.assert_close(
                found.double(), step.expected, atol=2e-2, rtol=2e-2, msg=f"{turn} {size} {lengths}"
            )
    if (wrappers := getattr(attention, "_wrappers", {}).get(shape)) is not None:
        # flashinfer's Python was left out, where it plans decodes
        own = attention._most_own if shape.kv_dtype == BF16 else max(size.decodes for size in sizes)
        with_decodes = sum(size.decodes > own for size in sizes)
        assert len(wrappers._calls) == with_decodes and all(wrappers._calls.values())
        assert all(0 < call.aside._words < 2**14 for call in wrappers._calls.values())
    # outside of graphs the same object goes on
    check(attention, MIXED, shape, decodes=4, device="cuda", tolerance=2e-2)


@pytest.mark.parametrize(
    "shape", [attention_shape(32, 2, 128, 64, BF16), attention_shape(16, 2, 256, 64, BF16)], ids=str
)
def test_flashinfer_captures_as_many_tokens_as_it_says(shape: AttentionShape) -> None:
    attention = make("flashinfer")
    tokens = attention.most_captured(shape, 16)
    assert tokens > 512
    cache = poisoned_cache(shape, 300, "cuda")
    empty = nothing(shape, cache)
    size = GraphSize(0, tokens, 16)
    static, graph, out = capture(attention, shape, padded(empty, size), cache)
    step = attention_step([(tokens - 300, tokens), (300, 500)], shape, device="cuda")
    cache.key[: len(step.cache.key)] = step.cache.key
    cache.value[: len(step.cache.value)] = step.cache.value
    update(static, padded(step, size))
    attention.plan(static.paged, shape)
    graph.replay()
    torch.testing.assert_close(out[:tokens].double(), step.expected, atol=2e-2, rtol=2e-2)
    with pytest.raises(RuntimeError, match="workspace|buffer|allocat"):
        capture(attention, shape, padded(empty, GraphSize(0, 2 * tokens, 16)), cache)


class Copying:
    """Gigabytes go from the host to the device, until the end."""

    def __init__(self) -> None:
        host = torch.empty(2**31, dtype=torch.uint8, pin_memory=True)
        here = torch.empty_like(host, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            for part in zip(here.split(2**24), host.split(2**24), strict=True):
                part[0].copy_(part[1], non_blocking=True)
            self._end = torch.cuda.current_stream().record_event()

    def is_over(self) -> bool:
        return self._end.query()


TOGETHER: Lengths = [*[(1, 70 * i) for i in range(1, 13)], (300, 2000), (64, 64), (100, 900)]


@pytest.mark.parametrize("decodes", [12, 0])
def test_prompts_do_not_wait_for_copies_of_others(forced: Forced, decodes: int) -> None:
    """The copy engines move KV and states, and a plan must come without them."""
    shape = attention_shape(32, 8, 128, 64, BF16)
    need_a_choice(shape)
    attention = forced.attention
    step = attention_step(TOGETHER[12 - decodes :], shape, decodes=decodes, device="cuda")
    for turn in range(4):  # the first two are planned with copies
        torch.cuda.synchronize()
        copying = Copying() if turn > 1 else None
        plan = attention.plan(step.paged, shape)
        attention.append(step.key, step.value, step.cache, plan)
        found = attention.attend(step.query, step.cache, plan)
        torch.cuda.current_stream().synchronize()
        assert copying is None or not copying.is_over()
        torch.testing.assert_close(found.double(), step.expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("decodes", [12, 0])
def test_graphs_of_prompts_do_not_wait_for_copies_of_others(decodes: int) -> None:
    shape, size = attention_shape(32, 8, 128, 64, BF16), GraphSize(decodes, 512, 4)
    attention = make("flashinfer")
    cache = poisoned_cache(shape, 300, "cuda")
    static, graph, out = capture(attention, shape, padded(nothing(shape, cache), size), cache)
    step = attention_step(TOGETHER[12 - decodes :], shape, decodes=decodes, device="cuda")
    cache.key[: len(step.cache.key)] = step.cache.key
    cache.value[: len(step.cache.value)] = step.cache.value
    update(static, padded(step, size))
    copying = Copying()
    attention.plan(static.paged, shape)
    graph.replay()
    torch.cuda.current_stream().synchronize()
    assert not copying.is_over()
    found = out[: len(step.expected)].double()
    torch.testing.assert_close(found, step.expected, atol=2e-2, rtol=2e-2)


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


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(16, 2, 256), (32, 8, 64), (9, 1, 128)]
)
@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
@pytest.mark.parametrize("norm_dtype", [None, BF16, torch.float32])
@pytest.mark.parametrize("rotary_dim", [0, 64])
def test_what_attention_takes(
    rotary_dim: int, norm_dtype: torch.dtype | None, kv_dtype: torch.dtype,
    heads: int, kv_heads: int, head_dim: int,
) -> None:  # fmt: skip
    from megatron_hybrid.kernels.rope import triton as rope

    attention = make("triton")
    shape = attention_shape(heads, kv_heads, head_dim, 16, BF16, kv_dtype=kv_dtype)
    lengths = [(1, 9), (1, 1), (300, 700), (1500, 1500)]
    for queries in (True, False):
        check_prepare(
            rope, attention, shape, rotary_dim, norm_dtype,
            queries=queries, tolerance=0.1, lengths=lengths, device="cuda",
        )  # fmt: skip
    check_batches(rope, attention, shape, 64, "cuda")


@pytest.mark.parametrize("tokens", [1, 3, 256, 8192])
def test_angles_have_the_bits_of_torchs(tokens: int) -> None:
    from megatron_hybrid.kernels.rope import triton as rope

    frequencies = 1e6 ** -torch.linspace(0, 1, 48, device="cuda")
    positions = torch.randint(0, 2**20, (tokens,), device="cuda", dtype=torch.int32)
    angles = positions[:, None].float() * frequencies
    expected = torch.cat((angles.cos(), angles.sin()), dim=1)
    assert torch.equal(rope.plan(positions, frequencies, BF16), expected)


def test_what_attention_takes_in_float32() -> None:
    from megatron_hybrid.kernels.rope import triton as rope

    shape = attention_shape(16, 2, 128, 16)
    check_prepare(rope, make("triton"), shape, 128, torch.float32, tolerance=1e-4, device="cuda")


@pytest.mark.parametrize("rotary_dim", [0, 64])
@pytest.mark.parametrize("norm_dtype", [None, BF16])
def test_what_a_layer_without_a_cache_takes(
    norm_dtype: torch.dtype | None, rotary_dim: int
) -> None:
    """As in Ring-linear."""
    from megatron_hybrid.kernels.rope import triton as rope

    check_turn(
        rope, 16, 128, rotary_dim, norm_dtype, dtype=BF16, tolerance=0.1, tokens=300, device="cuda"
    )
