"""Sampling: filters, seeds and log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_hybrid.execution.plan import StepPlan, StepResult
from megatron_hybrid.execution.random_streams import stream_seed, uniform
from megatron_hybrid.execution.rows import RowTable
from megatron_hybrid.execution.sampler import Sampler
from megatron_hybrid.kernels.sampling import reference
from megatron_hybrid.parallel import initialize


def table(n: int, **columns: object) -> RowTable:
    rows = RowTable(n, 1)
    rows.temperature[:] = 1.0
    for name, value in columns.items():
        getattr(rows, name)[:] = value
    return rows


def sample(logits: torch.Tensor, rows: RowTable) -> StepResult:
    """Every row decodes; each one's last token is kept for its next decode."""
    count = len(logits)
    last_token = torch.full((count,), -1)
    sampler = Sampler(rows, reference, initialize())
    plan = StepPlan(0, np.arange(count))
    result = sampler.sample(logits, plan, torch.arange(count), last_token).result()
    assert last_token.tolist() == result.tokens.tolist()
    return result


def draw(logits: torch.Tensor, rows: RowTable) -> np.ndarray:
    return sample(logits, rows).tokens


def frequencies(logits: list[float], count: int = 20_000, **columns: object) -> np.ndarray:
    """How often each token is drawn, over many seeds."""
    rows = table(count, seed=np.arange(count, dtype=np.uint64), **columns)
    tokens = draw(torch.tensor(logits).repeat(count, 1), rows)
    return np.bincount(tokens, minlength=len(logits)) / count


LOGITS = [1.0, 2.0, 0.0, 3.0, -1.0]


def softmax(logits: list[float], temperature: float = 1.0) -> np.ndarray:
    scaled = np.exp(np.asarray(logits) / temperature)
    return scaled / scaled.sum()


def test_temperature_zero_is_greedy():
    assert frequencies(LOGITS, 10, temperature=0.0).tolist() == [0, 0, 0, 1, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature):
    found = frequencies(LOGITS, temperature=temperature)
    assert np.abs(found - softmax(LOGITS, temperature)).max() < 0.02


def test_top_k_keeps_the_k_most_likely():
    expected = softmax([-np.inf, 2.0, -np.inf, 3.0, -np.inf])
    assert np.abs(frequencies(LOGITS, top_k=2) - expected).max() < 0.02
    for off in (0, -1, 100):
        assert np.abs(frequencies(LOGITS, top_k=off) - softmax(LOGITS)).max() < 0.02


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    # the two most likely hold 0.88 of the mass, the most likely one 0.64
    expected = softmax([-np.inf, 2.0, -np.inf, 3.0, -np.inf])
    assert np.abs(frequencies(LOGITS, top_p=0.7) - expected).max() < 0.02
    assert frequencies(LOGITS, top_p=0.5)[3] == 1.0
    assert frequencies(LOGITS, top_p=1e-6)[3] == 1.0


def test_min_p_is_relative_to_the_most_likely():
    expected = softmax([1.0, 2.0, -np.inf, 3.0, -np.inf])
    assert np.abs(frequencies(LOGITS, min_p=0.1) - expected).max() < 0.02
    assert frequencies(LOGITS, min_p=1.0)[3] == 1.0


def test_filters_combine_as_top_k_then_top_p_of_what_is_left():
    # of the top three, the first two hold 0.90
    found = frequencies(LOGITS, top_k=3, top_p=0.8)
    assert found[0] == 0 and found[1] > 0 and found[3] > 0
    # a top_p of 1 beside a top_k must not matter
    assert np.array_equal(frequencies(LOGITS, top_k=3, top_p=1.0), frequencies(LOGITS, top_k=3))


def test_the_same_seed_gives_the_same_token_whatever_is_in_the_batch():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 50, generator=generator)
    rows = table(64, seed=np.arange(64, dtype=np.uint64), generated=7)
    together = draw(logits, rows)
    rows.temperature[::2] = 0.0
    mixed = draw(logits, rows)
    assert (mixed[1::2] == together[1::2]).all()
    for i in range(1, 64, 9):
        alone = table(1, seed=rows.seed[i], generated=7)
        assert draw(logits[i : i + 1], alone)[0] == together[i]


