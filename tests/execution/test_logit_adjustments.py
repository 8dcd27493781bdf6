"""What changes logits before a token is chosen, against plain loops and transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from megatron_hybrid.execution.plan import ResumedRow, StepPlan, StepResult
from megatron_hybrid.execution.rows import RowTable
from megatron_hybrid.execution.sampler import Sampler
from megatron_hybrid.kernels.sampling import reference
from megatron_hybrid.parallel import initialize
from megatron_hybrid.request import MAX_BAD_WORD_TOKENS, SamplingParams
from tests.execution.steps import chunk

VOCAB = 40


def adjust(
    table: RowTable,
    row: int,
    text: tuple[list[int], list[int]] = ([], []),
    stop_ids: tuple[int, ...] = (),
    grammar: Any = None,
    **params: Any,
) -> None:
    """text: prompt and answer."""
    prompt, answer = (np.asarray(part, np.int32) for part in text)
    table.adjust(row, SamplingParams(**params), prompt, answer, stop_ids=stop_ids, grammar=grammar)


def bias(**values: float) -> tuple[tuple[int, float], ...]:
    """`t3=1.5`: token 3."""
    return tuple((int(name[1:]), value) for name, value in values.items())


class Rows:
    """A sampler whose rows see the same logits in every step, unless the test changes them."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.table = RowTable(count, 1)
        self.table.seed[:] = np.arange(count)
        self.last_token = torch.full((count,), -1)
        self.sampler = Sampler(self.table, reference, initialize())
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(count, VOCAB, generator=generator) * 3

    def step(
        self, decodes: list[int], ended: list[int] | None = None, resumed: list[int] | None = None
    ) -> StepResult:
        """`ended`: rows whose prompt ends in this step."""
        plan = StepPlan(
            0,
            np.asarray(decodes, dtype=np.int64),
            prefills=[chunk(row, 0, 1) for row in ended or []],
            resumed=[ResumedRow(row, None, 0) for row in resumed or []],
        )
        who = torch.from_numpy(plan.sampled_rows)
        result = self.sampler.sample(self.logits[who], plan, who, self.last_token).result()
        self.table.generated[plan.sampled_rows] += 1
        return result

    def answers(self, rows: list[int], count: int) -> list[list[int]]:
        """Prompts that end, and then decodes: the tokens of each row."""
        steps = [self.step([], ended=rows)] + [self.step(rows) for _ in range(count - 1)]
        return np.stack([step.tokens for step in steps], axis=1).tolist()


def penalised(
    logits: torch.Tensor,
    prompt: list[int],
    answer: list[int],
    repetition: float,
    frequency: float,
    presence: float,
) -> torch.Tensor:
    """One row: transformers for the repetition, a loop for the others."""
    ids = torch.tensor([prompt + answer])
    result = RepetitionPenaltyLogitsProcessor(repetition)(ids, logits.clone()[None])[0]
    for token in set(answer):
        result[token] -= frequency * answer.count(token) + presence
    return result


PENALTIES = [(1.3, 0.0, 0.0), (0.7, 0.0, 0.0), (1.0, 0.5, 0.0), (1.0, 0.0, 1.5), (1.2, -0.4, 0.9)]


def test_penalties_are_those_of_transformers_and_of_a_loop():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(len(PENALTIES), VOCAB, generator=generator) * 3
    texts = torch.randint(0, VOCAB, (len(PENALTIES), 30), generator=generator).tolist()
    counts = torch.zeros(len(PENALTIES), VOCAB, dtype=torch.int16)
    in_prompt = torch.zeros(len(PENALTIES), VOCAB, dtype=torch.bool)
    for row, text in enumerate(texts):
        in_prompt[row, text[:10]] = True
        for token in text[10:]:
            counts[row, token] += 1
    found = reference.penalise(logits, counts, in_prompt, *torch.tensor(PENALTIES).T)
    for row, (text, penalties) in enumerate(zip(texts, PENALTIES, strict=True)):
        expected = penalised(logits[row], text[:10], text[10:], *penalties)
        assert torch.allclose(found[row], expected, atol=1e-5)


def test_a_row_without_penalties_keeps_every_bit():
    logits = torch.randn(1, VOCAB)
    found = reference.penalise(
        logits.clone(),
        torch.ones(1, VOCAB, dtype=torch.int16),
        torch.ones(1, VOCAB, dtype=torch.bool),
        torch.ones(1),
        torch.zeros(1),
        torch.zeros(1),
    )
    assert torch.equal(found, logits)


