"""The oracle agrees with comparing every prompt to every earlier sequence."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from simulation.oracle import Oracle
from simulation.traces import make_trace, play


def brute_force(earlier, prompt):
    best = 0
    for sequence in earlier:
        length = min(len(sequence), len(prompt))
        equal = sequence[:length] == prompt[:length]
        best = max(best, length if equal.all() else int(np.argmin(equal)))
    return best


def sequences(prompt, answers):
    return [np.concatenate([prompt, answer[:-1]]) for answer in answers] or [prompt]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), min_size=1, max_size=4),
            st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), max_size=3),
        ),
        max_size=10,
    )
)
def test_equals_brute_force_on_small_texts(requests):
    oracle, earlier = Oracle(), []
    for parts, answers in requests:
        parts = [np.asarray(part, dtype=np.int32) for part in parts]
        answers = [np.asarray(answer, dtype=np.int32) for answer in answers]
        prompt = np.concatenate(parts)
        assert oracle.admit(parts, answers) == brute_force(earlier, prompt)
        earlier += sequences(prompt, answers)


def test_equals_brute_force_on_a_trace():
    oracle, earlier = Oracle(), []
    for request in play(make_trace("mixed", 150, seed=1)):
        prompt = request.prompt()
        assert oracle.admit(request.parts, request.answers) == brute_force(earlier, prompt)
        earlier += sequences(prompt, request.answers)


def test_the_same_prompt_again_costs_nothing():
    oracle, prompt = Oracle(), [np.arange(10, dtype=np.int32)]
    assert oracle.admit(prompt) == 0
    assert oracle.admit(prompt) == 10


def test_the_last_token_of_an_answer_is_unknown():
    oracle = Oracle()
    prompt, answer = np.arange(5, dtype=np.int32), np.arange(20, 24, dtype=np.int32)
    oracle.admit([prompt], [answer])
    assert oracle.admit([prompt, answer]) == 8
