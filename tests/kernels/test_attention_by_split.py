"""Batch-invariant attention's kernels in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import AttentionShape, KVCache
from megatron_hybrid.kernels.paged_attention.protocol import RelativeBias
from tests.thorough import A_THIRD, usually

if torch.cuda.is_available():
    pytest.skip("the GPU tests run the compiled kernels", allow_module_level=True)
pytest.importorskip("triton")

from megatron_hybrid.kernels.paged_attention.triton_by_split import (  # noqa: E402
    SplitAttention,
    Tile,
)
from tests.kernels.attention_cases import (  # noqa: E402
    FP8,
    AttentionStep,
    Lengths,
    Turns,
    assert_equal,
    attention_shape,
    attention_step,
    check,
    check_biases,
    check_bits_of_windows,
    check_copied_tokens,
    check_first_position,
    check_masked_writes,
    check_sinks,
    check_stored_fp8,
    check_windows,
    in_turns,
    padded_sequences,
    poisoned_cache,
)
from tests.kernels.dots_in_order import dots_in_order as dots_in_order  # noqa: E402

pytestmark = pytest.mark.usefixtures("dots_in_order")

KEYS, SPLIT = 16, 32
MIXED = [(1, 9), (1, 1), (1, 100), (4, 35), (5, 33), (3, 3), (0, 3), (6, 100), (40, 71), (2, 65)]


def small(workspace_bytes: int = 1 << 20, rows: int = 16) -> SplitAttention:
    """With small tiles and splits."""
    tile = Tile(rows, 4, 2, described=True)
    return SplitAttention(KEYS, SPLIT, workspace_bytes, prompts=tile)


# ---------------------------------------------------------------- against float64


def test_decodes_of_different_lengths_share_a_batch() -> None:
    check(small(), [(1, 9), (1, 1), (1, 4), (1, 200), (1, 32), (1, 33), (1, 64), (1, 65)])
    check(SplitAttention(), [(1, 9), (1, 1), (1, 600)], attention_shape(block_size=64))


@A_THIRD
@pytest.mark.parametrize("workspace_bytes", [0, 2000, 1 << 20])
def test_decodes_and_prompts_mix(workspace_bytes: int) -> None:
    """Whether partial results have no room, room for those of some sequences, or of all."""
    check(small(workspace_bytes), MIXED, decodes=3)
    check(small(workspace_bytes), MIXED[2:9], decodes=6)


def test_tiles_may_be_larger_than_prompts() -> None:
    check(small(rows=64), [(1, 40), (3, 3), (9, 70), (40, 40)], decodes=1)


@A_THIRD
@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    usually([(4, 4), (6, 3), (20, 1)], [(4, 4), (4, 1), (6, 3), (20, 1)]),
)
def test_query_heads_share_key_heads(heads: int, kv_heads: int) -> None:
    shape = attention_shape(heads=heads, kv_heads=kv_heads)
    check(small(), [(1, 6), (1, 70), (3, 8), (40, 50)], shape)
    check(small(), [(6, 6), (2, 70), (0, 3), (3, 8)], shape, decodes=3)


@A_THIRD
@pytest.mark.parametrize(("head_dim", "block_size"), [(16, 1), (24, 3), (80, 16), (32, 48)])
def test_heads_and_blocks_of_any_size(head_dim: int, block_size: int) -> None:
    shape = attention_shape(head_dim=head_dim, block_size=block_size)
    check(small(), [(1, 6), (1, 70), (40, 50), (5, 5)], shape)


def test_the_first_positions_may_be_hidden() -> None:
    """Where nothing is seen, the result is 0."""
    check_first_position(small(), [(1, 3), (1, 70), (7, 7), (5, 40), (1, 1), (3, 100)])
    shape = attention_shape(first_position=1)
    for decodes in (2, 0):
        step = attention_step([(1, 1), (1, 9)], shape, decodes=decodes)
        assert not attended(small(), step, shape)[0].any()


def test_a_token_sees_a_window() -> None:
    lengths = [(1, 9), (1, 8), (1, 70), (3, 3), (9, 40), (60, 64), (2, 65)]
    check_windows(small(), lengths, usually([9], [1, 2, 8, 9, 64, 100]), decodes=3)
    check_windows(small(rows=64), [(1, 40), (3, 70), (40, 90)], [9], decodes=1)
    check_bits_of_windows(small(), KEYS, usually([20], [2, 9, 20, 64]), block_size=16)


def test_scores_may_have_a_bias_by_distance() -> None:
    lengths = [(1, 9), (1, 8), (1, 70), (3, 3), (9, 40), (60, 64), (2, 65)]
    check_biases(small(), lengths, usually([(5, 20)], [(5, 20), (16, 1), (1, 64)]), decodes=3)
    check_biases(small(rows=64), [(1, 40), (3, 70), (40, 90)], [(5, 60)], heads=6, kv_heads=2)
    shape = {"block_size": 16, "relative": True}
    check_bits_of_windows(small(), KEYS, usually([20], [2, 9, 20, 64]), **shape)


def test_queries_may_have_sinks() -> None:
    """Whether there is room for the results of splits or not."""
    lengths = [(1, 9), (1, 70), (3, 3), (9, 40), (60, 64), (2, 65), (0, 5)]
    for workspace_bytes in (0, 1 << 20):
        check_sinks(small(workspace_bytes), lengths, decodes=3)
    check_sinks(small(rows=64), [(1, 40), (3, 70), (40, 90)], heads=6, kv_heads=2)
    shape = {"block_size": 16, "relative": True, "sinks": True}
    check_bits_of_windows(small(), KEYS, usually([20], [2, 9, 20, 64]), **shape)


def test_fp8_keys_and_values_are_attended_to_as_they_are_stored() -> None:
    check(small(), MIXED, attention_shape(kv_dtype=FP8), decodes=3)
    check(small(), MIXED, attention_shape(2, 1, 16, 16, kv_dtype=FP8), decodes=3)
    check_stored_fp8(small())


@pytest.mark.parametrize("kv_dtype", [torch.float32, FP8])
def test_writes_and_copies(kv_dtype: torch.dtype) -> None:
    check_masked_writes(small(), kv_dtype=kv_dtype)
    check_copied_tokens(small(), dtype=kv_dtype)


def test_not_a_number_is_not_taken_for_nothing() -> None:
    """A NaN in one split is no split without keys; other sequences don't notice."""
    shape = attention_shape()
    step = attention_step([(1, 100), (1, 70)], shape)
    step.key[0] = torch.nan
    missing = attended(small(), step, shape).isnan()
    assert missing[0].all() and not missing[1].any()


