"""/score_tokens: how likely given answers are behind a prompt."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
from flask.testing import FlaskClient

from megatron_hybrid.server.http.protocol import scoring
from megatron_hybrid.text.tokenizer import Tokenizer
from tests.server.conftest import RunningLoop
from tests.server.fake_engine import FakeEngine
from tests.server.running import wait_until

SCORE = "/score_tokens"
PROMPT = "The code of the north gate is 7313 – naïve 日本. Where is the gate whose code is " * 4


def scored(http: FlaskClient, **body: Any) -> dict[str, Any]:
    answer = http.post(SCORE, json=body)
    assert answer.status_code == 200, answer.data
    return dict(answer.get_json())


def test_texts_and_ids_are_scored_alike(
    http: FlaskClient, tokenizer: Tokenizer, engine: FakeEngine
) -> None:
    texts = scored(http, prompt="abc", answers=["de", "x"], model="fake")
    prompt = tokenizer.encode("abc")
    answers = [tokenizer.encode(text, add_special_tokens=False) for text in ("de", "x")]
    ids = scored(http, prompt=prompt, answers=answers, top_logprobs=None)
    for found in (texts, ids):
        assert found["object"] == "score" and found["model"] == "fake"
        assert found["id"].startswith("score-")
        assert found["scores"] == [
            {"token_ids": one, "logprobs": [-1.0] * len(one), "total_logprob": -float(len(one))}
            for one in answers
        ]
        usage = found["usage"]
        length = 2 * len(prompt) + len(answers[0]) + len(answers[1])
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (length, 0)
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 0
    assert [added.prompt for added in engine.added] == 2 * [prompt + one for one in answers]
    for added in engine.added:
        assert added.params.max_tokens == 0
        assert added.params.prompt_logprobs_start == len(prompt)
        assert added.cache_checkpoints == (len(prompt) - 1,)


def test_the_likeliest_come_where_they_are_asked_for(
    http: FlaskClient, tokenizer: Tokenizer
) -> None:
    body = {"prompt": "abc", "answers": ["de"]}
    first, second = tokenizer.encode("de")
    (score,) = scored(http, **body, top_logprobs=2)["scores"]
    assert score["top_logprobs"] == [
        [{"token_id": one, "logprob": -1.0}, {"token_id": one + 1, "logprob": -2.0}]
        for one in (first, second)
    ]
    (score,) = scored(http, **body, top_logprobs=0)["scores"]
    assert score["top_logprobs"] == [[], []]


def test_priority_and_salt_reach_the_engine(http: FlaskClient, engine: FakeEngine) -> None:
    scored(http, prompt="a", answers=[[5]], priority=-7, cache_salt="mine")
    (added,) = engine.added
    assert (added.priority, added.cache_salt, added.cache_checkpoints) == (-7, "mine", ())


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("prompt", {"prompt": ""}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": None}),
        ("prompt", {"prompt": [-1]}),
        ("prompt", {"prompt": [10**6]}),
        ("prompt", {"prompt": ["a"]}),
        ("prompt", {"prompt": [3] * 128}),
        ("answers", {"answers": []}),
        ("answers", {"answers": None}),
        ("answers", {"answers": "a"}),
        ("answers", {"answers": ["a", ""]}),
        ("answers", {"answers": ["a", []]}),
        ("answers", {"answers": [[5], 5]}),
        ("answers[1]", {"answers": [[5], [10**6]]}),
        ("answers[1]", {"answers": ["a", [3] * 126]}),
        ("answers[0]", {"answers": ["a" * 2_000_000]}),
        ("answers", {"answers": ["a"] * 1025}),
        ("top_logprobs", {"top_logprobs": 21}),
        ("top_logprobs", {"top_logprobs": -1}),
        ("priority", {"priority": 1001}),
        ("cache_salt", {"cache_salt": 5}),
        ("timeout", {"timeout": 0}),
        ("model", {"model": 5}),
        ("stream", {"stream": True}),
        ("max_tokens", {"max_tokens": 5}),
    ],
)
def test_what_is_wrong_is_named(
    http: FlaskClient, engine: FakeEngine, field: str, change: dict[str, Any]
) -> None:
    answer = http.post(SCORE, json={"prompt": "abc", "answers": ["d"], **change})
    assert answer.status_code == 400, answer.data
    error = answer.get_json()["error"]
    assert error["param"] == field and field in error["message"] and error["message"][-1] == "."
    assert not engine.added
    scored(http, prompt="abc", answers=["d"])


def test_both_together_have_to_fit(http: FlaskClient) -> None:
    scored(http, prompt=[3] * 100, answers=[[4] * 27])
    answer = http.post(SCORE, json={"prompt": [3] * 100, "answers": [[4], [4] * 28]})
    assert answer.status_code == 400
    assert answer.get_json()["error"]["message"] == (
        "answers[1] has 28 tokens and prompt 100; together they must have fewer than 128 "
        "(--inference-max-seq-length)."
    )


def test_a_short_body_cannot_ask_for_any_number_of_tokens(
    http: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "MAX_SCORED_TOKENS", 200)
    scored(http, prompt=[3] * 99, answers=[[4], [5]])
    answer = http.post(SCORE, json={"prompt": [3] * 99, "answers": [[4], [5, 6]]})
    assert answer.status_code == 400
    assert "201 tokens in all; the limit is 200" in answer.get_json()["error"]["message"]


def test_another_model_is_not_served(http: FlaskClient) -> None:
    answer = http.post(SCORE, json={"prompt": "abc", "answers": ["d"], "model": "other"})
    assert answer.status_code == 404


def test_more_answers_than_may_wait_are_turned_away(http: FlaskClient, engine: FakeEngine) -> None:
    engine.num_waiting = 1
    answer = http.post(SCORE, json={"prompt": "abc", "answers": [[5]] * 9})
    assert answer.status_code == 429 and answer.headers["Retry-After"]


def test_what_takes_too_long_is_aborted(http: FlaskClient, running: RunningLoop) -> None:
    running.engine.step_seconds = 0.5
    answer = http.post(SCORE, json={"prompt": "abc", "answers": ["d"] * 3, "timeout": 0.1})
    assert answer.status_code == 504
    wait_until(lambda: not running.engine.has_work())


def test_what_is_aborted_has_no_score(http: FlaskClient, running: RunningLoop) -> None:
    running.engine.step_seconds = 0.5
    answers: list[Any] = []
    body = {"prompt": "abc", "answers": ["d", "e"]}
    ask = partial(http.post, SCORE, json=body)
    asking = threading.Thread(target=lambda: answers.append(ask()), daemon=True)
    asking.start()
    wait_until(lambda: len(running.engine.added) == 2)
    for request_id in [f"{line.split()[1]}" for line in running.engine.log if line[:4] == "add "]:
        running.engine.abort(request_id)
    asking.join(10)
    assert answers[0].status_code == 503
    error = answers[0].get_json()["error"]
    assert (error["code"], error["param"]) == ("aborted", "answers")


def test_a_failed_step_is_said(http: FlaskClient) -> None:
    assert http.post(SCORE, json={"prompt": "abc", "answers": ["d~"]}).status_code == 500
    scored(http, prompt="abc", answers=["d"])


# ------------------------------------------------------------------- a model


def test_scores_are_those_of_a_prompt_and_the_prompt_is_cached(reference_http: FlaskClient) -> None:
    http = reference_http
    prompt = list(http.post("/tokenize", json={"prompt": PROMPT}).get_json()["tokens"])
    answers = [[5, 6, 7, 8], [900], [7] * 40]
    first = scored(http, prompt=PROMPT, answers=answers, cache_salt="fresh", top_logprobs=1)
    again = scored(http, prompt=prompt, answers=answers, cache_salt="fresh", top_logprobs=1)
    for score, other, answer in zip(first["scores"], again["scores"], answers, strict=True):
        body = {"prompt": prompt + answer, "echo": True, "max_tokens": 0, "logprobs": 1}
        (whole,) = http.post("/v1/completions", json=body).get_json()["choices"]
        expected = whole["logprobs"]["token_logprobs"][-len(answer) :]
        for one in (score, other):
            assert one["token_ids"] == answer
            assert one["logprobs"] == pytest.approx(expected, abs=1e-3)
            assert one["total_logprob"] == pytest.approx(sum(expected), abs=1e-2)
            for (likeliest,), own in zip(one["top_logprobs"], one["logprobs"], strict=True):
                assert likeliest["logprob"] >= own
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (first, again)]
    lengths = 3 * len(prompt)
    assert 0 < cached[0] < cached[1] <= lengths - 3
    usage = again["usage"]
    assert usage["prompt_tokens"] == usage["total_tokens"] == lengths + 45


def test_an_answers_own_logprobs_are_its_score(reference_http: FlaskClient) -> None:
    body = {"prompt": PROMPT, "max_tokens": 9, "temperature": 0, "logprobs": 0}
    answer = reference_http.post("/v1/completions", json={**body, "return_token_ids": True})
    (choice,) = answer.get_json()["choices"]
    ids = choice["token_ids"]
    (score,) = scored(reference_http, prompt=choice["prompt_token_ids"], answers=[ids])["scores"]
    assert score["logprobs"] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-3)
