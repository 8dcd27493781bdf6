"""The routes for tokens before the real engine: equal to /v1/completions, partial rollouts that go
on, groups of samples whose prompt is computed once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient

from tests.server.conftest import RunningLoop, reference_server
from tests.server.http.tokens.asking import (
    GENERATE,
    INFER,
    generate,
    generate_body,
    infer,
    infer_body,
    sampling,
)
from tests.server.running import wait_until

PROMPT = list(range(20, 80))


def completed(http: FlaskClient, **body: Any) -> Any:
    answer = http.post("/v1/completions", json={"return_token_ids": True, "logprobs": 2, **body})
    assert answer.status_code == 200, answer.data
    return answer.get_json()["choices"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_and_log_probabilities_are_those_of_completions(
    reference_http: FlaskClient, temperature: float
) -> None:
    same: dict[str, Any] = {"temperature": temperature, "top_k": 40, "n": 2}
    expected = completed(reference_http, prompt=PROMPT, max_tokens=12, seed=5, **same)
    found = generate(
        reference_http,
        PROMPT,
        sampling_params={"max_new_tokens": 12, "sampling_seed": 5, **same},
        return_logprob=True,
        top_logprobs_num=2,
    )
    choices = infer(reference_http, PROMPT, max_tokens=12, seed=5, logprobs=0, **same)["choices"]
    lean = generate(
        reference_http,
        PROMPT,
        sampling_params={"max_new_tokens": 12, "sampling_seed": 5, **same},
        return_logprob=True,
    )
    for want, answer, choice, short in zip(expected, found, choices, lean, strict=True):
        logprobs = want["logprobs"]["token_logprobs"]
        assert answer["output_ids"] == choice["token_ids"] == want["token_ids"]
        assert answer["text"] == want["text"]
        ours = answer["meta_info"]["output_token_logprobs"]
        # Beside others sums in float32 have another order: 1.4e-6 were seen.
        assert [entry[0] for entry in ours] == pytest.approx(logprobs, abs=1e-5)
        assert [entry[1] for entry in ours] == want["token_ids"]
        assert short["meta_info"]["output_token_logprobs"] == ours
        theirs = choice["logprobs"]["content"]
        assert [entry["logprob"] for entry in theirs] == [entry[0] for entry in ours]
        assert [entry["token_id"] for entry in theirs] == want["token_ids"]
        tops = [sorted(top.values()) for top in want["logprobs"]["top_logprobs"]]
        for likely, top in zip(answer["meta_info"]["output_top_logprobs"], tops, strict=True):
            assert sorted(entry[0] for entry in likely) == pytest.approx(top, abs=1e-5)


def test_those_of_a_temperature_are_of_what_tokens_are_drawn_from(
    reference_http: FlaskClient,
) -> None:
    warm: dict[str, Any] = {"temperature": 1.5, "top_k": 20}
    (plain,) = infer(reference_http, PROMPT, max_tokens=9, seed=5, logprobs=2, **warm)["choices"]
    params = {"max_new_tokens": 9, "sampling_seed": 5, "ignore_eos": True, **warm}
    found = generate(
        reference_http, PROMPT, sampling_params=params, return_logprob=True, top_logprobs_num=2
    )
    assert found["output_ids"] == plain["token_ids"]
    likely = found["meta_info"]["output_top_logprobs"]
    for entry, (first, second) in zip(plain["logprobs"]["content"], likely, strict=True):
        own = {one["token_id"]: one["logprob"] for one in entry["top_logprobs"]}
        apart = (own[first[1]] - own[second[1]]) / 1.5
        assert first[0] - second[0] == pytest.approx(apart, abs=1e-5)


def test_those_of_a_prompt_are_those_of_an_echo(reference_http: FlaskClient) -> None:
    (choice,) = completed(reference_http, prompt=PROMPT, max_tokens=1, temperature=0, echo=True)
    expected = choice["logprobs"]["token_logprobs"][: len(PROMPT)]
    meta = generate(
        reference_http,
        PROMPT,
        sampling_params=sampling(max_new_tokens=0),
        return_logprob=True,
        logprob_start_len=0,
    )["meta_info"]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == PROMPT
    given = [entry[0] for entry in meta["input_token_logprobs"]]
    assert given[0] is None and given[1:] == pytest.approx(expected[1:], abs=1e-6)
    later = generate(reference_http, PROMPT, return_logprob=True, logprob_start_len=40)["meta_info"]
    assert [entry[1] for entry in later["input_token_logprobs"]] == PROMPT[40:]
    assert [entry[0] for entry in later["input_token_logprobs"]][1:] == pytest.approx(
        expected[41:], abs=1e-5
    )
    of_prompt = infer(reference_http, PROMPT, prompt_logprobs=0)["prompt_logprobs"]
    assert [list(one) for one in of_prompt[1:]] == [[str(token)] for token in PROMPT[1:]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Flask, RunningLoop]]:
    """An application of its own, whose engine's counters nobody else moves."""
    with reference_server(tmp_path_factory.mktemp("s")) as (http, running):
        yield http.application, running


