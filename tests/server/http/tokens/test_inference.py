"""POST /inference/v1/generate: vLLM's fields and answers, before the fake engine."""

from __future__ import annotations

import threading
from typing import Any

from flask.testing import FlaskClient

from megatron_hybrid.request import SamplingParams
from megatron_hybrid.server.http.app import create_app
from megatron_hybrid.server.options import ServerOptions
from megatron_hybrid.text.tokenizer import Tokenizer
from tests.server.conftest import RunningLoop
from tests.server.fake_engine import FakeEngine
from tests.server.http.tokens.asking import INFER, infer, infer_body, streamed
from tests.server.running import wait_until


def token(token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
    return {
        "token": f"token_id:{token_id}",
        "token_id": token_id,
        "logprob": logprob,
        "rank": rank,
        "bytes": None,
    }


def test_an_answer_has_all_of_vllms_fields(http: FlaskClient) -> None:
    answer = infer(http, [5, 6, 7, 8, 9])
    assert answer.pop("request_id").startswith("gen-") and answer.pop("created") > 0
    assert answer == {
        "output_mode": "tokens",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "token_ids": [5, 6, 7],
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
                "weight_versions": [{"version": "0", "start": 0, "end": 3}],
                "routed_experts": None,
            }
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 3,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
        "prompt_token_ids": None,
        "prompt_logprobs": None,
        "kv_transfer_params": None,
    }


def test_log_probabilities_are_those_that_both_kinds_of_clients_read(http: FlaskClient) -> None:
    (choice,) = infer(http, logprobs=0)["choices"]
    chosen = [token(one, -0.5, None) for one in (5, 6, 7)]
    assert choice["logprobs"]["content"] == [{**one, "top_logprobs": [one]} for one in chosen]
    (choice,) = infer(http, logprobs=2)["choices"]
    first, second = token(5, -0.5, 1), token(6, -1.5, 2)
    assert choice["logprobs"]["content"][0] == {**first, "top_logprobs": [first, second]}


def test_the_prompts_own_come_first_in_theirs(http: FlaskClient) -> None:
    answer = infer(http, prompt_logprobs=1)
    one = {"logprob": -1.0, "rank": 1, "decoded_token": None}
    assert answer["prompt_logprobs"] == [None, {"6": one}, {"7": one}]
    plain = infer(http, prompt_logprobs=0)["prompt_logprobs"]
    assert plain == [None, {"6": {**one, "rank": None}}, {"7": {**one, "rank": None}}]


def test_sampling_and_what_stands_beside_it_reach_the_engine(
    http: FlaskClient, engine: FakeEngine
) -> None:
    body = {
        "priority": 3,
        "cache_salt": "mine",
        "return_token_ids": True,
        "request_id": "a",
        "model": "",
        "token_offsets": [[0, 1]],
        "assistant_tokens_mask": [1, 0, 1],
        "timeout": 50,
    }
    answer = infer(
        http,
        body=body,
        top_k=-1,
        top_p=0.5,
        seed=4,
        n=2,
        min_tokens=1,
        stop_token_ids=[9],
        bad_words=["zz"],
        skip_special_tokens=False,
        detokenize=False,
        return_token_ids=True,
        routed_experts_prompt_start=3,
        logit_bias={"5": 1},
    )
    (added,) = engine.added
    assert (added.priority, added.cache_salt) == (3, "mine")
    assert added.params.bad_words and all(
        isinstance(one, int) for word in added.params.bad_words for one in word
    )
    assert added.params.max_tokens == 3 and added.params.n == 2
    assert answer["request_id"] == "a" and answer["prompt_token_ids"] == [5, 6, 7]
    assert [one["token_ids"] for one in answer["choices"]] == [[5, 6, 7], [6, 7, 5]]


def test_without_max_tokens_it_is_the_owners_or_as_many_as_fit(
    running: RunningLoop, tokenizer: Tokenizer, options: ServerOptions, engine: FakeEngine
) -> None:
    for owners, expected in ((None, FakeEngine.max_seq_length - 3), (5, 5)):
        defaults = () if owners is None else (("max_tokens", owners), ("temperature", 0.5))
        named = options.replace(sampling_defaults=defaults)
        http = create_app(running.serve(tokenizer, named)).test_client()
        body = {"token_ids": [5, 6, 7], "sampling_params": {"ignore_eos": True}}
        answer = http.post(INFER, json=body).get_json()
        assert len(answer["choices"][0]["token_ids"]) == expected
    assert {added.params.temperature for added in engine.added} == {SamplingParams().temperature}


def test_what_has_ended_an_answer_is_named(http: FlaskClient, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("ab!STOPcd")
    (bang,) = tokenizer.encode("!")

    def ended(**params: Any) -> tuple[Any, ...]:
        (choice,) = infer(http, prompt, max_tokens=9, **params)["choices"]
        ids, spans = choice["token_ids"], choice["weight_versions"]
        assert spans == [{"version": "0", "start": 0, "end": len(ids)}]
        return len(ids), choice["finish_reason"], choice["stop_reason"]

    assert ended(stop_token_ids=[bang]) == (3, "stop", bang)
    count, reason, text = ended(stop="STOP")
    assert (reason, text) == ("stop", "STOP") and 3 < count <= 7


def test_events_have_what_is_new(http: FlaskClient) -> None:
    body = infer_body(logprobs=0, n=2, body={"return_token_ids": True, "request_id": "mine"})
    events = streamed(http, INFER, body)
    assert [event.get("prompt_token_ids") for event in events[:2]] == [[5, 6, 7], None]
    ids: dict[int, list[int]] = {0: [], 1: []}
    for event in events:
        assert event["request_id"] == "mine" and event["usage"] is None
        (choice,) = event["choices"]
        ids[choice["index"]] += choice["token_ids"]
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
        is_last = choice["finish_reason"] is not None
        assert (choice["weight_versions"] is not None) == is_last
    assert ids == {0: [5, 6, 7], 1: [6, 7, 5]}


def test_usage_comes_where_it_is_asked_for(http: FlaskClient) -> None:
    asked = {"include_usage": True, "continuous_usage_stats": True}
    events = streamed(http, INFER, infer_body(body={"stream_options": asked}))
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 3
    assert events[-2]["usage"]["total_tokens"] == 6


def test_which_weights_have_computed_which_tokens_is_said(
    http: FlaskClient, engine: FakeEngine
) -> None:
    engine.step_seconds = 0.01
    client = http.application.test_client()
    body = infer_body(max_tokens=60)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(client.post(INFER, json=body)))
    thread.start()
    wait_until(lambda: engine._generated > 5)
    assert http.post("/pause", json={"mode": "keep"}).status_code == 200
    before = engine._generated
    assert http.post("/update_weights", json={"path": "b"}).status_code == 200
    assert http.post("/resume").status_code == 200
    thread.join(10)
    (choice,) = answers[0].get_json()["choices"]
    assert choice["weight_versions"] == [
        {"version": "0", "start": 0, "end": before},
        {"version": "1", "start": before, "end": 60},
    ]
    for path in ("/weight_version", "/get_weight_version"):
        assert http.get(path).get_json() == {"weight_version": "1"}
    assert http.get("/model_info").get_json()["weight_version"] == "1"