# ---------------------------------------------------------------- bits


def attended(attention: SplitAttention, step: AttentionStep, shape: AttentionShape) -> Tensor:
    plan = attention.plan(step.paged, shape)
    attention.append(step.key, step.value, step.cache, plan)
    return attention.attend(step.query, step.cache, plan, step.bias, step.sinks)


class Sequences:
    """Some, with all their queries, keys and values, of which any part is computed at any time."""

    def __init__(self, lengths: list[int], shape: AttentionShape, seed: int = 0) -> None:
        self.shape, self.lengths = shape, lengths
        generator = torch.Generator().manual_seed(seed)
        width = shape.heads + 2 * shape.kv_heads
        self.qkv = [
            # scores that differ much: running maxima change often
            (2 * torch.randn(length, width, shape.head_dim, generator=generator)).to(shape.dtype)
            for length in lengths
        ]
        self.bank = torch.randn(5, 40, generator=generator).to(shape.dtype)
        self.weights = [  # of a relative shape's biases
            torch.randn(length, shape.heads, 5, generator=generator).to(shape.dtype)
            for length in lengths
        ]
        self.sinks = [
            (4 * torch.randn(length, shape.heads, generator=generator)).to(shape.dtype)
            for length in lengths
        ]

    def results(
        self,
        attention: SplitAttention,
        bounds: list[list[int]],
        *,
        decodes: int = 0,
        block_size: int | None = None,
        seed: int = 0,
        longest_run: int = 0,
    ) -> list[Tensor]:
        """Of the queries from bounds[s][i] to bounds[s][i + 1] in one call, for each i; the first
        `decodes` sequences count as those. Blocks lie anywhere, and hold NaN besides."""
        shape = replace(self.shape, block_size=block_size or self.shape.block_size)
        turns = Turns.of(self.lengths, shape.block_size, seed)
        cache = poisoned_cache(shape, turns.blocks, "cpu")
        found: list[list[Tensor]] = [[] for _ in self.lengths]
        for spans, paged in turns.paged(bounds, decodes, longest_run):
            qkv = torch.cat([x[a:b] for x, (a, b) in zip(self.qkv, spans, strict=True)])
            bias = sinks = None
            if shape.sinks:
                sinks = torch.cat([x[a:b] for x, (a, b) in zip(self.sinks, spans, strict=True)])
            if shape.relative:
                own = [x[a:b] for x, (a, b) in zip(self.weights, spans, strict=True)]
                bias = RelativeBias(torch.cat(own), self.bank)
            step = AttentionStep(
                paged, *qkv.split([shape.heads, *[shape.kv_heads] * 2], 1), cache, qkv, bias, sinks
            )
            out = attended(attention, step, shape)
            for row, part in enumerate(out.split([b - a for a, b in spans])):
                found[row].append(part)
        return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize(
    "shape",
    usually(
        [
            attention_shape(3, 1, 16, 16, kv_dtype=FP8, first_position=1),
            attention_shape(3, 1, 8, 16, torch.bfloat16, relative=True, sinks=True),
        ],
        [
            attention_shape(2, 1, 8, 16, first_position=1),
            attention_shape(3, 1, 8, 16, relative=True, sinks=True),
            attention_shape(3, 1, 16, 16, kv_dtype=FP8),
            attention_shape(2, 1, 8, 16, torch.bfloat16),
            attention_shape(2, 1, 8, 16),
            attention_shape(20, 1, 24, 4),
        ],
    ),
    ids=str,
)
def test_bits_depend_on_the_sequence_alone(shape: AttentionShape) -> None:
    sequences = Sequences([75, 41], shape)
    whole = [[0, length] for length in sequences.lengths]
    expected = sequences.results(small(rows=64), whole)
    for one in range(2):  # alone; other tiles of queries, another block size and place
        alone = Sequences([], shape)
        alone.lengths, alone.qkv = [sequences.lengths[one]], [sequences.qkv[one]]
        alone.weights, alone.bank = [sequences.weights[one]], sequences.bank
        alone.sinks = [sequences.sinks[one]]
        for block_size in usually((5,), (5, 32)):
            found = alone.results(small(), [whole[one]], block_size=block_size, seed=1)
            assert_equal(found, [expected[one]])
    chunks = [[0, 7, 7, 50, 75], [0, 1, 33, 40, 41]]
    assert_equal(sequences.results(small(), chunks), expected)
    # in runs, whether partial results have room or not, and beside a prompt
    ways = ((2, 1 << 20), (2, 0), (1, 3000))
    for decodes, workspace_bytes in usually(ways[1:], ways):
        turns = in_turns(sequences.lengths, 16)
        attention = small(workspace_bytes)
        found = sequences.results(attention, turns, decodes=decodes, longest_run=16)
        assert_equal(found, expected)


