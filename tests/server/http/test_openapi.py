"""/openapi.json is true: what it allows is served, what it forbids is refused, answers look so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from megatron_hybrid.server.http.openapi import path_of
from megatron_hybrid.server.keys import CONTROL_PATHS
from tests.server.running import ROOT, ServerProcess
from tests.thorough import usually

# Random cases for each route, besides those at the edges of every field, of which there are about
# a hundred a route (schemathesis_hooks.py sends some). SCHEMATHESIS_EXAMPLES=60 makes 2,600 cases.
EXAMPLES = os.environ.get("SCHEMATHESIS_EXAMPLES", usually("3", "5"))
FAKE = ("-m", "tests.server.fake_server", "--tokenizer")
# They take the same bodies as the routes beside them.
LEFT_OUT = usually("^/v1/messages/count_tokens$|/render$", "^$")
CONTROL = f"^({'|'.join(path for path in CONTROL_PATHS if path != '/reset_prefix_cache')})$"
KEY = "a-key"
# A paused server answers nobody, so the routes that pause come last.
WAYS = {
    "others": ("--exclude-path-regex", f"{CONTROL}|{LEFT_OUT}"),
    "control": ("--include-path-regex", CONTROL),
}


@pytest.fixture(scope="module")
def server(tokenizer_folder: Path) -> Iterator[ServerProcess]:
    """A server with a key, in processes of its own."""
    flags = ("--api-key", KEY, "--never-fails")
    with ServerProcess(*FAKE, str(tokenizer_folder), *flags) as server:
        yield server


@pytest.fixture
def url(server: ServerProcess) -> str:
    return server.url


def run_schemathesis(url: str, folder: Path, *way: str) -> None:
    arguments = [
        *("run", f"{url}/openapi.json", "--checks", "all", "-n", EXAMPLES),
        # Our own check takes its place: it knows which valid bodies a server has to refuse.
        *("--exclude-checks", "positive_data_acceptance"),
        *("--phases", "examples,coverage,fuzzing", "--generation-database", "none"),
        *("-H", f"Authorization: Bearer {KEY}", "--request-timeout", "60", "--no-color"),
        *("--seed", "1"),
    ]
    run = "from schemathesis.cli import schemathesis; schemathesis()"
    command = [sys.executable, "-c", run, *arguments, *way]
    # Else it hangs up after 20 events, and nobody knows how the stream ends.
    (folder / "schemathesis.toml").write_text("max-stream-events = 100000\n")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "SCHEMATHESIS_HOOKS": "tests.server.http.schemathesis_hooks",
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("way", WAYS)
def test_every_route_keeps_to_its_description(url: str, tmp_path: Path, way: str) -> None:
    pytest.importorskip("schemathesis")
    run_schemathesis(url, tmp_path, *WAYS[way])


def description(http: FlaskClient) -> dict[str, Any]:
    answer = http.get("/openapi.json")
    assert answer.status_code == 200
    return dict(answer.get_json())


def test_every_route_is_described(http: FlaskClient) -> None:
    described = {
        (path, method.upper())
        for path, operations in description(http)["paths"].items()
        for method in operations
    }
    installed = {
        (path_of(rule), method)
        for rule in http.application.url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
        if not rule.endpoint.endswith("static")
    }
    assert described == installed


def test_every_answer_is_described_with_the_requests_name(http: FlaskClient) -> None:
    document = description(http)
    name = {"$ref": "#/components/headers/RequestId"}
    assert "x-request-id" in document["components"]["headers"]["RequestId"]["description"]
    for operations in document["paths"].values():
        for operation in operations.values():
            assert {"200", "429"} <= operation["responses"].keys()
            for response in operation["responses"].values():
                assert response["headers"]["x-request-id"] == name


def test_every_get_route_answers_with_all_fields_that_are_described_and_no_others(
    reference_http: FlaskClient,
) -> None:
    jsonschema = pytest.importorskip("jsonschema_rs")
    body = {"prompt": "Who is", "max_tokens": 3, "temperature": 0}
    assert reference_http.post("/v1/completions", json=body).status_code == 200
    body = {"input": "Who is", "max_output_tokens": 3, "temperature": 0}
    stored = reference_http.post("/v1/responses", json=body).get_json()["id"]
    document = exactly(description(reference_http))
    seen = []
    for path, operations in document["paths"].items():
        content = operations.get("get", {"responses": {"200": {"content": {}}}})
        schema = content["responses"]["200"]["content"].get("application/json", {}).get("schema")
        if schema is None or path.endswith("_memory_occupation"):  # which are no questions
            continue
        name = stored if "responses" in path else "reference_model"
        answer = reference_http.get(path.replace("{name}", name))
        assert answer.status_code == 200
        whole = {**document, **schema, "$schema": _DIALECT}
        jsonschema.validator_for(whole).validate(answer.get_json())
        seen.append(path)
    responses = ["/v1/responses/{name}", "/v1/responses/{name}/input_items"]
    own = "/health /ping /load /version /stats".split()
    own += "/server_info /get_server_info /model_info /get_model_info /get_load /v1/loads".split()
    own += ["/openapi.json", "/health_generate", "/liveness"]
    own += ["/weight_version", "/get_weight_version"]
    own += ["/is_paused", "/weight_info", "/is_sleeping", "/get_world_size"]
    assert seen == [*responses, "/v1/models", "/v1/models/{name}", *own]
    health = document["components"]["schemas"]["Health"]["properties"]
    assert set(health) == {"status", "engine_pid"}


def exactly(schema: Any) -> Any:
    """The schema with every object closed and every field required."""
    if isinstance(schema, list):
        return [exactly(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: exactly(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict):
        schema["properties"].pop("engines", None)  # only with several replicas
    if schema.get("type") == "object" and "properties" in schema:
        schema |= {"required": list(schema["properties"]), "additionalProperties": False}
    return schema


def test_every_schema_is_a_schema_and_every_reference_is_there(http: FlaskClient) -> None:
    jsonschema = pytest.importorskip("jsonschema_rs")
    document = description(http)
    schemas = document["components"]["schemas"]
    for name, schema in schemas.items():
        assert jsonschema.meta.is_valid({"$schema": _DIALECT, **schema}), name
    names = {part.partition('"')[0] for part in json.dumps(document).split("#/components/schemas/")}
    assert {name for name in names if "{" not in name} <= set(schemas)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_every_chunk_of_a_stream_is_as_described(http: FlaskClient, path: str) -> None:
    jsonschema = pytest.importorskip("jsonschema_rs")
    chat = path.endswith("chat/completions")
    name = "ChatCompletionChunk" if chat else "CompletionChunk"
    document = {**description(http), "$ref": f"#/components/schemas/{name}", "$schema": _DIALECT}
    validator = jsonschema.validator_for(document)
    body: dict[str, Any] = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 4,
        "n": 2,
        "return_token_ids": True,
    }
    if chat:
        body |= {"messages": [{"role": "user", "content": "Hello"}], "logprobs": True}
    else:
        body |= {"prompt": "Hello", "echo": True, "logprobs": 2}
    events = http.post(path, json=body).get_data(as_text=True).split("\n\n")[:-2]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    for chunk in chunks:
        validator.validate(chunk)
    # Tokens that come together share a chunk, so that their number says nothing.
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert {choice["index"] for choice in choices} == {0, 1}
    assert [choice["finish_reason"] for choice in choices].count("length") == 2
    assert chunks[-1]["usage"]["completion_tokens"] == 8


def test_a_server_with_a_key_says_so_and_shows_the_description_to_all(url: str) -> None:
    import urllib.error
    import urllib.request

    with urllib.request.urlopen(f"{url}/openapi.json") as answer:
        document = json.load(answer)
    assert document["security"] == [{"bearer": []}]
    assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    assert document["paths"]["/health"]["get"]["security"] == []
    assert "401" in document["paths"]["/v1/completions"]["post"]["responses"]
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{url}/v1/models")
    assert refused.value.code == 401
    refused.value.close()


_DIALECT = "https://json-schema.org/draft/2020-12/schema"
