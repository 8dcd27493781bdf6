"""Latent attention's kernels in Triton's interpreter."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron_hybrid.kernels.contract import AttentionShape
from tests.thorough import A_THIRD, usually

if torch.cuda.is_available():
    pytest.skip("the GPU tests run the compiled kernels", allow_module_level=True)
pytest.importorskip("triton")

from megatron_hybrid.kernels.latent_attention import triton  # noqa: E402
from megatron_hybrid.kernels.latent_attention.triton import TritonLatentAttention  # noqa: E402
from megatron_hybrid.kernels.paged_attention.triton_by_split import Tile  # noqa: E402
from megatron_hybrid.kernels.rope import triton as rope  # noqa: E402
from tests.kernels.attention_cases import Lengths, padded_sequences  # noqa: E402
from tests.kernels.dots_in_order import dots_in_order as dots_in_order  # noqa: E402
from tests.kernels.latent_cases import (  # noqa: E402
    FP8,
    MIXED,
    LatentStep,
    attended,
    check,
    check_bits,
    check_first_position,
    check_masked_writes,
    latent_shape,
    latent_step,
)

KEYS, SPLIT = 16, 32


def small(
    batch_invariant: bool = True, workspace_bytes: int = 1 << 20, rows: int = 16
) -> TritonLatentAttention:
    """With small tiles and splits."""
    tile = Tile(rows, 4, 2)
    return TritonLatentAttention(
        batch_invariant, keys=KEYS, split=SPLIT, workspace_bytes=workspace_bytes, prompts=tile
    )


BOTH = pytest.mark.parametrize("batch_invariant", [False, True])


@A_THIRD
@BOTH
@pytest.mark.parametrize("workspace_bytes", [0, 8000, 1 << 20])
def test_decodes_and_prompts_mix(batch_invariant: bool, workspace_bytes: int) -> None:
    """Whether partial results have no room, room for those of some sequences, or of all."""
    attention = small(batch_invariant, workspace_bytes)
    check(attention, rope, MIXED, decodes=3)
    check(attention, rope, MIXED[2:9], decodes=6)
    many: Lengths = [*[(1, 5 + 9 * i) for i in range(7)], (2, 40), (3, 3), (1, 70)]
    check(attention, rope, many, decodes=len(many))


@A_THIRD
@BOTH
def test_as_it_is_by_default(batch_invariant: bool) -> None:
    shape = latent_shape(block_size=64)
    attention = TritonLatentAttention(batch_invariant)
    check(attention, rope, [(1, 9), (1, 600), (30, 70)], shape)


@pytest.mark.parametrize("interleaved", [True, False])
def test_pairs_lie_side_by_side_or_half_apart(interleaved: bool) -> None:
    check(small(), rope, MIXED, interleaved=interleaved)


def test_positions_may_rotate_nothing() -> None:
    check(small(), rope, MIXED, turns=False)


@A_THIRD
@BOTH
@pytest.mark.parametrize(
    ("heads", "latent", "turned"), usually([(3, 24, 4), (20, 32, 0)],
    [(1, 8, 2), (20, 32, 0), (3, 24, 4), (5, 20, 16), (20, 32, 16)]),
)  # fmt: skip
def test_heads_and_latents_of_any_size(
    heads: int, latent: int, turned: int, batch_invariant: bool
) -> None:
    for block_size in (3, 16):
        shape = latent_shape(heads, latent, turned, block_size)
        lengths = [(1, 6), (1, 70), (40, 50), (5, 5)]
        check(small(batch_invariant), rope, lengths, shape, nope=7, v_dim=9, turns=turned > 0)


@A_THIRD
@BOTH
def test_the_first_positions_may_be_hidden(batch_invariant: bool) -> None:
    lengths = [(1, 3), (1, 70), (7, 7), (5, 40), (1, 1), (3, 100)]
    check_first_position(small(batch_invariant), rope, lengths)
    shape = latent_shape(first_position=1)
    for decodes in (2, 0):
        step = latent_step([(1, 1), (1, 9)], shape, decodes=decodes)
        assert not attended(small(batch_invariant), rope, step)[0].any()


@A_THIRD
@BOTH
def test_fp8_latents_are_attended_to_as_they_are_stored(batch_invariant: bool) -> None:
    check(small(batch_invariant), rope, MIXED, latent_shape(kv_dtype=FP8), decodes=3)


@A_THIRD
@pytest.mark.usefixtures("dots_in_order")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("latent", "turned", "block_size"), usually([(16, 8, 4), (15, 4, 16)],
    [(16, 8, 4), (20, 6, 16), (24, 0, 3), (15, 4, 4), (31, 0, 16)]),
)  # fmt: skip
def test_decodes_read_two_fp8_numbers_as_one(
    latent: int, turned: int, block_size: int, dtype: torch.dtype
) -> None:
    """If there are two: latents of odd sizes are read as others are."""
    shape = latent_shape(3, latent, turned, block_size, dtype, kv_dtype=FP8)
    tolerance = 5e-3 if dtype == torch.float16 else 4e-2
    for first in (0, 3):
        moved = replace(shape, first_position=first)
        lengths: Lengths = [(n, keys + first) for n, keys in MIXED]
        check(small(False), rope, lengths, moved, decodes=8, tolerance=tolerance, turns=turned > 0)


@pytest.mark.usefixtures("dots_in_order")
def test_queries_of_any_size_meet_fp8_latents() -> None:
    """Which are multiplied in float16: those times a power of two give the same to the bit."""
    shape = latent_shape(3, 16, 8, 4, torch.bfloat16, kv_dtype=FP8)

    def found(size: float, scale: float) -> torch.Tensor:
        step = latent_step([(1, 100), (2, 65)], replace(shape, scale=scale), decodes=2)
        return attended(small(False), rope, replace(step, query=step.query * size))

    for size in (2.0**-40, 2.0**40):
        assert torch.equal(found(size, shape.scale / size), found(1.0, shape.scale))
    assert found(0.0, shape.scale).isfinite().all()


def test_small_weights_of_fp8_latents_count() -> None:
    """One key has nearly all the weight, and the others 2^-26 of it each, which float16 has not;
    but what is added up they alone have."""
    shape = latent_shape(2, 16, 8, 16, torch.float16, kv_dtype=FP8)
    step = latent_step([(1, 300)], shape, decodes=1)
    rows = torch.zeros(step.cache.key.shape)
    rows[..., 1] = 448.0
    first = rows[int(step.paged.kv_indices[0]), 0, 0]
    first[0], first[1] = 1.0, 0.0
    step.cache.key.copy_(rows)
    step.weights.both.zero_()
    step.weights.key[:, 0, 0] = 1.0
    step.weights.value[:, 0, 1] = 1.0
    step.query.zero_()
    step.query[..., 0] = 26 * math.log(2) / (shape.scale * step.cache.k_scale)
    attention = small(False)
    plan = attention.plan(step.paged, shape)
    found = attention.attend(step.query, step.weights, step.cache, plan)[0, :, 0].double()
    expected = torch.full_like(found, 299 * 2.0**-26 * 448 * step.cache.k_scale)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.0)


@pytest.mark.parametrize(
    "lengths", [[(1, 1300), (3, 70), (2, 1100)], [(1, 300), (2, 290), *[(1, 9)] * 6, (5, 300)]]
)
def test_splits_are_joined_some_at_a_time(
    lengths: Lengths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than that, of few sequences and of many."""
    monkeypatch.setattr(triton, "processors", lambda device: 64)
    monkeypatch.setattr(triton, "_KEYS_A_ROW", 0)
    check(small(False), rope, lengths, decodes=len(lengths))