@pytest.mark.parametrize("penalties", PENALTIES)
def test_an_answer_is_penalised_by_what_it_has_written_so_far(penalties):
    rows = Rows(1)
    repetition, frequency, presence = penalties
    adjust(rows.table, 0, repetition_penalty=repetition, frequency_penalty=frequency,
        presence_penalty=presence, text=([3, 4, 4], []),
    )  # fmt: skip
    (answer,) = rows.answers([0], 12)
    for i, token in enumerate(answer):
        logits = penalised(rows.logits[0], [3, 4, 4], answer[:i], *penalties)
        assert token == int(logits.argmax())
    if repetition != 0.7:  # which rewards repetition
        assert len(set(answer)) > 1


def test_a_row_gets_the_same_tokens_whoever_is_beside_it():
    def fill(rows: Rows) -> None:
        rows.table.temperature[3:] = 0.8
        for row, (repetition, frequency, presence) in zip((0, 2, 4, 6, 7), PENALTIES, strict=True):
            adjust(rows.table, row, repetition_penalty=repetition, frequency_penalty=frequency,
                presence_penalty=presence, text=([row, row + 1], []),
                logit_bias=bias(t9=2.5) if row > 2 else (),
            )  # fmt: skip
        adjust(rows.table, 5, logit_bias=bias(t1=4.0))

    together = Rows(9)
    fill(together)
    answers = together.answers(list(range(9)), 8)
    plain = Rows(9)  # rows 1, 3 and 8 ask for nothing
    plain.table.temperature[3:] = 0.8
    unadjusted = plain.answers(list(range(9)), 8)
    for row in range(9):
        alone = Rows(9)
        fill(alone)
        assert alone.answers([row], 8) == [answers[row]]
        if row in (1, 3, 8):
            assert answers[row] == unadjusted[row]
    assert sum(a != b for a, b in zip(answers, unadjusted, strict=True)) >= 4


def test_an_answer_that_goes_on_after_preemption_counts_what_it_had_written():
    rows = Rows(1)
    adjust(rows.table, 0, frequency_penalty=0.6, presence_penalty=0.2, text=([1], []))
    (whole,) = rows.answers([0], 20)
    for done in range(1, 20):
        again = Rows(2)
        again.logits[1] = rows.logits[0]
        adjust(
            again.table, 1, frequency_penalty=0.6, presence_penalty=0.2, text=([1], whole[:done])
        )
        rest = [int(again.step([], ended=[1]).tokens[0])]
        rest += [int(again.step([1]).tokens[0]) for _ in range(19 - done)]
        assert rest == whole[done:]


def test_a_row_that_changes_hands_starts_from_nothing():
    rows = Rows(1)
    rows.table.take()
    adjust(rows.table, 0, repetition_penalty=1.5, presence_penalty=2.0, text=([1, 2, 3], []))
    (first,) = rows.answers([0], 6)
    for again in ("ended", "resumed"):
        rows.table.give_back(0)
        assert not rows.sampler._adjustments.among(np.asarray([0])).size
        rows.table.take()
        rows.table.generated[0] = 0
        adjust(rows.table, 0, repetition_penalty=1.5, presence_penalty=2.0, text=([1, 2, 3], []))
        steps = [rows.step([], **{again: [0]})] + [rows.step([0]) for _ in range(5)]
        assert [int(step.tokens[0]) for step in steps] == first


def test_what_an_earlier_owners_prompt_held_is_forgotten():
    rows, fresh = Rows(1), Rows(1)
    for prompt in ([int(rows.logits.argmax())], [1, 2]):
        rows.table.take()
        adjust(rows.table, 0, repetition_penalty=4.0, text=(prompt, []))
        rows.table.generated[0] = 0
        (answer,) = rows.answers([0], 6)
        rows.table.give_back(0)
    adjust(fresh.table, 0, repetition_penalty=4.0, text=([1, 2], []))
    assert fresh.answers([0], 6) == [answer]


class OnlyStops:
    """A grammar after which nothing but token 5 may follow."""

    def allowed(self, avoid: np.ndarray | None = None) -> np.ndarray:
        assert avoid is not None and avoid.tolist() == [5]
        return np.packbits(np.arange(VOCAB) == 5, bitorder="little")


