"""Large bodies are prepared in other processes: with the same answers, and no harm if one dies."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from worst_bodies import WORST_BODIES, WorstBody

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.server.http.app import create_app
from megatron_hybrid.server.http.preparation import Preparation
from megatron_hybrid.server.http.preparers import Preparers, serve
from megatron_hybrid.server.http.serving import MOST_BYTES_HERE, Serving
from megatron_hybrid.server.keys import ApiKey
from megatron_hybrid.server.link.answer_memory import AnswerMemoryClient
from megatron_hybrid.server.link.messages import EngineReady
from megatron_hybrid.server.options import ServerOptions
from megatron_hybrid.text.tokenizer import Tokenizer
from tests.server.conftest import RunningLoop
from tests.thorough import usually

MESSAGES = "/v1/messages"
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
GREEDY = {"temperature": 0, "max_tokens": 4}
LARGE = MOST_BYTES_HERE + 1
TOOLS = [
    {
        "type": "function",
        "function": {"name": f"f{number}", "description": "a" * 2000, "parameters": {}},
    }
    for number in range(10)
]


class Children:
    """In the place of the processes, threads: what they are given, and how they may die."""

    def __init__(self, folder: Path, preparation: Preparation) -> None:
        self.path = f"{folder}/preparers"
        self.dies = False
        self.count = 0
        self._preparation = preparation
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            self.count += 1
            threading.Thread(target=self._live, args=(connection,), daemon=True).start()

    def _live(self, connection: socket.socket) -> None:
        with connection:
            if self.dies:
                connection.recv(1)
            else:
                serve(connection, self._preparation)


@pytest.fixture
def children(
    running: RunningLoop,
    tokenizer: Tokenizer,
    options: ServerOptions,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Children]:
    folder = tmp_path_factory.mktemp("s")
    memory = AnswerMemoryClient(running.endpoint.replace("engine", "answers"))
    yield Children(folder, Preparation(tokenizer, options, lambda: memory))
    memory.close()


@pytest.fixture
def apart(
    running: RunningLoop, tokenizer: Tokenizer, options: ServerOptions, children: Children
) -> FlaskClient:
    """A server that lets children prepare large bodies."""
    preparers = Preparers(children.path, 2)
    return create_app(
        Serving(running.engines, tokenizer, options, running.answers, preparers)
    ).test_client()


def ask(http: FlaskClient, path: str, body: bytes | dict[str, Any]) -> tuple[int, Any]:
    """The answer to a body that is large if only by white space, without what differs from one
    request to the next."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode().ljust(LARGE)
    answer = http.post(path, data=data, content_type="application/json")
    content = answer.get_json()
    for name in ("id", "created", "usage"):
        content.pop(name, None)
    return answer.status_code, content


