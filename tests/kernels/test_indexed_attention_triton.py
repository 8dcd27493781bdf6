"""Kernels of attention with an index in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.thorough import A_THIRD

if torch.cuda.is_available():
    pytest.skip("the GPU tests run the compiled kernels", allow_module_level=True)
pytest.importorskip("triton")

from megatron_hybrid.kernels.contract import (  # noqa: E402
    IndexShape,
    PagedHost,
    PagedSequences,
)
from megatron_hybrid.kernels.indexed_attention import reference  # noqa: E402
from megatron_hybrid.kernels.indexed_attention.triton import TritonIndexedAttention  # noqa: E402
from megatron_hybrid.kernels.indexed_attention.triton_index_kernels import (  # noqa: E402
    choose_kernel,
)
from megatron_hybrid.kernels.indexed_attention.triton_prompts import Tile  # noqa: E402
from megatron_hybrid.kernels.latent_attention import triton_expanded  # noqa: E402
from megatron_hybrid.kernels.latent_attention.triton import TritonLatentAttention  # noqa: E402
from megatron_hybrid.kernels.paged_attention.triton import TritonAttention  # noqa: E402
from tests.kernels.attention_cases import paged_sequences  # noqa: E402
from tests.kernels.dots_in_order import dots_in_order as dots_in_order  # noqa: E402
from tests.kernels.indexed_cases import (  # noqa: E402
    Kernels,
    check,
    check_choices,
    indexed_shape,
    latent_weights,
    sequences,
)


def rows_of(lengths: list[int]) -> PagedSequences:
    """Decodes of sequences of these lengths."""
    ones, table = np.ones(len(lengths), dtype=np.int64), np.ones((len(lengths), 100))
    host = PagedHost.of(ones, np.array(lengths), table.astype(np.int64), 2)
    return paged_sequences(host, torch.ones(len(lengths), dtype=torch.int64), len(lengths), "cpu")


POOLS = pytest.mark.parametrize("gated", [False, True], ids=["mean", "gated"])


def triton_kernels(batch_invariant: bool = False, **options: int) -> Kernels:
    attention = TritonAttention()
    latents = TritonLatentAttention(batch_invariant)
    return Kernels(
        attention, TritonIndexedAttention(attention, latents, batch_invariant, **options)
    )


@A_THIRD
@POOLS
def test_tokens_see_the_best_groups_and_the_tail(gated: bool) -> None:
    steps = [(0, 40, 3), (1, 0, 2), (1, 4, 1), (20, 1, 1)]
    check(triton_kernels(), steps, gated)


@A_THIRD
@POOLS
def test_bits_depend_on_the_sequence_alone(gated: bool) -> None:
    lengths = [37, 22]
    kernels = triton_kernels(True)
    whole = sequences(lengths, gated).step(lengths, kernels).split(lengths)
    own, parts = sequences(lengths, gated), ([], [])
    for counts in [(1, 3), (30, 2), (5, 0), (1, 17)]:
        for row, part in enumerate(own.step(counts, kernels).split(list(counts))):
            parts[row].append(part)
    for row in range(2):
        assert torch.equal(torch.cat(parts[row]), whole[row])


@A_THIRD
@POOLS
@pytest.mark.parametrize("scores", [50, 1 << 20])
def test_tokens_of_several_prompts_share_a_tile(gated: bool, scores: int) -> None:
    """Of eight tokens, behind a decode, some of which see all; and prompts that go on, one in the
    middle of a group."""
    kernels = triton_kernels(scores=scores)
    shape, lengths = indexed_shape(), [2, 50, 41, 9]
    own = sequences(lengths, gated, shape)
    for counts in [(1, 30, 25, 9), (1, 20, 16, 0)]:
        begins = list(own.done)
        found = own.step(counts, kernels).double().split(list(counts))
        shared = own.last.plan.shared
        assert shared is not None and len(shared.counts) == -(-sum(counts[1:]) // 8)
        for row, part in enumerate(found):
            for i, one in enumerate(part):
                wanted = own.expected(row, begins[row] + i)
                torch.testing.assert_close(one, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("index", "heads", "head_dim"),
    [
        (IndexShape(5, 6, 3, 2), 3, 8),
        (IndexShape(3, 8, 1, 7), 2, 12),
        (IndexShape(3, 8, 6, 2), 8, 8),
    ],
)
def test_groups_of_any_size_are_shared(index: IndexShape, heads: int, head_dim: int) -> None:
    """Keys of groups and of what is behind them, in tiles that neither fills."""
    shape = indexed_shape(index, heads, kv_heads=1, head_dim=head_dim, block_size=6)
    kernels = triton_kernels()
    check(kernels, [(37, 11), (16, 20)], True, shape)


def test_a_tile_lists_what_its_tokens_have_chosen() -> None:
    """Each group once, in order, with those who see it; and the keys behind."""
    own = sequences([45], False)
    own.step([45], triton_kernels())
    plan, size, queries = own.last.plan, own.shape.block_size, 8
    for tile, (groups, keys) in enumerate(plan.shared.counts.tolist()):
        rows, by = plan.shared.entries[tile].tolist()
        tokens = range(tile * queries, min(tile * queries + queries, 45))
        places = [int(own.table[0, p // size]) * size + p % size for p in range(45)]
        chosen = {
            places[4 * g]: sum(1 << i for i, t in enumerate(tokens) if g in plan.chosen[t])
            for g in range(11)
        }
        wanted = [(row, bits) for row, bits in chosen.items() if bits]
        assert list(zip(rows[:groups], by, strict=False)) == wanted
        behind = {
            places[p]: sum(1 << i for i, t in enumerate(tokens) if (t + 1) // 4 == p // 4 <= t >= p)
            for p in range(45)
        }
        first = queries * 3
        found = list(zip(rows[first : first + keys], by[first:], strict=False))
        assert found == [(row, bits) for row, bits in behind.items() if bits]


def test_groups_of_any_size_and_tokens_a_few_at_a_time() -> None:
    index = IndexShape(heads=5, dim=6, group=3, chosen=2)
    shape = indexed_shape(index, heads=3, kv_heads=1, block_size=6)
    check(triton_kernels(scores=40), [(19, 1), (1, 11), (3, 1)], True, shape)


@A_THIRD
@POOLS
def test_none_that_is_left_out_has_a_higher_score(gated: bool) -> None:
    """In float16, by what the cache holds."""
    shape = indexed_shape(dtype=torch.float16)
    own = sequences([25, 40], gated, shape)
    for counts in [(20, 39), (5, 1)]:
        check_choices(own, own.step(counts, triton_kernels(True)), 1e-2)


@pytest.mark.parametrize("warps", [4, 8])
def test_tokens_are_attended_for_alone(warps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few warps, and with many, which ask for a tile's places before."""
    monkeypatch.setattr(TritonIndexedAttention, "_tile", lambda *_: Tile(16, warps, 16, 2))
    shape = indexed_shape(IndexShape(8, 8, 4, 9))
    check(triton_kernels(True), [(50, 9), (1, 3)], False, shape)


