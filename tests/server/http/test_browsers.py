"""Which pages and names may have a browser ask: Host, Origin, Content-Type and CORS."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from flask.testing import FlaskClient

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.server.http.app import create_app
from megatron_hybrid.server.http.browsers import parse_hosts, parse_origins
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.keys import CONTROL_PATHS, ApiKey
from megatron_hybrid.server.options import ServerOptions
from tests.server.fake_engine import FakeEngine

HELLO = {"prompt": "Hello", "max_tokens": 2, "temperature": 0}
ARE_READ = ("/is_paused", "/weight_info", "/is_sleeping", "/get_world_size")
BODIES: dict[str, Any] = {
    **{path: {} for path in CONTROL_PATHS if path not in ARE_READ},
    "/v1/completions": HELLO,
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/responses/<name>/cancel": {},
    "/v1/completions/render": HELLO,
    "/v1/chat/completions/render": {"messages": [{"role": "user", "content": "Hi"}]},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1]},
    "/score_tokens": {"prompt": "Hello", "answers": [[1]]},
    "/generate": {"input_ids": [1]},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {}},
    "/abort_request": {"abort_all": True},
    "/flush_cache": {},
    "/health_generate": {},
    "/abort": {"request_id": "a"},
    "/reset_prefix_cache": {},
    "/pause": {},
    "/resume": {},
    "/update_weights": {"path": "b"},
}
FRIEND = "https://chat.example"
Make = Callable[..., FlaskClient]


@pytest.fixture
def make(serving: Serving, options: ServerOptions) -> Make:
    """The application with changed options."""

    def make(address: str | None = None, **changes: Any) -> FlaskClient:
        serving.options = dataclasses.replace(options, **changes)
        return create_app(serving, address).test_client()

    return make


def refusal(answer: Any) -> str:
    assert answer.status_code == 403
    error = answer.get_json()["error"]
    # Anthropic's has it elsewhere.
    assert (error.get("code") or error["details"]["error_code"]) == "forbidden"
    assert "Access-Control-Allow-Origin" not in answer.headers
    return str(error["message"])


def test_every_route_that_does_something_refuses_pages_of_other_origins(
    http: FlaskClient, engine: FakeEngine
) -> None:
    posts = {rule.rule for rule in http.application.url_map.iter_rules() if "POST" in rule.methods}
    assert posts == set(BODIES)
    for path, body in BODIES.items():
        for origin in (
            "https://evil.example",
            "http://localhost:8000",
            "http://127.0.0.1",
            "http://localhost.evil.example",
            "http://localhost@evil.example",
            "ftp://localhost",
            "//localhost",
            "http://",
            "null",
            "",
        ):
            message = refusal(http.post(path, json=body, headers={"Origin": origin}))
            assert "--allowed-origins" in message and origin in message
    assert engine.log == [] and not engine.is_paused


@pytest.mark.parametrize(
    ("address", "origin", "own"),
    [
        ("http://localhost", "http://localhost", True),
        ("http://localhost", "http://localhost:80", True),
        ("http://localhost:5000", "http://localhost:5000", True),
        ("http://localhost:5000", "http://LOCALHOST:5000", True),
        ("http://[::1]:5000", "http://[::1]:5000", True),
        ("http://127.0.0.1:5000", "http://localhost:5000", False),
        ("http://localhost:5000", "http://localhost", False),
        ("http://localhost:443", "https://localhost", True),  # of a proxy before us
        ("http://localhost", "https://localhost", True),
        ("http://localhost:80", "https://localhost", False),
        ("https://localhost:5000", "https://localhost:5000", True),
        ("https://localhost:5000", "http://localhost:5000", False),
        ("https://localhost", "https://localhost:443", True),
    ],
)
def test_the_own_origin_is_the_address_by_which_the_page_asks(
    http: FlaskClient, address: str, origin: str, own: bool
) -> None:
    answer = http.post("/v1/completions", json=HELLO, base_url=address, headers={"Origin": origin})
    assert answer.status_code == (200 if own else 403)
    assert "Access-Control-Allow-Origin" not in answer.headers


def test_pages_of_other_origins_read_nothing(make: Make) -> None:
    for client in (make(), make(allowed_origins=(FRIEND,))):
        for path in ("/stats", "/metrics", "/v1/models", "/health", "/openapi.json", "/"):
            answer = client.get(path, headers={"Origin": "https://evil.example"})
            assert answer.status_code == 200
            assert not any(name.startswith("Access-Control") for name, _ in answer.headers)


@pytest.mark.parametrize("kind", [None, "text/plain", "text/plain;application/json", "json"])
def test_a_body_must_be_json(http: FlaskClient, engine: FakeEngine, kind: str | None) -> None:
    for path in BODIES:
        answer = http.post(path, data=b"{}", content_type=kind)
        assert answer.status_code == 415, path
        assert (kind or "missing").split(";")[0] in answer.get_json()["error"]["message"]
    # In chunks nobody knows how long it is.
    for length in ({}, {"CONTENT_LENGTH": ""}):
        environ = {**length, "HTTP_TRANSFER_ENCODING": "chunked", "wsgi.input_terminated": True}
        assert http.post("/pause", environ_overrides=environ).status_code == 415
    assert engine.log == [] and not engine.is_paused


def test_json_may_name_its_charset_and_no_body_needs_no_name(http: FlaskClient) -> None:
    for kind in ("application/json; charset=utf-8", "Application/JSON"):
        answer = http.post("/tokenize", data=b'{"prompt": "a"}', content_type=kind)
        assert answer.status_code == 200
    for path in ("/pause", "/resume", "/reset_prefix_cache"):
        assert http.post(path).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:5000",
        "127.0.0.1:1",
        "127.9.8.7",
        "[::1]",
        "[::1]:5000",
        "localhost:",
    ],
)
def test_a_server_on_loopback_answers_to_loopback_names(http: FlaskClient, host: str) -> None:
    assert http.get("/stats", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:5000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "127.evil.example",
        "localhost@evil.example",
        "localhost, evil.example",
        "10.0.0.7",
        "0.0.0.0:5000",
        "[fe80::1]:5000",
        "[::1",
        "",
    ],
)
def test_a_server_on_loopback_answers_to_no_other_name(
    http: FlaskClient, engine: FakeEngine, host: str
) -> None:
    """A name that an attacker lets point here: then the page is of our own origin."""
    origin = {"Host": host, "Origin": f"http://{host}"}
    for path in ("/stats", "/metrics", "/v1/models", "/v1/models/fake", "/openapi.json", "/"):
        assert "--allowed-hosts" in refusal(http.get(path, headers=origin))
    for path, body in BODIES.items():
        assert "--allowed-hosts" in refusal(http.post(path, json=body, headers=origin))
    assert engine.log == [] and not engine.is_paused


def test_a_client_that_names_no_host_is_no_browser(http: FlaskClient) -> None:
    environ = http.application.test_request_context().request.environ
    del environ["HTTP_HOST"]
    with http.application.request_context(environ):
        assert http.application.preprocess_request() is None


@pytest.mark.parametrize(
    ("changes", "address", "answered"),
    [
        ({}, "::1", []),
        ({}, "127.0.1.1", []),  # of Debian's own host name
        ({"host": "node7"}, "127.0.1.1", ["node7"]),
        ({"host": "0.0.0.0"}, "0.0.0.0", ["node7", "llm.example", "10.0.0.7", "evil.example"]),
        ({"host": "node7"}, "10.0.0.7", ["node7", "llm.example", "10.0.0.7", "evil.example"]),
        ({"allowed_hosts": ("llm.example",)}, "127.0.0.1", ["llm.example"]),
        # Health checks and scrapers ask by address, and no attacker has ours for a name.
        (
            {"host": "0.0.0.0", "allowed_hosts": ("llm.example",)},
            "0.0.0.0",
            ["llm.example", "10.0.0.7"],
        ),
        (
            {"host": "node7", "allowed_hosts": ("llm.example",)},
            "10.0.0.7",
            ["node7", "llm.example", "10.0.0.7"],
        ),
    ],
)
def test_names_are_looked_at_on_loopback_or_where_some_are_given(
    make: Make, changes: dict[str, Any], address: str, answered: list[str]
) -> None:
    client = make(address, **changes)
    names = ["localhost", "node7", "llm.example", "10.0.0.7", "evil.example"]
    good = [
        name
        for name in names
        if client.get("/health", headers={"Host": f"{name}:5000"}).status_code == 200
    ]
    assert sorted(good) == sorted(["localhost", *answered])


def test_an_allowed_page_asks_first_and_reads_answers_and_errors(make: Make) -> None:
    client = make(allowed_origins=(FRIEND,), api_keys=(ApiKey("sesame", "a"),))
    names = "authorization,content-type,x-stainless-os"
    asking = {
        "Origin": FRIEND,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": names,
    }
    for path in BODIES:
        answer = client.options(path, headers=asking)
        assert (answer.status_code, answer.data) == (204, b"")
        assert answer.headers["Access-Control-Allow-Origin"] == FRIEND
        assert "POST" in answer.headers["Access-Control-Allow-Methods"]
        assert answer.headers["Access-Control-Allow-Headers"] == names
        assert int(answer.headers["Access-Control-Max-Age"]) > 0
        assert "Origin" in answer.vary
        assert "Access-Control-Allow-Private-Network" not in answer.headers
    private = {**asking, "Access-Control-Request-Private-Network": "true"}
    answer = client.options("/v1/completions", headers=private)
    assert answer.headers["Access-Control-Allow-Private-Network"] == "true"

    key = {"Authorization": "Bearer sesame"}
    for headers, status in ((key, 200), ({}, 401)):
        for body in (HELLO, {**HELLO, "stream": True}):
            answer = client.post(
                "/v1/completions", json=body, headers={"Origin": FRIEND, **headers}
            )
            assert answer.status_code == status
            assert answer.headers["Access-Control-Allow-Origin"] == FRIEND
            assert "X-Request-Id" in answer.headers["Access-Control-Expose-Headers"]
            assert "Origin" in answer.vary
    answer = client.get("/v1/models", headers=key)
    assert "Origin" in answer.vary and "Access-Control-Allow-Origin" not in answer.headers


def test_a_page_that_is_not_allowed_is_refused_when_it_asks_first(make: Make) -> None:
    asking = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    for client in (make(), make(allowed_origins=(FRIEND,))):
        assert "--allowed-origins" in refusal(client.options("/pause", headers=asking))


def test_all_origins_may_be_allowed_but_not_all_names(make: Make) -> None:
    client = make(allowed_origins=("*",))
    for origin in ("null", "https://evil.example", "chrome-extension://abc"):
        answer = client.post("/v1/completions", json=HELLO, headers={"Origin": origin})
        assert answer.status_code == 200
        assert answer.headers["Access-Control-Allow-Origin"] == origin
    refusal(client.get("/stats", headers={"Host": "evil.example"}))


def test_origins_are_read_as_browsers_write_them() -> None:
    given = ["HTTPS://Chat.Example:443/", "http://a:80", "http://a", "http://[::1]:3000", "*"]
    given += ["tauri://localhost", "http://a:8080"]
    read = ("https://chat.example", "http://a", "http://[::1]:3000", "*")
    assert parse_origins(given) == (*read, "tauri://localhost", "http://a:8080")
    for wrong in ("chat.example", "null", "https://a/b", "", '["*"]', "https://*.example"):
        with pytest.raises(ConfigurationError, match="--allowed-origins takes"):
            parse_origins([wrong])


def test_names_are_read_without_ports() -> None:
    assert parse_hosts(["LLM.example", "[FE80::1]", "a_b"]) == ("llm.example", "fe80::1", "a_b")
    for wrong in ("llm.example:443", "http://a", "*", "", "a b", "-a"):
        with pytest.raises(ConfigurationError, match="--allowed-hosts takes"):
            parse_hosts([wrong])
