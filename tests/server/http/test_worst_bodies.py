"""What tools/worst_bodies.py sends, made small: an answer or a refusal, never a failure."""

from __future__ import annotations

import http.client
import io
import json

import pytest
from flask.testing import FlaskClient
from worst_bodies import WORST_BODIES, WorstBody, _pieces

SMALL = 40_000
NOT_JSON = {"open_lists", "no_end", "wrong_utf8", "wrong_utf8_at_the_end", "zeros"}
# Python's parser refuses them: numbers of more than 4,300 digits, and what is nested too deeply.
REFUSED_BY_PARSER = {"long_number", "nested_lists", "nested_objects"}


def test_none_is_a_failure_of_the_server(http: FlaskClient) -> None:
    statuses = {
        worst.name: http.post(
            worst.path, data=worst.body(SMALL), content_type="application/json"
        ).status_code
        for worst in WORST_BODIES
    }
    assert {name: status for name, status in statuses.items() if not 200 <= status < 500} == {}
    assert http.post("/tokenize", json={"prompt": "a"}).status_code == 200


@pytest.mark.parametrize("worst", WORST_BODIES, ids=lambda worst: worst.name)
def test_each_is_what_it_says(worst: WorstBody) -> None:
    body = worst.body(SMALL)
    assert SMALL // 5 < len(body) <= SMALL or worst.size < SMALL or len(body) == len(worst.body())
    if worst.name not in NOT_JSON | REFUSED_BY_PARSER:
        assert json.loads(body)


def test_their_names_differ() -> None:
    assert len({worst.name for worst in WORST_BODIES}) == len(WORST_BODIES)


@pytest.mark.parametrize("chunk", [1, 3, 1000, 2**16])
def test_a_body_in_chunks_arrives_whole(chunk: int) -> None:
    body = bytes(range(256)) * 600
    message = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(
        _pieces(body, chunk)
    )

    class Connection:
        def makefile(self, mode: str) -> io.BytesIO:
            return io.BytesIO(message)

    answer = http.client.HTTPResponse(Connection())
    answer.begin()
    assert answer.read() == body