def test_latents() -> None:
    shape = indexed_shape(heads=5, kv_heads=1, head_dim=12, value_dim=12)
    own = sequences([30, 19], True, shape)
    weights, value = latent_weights(shape)
    for counts in [(28, 18), (2, 1)]:
        begins = list(own.done)
        found = own.step(counts, triton_kernels(), weights).double().split(list(counts))
        for row, part in enumerate(found):
            for i, one in enumerate(part):
                seen = own.expected(row, begins[row] + i)
                wanted = torch.einsum("hl,hvl->hv", seen, value)
                torch.testing.assert_close(one, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("index", [IndexShape(8, 8, 4, 8), IndexShape(8, 8, 16, 3)], ids=str)
def test_prompts_of_latents_by_keys_of_each_head(
    index: IndexShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Give what they give by latents that are gathered."""
    monkeypatch.setattr(triton_expanded, "PAYS_FROM", 0)
    shape = indexed_shape(index, 3, 1, 32, 16, torch.float16, 32)
    own = sequences([3, 156, 90, 40], True, shape)
    weights, _ = latent_weights(shape, 16)
    latents = TritonLatentAttention()
    kernels = Kernels(latents, TritonIndexedAttention(TritonAttention(), latents))
    for counts in [(1, 140, 70, 40), (1, 16, 20, 0)]:
        found = own.step(counts, kernels, weights)
        plan = own.last.plan
        assert plan.bits is not None and len(plan.bits) == sum(counts[1:])
        wanted = kernels.indexed._absorbed(own.stepped, weights, own.cache, plan, plan.chosen)
        torch.testing.assert_close(found, wanted, atol=1e-2, rtol=1e-2)


def test_float16() -> None:
    shape = indexed_shape(IndexShape(8, 8, 4, 8), dtype=torch.float16)
    check(triton_kernels(), [(20, 25), (16, 1)], False, shape, tolerance=1e-2)


def test_what_fits_the_budget_is_left_to_attention_without_an_index() -> None:
    shape = indexed_shape(IndexShape(8, 8, 4, 9))
    own = sequences([39], False, shape)
    kernels = triton_kernels()
    asked = []
    plain = kernels.attention.attend
    kernels.attention.attend = lambda *args: asked.append(1) or plain(*args)  # type: ignore[attr-defined]
    own.step([39], kernels)
    assert asked == [1]


@pytest.mark.parametrize("block", [32, 64, 128])
def test_equal_scores_are_chosen_as_by_the_reference(block: int) -> None:
    """Many are: a few values, of both signs, and both zeros."""
    generator = torch.Generator().manual_seed(2)
    scores = torch.randint(-3, 3, (4, 90), generator=generator).float() / 2
    scores[0, ::2] = -0.0
    lengths = [5, 61, 179, 180]  # of groups of two tokens, and the token behind them
    paged = rows_of(lengths)
    chosen = torch.full((4, 7), -5, dtype=torch.int32)
    choose_kernel[(4,)](
        scores, chosen, None, paged.cu_seqlens, paged.kv_length, 0, 4, scores.shape[1], 0,
        GROUP=2, CHOSEN=7, BLOCK=block, FEW=32, num_warps=4,
    )  # fmt: skip
    found = reference.chosen_groups(scores, torch.tensor(lengths) // 2, 7)
    for own, wanted in zip(chosen.tolist(), found.tolist(), strict=True):
        kept = sorted(one for one in wanted if one >= 0)
        assert own == kept + [-1] * (7 - len(kept))
