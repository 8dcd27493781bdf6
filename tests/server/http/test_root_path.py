"""Behind a proxy that shows the server under a path of its own."""

from __future__ import annotations

import pytest
from flask.testing import FlaskClient

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.server.http.app import create_app
from megatron_hybrid.server.http.root_path import without_root
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.keys import ApiKey
from megatron_hybrid.server.options import ServerOptions
from tests.server.conftest import RunningLoop

HELLO = {"prompt": "Hello", "max_tokens": 2}


@pytest.fixture
def http(running: RunningLoop, serving: Serving, options: ServerOptions) -> FlaskClient:
    rooted = options.replace(root_path="/our/llm", api_keys=(ApiKey("sesame", "door"),))
    return create_app(Serving(running.engines, serving.tokenizer, rooted)).test_client()


@pytest.mark.parametrize("root", ["", "/our/llm"])
def test_requests_come_with_the_root_or_without(http: FlaskClient, root: str) -> None:
    key = {"Authorization": "Bearer sesame"}
    assert http.post(f"{root}/v1/completions", json=HELLO, headers=key).status_code == 200
    assert http.get(f"{root}/v1/models/fake", headers=key).get_json()["id"] == "fake"
    # Which routes want a key does not depend on it.
    assert http.post(f"{root}/v1/completions", json=HELLO).status_code == 401
    assert http.get(f"{root}/health").status_code == http.get(f"{root}/ping").status_code == 200
    page = http.get(f"{root}/")
    assert page.status_code == 200 and b'src="dashboard/main.js"' in page.data
    assert http.get(f"{root}/dashboard/main.js").status_code == 200
    assert http.get(f"{root}/openapi.json").get_json()["servers"] == [{"url": "/our/llm"}]


def test_the_root_alone_leads_to_the_page(http: FlaskClient) -> None:
    answer = http.get("/our/llm")
    assert (answer.status_code, answer.headers["Location"]) == (308, "/our/llm/")


def test_what_only_begins_alike_is_elsewhere(http: FlaskClient) -> None:
    assert http.get("/our/llm2/health").status_code in (401, 404)
    assert without_root("/our/llm2/health", "/our/llm") == "/our/llm2/health"
    assert without_root("/health", "") == "/health"


def test_without_a_root_no_server_is_named(serving: Serving) -> None:
    description = create_app(serving).test_client().get("/openapi.json").get_json()
    assert "servers" not in description


@pytest.mark.parametrize("root", ["llm", "/llm/", "/", "//x", "/a b", "https://x"])
def test_no_path_is_refused(root: str) -> None:
    with pytest.raises(ConfigurationError, match="--root-path is .* it must be a path such as"):
        ServerOptions(tokenizer_folder="", model_name="", root_path=root)