def counted(running: RunningLoop, before: dict[str, Any] | None = None) -> dict[str, int]:
    """Tokens so far, or since then."""
    stats, since = running.engine.stats(), before or {}
    names = ("computed_tokens", "skipped_tokens", "generated_tokens")
    return {name: stats[name] - since.get(name, 0) for name in names}


def test_a_partial_rollout_goes_on_where_it_was(server: tuple[Flask, RunningLoop]) -> None:
    """Ended in the middle, and sent again with what there was: at most its last token, which no
    step has fed, is computed."""
    (app, running), length = server, 150
    http, whole = app.test_client(), sampling(max_new_tokens=length)
    expected = generate(http, PROMPT, sampling_params=whole)["output_ids"]
    http.post("/reset_prefix_cache")
    before = counted(running)
    body = generate_body(PROMPT, sampling_params=whole, return_logprob=True)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(lambda: app.test_client().post(GENERATE, json=body))
        wait_until(lambda: counted(running, before)["generated_tokens"] > 10)
        assert http.post("/abort_request", json={"abort_all": True}).get_json() == {"aborted": 1}
        answer = first.result(30)
    assert answer.status_code == 200
    ids, meta = answer.get_json()["output_ids"], answer.get_json()["meta_info"]
    assert meta["finish_reason"]["type"] == "abort" and 10 <= len(ids) < length
    before = counted(running)
    left = sampling(max_new_tokens=length - len(ids))
    rest = generate(http, PROMPT + ids, sampling_params=left, return_logprob=True)
    assert ids + rest["output_ids"] == expected
    assert len(rest["meta_info"]["output_token_logprobs"]) == length - len(ids)
    after = counted(running, before)
    assert after["skipped_tokens"] == rest["meta_info"]["cached_tokens"]
    assert after["computed_tokens"] + after["skipped_tokens"] == len(PROMPT) + len(ids)
    assert after["computed_tokens"] <= 1


def test_samples_of_a_prompt_that_come_as_requests_of_their_own_share_it(
    server: tuple[Flask, RunningLoop],
) -> None:
    """As slime sends them: a request for each sample, those of other prompts between them."""
    app, running = server
    prompts = [[100 + i, *range(20 + i, 220 + i)] for i in range(4)]
    requests = [(prompt, seed) for prompt in range(4) for seed in range(8)]
    random.Random(1).shuffle(requests)
    before = counted(running)

    def ask(prompt: int, seed: int) -> list[int]:
        params = {"max_new_tokens": 4, "sampling_seed": seed, "ignore_eos": True}
        answer = generate(app.test_client(), prompts[prompt], sampling_params=params)
        return list(answer["output_ids"])

    with ThreadPoolExecutor(len(requests)) as pool:
        found = list(pool.map(lambda one: ask(*one), requests))
    after = counted(running, before)
    assert after["computed_tokens"] == sum(map(len, prompts))
    assert after["skipped_tokens"] == 7 * sum(map(len, prompts))
    assert all(len(one) == 4 for one in found)
    assert len({tuple(one) for one in found}) > 4, "each draws for itself"


def test_two_requests_may_be_called_alike(reference_http: FlaskClient) -> None:
    for path, body in (
        (GENERATE, generate_body(rid="same")),
        (INFER, infer_body(body={"request_id": "same"})),
    ):
        assert [reference_http.post(path, json=body).status_code for _ in range(2)] == [200, 200]
