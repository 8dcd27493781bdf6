"""A client sees of drafts only that the answer comes sooner."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from flask.testing import FlaskClient

from tests.server.conftest import reference_server
from tests.thorough import A_THIRD, usually

PROMPT = "The old town, the old harbour, the old town, the old harbour, the old"
COMPLETION = "/v1/completions"
BODY = {
    "prompt": PROMPT, "max_tokens": usually(40, 64), "seed": 5, "return_token_ids": True,
}  # fmt: skip


# test_oracle_mamba2.py has drafts of an engine that goes step by step.
@pytest.fixture(
    scope="module",
    params=usually([True], [False, True]),
    ids=usually(["in flight"], ["step by step", "in flight"]),
)
def drafting(
    request: pytest.FixtureRequest,
    reference_http: FlaskClient,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[FlaskClient]:
    folder = tmp_path_factory.mktemp("s")
    with reference_server(folder, num_speculative_tokens=6) as (http, running):
        running.engine.runner.asynchronous = request.param
        yield http
        # How many have held depends on when a stop string ended an answer. If too few: a long one.
        if accepted(http) <= 20:
            body = {**BODY, "temperature": 0.0, "max_tokens": usually(80, 200)}
            assert answer(http, body) == answer(reference_http, body)
        assert accepted(http) > 20


def accepted(http: FlaskClient) -> int:
    return int(http.get("/stats").get_json()["engine"]["accepted_tokens"])


def answer(http: FlaskClient, body: dict[str, Any]) -> dict[str, Any]:
    (choice,) = http.post(COMPLETION, json=body).get_json()["choices"]
    lists = choice.pop("logprobs")
    if lists is not None:
        choice["tokens"], choice["text_offset"] = lists["tokens"], lists["text_offset"]
        choice["token_logprobs"] = lists["token_logprobs"]
    return dict(choice)


def streamed_text(http: FlaskClient, body: dict[str, Any]) -> str:
    events = http.post(COMPLETION, json={**body, "stream": True}).get_data(as_text=True)
    pieces = [json.loads(event[6:]) for event in events.split("\n\n")[:-2]]
    return "".join(choice["text"] for piece in pieces for choice in piece["choices"])


@A_THIRD
@pytest.mark.parametrize("temperature, logprobs", [(0.0, 2), (0.7, None)])
@pytest.mark.parametrize("stop", usually([None, ["e o"]], [None, ["harbour, the"], ["e o"]]))
def test_answers_are_those_without_drafts(
    reference_http: FlaskClient,
    drafting: FlaskClient,
    stop: list[str] | None,
    temperature: float,
    logprobs: int | None,
) -> None:
    """Those that end within several tokens that come at once, too."""
    body = {**BODY, "temperature": temperature, "stop": stop, "logprobs": logprobs}
    expected = answer(reference_http, body)
    if logprobs is not None:
        expected["token_logprobs"] = pytest.approx(expected["token_logprobs"], abs=1e-3)
    assert answer(drafting, body) == expected
    assert streamed_text(drafting, body) == expected["text"]
