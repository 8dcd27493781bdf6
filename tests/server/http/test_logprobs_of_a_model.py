"""Log-probabilities and token ids of the reference model: every list says the same of a choice."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flask.testing import FlaskClient

from tests.thorough import A_THIRD

COMPLETION = "/v1/completions"
PROMPT = "The code of the north gate is 7313 – naïve 日本. Where is the gate"
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def choices(http: FlaskClient, stream: bool, **body: Any) -> list[dict[str, Any]]:
    """The choices, whole; of a stream, put together from its chunks."""
    answer = http.post(COMPLETION, json={"return_token_ids": True, **body, "stream": stream})
    assert answer.status_code == 200, answer.data
    if not stream:
        return list(answer.get_json()["choices"])
    whole: dict[int, dict[str, Any]] = {}
    for event in answer.get_data(as_text=True).split("\n\n")[:-2]:
        (piece,) = json.loads(event.removeprefix("data: "))["choices"]
        choice = whole.setdefault(piece["index"], piece)
        if choice is not piece:
            choice["text"] += piece["text"]
            choice["token_ids"] += piece["token_ids"]
            choice["finish_reason"] = piece["finish_reason"]
            for name in LISTS:
                choice["logprobs"][name] += piece["logprobs"][name]
    return [whole[index] for index in sorted(whole)]


def tokenized(http: FlaskClient, prompt: str) -> list[int]:
    return list(http.post("/tokenize", json={"prompt": prompt}).get_json()["tokens"])


@A_THIRD
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 20.0])  # 20: any token, also parts of characters
def test_every_list_has_an_entry_for_every_token_of_every_choice(
    reference_http: FlaskClient, stream: bool, echo: bool, temperature: float
) -> None:
    prompts = [PROMPT, "Who is"]
    body = {"prompt": prompts, "n": 3, "temperature": temperature, "seed": 5, "max_tokens": 9}
    got = choices(reference_http, stream, **body, echo=echo, logprobs=2)
    assert len(got) == 6
    for index, choice in enumerate(got):
        prompt = prompts[index // 3]
        ids = tokenized(reference_http, prompt)
        assert choice["prompt_token_ids"] == ids
        before = len(ids) if echo else 0
        lists = choice["logprobs"]
        length = before + len(choice["token_ids"])
        assert [len(lists[name]) for name in LISTS] == [length] * 4
        assert choice["text"].startswith(prompt) or not echo
        assert choice["finish_reason"] in ("stop", "length")
        offsets = lists["text_offset"]
        assert offsets == sorted(offsets)
        assert offsets[0] == 0 and offsets[-1] <= len(choice["text"])
        if echo:
            assert offsets[before] == len(prompt)
            assert lists["token_logprobs"][0] is lists["top_logprobs"][0] is None
        start = 1 if echo else 0
        for token, logprob, top, offset in list(zip(*(lists[n] for n in LISTS), strict=True))[
            start:
        ]:
            assert logprob <= 0 and len(top) >= 1
            assert all(other <= max(top.values()) for other in (logprob, *top.values()))
            if not token.startswith(("bytes:", "<|")):
                assert choice["text"][offset:].startswith(token)


def test_choices_of_a_prompt_agree_about_it(reference_http: FlaskClient) -> None:
    body = {"prompt": PROMPT, "n": 3, "temperature": 1.0, "seed": 1, "max_tokens": 2}
    got = choices(reference_http, False, **body, echo=True, logprobs=3)
    length = len(got[0]["prompt_token_ids"])
    first, *others = [[c["logprobs"][name][:length] for name in LISTS] for c in got]
    assert others == [first, first]


@pytest.mark.parametrize("n", [1, 2])
def test_an_answer_scored_as_a_prompt_has_the_logprobs_that_it_was_given(
    reference_http: FlaskClient, n: int
) -> None:
    """With `echo` and no new tokens, which is how prompts are scored."""
    body = {"prompt": PROMPT, "temperature": 1.0, "seed": 3, "max_tokens": 12, "logprobs": 0}
    for choice in choices(reference_http, False, **body, n=n):
        prompt = choice["prompt_token_ids"] + choice["token_ids"]
        (scored,) = choices(
            reference_http, False, prompt=prompt, echo=True, logprobs=0, max_tokens=0
        )
        assert scored["token_ids"] == []
        lists = scored["logprobs"]
        assert len(lists["tokens"]) == len(prompt)
        assert lists["tokens"][-len(choice["token_ids"]) :] == choice["logprobs"]["tokens"]
        assert lists["token_logprobs"][-len(choice["token_ids"]) :] == pytest.approx(
            choice["logprobs"]["token_logprobs"], abs=1e-3
        )


def test_the_end_has_a_logprob_only_beside_its_id(reference_http: FlaskClient) -> None:
    """`stop` by an id: OpenAI's lists do not know it, but whoever trains on the ids needs it."""
    messages = [{"role": "user", "content": "Who are you?"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 60, "logprobs": True}

    def ended(**fields: Any) -> tuple[Any, int, int]:
        answer = reference_http.post("/v1/chat/completions", json={**body, **fields}).get_json()
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "stop"
        entries = len(choice["logprobs"]["content"])
        return choice.get("token_ids"), entries, answer["usage"]["completion_tokens"]

    ids, entries, tokens = ended()
    assert (ids, entries) == (None, tokens - 1)
    ids, entries, tokens = ended(return_token_ids=True)
    assert len(ids) == entries == tokens