def test_a_grammar_decides_about_stops_before_min_tokens():
    rows = Rows(1)
    adjust(rows.table, 0, min_tokens=3, stop_ids=(5,), grammar=OnlyStops())
    rows.logits[0, 5] = -50.0
    assert rows.step([], ended=[0]).tokens.tolist() == [5]


def test_counts_end_at_the_largest_that_they_can_hold():
    rows = Rows(1)
    adjust(rows.table, 0, frequency_penalty=1e-4, text=([], [7] * 40_000))
    rows.logits[:] = 0.0
    rows.logits[0, 7] = 100.0
    for _ in range(2):
        rows.step([], ended=[0])
        rows.step([0])
        assert rows.sampler._adjustments._written.counts[0, 7] == 32767


def test_a_bias_of_100_forces_a_token_and_one_of_minus_100_bans_it():
    rows = Rows(4)
    best = rows.logits.argmax(-1).tolist()
    for row, temperature in ((0, 0.0), (1, 1.0)):
        rows.table.temperature[row] = temperature
        adjust(rows.table, row, logit_bias=bias(t17=100.0, t3=-1.0))
    for row in (2, 3):
        adjust(rows.table, row, logit_bias=bias(**{f"t{best[row]}": -100.0}))
    answers = rows.answers([0, 1, 2, 3], 5)
    assert answers[:2] == [[17] * 5] * 2
    for row in (2, 3):
        assert answers[row] == [int(rows.logits[row].topk(2).indices[1])] * 5


def test_drawn_tokens_follow_the_biased_distribution():
    count = 20_000
    rows = Rows(1)
    table = rows.table = RowTable(count, 1)
    table.seed[:], table.temperature[:] = np.arange(count), 1.0
    for row in range(count):
        adjust(table, row, logit_bias=bias(t1=1.0, t2=-1.0))
    sampler = Sampler(table, reference, initialize())
    logits = torch.tensor([0.0, 0.0, 0.0, 1.0])
    who = torch.arange(count)
    tokens = sampler.sample(
        logits.repeat(count, 1), StepPlan(0, np.arange(count)), who, who.clone()
    )
    found = np.bincount(tokens.result().tokens, minlength=4) / count
    assert (
        np.abs(found - torch.softmax(torch.tensor([0.0, 1.0, -1.0, 1.0]), 0).numpy()).max() < 0.02
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_stop_comes_before_min_tokens(temperature):
    rows = Rows(2)
    rows.table.temperature[:] = temperature
    rows.logits[:, [5, 6]] += 50.0
    adjust(rows.table, 0, min_tokens=4, stop_ids=(5, 6))
    adjust(rows.table, 1, min_tokens=4, stop_ids=(5,))
    first, second = rows.answers([0, 1], 6)
    assert not {5, 6} & set(first[:4]) and {5, 6} >= set(first[4:])
    assert second[:4] == [6] * 4
    assert not rows.sampler._adjustments.among(np.asarray([0, 1])).size, "it costs no more"


def test_a_biased_stop_is_banned_all_the_same():
    rows = Rows(1)
    adjust(rows.table, 0, logit_bias=bias(t5=100.0), min_tokens=2, stop_ids=(5,))
    (answer,) = rows.answers([0], 3)
    assert 5 not in answer[:2] and answer[2] == 5


def test_reported_logprobs_are_the_models_own():
    rows = Rows(1)
    rows.table.logprobs[0] = VOCAB
    adjust(rows.table, 0, repetition_penalty=2.0, presence_penalty=2.0, text=([1, 2], []),
        logit_bias=bias(t17=100.0), min_tokens=1, stop_ids=(3,),
    )  # fmt: skip
    before = rows.logits.clone()
    (entry,) = rows.step([], ended=[0]).logprobs[0]
    truth = torch.log_softmax(before[0], dim=-1)
    assert torch.equal(rows.logits, before)
    assert entry.token_id == 17 and entry.logprob == pytest.approx(float(truth[17]), abs=1e-5)
    for token, logprob in entry.top:
        assert logprob == pytest.approx(float(truth[token]), abs=1e-5)


def test_nothing_is_kept_for_rows_that_want_no_penalties():
    rows = Rows(2)
    adjust(rows.table, 0, logit_bias=bias(t1=1.0))
    rows.answers([0, 1], 2)
    assert rows.sampler._adjustments._written is None


def without_words(
    logits: torch.Tensor, words: list[tuple[int, ...]], answer: list[int], count: int
) -> list[int]:
    """The most likely token after the other that completes none of the words: by a loop."""
    start = len(answer)
    while len(answer) < start + count:
        own = logits.clone()
        for *before, last in words:
            if not before or answer[-len(before) :] == before:
                own[last] = -torch.inf
        answer = [*answer, int(own.argmax())]
    return answer[start:]


def random_words(logits: torch.Tensor, generator: np.random.Generator) -> list[tuple[int, ...]]:
    """Of likely tokens, so that they come."""
    likely = logits.topk(4).indices.numpy()
    lengths = generator.integers(1, 5, size=8)
    words = [tuple(generator.choice(likely, length).tolist()) for length in lengths]
    return [word for word in words if len(word) > 1 or word[0] != likely[0]] + [(likely[3].item(),)]


@pytest.mark.parametrize("seed", range(4))
def test_bad_words_never_come_whoever_is_beside_them(seed):
    generator = np.random.default_rng(seed)
    rows = Rows(5, seed)
    words = {row: random_words(rows.logits[row], generator) for row in (0, 1, 3, 4)}
    for row in (0, 1, 3):
        adjust(rows.table, row, bad_words=words[row], text=([words[row][0][0]], []))
    found = rows.answers([0, 1, 2, 3], 12)
    for row in (0, 1, 3):
        assert found[row] == without_words(rows.logits[row], words[row], [], 12)
    assert set(found[2]) == {int(rows.logits[2].argmax())}
    # Another one begins where others have been, and one that was stopped goes on.
    rows.table._forget_adjustments(1)
    before = without_words(rows.logits[4], words[4], [], 5)
    adjust(rows.table, 4, bad_words=words[4], text=([], before))
    adjust(rows.table, 1, bad_words=words[0])
    rows.logits[1] = rows.logits[0]
    more = [rows.step([0, 2, 3], ended=[1], resumed=[4])]
    more += [rows.step([0, 1, 2, 3, 4]) for _ in range(5)]
    order = {0: 0, 2: 1, 3: 2, 1: 3, 4: 4}
    for row, history in ((0, found[0]), (3, found[3]), (1, []), (4, before)):
        tokens = [more[0].tokens[order[row]], *(step.tokens[row] for step in more[1:])]
        own = words[0] if row == 1 else words[row]
        assert tokens == without_words(rows.logits[row], own, history, 6), row


def test_the_longest_word_is_compared_whole():
    rows = Rows(2)
    best = int(rows.logits[0].argmax())
    rows.logits[1] = rows.logits[0]
    adjust(rows.table, 0, bad_words=[[best] * MAX_BAD_WORD_TOKENS])
    adjust(rows.table, 1, bad_words=[[best + 1] + [best] * (MAX_BAD_WORD_TOKENS - 1)])
    first, second = rows.answers([0, 1], MAX_BAD_WORD_TOKENS)
    assert first[:-1] == second[:-1] == [best] * (MAX_BAD_WORD_TOKENS - 1)
    assert first[-1] != best == second[-1]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0, 1e-30])