def test_streams_differ_by_seed_and_by_position_and_are_uniform():
    numbers = uniform(np.arange(10_000, dtype=np.uint64), np.zeros(10_000, dtype=np.int64))
    assert len(set(numbers)) == 10_000 and numbers.min() >= 0 and numbers.max() < 1
    assert np.abs(np.histogram(numbers, bins=10, range=(0, 1))[0] - 1000).max() < 150
    along = uniform(np.full(10_000, 3, dtype=np.uint64), np.arange(10_000))
    assert np.abs(np.histogram(along, bins=10, range=(0, 1))[0] - 1000).max() < 150
    assert abs(np.corrcoef(along[:-1], along[1:])[0, 1]) < 0.05
    assert len({stream_seed(seed, stream) for seed in range(50) for stream in range(50)}) == 2500


def test_extreme_logits_give_a_token_of_the_vocabulary():
    logits = torch.tensor([[1e30, -1e30, 0.0], [-torch.inf, 0.0, -torch.inf]])
    assert draw(logits, table(2)).tolist() == [0, 1]


def test_logprobs_are_of_the_models_distribution_whatever_the_temperature():
    rows = table(3, temperature=0.3, logprobs=np.asarray([-1, 0, 2]))
    logits = torch.tensor([LOGITS] * 3)
    found = sample(logits, rows)
    assert set(found.logprobs) == {1, 2}
    truth = np.log(softmax(LOGITS))
    for row, (entry,) in found.logprobs.items():
        assert entry.token_id == found.tokens[row]
        assert entry.logprob == pytest.approx(truth[entry.token_id], abs=1e-5)
    assert found.logprobs[1][0].top == ()
    assert [token for token, _ in found.logprobs[2][0].top] == [3, 1]


def test_logprobs_may_be_those_after_the_temperature() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(4))
    temperature = np.asarray([0.3, 0.3, 0.0, 1.7], dtype=np.float32)
    rows = table(4, tempered=[True, False, True, True], logprobs=np.asarray([2, 2, 0, 2]))
    rows.temperature[:] = temperature
    found = sample(logits, rows).logprobs
    for row, divisor in enumerate([0.3, 1.0, 1.0, 1.7]):  # greedy ones are as with 1
        truth = torch.log_softmax(logits[row].double() / divisor, -1)
        (entry,) = found[row]
        assert entry.logprob == pytest.approx(truth[entry.token_id].item(), abs=1e-5)
        for token, logprob in entry.top:
            assert logprob == pytest.approx(truth[token].item(), abs=1e-5)
    rows.logprobs[:] = 0
    assert {row: entries[0].logprob for row, entries in found.items()} == {
        row: number for row, (number,) in sample(logits, rows).logprobs.items()
    }


def test_those_of_chosen_tokens_alone_are_numbers_and_rank_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(3))
    found = sample(logits, table(3, temperature=0.0, logprobs=np.asarray([0, -1, 2])))
    both = {row: entry for row, (entry,) in found.logprobs.items()}
    monkeypatch.setattr(torch.Tensor, "topk", None)
    lean = sample(logits, table(3, temperature=0.0, logprobs=np.asarray([0, -1, 0])))
    assert lean.logprobs == {row: [entry.logprob] for row, entry in both.items()}
    every = sample(logits, table(3, temperature=0.0, logprobs=0)).logprobs
    assert {row: every[row] for row in (0, 2)} == lean.logprobs
    truth = torch.log_softmax(logits, -1).amax(-1).tolist()
    assert [every[row][0] for row in range(3)] == pytest.approx(truth, abs=1e-6)


def test_logprobs_ask_for_no_more_than_the_vocabulary_has():
    found = sample(torch.tensor([[0.0, 1.0]]), table(1, temperature=0.0, logprobs=20))
    assert len(found.logprobs[0][0].top) == 2


def test_rows_are_indexed_where_they_are_also_in_a_first_step_that_samples_none() -> None:
    """As the first part of a prompt that is longer than a step. On a GPU rows come in 32 bits."""
    sampler = Sampler(table(4), reference, initialize())
    for rows in ([], [2, 1], [2, 1], []):
        on_device = torch.tensor(rows, dtype=torch.int32, device="meta")
        index = sampler._index(np.asarray(rows, dtype=np.int64), on_device)
        assert (index.device.type, index.dtype, len(index)) == ("meta", torch.int64, len(rows))
