"""The generated traces are what their descriptions say, and the same for everybody."""

from __future__ import annotations

from statistics import mean

import numpy as np
import pytest

from simulation.parameters import MAX_CONTEXT
from simulation.text import GENERATION_PROMPT
from simulation.traces import TRACES, make_trace, play

REQUESTS = 2_000


@pytest.fixture(scope="module", params=TRACES)
def requests(request):
    return list(play(make_trace(request.param, REQUESTS, seed=7)))


def fingerprint(name, seed, count=300):
    return [
        (r.arrival, r.message_ends, r.prompt().tobytes(), [a.tobytes() for a in r.answers])
        for r in play(make_trace(name, count, seed))
    ]


@pytest.mark.parametrize("name", TRACES)
def test_a_seed_decides_everything(name):
    assert fingerprint(name, 3) == fingerprint(name, 3)
    assert fingerprint(name, 3) != fingerprint(name, 4)


def test_prompts_and_answers_are_as_long_as_promised(requests):
    assert len(requests) == REQUESTS
    assert mean(r.prompt_tokens for r in requests) >= 4_000
    assert mean(len(answer) for r in requests for answer in r.answers) >= 128


def test_everything_fits_the_context(requests):
    assert all(
        r.prompt_tokens + max(map(len, r.answers)) <= MAX_CONTEXT and r.prompt_tokens > 0
        for r in requests
    )


def test_requests_are_numbered_in_order_of_arrival(requests):
    assert [r.number for r in requests] == list(range(REQUESTS))
    arrivals = [r.arrival for r in requests]
    assert arrivals == sorted(arrivals)


def test_messages_end_before_the_generation_prompt(requests):
    for r in requests[:500]:
        assert list(r.message_ends) == sorted(set(r.message_ends))
        assert r.message_ends[0] > 0 and r.message_ends[-1] < r.prompt_tokens
        start = r.message_ends[-1]
        prompt = r.prompt()
        assert (prompt[start : start + len(GENERATION_PROMPT)] == GENERATION_PROMPT).all()


def test_the_next_turn_repeats_prompt_and_answer():
    seen = set()
    follow_ups = 0
    for r in play(make_trace("chat", 3_000, seed=5)):
        if len(r.message_ends) > 2:
            earlier = r.prompt()[: r.message_ends[-2]]
            follow_ups += earlier.tobytes() in seen
        seen |= {np.concatenate([r.prompt(), a]).tobytes() for a in r.answers}
    assert follow_ups > 1_000


def test_the_rate_does_not_depend_on_the_number_of_requests():
    few = [r.arrival for r in play(make_trace("shared", 500, seed=2))]
    many = [r.arrival for r in play(make_trace("shared", 2_000, seed=2))]
    assert many[:500] == few


def test_a_slow_engine_changes_times_but_no_texts():
    """A session's texts come from its own seed, however long its answers take."""

    def prompts(delay):
        trace = make_trace("forks", 400, seed=3)
        running, texts = [], {}
        while (due := trace.next_arrival()) is not None:
            if running and running[0].arrival + delay <= due:
                request = running.pop(0)
                trace.finished(request, request.arrival + delay)
                continue
            for request in trace.take(due):
                running.append(request)
                texts[request.prompt().tobytes()] = request.n
        return texts

    fast, slow = prompts(10), prompts(400)
    assert len(fast.keys() & slow.keys()) > 250


def test_an_unknown_trace_is_refused():
    with pytest.raises(ValueError, match="chat, agents"):
        make_trace("nonsense", 10, seed=1)
