"""API keys: several, with names, from flags, files and the environment; admin keys; salts."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flask import g
from flask.testing import FlaskClient

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.server import cli
from megatron_hybrid.server.http.app import create_app
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.keys import (
    ADMIN_KEY_VARIABLE,
    API_KEY_VARIABLE,
    CONTROL_PATHS,
    ApiKey,
    Caller,
    KeyRing,
    check_distinct,
    read_keys,
)
from megatron_hybrid.server.options import ServerOptions
from megatron_hybrid.server.processes.launch import _environment
from tests.server.fake_engine import FakeEngine

PROMPT = {"prompt": "The code of the gate is 7315", "max_tokens": 2, "temperature": 0}
ALICE, BOB, ROOT = ApiKey("alpha", "alice"), ApiKey("beta", "bob"), ApiKey("omega", "root", True)
Make = Callable[..., FlaskClient]


@pytest.fixture
def make(serving: Serving, options: ServerOptions) -> Make:
    """The application with these keys and changed options."""

    def make(*keys: ApiKey, **changes: Any) -> FlaskClient:
        serving.options = dataclasses.replace(options, api_keys=keys, **changes)
        return create_app(serving).test_client()

    return make


def bearer(key: str, scheme: str = "Bearer") -> dict[str, str]:
    return {"Authorization": f"{scheme} {key}"}


def read(
    flags: list[str] | None = None, file: Path | None = None, *, admin: bool = False
) -> list[ApiKey]:
    path = None if file is None else str(file)
    flag, variable = ("--admin-api-key", ADMIN_KEY_VARIABLE) if admin else ("--api-key", "KEYS")
    return read_keys(flags, path, flag=flag, variable=variable, admin=admin)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", " bEaReR "])
def test_every_key_opens_and_the_log_can_know_whose_it_is(make: Make, scheme: str) -> None:
    http = make(ALICE, BOB)
    seen: list[str | None] = []
    http.application.after_request(lambda response: seen.append(g.key_name) or response)
    for key in ("alpha", "beta"):
        answer = http.post("/v1/completions", json=PROMPT, headers=bearer(key, scheme))
        assert answer.status_code == 200
    assert seen == ["alice", "bob"]


def test_what_is_no_key_opens_nothing(make: Make) -> None:
    http = make(ALICE, BOB)
    seen: list[str | None] = []
    http.application.after_request(lambda response: seen.append(g.key_name) or response)
    wrong = ["", "alph", "alphaa", "ALPHA", "alpha beta", "alpha,beta", "b\xe9ta", "alice"]
    for key in wrong:
        answer = http.post("/v1/completions", json=PROMPT, headers=bearer(key))
        assert answer.status_code == 401
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert answer.get_json()["error"]["code"] == "invalid_api_key"
    for header in ({}, {"Authorization": "alpha"}, bearer("alpha", "Basic")):
        assert http.get("/v1/models", headers=header).status_code == 401
    assert http.get("/health").status_code == 200
    assert set(seen) == {None} and len(seen) == len(wrong) + 4


def test_a_server_without_keys_knows_nobody(make: Make) -> None:
    http = make()
    with http:
        assert http.get("/stats", headers=bearer("alpha")).status_code == 200
        assert g.key_name is None


def test_with_admin_keys_others_do_not_control_the_server(make: Make, engine: FakeEngine) -> None:
    http = make(ALICE, ROOT)
    for path in CONTROL_PATHS:
        body = {"path": "b"} if path == "/update_weights" else {}
        answer = http.post(path, json=body, headers=bearer("alpha"))
        assert answer.status_code == 403
        assert "--admin-api-key" in answer.get_json()["error"]["message"]
        assert http.post(path, json=body).status_code == 401
    assert not engine.is_paused and not engine.log
    for path in ("/pause", "/resume", "/update_weights", "/reset_prefix_cache"):
        body = {"path": "b"} if path == "/update_weights" else {}
        assert http.post(path, json=body, headers=bearer("omega")).status_code == 200
    for path in CONTROL_PATHS:
        answer = http.post(path, json={"x": 1}, headers=bearer("omega"))
        assert answer.status_code not in (401, 403)
    for key in ("alpha", "omega"):
        assert http.post("/v1/completions", json=PROMPT, headers=bearer(key)).status_code == 200


def test_without_admin_keys_every_key_controls_the_server(make: Make) -> None:
    http = make(ALICE)
    for path in ("/pause", "/resume", "/reset_prefix_cache"):
        assert http.post(path, headers=bearer("alpha")).status_code == 200


def test_the_description_has_the_key_and_the_refusals(make: Make) -> None:
    document = make(ROOT).get("/openapi.json").get_json()
    assert document["security"] == [{"bearer": []}]
    for operations in document["paths"].values():
        if "post" in operations:
            assert {"401", "403", "415"} <= set(operations["post"]["responses"])


def test_keys_come_from_flags_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYS", "not-looked-at")
    file = tmp_path / "keys"
    file.write_text("# who  may\n\nalice alpha\n\tbob   beta  \r\ngamma\n")
    keys = read(["a,b:c"], file)
    assert [key.key for key in keys] == ["a,b:c", "alpha", "beta", "gamma"]
    assert [key.name for key in keys][1:3] == ["alice", "bob"]
    for key in (keys[0], keys[3]):
        assert key.name.startswith("key-") and len(key.name) == 12 and key.key not in key.name
        assert key.key not in repr(key)
    assert [key.admin for key in read(["a"], file, admin=True)] == [True] * 4


def test_keys_come_from_the_environment_where_nothing_else_has_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KEYS", raising=False)
    assert read() == []
    monkeypatch.setenv("KEYS", " alpha beta\n")
    assert [key.key for key in read()] == ["alpha", "beta"]
    assert [key.key for key in read(["gamma"])] == ["gamma"]
    for empty in ("", "  \n"):
        monkeypatch.setenv("KEYS", empty)
        with pytest.raises(ConfigurationError, match="KEYS is set but holds no key"):
            read()


def test_the_front_end_gets_no_keys_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (API_KEY_VARIABLE, ADMIN_KEY_VARIABLE):
        monkeypatch.setenv(variable, "sesame")
    monkeypatch.setenv("ANOTHER", "stays")
    environment = _environment()
    assert environment["ANOTHER"] == "stays" and "sesame" not in environment.values()


@pytest.mark.parametrize("key", ["", "two words", "caf\xe9", "a\n", "x" * 1025])
def test_what_can_be_no_key_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigurationError, match="--api-key") as refused:
        read([key])
    assert not key or key not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no key"),
        (b"# nothing\n\n", "holds no key"),
        (b"alice a b secret", "line 1 of .* has 4 words"),
        (b"a\nalice caf\xc3\xa9", "key of line 2"),
        (b"x" * 65 + b" secret", "name of line 1"),
        (b"\xff", "no UTF-8"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_none_of_keys_is_refused(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=message) as refused:
        read(file=file)
    assert str(file) in str(refused.value) and "secret" not in str(refused.value)


def test_a_key_is_one_persons_and_one_kind() -> None:
    check_distinct([ALICE, BOB, ROOT, ApiKey("alpha2", "alice")])  # while one replaces the other
    with pytest.raises(ConfigurationError, match="alice, root") as refused:
        check_distinct([ALICE, BOB, ApiKey("alpha", "root", True)])
    assert "alpha" not in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--api-key", ""], "The key of --api-key is empty"),
        (["--api-key", "a", "--admin-api-key", "a"], "more than once"),
        (["--api-key-file", "/nowhere/keys"], "/nowhere/keys"),
        (["--cache-salt-per-key"], "needs keys"),
        (["--ssl-certfile", "/nowhere/a.pem"], "/nowhere/a.pem (--ssl-certfile)"),
        (["--ssl-keyfile", "a.key"], "--ssl-keyfile needs --ssl-certfile"),
        (["--allowed-origins", "chat.example"], "--allowed-origins"),
        (["--allowed-hosts", "a:5"], "--allowed-hosts"),
    ],
)
def test_wrong_flags_end_the_server_with_a_sentence_before_anything_starts(
    flags: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    monkeypatch.setattr(cli, "_serve_first_rank", lambda *arguments: pytest.fail("it started"))
    assert cli.main(flags) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_flags_and_environment_become_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("alice alpha\n")
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, "omega")
    taken: list[ServerOptions] = []
    monkeypatch.setattr(
        cli, "_serve_first_rank", lambda config, options, *rest: taken.append(options) or 0
    )
    flags = ["--api-key", "k1", "--api-key", "k2", "--api-key-file", str(file)]
    flags += ["--cache-salt-per-key", "--no-report-cached-tokens"]
    flags += ["--allowed-origins", "http://a", "--allowed-origins", "http://b", "http://c/"]
    flags += ["--allowed-hosts", "llm.example"]
    assert cli.main(flags) == 0
    (options,) = taken
    assert [(key.key, key.admin) for key in options.api_keys] == [
        ("k1", False),
        ("k2", False),
        ("alpha", False),
        ("omega", True),
    ]
    assert options.cache_salt_per_key and not options.report_cached_tokens
    assert options.allowed_origins == ("http://a", "http://b", "http://c")
    assert options.allowed_hosts == ("llm.example",)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"host": "0.0.0.0"}, ["--host 0.0.0.0", "--api-key"]),
        ({"host": "0.0.0.0", "api_keys": (ALICE,)}, []),
        ({"allowed_origins": ("*",)}, ["--allowed-origins *", "--api-key"]),
        ({"allowed_origins": ("*",), "api_keys": (ALICE,)}, []),
    ],
)
def test_a_server_that_is_open_to_others_says_so(
    options: ServerOptions,
    changes: dict[str, Any],
    words: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        cli._warn(dataclasses.replace(options, **changes))
    assert len(caplog.messages) == bool(words)
    assert all(word in caplog.text for word in words)


def test_a_salt_belongs_to_a_key_and_to_what_was_asked_for() -> None:
    ring = KeyRing([ALICE, BOB], salted=True)
    alice, bob = ring.find("Bearer alpha"), ring.find("Bearer beta")
    assert alice is not None and bob is not None
    given = ["", "a", "alpha", alice.salt_for(""), bob.salt_for("")]
    salts = [caller.salt_for(salt) for caller in (alice, bob) for salt in given]
    assert len({*salts, *given}) == len(salts) + len(given) - 2  # `given` has two of them
    again = KeyRing([ALICE], salted=True).find("Bearer alpha")  # another worker, or a restart
    assert again is not None and again.salt_for("a") == alice.salt_for("a")
    assert Caller().salt_for("a") == "a"
    plain = KeyRing([ALICE]).find("Bearer alpha")
    assert plain is not None and plain.salt_for("a") == "a"


def cached(http: FlaskClient, key: str, **more: Any) -> int:
    answer = http.post("/v1/completions", json={**PROMPT, **more}, headers=bearer(key)).get_json()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_keys_do_not_find_each_others_prompts(make: Make, engine: FakeEngine) -> None:
    shared = make(ALICE, BOB)
    assert cached(shared, "alpha") == 0 < cached(shared, "beta")  # what docs/server.md says
    shared.post("/reset_prefix_cache", headers=bearer("alpha"))

    http = make(ALICE, BOB, cache_salt_per_key=True)
    engine.added.clear()
    for more in ({}, {"cache_salt": "x"}):
        assert cached(http, "alpha", **more) == 0
        assert cached(http, "beta", **more) == 0
        assert cached(http, "alpha", **more) > 0 < cached(http, "beta", **more)
    alice, bob = engine.added[0].cache_salt, engine.added[1].cache_salt
    assert len({one.cache_salt for one in engine.added}) == 4
    assert cached(http, "beta", cache_salt=alice) == 0
    assert cached(http, "alpha", cache_salt=bob) == 0


def test_keys_do_not_find_each_others_answers(make: Make, engine: FakeEngine) -> None:
    """Neither in the prompt of a next turn nor by /tokenize."""
    http = make(ALICE, BOB, cache_salt_per_key=True)
    chat: list[dict[str, str]] = [{"role": "user", "content": "Hello"}]
    body = {"messages": chat, "max_tokens": 4, "return_token_ids": True, "temperature": 1.0}
    answer = http.post("/v1/chat/completions", json=body, headers=bearer("alpha")).get_json()
    generated = answer["choices"][0]["token_ids"]
    turn = [*chat, answer["choices"][0]["message"], {"role": "user", "content": "And?"}]

    def holds_the_answer(tokens: list[int]) -> bool:
        return any(tokens[at : at + 4] == generated for at in range(len(tokens)))

    for key, found in (("alpha", True), ("beta", False)):
        answer = http.post("/tokenize", json={"messages": turn}, headers=bearer(key))
        assert holds_the_answer(answer.get_json()["tokens"]) == found
        body = {"messages": turn, "max_tokens": 1}
        http.post("/v1/chat/completions", json=body, headers=bearer(key))
        assert holds_the_answer(engine.added[-1].prompt) == found


def test_cached_tokens_may_be_kept_to_the_server(make: Make) -> None:
    http = make(report_cached_tokens=False)
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    for path, body in (("/v1/completions", PROMPT), ("/v1/chat/completions", chat)):
        for _ in range(2):
            usage = http.post(path, json=body).get_json()["usage"]
            assert set(usage) == {"prompt_tokens", "completion_tokens", "total_tokens"}
        usages = {"include_usage": True, "continuous_usage_stats": True}
        streamed = {**body, "stream": True, "stream_options": usages}
        text = http.post(path, json=streamed).get_data(as_text=True)
        assert '"usage"' in text and "cached" not in text