def chat(*contents: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": one} for i, one in enumerate(contents)]
    return CHAT, {"messages": messages, **GREEDY, **fields}


SERVED = {
    "a chat": chat("Hello"),
    "a chat in turns": chat("Hello", "Hi", "How are you?"),
    "a chat with token ids": chat("Hello", return_token_ids=True),
    "a chat with tools": chat("Hello", tools=TOOLS),
    "a chat that calls": chat("Hello", tools=TOOLS, tool_choice="required"),
    "a message": (MESSAGES, chat("Hello", "Hi", "How are you?")[1]),
    "tokens of a message": (f"{MESSAGES}/count_tokens", chat("Hello you " * 5000)[1]),
    "a text": (COMPLETION, {"prompt": "Hello", "n": 2, **GREEDY}),
    "texts": (COMPLETION, {"prompt": ["Hello", "you"], **GREEDY}),
    "ids": (COMPLETION, {"prompt": [5, 6], "echo": True, **GREEDY}),
    "an echo": (COMPLETION, {"prompt": "Hello", "echo": True, "logprobs": 1, **GREEDY}),
    "no text": (COMPLETION, {"prompt": "Hello", "logit_bias": {"5": 1e9}}),
    "a wrong model": (COMPLETION, {"prompt": "Hello", "model": "another"}),
    "a wrong position": (COMPLETION, {"prompt": "Hello", "cache_checkpoints": [99]}),
    "tokens of a text": ("/tokenize", {"prompt": "Hello you " * 5000}),
    "tokens of a chat": ("/tokenize", chat("Hello you " * 5000)[1] | {"max_tokens": None}),
    "text of tokens": ("/detokenize", {"tokens": [5, 6] * 10_000}),
}


@pytest.mark.parametrize("name", SERVED)
def test_a_large_request_is_answered_as_it_would_be_here(
    name: str, http: FlaskClient, apart: FlaskClient, children: Children
) -> None:
    path, body = SERVED[name]
    if name == "tokens of a chat":
        body = {"messages": body["messages"]}
    expected = ask(http, path, body)
    assert ask(apart, path, body) == expected
    assert children.count == 1


@pytest.mark.parametrize(
    "worst", usually(WORST_BODIES[::3], WORST_BODIES), ids=lambda worst: worst.name
)
def test_the_worst_bodies_get_the_same_answers_from_another_process(
    worst: WorstBody, http: FlaskClient, apart: FlaskClient
) -> None:
    body = worst.body(4 * LARGE)
    status, content = ask(http, worst.path, body)
    assert status < 500
    assert ask(apart, worst.path, body) == (status, content)


def test_small_bodies_are_prepared_here(apart: FlaskClient, children: Children) -> None:
    head = len(json.dumps({"prompt": "", **GREEDY}))
    for length, count in ((MOST_BYTES_HERE, 0), (LARGE, 1)):
        apart.post(COMPLETION, json={"prompt": " " * (length - head), **GREEDY})
        assert children.count == count


def test_what_an_answer_was_is_found_again_by_another_process(
    apart: FlaskClient, running: RunningLoop
) -> None:
    path, body = chat("Hello you")
    first = ask(apart, path, body)[1]["choices"][0]["message"]["content"]
    ask(apart, *chat("Hello you", first, "Hello"))
    one, two = (added.prompt for added in running.engine.added)
    assert two[: len(one)] == one


def test_a_keys_salt_is_the_same_in_another_process(
    running: RunningLoop, tokenizer: Tokenizer, options: ServerOptions, children: Children
) -> None:
    keyed = dataclasses.replace(
        options, api_keys=(ApiKey("sesame", "door"),), cache_salt_per_key=True
    )
    preparers = Preparers(children.path, 2)
    app = create_app(Serving(running.engines, tokenizer, keyed, running.answers, preparers))
    http, key = app.test_client(), {"Authorization": "Bearer sesame"}
    for path, body in (SERVED["a text"], SERVED["a chat"]):
        for length in (0, LARGE):
            data = json.dumps({**body, "cache_salt": "mine"}).encode().ljust(length)
            http.post(path, data=data, content_type="application/json", headers=key)
    salts = {added.cache_salt for added in running.engine.added}
    assert len(salts) == 1 and not salts & {"", "mine"}
    assert children.count == 1


def test_a_process_that_dies_fails_one_request(apart: FlaskClient, children: Children) -> None:
    path, body = SERVED["a text"]
    assert ask(apart, path, body)[0] == 200
    children.dies = True
    idle, _ = ask(apart, path, body)  # the one that waits for more is alive
    assert idle == 200
    ask(apart, path, b" " * 2**20 + json.dumps(body).encode())  # it ends with a huge one
    status, answer = ask(apart, path, body)
    assert (status, answer["error"]["code"]) == (503, "preparation_lost")
    children.dies = False
    assert ask(apart, path, body)[0] == 200


def limits(tokens: int) -> EngineReady:
    return EngineReady(tokens, 1000, (), max_seq_length_flag="--inference-max-seq-length")


@pytest.mark.parametrize(
    "make",
    [
        lambda text: ("chat", {"messages": [{"role": "user", "content": text}]}),
        lambda text: ("completion", {"prompt": text}),
        lambda text: ("completion", {"prompt": ["Hello", text]}),
        lambda text: ("tokenize", {"prompt": text}),
    ],
)
def test_a_text_that_cannot_fit_is_not_encoded(
    make: Callable[[str], tuple[str, dict[str, Any]]],
    tokenizer: Tokenizer,
    options: ServerOptions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preparation = Preparation(tokenizer, options)
    lengths: list[int] = []
    encode = tokenizer.encode

    def note(text: str, **options: Any) -> list[int]:
        lengths.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", note)
    monkeypatch.setattr("megatron_hybrid.server.http.preparation.LEAST_LONGEST_TEXT", 0)
    name, body = make("a" * 100 * tokenizer.most_characters_of_a_token)
    with pytest.raises(InvalidRequestError, match=r"characters; the limit .* is 50 tokens") as it:
        getattr(preparation, name)(json.dumps(body).encode(), limits(50))
    assert it.value.status == 413
    assert lengths in ([], [5])


def test_a_token_has_no_more_characters_than_is_said(tokenizer: Tokenizer) -> None:
    most = tokenizer.most_characters_of_a_token
    assert all(
        len(tokenizer.decode([token], skip_special_tokens=False)) <= most
        for token in range(tokenizer.vocab_size)
    )


@pytest.mark.parametrize(
    "error",
    [InvalidRequestError("a", "b", 413), InvalidRequestError("a", "b", code="c")],
    ids=["400", "field"],
)
def test_errors_come_whole_from_another_process(error: InvalidRequestError) -> None:
    import pickle

    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_pieces_of_a_body_are_put_together(children: Children) -> None:
    body = json.dumps(SERVED["a text"][1]).encode()
    pieces: Sequence[bytes] = [body[start : start + 7] for start in range(0, len(body), 7)]
    prepared = Preparers(children.path, 1).prepare("completion", pieces, limits(128))
    assert prepared.generation.params.n == 2
