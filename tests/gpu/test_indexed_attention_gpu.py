"""Kernels of attention with an index on a GPU: against float64, and their bits."""

from __future__ import annotations

import pytest
import torch

from megatron_hybrid.kernels.contract import AttentionShape, IndexShape
from tests.kernels.indexed_cases import (
    Kernels,
    check,
    check_choices,
    indexed_shape,
    latent_weights,
    sequences,
)

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytestmark = pytest.mark.gpu

from megatron_hybrid.kernels.indexed_attention import triton_prompts  # noqa: E402
from megatron_hybrid.kernels.indexed_attention.triton import TritonIndexedAttention  # noqa: E402
from megatron_hybrid.kernels.latent_attention.protocol import LatentWeights  # noqa: E402
from megatron_hybrid.kernels.latent_attention.triton import TritonLatentAttention  # noqa: E402
from megatron_hybrid.kernels.paged_attention.triton_by_split import SplitAttention  # noqa: E402

BF16 = torch.bfloat16
POOLS = pytest.mark.parametrize("gated", [False, True], ids=["mean", "gated"])
MODES = pytest.mark.parametrize("batch_invariant", [False, True])
QSA, DSA = IndexShape(16, 128, 4, 512), IndexShape(32, 128, 16, 128)  # as of released models
SHAPES = {
    "qsa": (False, indexed_shape(QSA, 16, 2, 256, 64, BF16)),
    "qsa in float32": (False, indexed_shape(QSA, 16, 2, 256, 64)),
    "dsa": (True, indexed_shape(DSA, 64, 1, 512, 64, BF16, 512)),
    "dsa of some heads": (True, indexed_shape(DSA, 8, 1, 512, 64, BF16, 512)),
    "dsa in float32": (True, indexed_shape(DSA, 8, 1, 512, 64, value_dim=512)),
    "odd sizes": (True, indexed_shape(IndexShape(5, 24, 6, 7), 6, 2, 40, 48, torch.float16)),
}
CASES = pytest.mark.parametrize("name", SHAPES)


def kernels_of(
    shape: AttentionShape, batch_invariant: bool = False, scores: int = 1 << 24
) -> Kernels:
    attention, latents = SplitAttention(), TritonLatentAttention(batch_invariant)
    indexed = TritonIndexedAttention(attention, latents, batch_invariant, scores=scores)
    return Kernels(attention if shape.value_dim is None else latents, indexed)


@POOLS
@MODES
def test_tokens_see_the_best_groups_and_the_tail(gated: bool, batch_invariant: bool) -> None:
    shape = indexed_shape(head_dim=32)
    steps = [(0, 0, 70, 3, 33), (1, 40, 0, 0, 2), (1, 5, 0, 4, 1), (1, 1, 3, 1, 1)]
    check(kernels_of(shape, batch_invariant), steps, gated, shape, "cuda", tolerance=1e-4)


@CASES
@MODES
@pytest.mark.parametrize("scores", [1 << 24, 9000])
def test_long_sequences(name: str, batch_invariant: bool, scores: int) -> None:
    gated, shape = SHAPES[name]
    kernels = kernels_of(shape, batch_invariant, scores)
    own = sequences([4200, 2300, 90], gated, shape, "cuda")
    tolerance = 1e-3 if shape.dtype == torch.float32 else 3e-2
    for counts in [(4000, 2200, 80), (190, 99, 3), (1, 1, 1), (9, 0, 6)]:
        if shape.value_dim is None:
            found = own.step(counts, kernels)
        else:  # latents as they are
            weights, _ = latent_weights(shape, 8, "cuda")
            own.step(counts, kernels, weights)
            found = kernels.indexed._attended(
                own.stepped, own.cache, own.last.plan, own.last.plan.chosen
            )
        check_choices(own, found, tolerance)


@pytest.mark.parametrize("name", ["dsa of some heads", "qsa"])
def test_tokens_of_prompts_share_what_they_have_chosen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside decodes, in tiles of several prompts' tokens, and in chunks of tokens."""
    monkeypatch.setattr(triton_prompts, "HIDDEN_UP_TO", 0)
    gated, shape = SHAPES[name]
    weights = latent_weights(shape, 8, "cuda")[0] if shape.value_dim else None
    for scores in (1 << 24, 90_000):
        kernels = kernels_of(shape, scores=scores)
        own = sequences([4200, 2300, 700, 90], gated, shape, "cuda")
        for counts in [(100, 2200, 600, 80), (4099, 50, 90, 9), (1, 50, 10, 1)]:
            found = own.step(counts, kernels, weights)
            plan = own.last.plan
            if weights is not None:
                found = kernels.indexed._attended(own.stepped, own.cache, plan, plan.chosen)
            assert (plan.shared is not None) == (sum(counts) > 1000)
            check_choices(own, found, 3e-2)


def test_prompts_of_latents_by_keys_of_each_head() -> None:
    """Give what they give by latents that are gathered."""
    heads, nope = 16, 256
    shape = indexed_shape(DSA, heads, 1, 512, 64, BF16, 512)
    generator = torch.Generator("cuda").manual_seed(4)
    both = torch.randn(heads, 2 * nope, 512, device="cuda", generator=generator) * 512**-0.5
    weights, kernels = LatentWeights(both.to(BF16), nope), kernels_of(shape)
    own = sequences([4200, 2300, 700, 90], True, shape, "cuda")
    for counts in [(100, 2200, 600, 80), (4099, 50, 90, 9)]:
        prepared = own.prepare(counts, kernels)
        prepared = prepared._replace(query=prepared.query[..., :nope].contiguous())
        found, plan = own.run(prepared, kernels, weights), own.last.plan
        assert plan.bits is not None
        wanted = kernels.indexed._absorbed(prepared.query, weights, own.cache, plan, plan.chosen)
        torch.testing.assert_close(found, wanted, atol=3e-2, rtol=3e-2)


@CASES
def test_bits_depend_on_the_sequence_alone(name: str) -> None:
    gated, shape = SHAPES[name]
    lengths = [2600, 700]
    kernels = kernels_of(shape, True)
    weights = latent_weights(shape, 64, "cuda")[0] if shape.value_dim else None
    whole = sequences(lengths, gated, shape, "cuda").step(lengths, kernels, weights).split(lengths)
    own = sequences(lengths, gated, shape, "cuda")
    for counts in [(1, 300), (2500, 2), (5, 1), (1, 1), (93, 396)]:
        begins = list(own.done)
        found = own.step(counts, kernels, weights).split(list(counts))
        for row, (begin, part) in enumerate(zip(begins, found, strict=True)):
            assert torch.equal(part, whole[row][begin : begin + len(part)])


@pytest.mark.parametrize("name", ["qsa", "dsa"])
def test_a_step_is_captured(name: str) -> None:
    """Without a wait for the device, with room for longer sequences."""
    gated, shape = SHAPES[name]
    weights = latent_weights(shape, 64, "cuda")[0] if shape.value_dim else None
    kernels = kernels_of(shape)
    own = sequences([2500, 2500], gated, shape, "cuda")
    own.step((2400, 2400), kernels, weights)
    own.most_blocks = own.table.shape[1]
    own.step((1, 1), kernels, weights)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    prepared = own.prepare((1, 1), kernels)
    with torch.cuda.graph(graph):
        found = own.run(prepared, kernels, weights)
    graph.replay()
    torch.cuda.synchronize()
    expected = own.run(prepared, kernels, weights)
    assert torch.equal(found, expected)
