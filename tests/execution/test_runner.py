"""ModelRunner: copied blocks, prompts that end in the cache, chunks that start anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_hybrid.execution.sampler import Sampler
from megatron_hybrid.layers.inputs import allocate_caches
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import ParallelContext
from megatron_hybrid.request import TokenLogprob
from tests.execution.steps import BLOCK, VOCAB, Steps, chunk
from tests.models.conftest import TinyModel, random_tokens
from tests.thorough import A_THIRD, usually

Tiny = Callable[[str], TinyModel]
Model = Callable[[str, torch.dtype], HybridModel]

PROMPT = random_tokens(37)  # two blocks and five tokens
BLOCKS = [3, 9, 4, 0]
OTHER = random_tokens(23, seed=1)
DTYPES = [torch.float32, torch.bfloat16]


def kept_end(steps: Steps) -> TokenLogprob:
    """Row 0 computes PROMPT; its state stays in slot 20, with the logits. Returns its token."""
    steps.row(0, BLOCKS, slot=20)
    result = steps.step(prefills=[chunk(0, 0, 37, prompt=PROMPT, write_slot=20, logits_slot=20)])
    return result.logprobs[0][0]


def close(found: TokenLogprob, expected: Tensor, tolerance: float = 2e-4) -> None:
    """`expected` [vocabulary]: transformers' logits."""
    truth = torch.log_softmax(expected, dim=-1)
    assert found.token_id == int(truth.argmax())
    assert found.logprob == pytest.approx(float(truth.max()), abs=tolerance)
    for token, logprob in found.top:
        assert logprob == pytest.approx(float(truth[token]), abs=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["bamba", "nemotron_h_moe", "llama"])
def test_a_resumed_row_samples_what_the_prompts_end_did(
    model: Model, parallel: ParallelContext, family: str, dtype: torch.dtype
) -> None:
    """Beside a decode, a chunk that goes on, one that ends and one that wants prompt
    log-probabilities; the others are as they are without it."""
    targets = np.asarray(OTHER[1:], dtype=np.int32)
    prefills = [
        chunk(1, 0, 9, prompt=OTHER, samples=False),
        chunk(2, 0, 23, prompt=OTHER, logprob_targets=targets, num_top_logprobs=2),
        chunk(3, 0, 12, prompt=PROMPT, logits_slot=21),
    ]
    steps, alone = Steps(model(family, dtype), parallel), Steps(model(family, dtype), parallel)
    for one in (steps, alone):
        first = kept_end(one)
        for row in range(1, 5):
            one.row(row, [8 + 4 * row, 9 + 4 * row])
    expected = alone.step(decodes=[0], prefills=prefills)
    result = steps.step(decodes=[0], prefills=prefills, resumed=[(4, 20)])
    assert result.tokens.tolist() == [*expected.tokens, first.token_id]
    assert result.logprobs == expected.logprobs | {4: [first]}
    assert result.prompt_logprobs == expected.prompt_logprobs
    assert len(result.prompt_logprobs[2]) == 22
    assert torch.equal(steps.caches.end_logits[21], alone.caches.end_logits[21])


@pytest.mark.parametrize("family", ["bamba", "nemotron_h_moe", "llama"])
def test_resumed_rows_alone_compute_nothing_and_then_decode(
    tiny: Tiny, parallel: ParallelContext, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(tiny(family).ours, parallel)
    first = kept_end(steps)
    for row in (1, 2):  # two blocks are shared; the third one's five tokens are copied
        steps.row(row, [3, 9, 20 + row], slot=20, position=37)
    with monkeypatch.context() as patch:
        patch.setattr(HybridModel, "forward", None)  # calling it would fail
        result = steps.step(resumed=[(1, 20), (2, 20)], copies=[(4, 21, 5), (4, 22, 5)])
    assert result.tokens.tolist() == [first.token_id] * 2
    assert result.logprobs == {1: [first], 2: [first]}
    text = [*PROMPT, first.token_id]
    for _ in range(14):  # into the next block, which row 0 shares with nobody
        steps.rows.block_table[:3, 3] = [5, 23, 24]
        result = steps.step(decodes=[0, 1, 2])
        expected = tiny(family).expected(text)[-1]
        for row in range(3):
            close(result.logprobs[row][0], expected)
        text.append(int(result.tokens[0]))


def test_resumed_rows_draw_from_their_own_streams(steps: Steps) -> None:
    """The same token as a row with this seed that computes the prompt."""
    seeds = np.arange(5, dtype=np.uint64)
    kept_end(steps)
    steps.rows.temperature[:] = 3.0
    for row in range(1, 6):
        steps.row(row, BLOCKS)
        steps.rows.seed[row] = seeds[row - 1]
    resumed = steps.step(resumed=[(row, 20) for row in range(1, 6)])
    computed = []
    for seed in seeds:
        steps.row(0, BLOCKS)
        steps.rows.seed[0] = seed
        computed += steps.step(prefills=[chunk(0, 0, 37, prompt=PROMPT)]).tokens.tolist()
    assert resumed.tokens.tolist() == computed
    assert len(set(computed)) > 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["bamba", "llama"])
