"""Good requests: the shapes of OpenAI's answers, streamed and not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flask.testing import FlaskClient

from megatron_hybrid.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.running import wait_until

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
GREEDY = {"temperature": 0, "max_tokens": 6}


def complete(http: FlaskClient, prompt: Any, **fields: Any) -> dict[str, Any]:
    answer = http.post(COMPLETION, json={**GREEDY, "prompt": prompt, **fields})
    assert answer.status_code == 200, answer.data
    return dict(answer.get_json())


def chat(http: FlaskClient, content: Any, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    answer = http.post(CHAT, json={**GREEDY, "messages": messages, **fields})
    assert answer.status_code == 200, answer.data
    return dict(answer.get_json())


def events(http: FlaskClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a streamed answer; its frame is checked on the way."""
    answer = http.post(path, json={**GREEDY, "stream": True, **body})
    assert answer.status_code == 200, answer.data
    assert answer.mimetype == "text/event-stream"
    parts = answer.get_data(as_text=True).split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    assert all(part.startswith("data: ") for part in parts[:-1])
    return [json.loads(part[len("data: ") :]) for part in parts[:-2]]


def test_a_completion_has_openais_shape(http: FlaskClient, tokenizer: Tokenizer) -> None:
    prompt = "ab cd, ef: gh; ij"
    answer = complete(http, prompt)
    length = len(tokenizer.encode(prompt))
    assert length > 6
    assert answer["object"] == "text_completion"
    assert answer["model"] == "fake"
    assert answer["id"].startswith("cmpl-")
    text = tokenizer.decode(tokenizer.encode(prompt)[:6])
    assert answer["choices"] == [
        {"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}
    ]
    assert answer["usage"] == {
        "prompt_tokens": length,
        "completion_tokens": 6,
        "total_tokens": length + 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_chat_has_openais_shape(http: FlaskClient) -> None:
    answer = chat(http, "Hello")
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": choice["message"]["content"],
        "refusal": None,
    }
    assert "Hello".startswith(choice["message"]["content"]) or choice["message"]["content"]


def test_the_second_request_reports_cached_tokens_unless_its_salt_differs(
    http: FlaskClient,
) -> None:
    def cached(**fields: Any) -> int:
        usage = complete(http, list(range(5, 25)), **fields)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached() == 0
    assert cached() == 16
    assert cached(cache_salt="mine") == 0
    assert http.post("/reset_prefix_cache").status_code == 200
    assert cached() == 0


def test_every_form_of_prompt_gives_its_choices_in_order(
    http: FlaskClient, tokenizer: Tokenizer
) -> None:
    first, second = "abc def", "xyz uvw"
    ids = [tokenizer.encode(first), tokenizer.encode(second)]
    texts = [complete(http, prompt)["choices"][0]["text"] for prompt in (first, second)]
    assert texts[0] != texts[1]
    for prompt in ([first, second], ids):
        choices = complete(http, prompt)["choices"]
        assert [choice["index"] for choice in choices] == [0, 1]
        assert [choice["text"] for choice in choices] == texts
    assert complete(http, ids[0])["choices"][0]["text"] == texts[0]


def test_choices_draw_from_their_own_streams_and_a_seed_repeats_them(http: FlaskClient) -> None:
    sampled = {"temperature": 1.0, "max_tokens": 8, "ignore_eos": True}

    def texts(seed: int, n: int) -> list[str]:
        return [c["text"] for c in complete(http, "Hello", seed=seed, n=n, **sampled)["choices"]]

    three = texts(7, 3)
    assert len(set(three)) == 3
    assert texts(7, 3) == three
    assert texts(7, 1) == three[:1]
    assert texts(8, 3) != three
    assert len(texts(-1, 2)) == 2


def test_several_choices_count_their_prompt_once(http: FlaskClient, tokenizer: Tokenizer) -> None:
    usage = complete(http, ["Hello", "Hello you"], n=3)["usage"]
    both = len(tokenizer.encode("Hello")) + len(tokenizer.encode("Hello you"))
    assert usage["prompt_tokens"] == both
    assert usage["completion_tokens"] == 6 * 6


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_and_aborts_the_request(
    http: FlaskClient, engine: FakeEngine, stream: bool
) -> None:
    engine.step_seconds = 0.05  # else it has ended before anybody can abort it
    prompt = "one two three STOP four"
    body = {"prompt": prompt, "stop": ["STOP"], "max_tokens": 90}
    if stream:
        chunks = events(http, COMPLETION, body)
        choices = [chunk["choices"][0] for chunk in chunks]
        text = "".join(choice["text"] for choice in choices)
        reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    else:
        choice = complete(http, prompt, stop="STOP", max_tokens=90)["choices"][0]
        text, reasons = choice["text"], [choice["finish_reason"]]
    assert text == "one two three "
    assert reasons == ["stop"]
    wait_until(lambda: any(line.startswith("abort") for line in engine.log))


def test_the_end_of_sequence_ends_the_answer_unless_ignored(
    http: FlaskClient, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode("ab<eos>cd")
    answer = complete(http, prompt, max_tokens=20)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["text"] == "ab"
    assert answer["usage"]["completion_tokens"] == 3
    answer = complete(http, prompt, max_tokens=5, ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["text"] == "abcd"


def test_a_stop_token_is_counted_but_not_shown(http: FlaskClient, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("x!z")
    stop = tokenizer.encode("!")
    answer = complete(http, prompt, stop_token_ids=stop)
    assert answer["choices"][0]["text"] == "x"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 2


def test_a_completion_asks_for_16_tokens_and_a_chat_for_the_rest_of_the_context(
    http: FlaskClient,
) -> None:
    usage = complete(http, "Hello", max_tokens=None)["usage"]
    assert usage["completion_tokens"] == 16
    usage = complete(http, [7] * 120, max_tokens=None)["usage"]
    assert usage["completion_tokens"] == 8
    usage = chat(http, "Hello", max_tokens=None, ignore_eos=True)["usage"]
    assert usage["total_tokens"] == FakeEngine.max_seq_length


def test_a_streamed_completion_adds_up_to_the_whole(
    http: FlaskClient, tokenizer: Tokenizer
) -> None:
    prompt = "naïve 日本 😀 text"
    length = len(tokenizer.encode(prompt))
    whole = complete(http, prompt, max_tokens=length)
    assert whole["choices"][0]["text"] == prompt
    chunks = events(http, COMPLETION, {"prompt": prompt, "max_tokens": length})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert all("\ufffd" not in chunk["choices"][0]["text"] for chunk in chunks)
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert all("usage" not in chunk for chunk in chunks)


def test_a_streamed_chat_begins_with_the_role_and_ends_with_the_reason(http: FlaskClient) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hello"}],
        "stream_options": {"include_usage": True},
        "n": 2,
        "ignore_eos": True,
    }
    chunks = events(http, CHAT, body)
    *chunks, last = chunks
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12
    assert all(chunk["usage"] is None for chunk in chunks)
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    for index in range(2):
        deltas = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
        assert deltas[-1]["finish_reason"] == "length"
        assert deltas[-1]["delta"] == {}
        assert all(delta["finish_reason"] is None for delta in deltas[:-1])


def test_streamed_choices_of_several_prompts_carry_their_index(http: FlaskClient) -> None:
    chunks = events(http, COMPLETION, {"prompt": ["abc", "xyz"]})
    texts = {index: "" for index in range(2)}
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts[0].startswith("abc")
    assert texts[1].startswith("xyz")


def test_chat_logprobs_have_bytes_and_alternatives(http: FlaskClient) -> None:
    answer = chat(http, "Hello", logprobs=True, top_logprobs=2, ignore_eos=True)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 6
    for entry in content:
        assert entry["logprob"] == -0.5
        assert len(entry["top_logprobs"]) == 2
        assert isinstance(entry["token"], str)
        assert all(0 <= byte < 256 for byte in entry["bytes"])
    assert (
        chat(http, "Hello", logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        == []
    )


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs_line_up_with_the_text(http: FlaskClient, stream: bool) -> None:
    body = {"prompt": "abc def ghi", "logprobs": 3}
    if stream:
        choices = [chunk["choices"][0] for chunk in events(http, COMPLETION, body)]
    else:
        choices = complete(http, **body)["choices"]
    text = "".join(choice["text"] for choice in choices)
    lists = [choice["logprobs"] for choice in choices]
    tokens = [token for one in lists for token in one["tokens"]]
    offsets = [offset for one in lists for offset in one["text_offset"]]
    assert "".join(tokens) == text
    assert all(text[at:].startswith(token) for token, at in zip(tokens, offsets, strict=True))
    assert [value for one in lists for value in one["token_logprobs"]] == [-0.5] * 6
    assert all(len(top) == 3 for one in lists for top in one["top_logprobs"])


def test_text_parts_and_template_arguments_reach_the_prompt(
    http: FlaskClient, tokenizer: Tokenizer
) -> None:
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "you"}]
    body = {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": parts},
        ],
        "chat_template_kwargs": {"greeting": "Sure:"},
    }
    tokens = http.post("/tokenize", json=body).get_json()["tokens"]
    assert tokenizer.decode(tokens, skip_special_tokens=False) == (
        "<|system|>Be brief.<eos><|user|>Hello\nyou<eos><|assistant|>Sure:"
    )
    assert http.post(CHAT, json={**GREEDY, **body}).status_code == 200


def test_an_answer_of_ours_can_be_sent_back(http: FlaskClient) -> None:
    message = chat(http, "Hello")["choices"][0]["message"]
    sent_back = {**message, "annotations": [], "audio": None, "tool_calls": None}
    messages = [{"role": "user", "content": "a"}, sent_back, {"role": "user", "content": "b"}]
    assert http.post(CHAT, json={**GREEDY, "messages": messages}).status_code == 200


def test_tokenize_and_detokenize_are_inverse(http: FlaskClient) -> None:
    text = "Hello, 日本 😀"
    answer = http.post("/tokenize", json={"prompt": text}).get_json()
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == FakeEngine.max_seq_length
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).get_json() == {
        "prompt": text
    }


