from __future__ import annotations

from types import ModuleType

import pytest
import torch

from megatron_hybrid.kernels.contract import IndexShape
from megatron_hybrid.kernels.indexed_attention import by_key_tiles as indexed_by_tiles
from megatron_hybrid.kernels.indexed_attention import reference as indexed
from megatron_hybrid.kernels.indexed_attention.reference import chosen_groups
from megatron_hybrid.kernels.latent_attention import by_key_tiles as latents_by_tiles
from megatron_hybrid.kernels.latent_attention import reference as latents
from megatron_hybrid.kernels.paged_attention import by_key_tiles, reference
from tests.kernels.indexed_cases import (
    Kernels,
    check,
    indexed_shape,
    latent_weights,
    sequences,
)
from tests.thorough import usually

PLAIN, BY_TILES = Kernels(reference, indexed), Kernels(by_key_tiles, indexed_by_tiles)
BOTH = pytest.mark.parametrize("kernels", [PLAIN, BY_TILES])
POOLS = pytest.mark.parametrize("gated", [False, True], ids=["mean", "gated"])
# Decodes, drafts, prompts cold and warm, cut anywhere, short and long.
STEPS = [
    (0, 0, 70, 3, 33), (1, 40, 0, 0, 2), (1, 5, 0, 4, 1), (1, 1, 3, 1, 1), (1, 1, 1, 30, 1),
]  # fmt: skip


@BOTH
@POOLS
def test_tokens_see_the_best_groups_and_the_tail(kernels: Kernels, gated: bool) -> None:
    check(kernels, STEPS, gated)


@BOTH
@POOLS
def test_one_token_at_a_time(kernels: Kernels, gated: bool) -> None:
    check(kernels, [(1, 1)] * 30, gated)


@BOTH
@pytest.mark.parametrize(
    "index", [IndexShape(8, 6, 1, 5), IndexShape(5, 8, 6, 2), IndexShape(8, 4, 3, 1)]
)
def test_groups_of_any_size(kernels: Kernels, index: IndexShape) -> None:
    shape = indexed_shape(index, heads=3, kv_heads=1, block_size=index.group * 2)
    check(kernels, [(30, 1), (1, 40), (5, 1)], True, shape)


@BOTH
def test_long_prompts_are_computed_some_queries_at_a_time(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed, "_NUMBERS", usually(3000, 10_000))
    check(kernels, usually([(90, 1), (70, 2)], [(200, 1), (140, 2)]), False)


@BOTH
@POOLS
def test_bfloat16(kernels: Kernels, gated: bool) -> None:
    # So many groups are chosen that what bfloat16 rounds does not choose others.
    shape = indexed_shape(IndexShape(8, 8, 4, 8), dtype=torch.bfloat16)
    check(kernels, [(20, 31), (12, 1)], gated, shape, tolerance=4e-2)


@pytest.mark.parametrize(
    "kernels", [Kernels(latents, indexed), Kernels(latents_by_tiles, indexed_by_tiles)]
)
def test_latents(kernels: Kernels) -> None:
    shape = indexed_shape(heads=5, kv_heads=1, head_dim=12, value_dim=12)
    own = sequences([60, 31], True, shape)
    weights, value = latent_weights(shape)
    for counts in [(44, 30), (16, 1)]:
        begins = list(own.done)
        found = own.step(counts, kernels, weights).double().split(list(counts))
        for row, part in enumerate(found):
            for i, one in enumerate(part):
                seen = own.expected(row, begins[row] + i)
                wanted = torch.einsum("hl,hvl->hv", seen, value)
                torch.testing.assert_close(one, wanted, atol=1e-5, rtol=1e-5)


@BOTH
def test_what_fits_the_budget_is_seen_as_without_an_index(kernels: Kernels) -> None:
    shape = indexed_shape(IndexShape(8, 8, 4, 9))
    own = sequences([38, 20], False, shape)
    found = own.step((38, 20), kernels)
    bits = found[38 - 1].clone()
    check(kernels, [(38, 20)], False, shape)
    every = indexed_shape(IndexShape(8, 8, 4, 50))
    others = sequences([38, 20], False, every)
    assert torch.equal(others.step((38, 20), kernels)[38 - 1], bits)


@POOLS
def test_bits_by_key_tiles_depend_on_the_sequence_alone(gated: bool) -> None:
    lengths = [75, 41]
    whole = sequences(lengths, gated).step(lengths, BY_TILES).split(lengths)
    for cuts in ([(1, 1)] * 41 + [(34, 0)], [(50, 3), (3, 38), (22, 0)], [(0, 41), (75, 0)]):
        own, parts = sequences(lengths, gated), ([], [])
        for counts in cuts:
            for row, part in enumerate(own.step(counts, BY_TILES).split(list(counts))):
                parts[row].append(part)
        for row in range(2):
            assert torch.equal(torch.cat(parts[row]), whole[row])


def test_of_equal_scores_the_earliest_groups_are_chosen() -> None:
    scores = torch.tensor([[0.0, 2.0, -0.0, 1.0, 0.0, 2.0], [-1.0, -3.0, -2.0, 5.0, 5.0, 5.0]])
    found = chosen_groups(scores, torch.tensor([6, 3]), 4)
    assert found.tolist() == [[1, 5, 3, 0], [0, 2, 1, -1]]
    more = torch.nn.functional.pad(scores, (0, 100))
    assert torch.equal(chosen_groups(more, torch.tensor([6, 3]), 4), found)


@BOTH
def test_copied_tokens_have_all_that_groups_need(kernels: Kernels) -> None:
    """The first 6 of 8 tokens of a block go on elsewhere, in the middle of a group."""
    attention: ModuleType = kernels.attention
    own = sequences([30, 30], False)
    for name in ("query", "key", "value", "index_query", "entries"):
        parts = getattr(own, name)
        parts[1][:22] = parts[0][:22]
    own.step((30, 0), kernels)
    size = own.shape.block_size
    own.table[1, :2] = own.table[0, :2]  # shared
    source = own.table[0, 2] * size + torch.arange(6)
    attention.copy_tokens(own.cache, source, own.table[1, 2] * size + torch.arange(6))
    own.done[1] = 22
    found = own.step((0, 8), kernels)
    for i, one in enumerate(found):
        torch.testing.assert_close(one.double(), own.expected(1, 22 + i), atol=1e-5, rtol=1e-5)