def test_only_allowed_ids_come(temperature):
    rows = Rows(3)
    rows.table.temperature[:] = temperature
    adjust(rows.table, 0, allowed_token_ids=(7, 9, 7))
    adjust(rows.table, 2, allowed_token_ids=(9, 30), bad_words=[[30]], stop_ids=(9,))
    first, free, last = rows.answers([0, 1, 2], 20)
    assert {*first} <= {7, 9} and {*last} == {9}
    if temperature == 1.0:
        assert {*first} == {7, 9}
    assert {*free} != {*first}


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e-30])
def test_where_nothing_else_is_left_a_ban_is_broken(temperature):
    rows = Rows(2)
    rows.table.temperature[:] = temperature
    adjust(rows.table, 0, allowed_token_ids=(7,), bad_words=[[7]], logit_bias=bias(t9=100.0))
    adjust(rows.table, 1, allowed_token_ids=(5, 6), min_tokens=9, stop_ids=(5, 6))
    first, second = rows.answers([0, 1], 6)
    assert {*first} == {7} and {*second} <= {5, 6}


def test_allowed_ids_that_end_the_answer_wait_for_min_tokens():
    rows = Rows(1)
    rows.logits[0, 5] = 50.0
    adjust(rows.table, 0, allowed_token_ids=(5, 6), min_tokens=3, stop_ids=(5,))
    assert rows.answers([0], 5) == [[6, 6, 6, 5, 5]]