CONTINUOUS = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@pytest.mark.parametrize("extra", [{}, {"return_token_ids": True}, {"logprobs": 1}])
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_usage_in_every_chunk_counts_up_to_the_last_ones(
    http: FlaskClient, path: str, extra: dict[str, Any]
) -> None:
    asked: dict[str, Any] = {"prompt": ["Hello there", "ab"]}
    if path == CHAT:
        asked = {"messages": [{"role": "user", "content": "Hello"}]}
        extra = {name: bool(value) for name, value in extra.items()}
    body = {**asked, "max_tokens": 5, "n": 2, **extra}
    *chunks, last = events(http, path, {**body, **CONTINUOUS})
    assert last["choices"] == []
    by_choice: dict[int, list[dict[str, Any]]] = {}
    for chunk in chunks:
        usage = chunk["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        by_choice.setdefault(chunk["choices"][0]["index"], []).append(usage)
    assert sorted(by_choice) == ([0, 1] if path == CHAT else [0, 1, 2, 3])
    for usages in by_choice.values():
        written = [usage["completion_tokens"] for usage in usages]
        assert written == sorted(written) and written[-1] == 5
        assert written[0] == 0 or path == COMPLETION, "a role is no token"
        assert len({usage["prompt_tokens"] for usage in usages}) == 1
        assert set(usages[0]) == set(last["usage"])
    prompts = sum(by_choice[index][0]["prompt_tokens"] for index in sorted(by_choice)[::2])
    assert prompts == last["usage"]["prompt_tokens"]
    written = sum(usages[-1]["completion_tokens"] for usages in by_choice.values())
    assert written == last["usage"]["completion_tokens"]


def test_usage_in_every_chunk_goes_only_with_usage_at_the_end(http: FlaskClient) -> None:
    for wanted in ({"continuous_usage_stats": True}, {"include_usage": False}):
        chunks = events(http, COMPLETION, {"prompt": "Hello", "stream_options": wanted})
        assert not any("usage" in chunk for chunk in chunks)
    chunks = events(
        http, COMPLETION, {"prompt": "Hello", "stream_options": {"include_usage": True}}
    )
    assert {str(chunk["usage"]) for chunk in chunks[:-1]} == {"None"}