def test_a_decode_has_the_bits_of_a_prompt() -> None:
    """Around the end of a tile, and of a split."""
    shape = attention_shape(4, 2, 8, 16)
    sequences = Sequences([72, 66], shape)
    expected = sequences.results(small(), [[0, 72], [0, 66]])
    for begin in usually((61,), (13, 61)):
        bounds = [[0, *range(begin, begin + 6)]] * 2
        found = sequences.results(small(), bounds, decodes=2)
        assert_equal(found, [one[: begin + 5] for one in expected])


# ---------------------------------------------------------------- a graph's steps


def padded(
    step: AttentionStep, decodes: int, prompts: int, tokens: int, blocks: int, longest_run: int = 0
) -> AttentionStep:
    """The step as one of a graph; padded tokens are NaN."""
    paged, spread = padded_sequences(step.paged, decodes, prompts, tokens, blocks, longest_run)
    query, key, value = (spread(x, torch.nan) for x in (step.query, step.key, step.value))
    return AttentionStep(paged, query, key, value, step.cache, step.expected)


@A_THIRD
@pytest.mark.parametrize("blocks", [60, 2000])
@pytest.mark.parametrize(
    ("lengths", "n", "longest_run"),
    [
        ([(1, 9), (1, 100), (1, 33)], 3, 0),
        ([(1, 70), (5, 40), (33, 66)], 1, 0),
        ([(3, 70), (1, 40), (5, 5), (33, 66)], 3, 5),
        ([(20, 20)], 0, 0),
    ],
)
def test_a_padded_step_has_the_same_bits(
    lengths: Lengths, n: int, longest_run: int, blocks: int
) -> None:
    shape = attention_shape(4, 2, 8, 16)
    step = attention_step(lengths, shape, decodes=n)
    before = KVCache(step.cache.key.clone(), step.cache.value.clone())
    expected = attended(small(), step, shape)
    torch.testing.assert_close(expected.double(), step.expected, atol=1e-5, rtol=1e-5)
    middle = int(step.paged.host.cu_seqlens[n])
    step = replace(step, cache=before)
    full = padded(step, n + 2, 3, len(step.query) + 9, blocks, longest_run)
    found = attended(small(), full, shape)
    assert torch.equal(found[:middle], expected[:middle])
    assert torch.equal(found[middle + 2 : len(expected) + 2], expected[middle:])


def test_a_graphs_launches_follow_from_sizes() -> None:
    shape = attention_shape(4, 2, 8, 16)
    plans = []
    for lengths in ([(1, 9), (1, 1), (7, 7)], [(1, 300), (1, 90), (3, 200)]):
        step = attention_step(lengths, shape)
        plan = small().plan(padded(step, 4, 2, 40, 100).paged, shape)
        plans.append((plan.longest, plan.items, plan.joins, plan.prompt_tokens))
    assert plans[0] == plans[1]


def test_any_number_of_prompt_tokens_can_be_captured() -> None:
    assert SplitAttention().most_captured(attention_shape(), 16) > 1 << 20
