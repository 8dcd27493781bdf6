"""What is wrong with one request ends that request alone, in the engine's loop on every rank and in
the front end."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flask.testing import FlaskClient

from megatron_hybrid.request import RequestEvent, SamplingParams
from megatron_hybrid.server.link import messages as wire
from megatron_hybrid.server.loop.engine_loop import EngineLoop
from megatron_hybrid.text.answer_text import AnswerText
from megatron_hybrid.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.running import wait_until

COMPLETION = "/v1/completions"
LETTERS = "x!abcdefgh"  # a token each
GREEDY = {"temperature": 0, "max_tokens": 4}


class PickyEngine(FakeEngine):
    """Fails at whatever has 7 for its prompt, as late as it can."""

    def add_request(self, request_id: str, prompt_token_ids: Any, *args: Any, **kw: Any) -> None:
        super().add_request(request_id, prompt_token_ids, *args, **kw)
        if list(prompt_token_ids) == [7]:
            raise MemoryError("no room for a grammar")


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeEngine:
    return PickyEngine(tokenizer.vocab_size, tokenizer.eos_token_ids)


def test_what_raises_when_it_is_added_is_answered_with_500(
    http: FlaskClient, engine: FakeEngine
) -> None:
    for n in (1, 3):
        answer = http.post(COMPLETION, json={**GREEDY, "prompt": [7], "n": n})
        error = answer.get_json()["error"]
        assert (answer.status_code, error["code"]) == (500, "engine_error")
        assert "could not take the request: MemoryError: no room" in error["message"]
        whole = http.post(COMPLETION, json={**GREEDY, "prompt": LETTERS}).get_json()
        assert whole["choices"][0]["text"] == "x!ab"
    stream = http.post(COMPLETION, json={**GREEDY, "prompt": [7], "stream": True})
    assert b"no room for a grammar" in stream.get_data()
    wait_until(lambda: not engine.has_work())


def test_a_rank_without_a_socket_goes_on_alike(tokenizer: Tokenizer) -> None:
    engine = PickyEngine(tokenizer.vocab_size, tokenizer.eos_token_ids)
    loop = EngineLoop(engine, None, broadcast=lambda commands: commands)
    params = SamplingParams(max_tokens=1)
    for name, prompt in (("a-0", [7]), ("b-0", [8])):
        loop._apply(wire.AddRequest(name, wire.packed(prompt), params))
    assert list(loop._requests._owned) == ["b-0"]
    assert loop._step() and not loop._requests
    assert not engine.has_work()


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_whose_text_raises_is_an_error_of_its_own(
    http: FlaskClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    take = AnswerText.take

    def picky(self: AnswerText, event: RequestEvent) -> Any:
        if event.prompt_tokens == 3 and event.finish_reason is not None:
            raise KeyError("no such token")
        return take(self, event)

    monkeypatch.setattr(AnswerText, "take", picky)
    beside = http.post(COMPLETION, json={**GREEDY, "prompt": LETTERS, "stream": True})
    bad = http.post(COMPLETION, json={**GREEDY, "prompt": "abc", "stream": stream})
    assert bad.status_code == 500 or stream  # which may have begun
    assert b"server_error" in bad.get_data()
    chunks = beside.get_data(as_text=True).split("\n\n")[:-2]
    texts = [json.loads(chunk.removeprefix("data: "))["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == "x!ab"
