"""Stored responses over HTTP: read, listed, dropped, gone on with, and whose they are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flask.testing import FlaskClient

from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.keys import ApiKey
from megatron_hybrid.server.link.memory_socket import MemoryClient
from tests.server.http.responses.responding import (
    ADD,
    CALL,
    FOX,
    OPENED,
    PATH,
    Serve,
    Server,
    bearer,
)
from tests.server.http.responses.test_answers import check_types
from tests.text import thinking_templates as templates

UNKNOWN = f"resp_{'0' * 32}"
KEYS = (ApiKey("alices", "alice"), ApiKey("bobs", "bob"))


def get(server: Server, path: str, key: str = "", **query: Any) -> tuple[int, Any]:
    answer = server.http.get(f"{PATH}/{path}", query_string=query, headers=bearer(key))
    return answer.status_code, answer.get_json()


def drop(server: Server, name: str, key: str = "") -> tuple[int, Any]:
    answer = server.http.delete(f"{PATH}/{name}", headers=bearer(key))
    return answer.status_code, answer.get_json()


def listed(server: Server, name: str, **query: Any) -> list[dict[str, Any]]:
    status, found = get(server, f"{name}/input_items", **query)
    assert status == 200, found
    check_list(found)
    return list(found["data"])


def check_list(found: dict[str, Any]) -> None:
    check_types("response_item_list.ResponseItemList", found)
    ids = [one["id"] for one in found["data"]]
    assert (found["first_id"], found["last_id"]) == (ids[0], ids[-1])


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_can_be_read_again_until_it_is_dropped(serve: Serve, stream: bool) -> None:
    server = serve(templates.QWEN3_5, f"{OPENED}Look.\n{CALL}")
    more: dict[str, Any] = {"tools": [ADD], "metadata": {"a": "b"}}
    response = server.stream(**more)[-1]["response"] if stream else server.ask(**more)
    name = response["id"]
    assert get(server, name) == (200, response)
    check_types("Response", response)
    assert drop(server, name) == (200, {"id": name, "object": "response", "deleted": True})
    for status, found in (
        get(server, name),
        drop(server, name),
        get(server, f"{name}/input_items"),
    ):
        assert (status, found["error"]["param"]) == (404, "response_id")
        assert name in found["error"]["message"]
    assert server.refused(previous_response_id=name)[0] == 404


def test_one_that_was_cut_off_can_be_gone_on_with(serve: Serve) -> None:
    server = serve(templates.QWEN3, FOX)
    cut = server.ask(max_output_tokens=5)
    known = server.prompt + server.engine.ids[:5]
    server.ask("Go on", previous_response_id=cut["id"])
    assert server.prompt[: len(known)] == known


def test_what_is_not_to_be_stored_is_not(serve: Serve) -> None:
    server = serve(templates.QWEN3, FOX)
    response = server.ask(store=False)
    assert response["store"] is False
    assert get(server, response["id"])[0] == 404
    expected = (404, "previous_response_id", "previous_response_not_found")
    assert server.refused(previous_response_id=response["id"]) == expected


def test_a_server_may_store_nothing(serve: Serve) -> None:
    server = serve(templates.QWEN3, FOX, responses_store_gb=0.0)
    response = server.ask(store=True)
    assert response["store"] is False
    assert get(server, response["id"])[0] == drop(server, response["id"])[0] == 404
    assert server.refused(previous_response_id=response["id"])[0] == 404


def test_another_key_finds_nothing(serve: Serve) -> None:
    server = serve(templates.QWEN3, "one", FOX, api_keys=KEYS)
    name = server.ask(key="alices")["id"]
    item = {"type": "item_reference", "id": server.ask(key="alices")["output"][0]["id"]}
    for path in (name, f"{name}/input_items"):
        assert get(server, path, "alices")[0] == 200
        assert get(server, path, "bobs")[0] == 404
    assert drop(server, name, "bobs")[0] == 404
    assert server.refused(key="bobs", previous_response_id=name)[0] == 404
    assert server.refused([item], key="bobs") == (404, "input[0].id", "not_found")
    server.ask([item], key="alices", previous_response_id=name)
    assert "one" in server.said


def test_unknown_ids_are_not_found(serve: Serve) -> None:
    server = serve(templates.QWEN3, FOX)
    for name in (UNKNOWN, "resp_1", "a"):
        assert get(server, name)[0] == drop(server, name)[0] == 404
        code = server.refused(previous_response_id=name)[2]
        assert code == "previous_response_not_found"
    for item in ("msg_1", f"msg_{'0' * 32}_0", server.ask()["output"][0]["id"] + "0"):
        given = [{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": item}]
        assert server.refused(given) == (404, "input[1].id", "not_found")
    assert len(server.engine.added) == 1


def test_a_dropped_turn_ends_the_conversation(serve: Serve) -> None:
    server = serve(templates.QWEN3, FOX)
    first = server.ask()
    second = server.ask(previous_response_id=first["id"])
    drop(server, first["id"])
    assert get(server, second["id"])[0] == 200
    assert server.refused(previous_response_id=second["id"])[0] == 404


def test_the_items_that_a_response_answers_are_listed(serve: Serve) -> None:
    server = serve(templates.QWEN3_5, f"{OPENED}{CALL}", FOX)
    first = server.ask([{"role": "user", "content": "Hello", "id": "mine"}], tools=[ADD])
    call = first["output"][-1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
    again = {"role": "assistant", "content": "So"}
    second = server.ask([result, again, {"role": "user", "content": "And"}], **follow(first))
    items = listed(server, second["id"], order="asc")
    kinds = "message reasoning function_call function_call_output message message".split()
    assert [one["type"] for one in items] == kinds
    assert items[0]["id"] == "mine" and items[1:3] == first["output"]
    assert items[3]["output"] == "3" and items[3]["id"].startswith("fco_")
    assert items[4]["content"][0]["type"] == "output_text"
    assert items[5]["content"] == [{"type": "input_text", "text": "And"}]
    assert listed(server, second["id"]) == items[::-1]
    assert listed(server, first["id"]) == items[:1]
    # In pages.
    pages: list[dict[str, Any]] = []
    after: dict[str, str] = {}
    for _ in range(3):
        _, page = get(server, f"{second['id']}/input_items", limit=2, **after)
        pages += page["data"]
        assert page["has_more"] == (len(pages) < 6)
        after = {"after": page["last_id"]}
    assert pages == items[::-1]
    # What was listed is an input, too.
    server.ask(items[:-1], tools=[ADD])
    # Its items can be referred to.
    server.ask([{"type": "item_reference", "id": items[5]["id"]}])
    assert "And" in server.said


def follow(response: dict[str, Any]) -> dict[str, Any]:
    return {"previous_response_id": response["id"], "tools": [ADD]}


@pytest.mark.parametrize(
    ("path", "query", "field"),
    [
        ("", {"stream": "true"}, "stream"),
        ("", {"include": "everything"}, "include"),
        ("", {"starting_after": "1"}, "starting_after"),
        ("/input_items", {"limit": "0"}, "limit"),
        ("/input_items", {"limit": "101"}, "limit"),
        ("/input_items", {"limit": "many"}, "limit"),
        ("/input_items", {"order": "up"}, "order"),
        ("/input_items", {"after": "nothing"}, "after"),
    ],
)
def test_what_is_wrong_with_a_query_is_named(
    serve: Serve, path: str, query: dict[str, str], field: str
) -> None:
    server = serve(templates.QWEN3, FOX)
    name = server.ask()["id"]
    status, found = get(server, name + path, **query)
    assert (status, found["error"]["param"]) == (400, field)
    include = {"include[]": "message.output_text.logprobs", "stream": "false"}
    assert get(server, name, **include)[0] == 200


def test_only_responses_in_the_background_could_be_cancelled(serve: Serve) -> None:
    server = serve(templates.QWEN3, FOX)
    answer = server.http.post(f"{PATH}/{server.ask()['id']}/cancel")
    assert answer.status_code == 400
    assert "background" in answer.get_json()["error"]["message"]
    assert server.http.post(f"{PATH}/{UNKNOWN}/cancel").status_code == 404


def test_without_its_memory_a_response_is_answered_and_says_so_to_who_asks_again(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(templates.QWEN3, FOX)
    monkeypatch.setattr(MemoryClient, "ask", lambda self, payload: None)
    name = server.ask()["id"]
    status, found = get(server, name)
    assert (status, found["error"]["code"]) == (503, "responses_unavailable")
    answer = server.http.post(PATH, json={"input": "a", "previous_response_id": name})
    assert answer.status_code == 503 and answer.headers["Retry-After"] == "1"


def test_what_goes_on_from_a_stored_response_is_prepared_elsewhere(
    http: FlaskClient, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However short its body is: what is stored may be long."""
    seen = []

    class Elsewhere:
        def prepare(self, name: str, body: list[bytes], *more: Any) -> Any:
            seen.append(json.loads(b"".join(body))["input"])
            return getattr(serving._preparation, name)(b"".join(body), *more)

    monkeypatch.setattr(serving, "_preparers", Elsewhere())

    def ask(**body: Any) -> Any:
        answer = http.post(PATH, json={"max_output_tokens": 2, **body})
        assert answer.status_code == 200
        return answer.get_json()

    first = ask(input="Hello")
    assert seen == []
    reference = [{"type": "item_reference", "id": first["output"][0]["id"]}]
    ask(input="And?", previous_response_id=first["id"])
    ask(input=reference)
    assert seen == ["And?", reference]