@pytest.mark.usefixtures("dots_in_order")
def test_bfloat16() -> None:
    check(small(), rope, MIXED, latent_shape(dtype=torch.bfloat16), tolerance=8e-2)


def test_masked_writes() -> None:
    check_masked_writes(small(), rope)


@BOTH
def test_not_a_number_is_not_taken_for_nothing(batch_invariant: bool) -> None:
    """A NaN in one split is no split without keys; other sequences don't notice."""
    step = latent_step([(1, 100), (1, 70)], latent_shape())
    step.latent[0] = torch.nan
    missing = attended(small(batch_invariant), rope, step).isnan()
    assert missing[0].all() and not missing[1].any()


# ---------------------------------------------------------------- bits


@pytest.mark.usefixtures("dots_in_order")
@pytest.mark.parametrize(
    "shape",
    usually(
        [latent_shape(3, 16, 8, 16, kv_dtype=FP8, first_position=1)],
        [
            latent_shape(2, 16, 4, 16, first_position=1),
            latent_shape(3, 16, 8, 16, kv_dtype=FP8),
            latent_shape(2, 16, 4, 16, torch.bfloat16),
            latent_shape(20, 24, 8, 4),
        ],
    ),
    ids=str,
)
def test_bits_depend_on_the_sequence_alone(
    shape: AttentionShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Splits are not cut by what is to do, of which one long split would be enough here."""
    monkeypatch.setattr(triton, "_ITEMS", 1)
    check_bits(small, rope, shape, usually([43, 22], [75, 41]))


# ---------------------------------------------------------------- a graph's steps


def padded(step: LatentStep, blocks: int, longest_run: int) -> LatentStep:
    """The step as one of a graph, with two more decodes and room for three prompts; padded tokens
    are NaN."""
    decodes, tokens = step.paged.num_decodes + 2, len(step.query) + 9
    paged, spread = padded_sequences(step.paged, decodes, 3, tokens, blocks, longest_run)
    query, latent = (spread(x, torch.nan) for x in (step.query, step.latent))
    return replace(
        step, paged=paged, query=query, latent=latent, positions=spread(step.positions, 0)
    )


@pytest.mark.usefixtures("dots_in_order")
@A_THIRD
@pytest.mark.parametrize("blocks", [60, 2000])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(
    ("lengths", "n", "longest_run"),
    [
        ([(1, 9), (1, 100), (1, 33)], 3, 0),
        ([(1, 70), (5, 40), (33, 66)], 1, 0),
        ([(3, 70), (1, 40), (5, 5), (33, 66)], 3, 5),
        ([(20, 20)], 0, 0),
    ],
)
def test_a_padded_step_gives_the_same(
    lengths: Lengths, n: int, longest_run: int, batch_invariant: bool, blocks: int
) -> None:
    """In batch-invariant mode to the bit."""
    shape = latent_shape(4, 16, 8, 16)
    step = latent_step(lengths, shape, decodes=n)
    full = padded(step, blocks, longest_run)
    attention = small(batch_invariant)
    expected = attended(attention, rope, step)
    found = attended(attention, rope, full)
    middle = int(step.paged.host.cu_seqlens[n])
    real = torch.cat((found[:middle], found[middle + 2 : len(expected) + 2]))
    if batch_invariant:
        assert torch.equal(real, expected)
    torch.testing.assert_close(real, expected, atol=1e-5, rtol=1e-5)


def test_a_graphs_launches_follow_from_sizes() -> None:
    shape = latent_shape(4, 16, 8, 16)
    plans = []
    for lengths in ([(1, 9), (1, 1), (7, 7)], [(1, 300), (1, 90), (7, 200)]):
        plan = small().plan(padded(latent_step(lengths, shape), 100, 0).paged, shape)
        inner = plan.inner
        plans.append((inner.longest, inner.items, inner.joins, inner.prompt_tokens, plan.wanted))
    assert plans[0] == plans[1]


def test_any_number_of_prompt_tokens_can_be_captured() -> None:
    assert small().most_captured(latent_shape(), 16) > 1 << 20


EXPANDED = {"nope": 32, "v_dim": 16}


def by_head_keys(monkeypatch: pytest.MonkeyPatch) -> TritonLatentAttention:
    """With which all prompts are computed by keys and values of each head."""
    monkeypatch.setattr(triton.expanded, "PAYS_FROM", 0)
    return small(batch_invariant=False)


@A_THIRD
@pytest.mark.parametrize("made_bytes", [1, 1 << 20])
@pytest.mark.parametrize("kv_dtype", [torch.float16, FP8])
@pytest.mark.parametrize(("first", "block_size"), [(0, 4), (3, 24)])
def test_prompts_by_keys_of_each_head(
    first: int, block_size: int, kv_dtype: torch.dtype, made_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Made head by head, or of all at once; alone, and behind decodes. What is not seen is NaN."""
    monkeypatch.setattr(triton.expanded, "MADE_BYTES", made_bytes)
    attention, half = by_head_keys(monkeypatch), torch.float16
    shape = latent_shape(3, 32, 16, block_size, half, first_position=first, kv_dtype=kv_dtype)
    lengths: Lengths = [(n, keys + first) for n, keys in [*MIXED, (150, 150), (2, 300)]]
    for decodes in usually((3,), (0, 3)):
        step = latent_step(lengths, shape, decodes=decodes, **EXPANDED)
        assert attention.plan(step.paged, shape).prompts is not None
        check(attention, rope, lengths, shape, decodes=decodes, tolerance=5e-3, **EXPANDED)


def test_few_queries_of_many_keys_make_no_keys() -> None:
    attention, shape = small(False), latent_shape(3, 32, 16, 16, torch.float16)
    for lengths, are_made in (([(40, 400)], False), ([(200, 400)], True), ([(200, 200)], True)):
        plan = attention.plan(latent_step(lengths, shape, decodes=0, **EXPANDED).paged, shape)
        assert (plan.prompts is not None) == are_made
    static = latent_step([(200, 400)], shape, decodes=0, **EXPANDED)
    static = replace(static, paged=replace(static.paged, static=True))
    assert attention.plan(static.paged, shape).prompts is None  # a graph's launches are fixed


def test_heads_of_other_sizes_are_computed_as_short_prompts_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attention, shape = by_head_keys(monkeypatch), latent_shape(3, 32, 8, 16, torch.float16)
    check(attention, rope, MIXED, shape, decodes=3, tolerance=5e-3, **EXPANDED)


@A_THIRD
@BOTH
def test_few_queries_are_cut_by_keys(
    batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where most of a device would have nothing to do; to the bit as if they were not."""
    lengths: Lengths = [(1, 100), (1, 40), (9, 300), (3, 3), (2, 130)]
    attention, shape = small(batch_invariant), latent_shape()
    step = latent_step(lengths, shape, decodes=2)
    assert attention.plan(step.paged, shape).few is None
    whole = attended(attention, rope, latent_step(lengths, shape, decodes=2))
    monkeypatch.setattr(triton, "processors", lambda device: 64)
    plan = attention.plan(step.paged, shape)
    assert plan.few is not None and plan.few.inner.joins and plan.few.wanted > 3
    assert attention.plan(latent_step(MIXED, shape, decodes=3).paged, shape).few is not None
    many: Lengths = [(300, 300)]
    assert attention.plan(latent_step(many, shape, decodes=0).paged, shape).few is None
    for decodes in usually((2,), (0, 2)):
        check(attention, rope, lengths, decodes=decodes)
    if batch_invariant:
        assert torch.equal(attended(attention, rope, latent_step(lengths, shape, decodes=2)), whole)