def test_all_rows_of_all_steps_are_drawn_from_one_type(
    model: Model,
    parallel: ParallelContext,
    family: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A draw on a GPU adds up in an order that follows the type: others must not change it."""
    steps, found = Steps(model(family, dtype), parallel), []
    sample = Sampler.sample

    def watched(self: Sampler, logits: Tensor, *arguments: Any) -> Any:
        found.append(logits.dtype)
        return sample(self, logits, *arguments)

    monkeypatch.setattr(Sampler, "sample", watched)
    kept_end(steps)
    for row in range(1, 5):
        steps.row(row, [8 + 4 * row, 9 + 4 * row])
    steps.step(decodes=[0])
    steps.step(decodes=[0], prefills=[chunk(1, 0, 23, prompt=OTHER)], resumed=[(2, 20)])
    steps.step(resumed=[(3, 20)])
    assert found == [dtype] * 4


def test_kept_logits_are_read_before_the_step_stores_its_own(steps: Steps) -> None:
    first = kept_end(steps)
    steps.row(1, [10, 11])
    new = chunk(1, 0, 23, prompt=OTHER, logits_slot=20)
    result = steps.step(prefills=[new], resumed=[(2, 20)])
    assert result.tokens.tolist()[1] == first.token_id != result.tokens[0]
    again = steps.step(resumed=[(3, 20)])
    assert again.tokens.tolist() == [result.tokens[0]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_the_ends_that_are_asked_for_are_kept(
    model: Model, parallel: ParallelContext, dtype: torch.dtype
) -> None:
    """In float32, whatever the model's dtype: every bit of what was sampled from."""
    steps = Steps(model("bamba", dtype), parallel)
    kept_end(steps)
    before = steps.caches.end_logits.clone()
    for row in range(1, 4):
        steps.row(row, [6 + 3 * row, 7 + 3 * row])
    targets = np.asarray(OTHER[1:], dtype=np.int32)
    asked = [
        chunk(1, 0, 23, prompt=OTHER, logprob_targets=targets),
        chunk(2, 0, 7, prompt=OTHER, samples=False),
        chunk(3, 0, 19, prompt=OTHER, logits_slot=7),
    ]
    result = steps.step(decodes=[0], prefills=asked)
    table = steps.caches.end_logits
    assert table.dtype == torch.float32
    changed = (~torch.isclose(table, before, rtol=0, atol=0, equal_nan=True)).any(1)
    assert changed.nonzero().flatten().tolist() == [7]
    logprobs = torch.log_softmax(table[7], dim=-1)
    assert result.logprobs[3][0].logprob == float(logprobs.max())


def test_copied_tokens_are_what_the_source_held_before_the_step(steps: Steps) -> None:
    """Several readers of one source; the rest of a destination stays as it was, though the source
    itself is written in the same step."""
    generator = torch.Generator().manual_seed(0)
    tensors = [t for kv in steps.caches.kv.values() for t in (kv.key, kv.value)]
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    before = [tensor.clone() for tensor in tensors]
    steps.row(0, [5, 6])
    copies = [(5, 10, 7), (5, 11, 1), (6, 12, BLOCK), (5, 13, 7), (8, 14, 0)]
    steps.step(prefills=[chunk(0, 0, 23, prompt=OTHER)], copies=copies)
    assert tensors
    for tensor, old in zip(tensors, before, strict=True):
        assert not torch.equal(tensor[5], old[5])
        expected = old.clone()
        for source, destination, count in copies:
            expected[destination, :count] = old[source, :count]
        for block in (10, 11, 12, 13, 14, 8, 9):
            assert torch.equal(tensor[block], expected[block])


@A_THIRD
@pytest.mark.parametrize("family", ["bamba", "llama"])
@pytest.mark.parametrize("length", [1, 2, 3, 20])
def test_a_chunk_goes_on_from_any_position(
    tiny: Tiny, parallel: ParallelContext, family: str, length: int
) -> None:
    """From a state and a partly filled block that another request left: alone, and then beside
    decodes of other lengths and another such chunk."""
    text = random_tokens(60, seed=2)
    expected = tiny(family).expected(text)
    # in CI each length has half of the positions, and two lengths have all of them
    for start in range(1 + usually(length % 2, 0), 34, usually(2, 1)):
        steps = Steps(tiny(family).ours, parallel)
        steps.row(0, [3, 9, 4, 7], slot=20)
        left = chunk(0, 0, start, prompt=text, write_slot=20, samples=False)
        steps.step(prefills=[left])
        end, shared, fill = start + length, start // BLOCK, start % BLOCK
        following = []
        for row in (1, 2, 3):
            own = [8 + 4 * row + i for i in range(4)]
            steps.row(row, [3, 9, 4, 7][:shared] + own[shared:])
            part = chunk(row, start, end, prompt=text, read_slot=20)
            copy = ([3, 9, 4, 7][shared], own[shared], fill)
            following.append((part, [copy] if fill else []))
        (part, copies), *both = following
        result = steps.step(prefills=[part], copies=copies)
        close(result.logprobs[1][0], expected[end - 1])
        steps.rows.last_token[:2] = text[start], text[end]
        steps.rows.block_table[0, 3] = 28
        result = steps.step(
            decodes=[0, 1],
            prefills=[part for part, _ in both],
            copies=[copy for _, copies in both for copy in copies],
        )
        close(result.logprobs[0][0], expected[start])
        close(result.logprobs[1][0], expected[end])
        for row in (2, 3):
            close(result.logprobs[row][0], expected[end - 1])


def test_no_logits_are_kept_unless_asked_for() -> None:
    caches = allocate_caches({}, {}, 2, BLOCK, 5, torch.device("cpu"))
    assert caches.end_logits.shape == (5, 0)
    caches = allocate_caches({}, {}, 2, BLOCK, 5, torch.device("cpu"), end_logits_vocab=VOCAB)
    assert caches.end_logits.shape == (5, VOCAB)
