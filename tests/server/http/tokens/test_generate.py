"""POST /generate: SGLang's fields and answers, before the fake engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from flask.testing import FlaskClient

from megatron_hybrid.request import MAX_PRIORITY, FinishReason, RequestEvent, SamplingParams
from megatron_hybrid.server.http.app import create_app
from megatron_hybrid.server.options import ServerOptions
from megatron_hybrid.text.tokenizer import Tokenizer
from tests.server.conftest import RunningLoop
from tests.server.fake_engine import FakeEngine
from tests.server.http.tokens.asking import (
    GENERATE,
    generate,
    generate_body,
    sampling,
    streamed,
)


def test_one_prompt_is_answered_by_an_object(http: FlaskClient, tokenizer: Tokenizer) -> None:
    answer = generate(http, [5, 6, 7, 8, 9])
    meta = answer.pop("meta_info")
    text = tokenizer.decode([5, 6, 7], skip_special_tokens=True)
    assert answer == {"text": text, "output_ids": [5, 6, 7]}
    assert meta.pop("id").startswith("gen-") and meta.pop("e2e_latency") > 0
    assert meta == {
        "finish_reason": {"type": "length", "length": 3},
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "cached_tokens": 0,
        "weight_version": "0",
        "weight_versions": [{"version": "0", "start": 0, "end": 3}],
    }


def test_text_is_encoded_as_elsewhere(http: FlaskClient, engine: FakeEngine) -> None:
    generate(http, "Hello you")
    ids = http.post("/tokenize", json={"prompt": "Hello you"}).get_json()["tokens"]
    assert engine.added[0].prompt == ids
    found = generate(http, ["Hello", "you"], rid="b")
    assert [one["meta_info"]["id"] for one in found] == ["b_0", "b_1"]


def test_every_key_of_the_sampling_reaches_the_engine(
    http: FlaskClient, engine: FakeEngine
) -> None:
    asked = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 7,
        "min_p": 0.25,
        "max_new_tokens": 9,
        "min_new_tokens": 2,
        "stop": "ab",
        "stop_token_ids": [3, 4],
        "ignore_eos": True,
        "n": 2,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "sampling_seed": 11,
        "logit_bias": {"5": 1.5},
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        "stream_interval": 4,
    }
    generate(http, sampling_params=asked, priority=7, cache_salt="mine")
    (added,) = engine.added
    assert added.params == SamplingParams(
        temperature=0.5,
        top_p=0.75,
        top_k=7,
        min_p=0.25,
        max_tokens=9,
        min_tokens=2,
        stop=("ab",),
        stop_token_ids=(3, 4),
        ignore_eos=True,
        n=2,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
        seed=11,
        logit_bias=((5, 1.5),),
    )
    assert (added.priority, added.cache_salt) == (-7, "mine"), "SGLang's larger ones run first"


def test_nothing_said_is_sglangs_defaults_and_not_the_models(
    running: RunningLoop, tokenizer: Tokenizer, options: ServerOptions, engine: FakeEngine
) -> None:
    owners = options.replace(sampling_defaults=(("temperature", 0.5), ("max_tokens", 5)))
    http = create_app(running.serve(tokenizer, owners)).test_client()
    for body in ({}, {"sampling_params": None}, {"sampling_params": {}}):
        answer = http.post(GENERATE, json={"input_ids": [5, 6, 7], **body})
        assert answer.status_code == 200
    for added in engine.added:
        plain = dataclasses.replace(SamplingParams(), max_tokens=added.params.max_tokens, top_k=-1)
        assert added.params == plain
        # 128 where they fit
        assert added.params.max_tokens == min(128, FakeEngine.max_seq_length - 3)


def test_null_is_as_many_tokens_as_fit(http: FlaskClient) -> None:
    answer = generate(http, sampling_params=sampling(max_new_tokens=None))
    assert len(answer["output_ids"]) == FakeEngine.max_seq_length - 3
    answer = generate(http, sampling_params=sampling(max_new_tokens=0), return_logprob=True)
    assert answer["output_ids"] == [] and answer["meta_info"]["output_token_logprobs"] == []
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}', None),
        ("json_schema", {"type": "string"}, None),
        ("regex", "[0-9]+", "regex"),
        ("ebnf", 'root ::= "a" | "b"', "lark"),
        (
            "structural_tag",
            '{"format": {"type": "const_string", "value": "a"}}',
            "structural_tag",
        ),
    ],
)
def test_the_form_of_an_answer_reaches_the_engine(
    http: FlaskClient, engine: FakeEngine, name: str, value: Any, kind: str | None
) -> None:
    generate(http, sampling_params=sampling(**{name: value}))
    grammar = engine.added[0].params.grammar
    assert grammar is not None and (kind is None or kind in (grammar.kind, "structural_tag"))


def test_log_probabilities_come_as_triples(http: FlaskClient, tokenizer: Tokenizer) -> None:
    meta = generate(http, return_logprob=True)["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, token, None] for token in (5, 6, 7)]
    assert meta["output_token_logprobs_length"] == 3 and meta["input_token_logprobs"] == []
    assert not {"output_top_logprobs", "input_top_logprobs"} & meta.keys()
    named = generate(http, return_logprob=True, return_text_in_logprobs=True)["meta_info"]
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in (5, 6, 7)]
    assert [entry[2] for entry in named["output_token_logprobs"]] == texts
    assert "output_token_logprobs" not in generate(http, top_logprobs_num=2)["meta_info"]


def test_the_likeliest_and_those_of_the_prompt_come_where_they_are_asked_for(
    http: FlaskClient, engine: FakeEngine
) -> None:
    asked = {"return_logprob": True, "top_logprobs_num": 2}
    meta = generate(http, **asked, logprob_start_len=0)["meta_info"]
    assert meta["output_top_logprobs"][0] == [[-0.5, 5, None], [-1.5, 6, None]]
    assert meta["input_token_logprobs"] == [[None, 5, None], [-1.0, 6, None], [-1.0, 7, None]]
    assert meta["input_top_logprobs"][0] is None
    assert meta["input_top_logprobs"][2] == [[-1.0, 7, None], [-2.0, 8, None]]
    later = generate(http, return_logprob=True, logprob_start_len=1)["meta_info"]
    # As SGLang has it, nothing is said of the first one.
    assert later["input_token_logprobs"] == [[None, 6, None], [-1.0, 7, None]]
    assert engine.added[1].params.prompt_logprobs_start == 1
    generate(http, logprob_start_len=1)
    assert engine.added[2].params.prompt_logprobs is None


def test_those_of_an_answer_are_after_its_temperature(
    http: FlaskClient, engine: FakeEngine
) -> None:
    warm = sampling(temperature=0.7)
    generate(http, sampling_params=warm, return_logprob=True, logprob_start_len=0)
    generate(http, sampling_params=warm)
    generate(http, sampling_params=sampling(temperature=1e-7), return_logprob=True)
    assert [added.params.tempered_logprobs for added in engine.added] == [True, False, True]
    assert [added.params.greedy for added in engine.added] == [False, False, True]


def test_a_batch_says_of_each_prompt_what_it_wants(http: FlaskClient, engine: FakeEngine) -> None:
    found = generate(
        http,
        [[5, 6], [7, 8, 9]],
        sampling_params=[sampling(max_new_tokens=1), sampling(max_new_tokens=4, stop="zzz")],
        rid=["one", "other"],
        return_logprob=[False, True],
        top_logprobs_num=[1, 2],
        logprob_start_len=[0, -1],
        lora_path=[None, ""],
        bootstrap_room=[1, 2],
    )
    assert [one["output_ids"] for one in found] == [[5], [7, 8, 9, 7]]
    assert [one["meta_info"]["id"] for one in found] == ["one", "other"]
    assert "output_token_logprobs" not in found[0]["meta_info"]
    assert len(found[1]["meta_info"]["output_top_logprobs"]) == 4
    assert [added.params.max_tokens for added in engine.added] == [1, 4]
    assert [added.params.stop for added in engine.added] == [(), ("zzz",)]


def test_n_answers_to_each_prompt_stand_one_behind_the_other(http: FlaskClient) -> None:
    found = generate(http, [[5, 6, 7], [8, 9]], sampling_params=sampling(n=2, max_new_tokens=2))
    assert [one["output_ids"] for one in found] == [[5, 6], [6, 7], [8, 9], [9, 8]]
    (first, second) = generate(http, sampling_params=sampling(n=2), rid="mine")
    assert first["meta_info"]["id"] == second["meta_info"]["id"] == "mine"
    (one,) = generate(http, [[5, 6, 7]])
    assert one["output_ids"] == [5, 6, 7], "a list is answered by a list"


def test_what_has_ended_an_answer_is_named(http: FlaskClient, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("ab!STOPcd")

    def ended(**params: Any) -> tuple[str, Any]:
        answer = generate(http, prompt, sampling_params=sampling(max_new_tokens=9, **params))
        return answer["text"], answer["meta_info"]["finish_reason"]

    (bang,) = tokenizer.encode("!")
    assert ended(stop_token_ids=[bang]) == ("ab", {"type": "stop", "matched": bang})
    assert ended(stop=["x", "STOP"]) == ("ab!", {"type": "stop", "matched": "STOP"})
    assert ended(stop="STOP", no_stop_trim=True)[0] == "ab!STOP"
    assert ended(stop_token_ids=[bang], no_stop_trim=True)[0] == "ab!"
    answer = generate(
        http,
        prompt,
        sampling_params=sampling(max_new_tokens=9, stop_token_ids=[bang]),
        return_logprob=True,
    )
    assert answer["output_ids"] == prompt[:3], "with the id that ended it"
    assert len(answer["meta_info"]["output_token_logprobs"]) == 3


def test_the_end_of_a_complete_grammar_is_its_last_token(
    http: FlaskClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The fake engine follows no grammar; what the real one says of such an end has no id.
    def complete(*key: Any) -> RequestEvent:
        event = FakeEngine._advance(engine, *key)
        if event.finish_reason is not None:
            event.finish_reason = FinishReason.STOP
        return event

    monkeypatch.setattr(engine, "_advance", complete)
    answer = generate(http, sampling_params=sampling(regex="[0-9]"))
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 7}


def test_events_have_all_that_there_is_so_far(http: FlaskClient) -> None:
    body = generate_body(return_logprob=True, top_logprobs_num=1, return_prompt_token_ids=True)
    events = streamed(http, GENERATE, body)
    lengths = [len(event["output_ids"]) for event in events]  # some may come together
    assert lengths == sorted(set(lengths)) and lengths[-1] == 3
    assert all(
        [5, 6, 7][:count] == event["output_ids"]
        for count, event in zip(lengths, events, strict=True)
    )
    assert all(event["meta_info"]["finish_reason"] is None for event in events[:-1])
    assert all(event["prompt_token_ids"] == [5, 6, 7] for event in events)
    assert "e2e_latency" not in events[0]["meta_info"] or len(events) == 1
    assert "index" not in events[0]
    whole = generate(http, return_logprob=True, top_logprobs_num=1, return_prompt_token_ids=True)
    for answer in (whole, events[-1]):
        for own in ("id", "e2e_latency", "cached_tokens"):
            del answer["meta_info"][own]
    assert events[-1] == whole


def test_events_of_several_answers_have_their_index(http: FlaskClient) -> None:
    events = streamed(http, GENERATE, generate_body([[5, 6], [7]], sampling_params=sampling(n=2)))
    last = {event["index"]: event["output_ids"] for event in events}
    assert last == {0: [5, 6, 5], 1: [6, 5, 6], 2: [7, 7, 7], 3: [7, 7, 7]}


def test_keys_that_change_nothing_are_taken(http: FlaskClient) -> None:
    asked = {
        "session_id": "s",
        "conversation_id": "c",
        "routing_key": "k",
        "routed_dp_rank": 0,
        "data_parallel_rank": 0,
        "disagg_prefill_dp_rank": 1,
        "kv_router_hint": {"block_hashes": []},
        "bootstrap_host": "h",
        "bootstrap_port": 8998,
        "bootstrap_room": 2**40,
        "bootstrap_pair_key": "p",
        "decode_tp_size": 2,
        "log_metrics": False,
        "no_logs": True,
        "custom_labels": {"a": "b"},
        "external_trace_header": {},
        "received_time": 1.5,
        "lora_path": "",
        "token_ids_logprob": [],
        "return_routed_experts": False,
        "routed_experts_start_len": 0,
        "image_data": [],
        "return_hidden_states": False,
        "background": False,
        "model": "fake",
    }
    assert generate(http, **asked)["output_ids"] == [5, 6, 7]


def test_two_salts_share_nothing(http: FlaskClient, engine: FakeEngine) -> None:
    for salts in (
        {},
        {"cache_salt": "a"},
        {"extra_key": "a"},
        {"cache_salt": "a", "extra_key": ""},
    ):
        generate(http, **salts)
    generate(http, cache_salt="a", extra_key="b")
    salts = [added.cache_salt for added in engine.added]
    assert salts[1] == salts[3] and len(set(salts)) == 4
    generate(http, priority=MAX_PRIORITY)


def test_cached_tokens_are_left_out_where_they_are_not_to_be_told(
    running: RunningLoop, tokenizer: Tokenizer, options: ServerOptions
) -> None:
    silent = options.replace(report_cached_tokens=False)
    http = create_app(running.serve(tokenizer, silent)).test_client()
    assert "cached_tokens" not in generate(http)["meta_info"]
