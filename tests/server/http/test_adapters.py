"""Adapters over HTTP: they come and go, requests name them as their model."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from tests.server.fake_engine import FakeEngine

PROMPT = {"prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the one that the server may read from, which is the present one."""
    for name in ("folder", "newer", "newest", "wrong"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)


def load(http: FlaskClient, name: str = "tuned", path: str = "folder", **more: Any) -> Any:
    body = {"lora_name": name, "lora_path": path, **more}
    return http.post("/v1/load_lora_adapter", json=body)


def test_requests_name_an_adapter_as_their_model(http: FlaskClient, engine: FakeEngine) -> None:
    assert http.post("/v1/completions", json={**PROMPT, "model": "tuned"}).status_code == 404
    answer = load(http)
    assert answer.status_code == 200
    assert answer.get_data(as_text=True) == "Success: LoRA adapter 'tuned' added successfully."
    for path, body in (
        ("/v1/completions", PROMPT),
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", CHAT),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 16}),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 2}}),
    ):
        for name, adapter in (("tuned", "tuned"), ("fake", "")):
            answer = http.post(path, json={**body, "model": name})
            assert answer.status_code == 200, answer.get_json()
            assert answer.get_json()["model"] == name
            assert engine.added[-1].adapter == adapter, path
    assert http.post("/v1/completions", json=PROMPT).get_json()["model"] == "fake"
    assert engine.added[-1].adapter == ""


def test_routes_without_an_answer_know_adapters_too(http: FlaskClient, engine: FakeEngine) -> None:
    load(http)
    score = {"prompt": "Hi", "answers": ["a", "b"], "model": "tuned"}
    assert http.post("/score_tokens", json=score).status_code == 200
    assert [one.adapter for one in engine.added] == ["tuned"] * 2
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", PROMPT)):
        answer = http.post(f"{path}/render", json={**body, "model": "tuned"})
        assert answer.status_code == 200
        said = answer.get_json()
        assert (said[0] if isinstance(said, list) else said)["model"] == "tuned"
    for path, body in (
        ("/v1/responses", {"input": "Hi"}),
        ("/score_tokens", score),
        ("/v1/chat/completions/render", CHAT),
        ("/v1/completions/render", PROMPT),
    ):
        assert http.post(path, json={**body, "model": "nobody"}).status_code == 404, path


def test_sglangs_clients_name_one_for_each_prompt(http: FlaskClient, engine: FakeEngine) -> None:
    load(http)
    sampling = {"max_new_tokens": 2, "temperature": 0}
    batch = {"input_ids": [[5], [6], [7]], "sampling_params": sampling}
    answer = http.post("/generate", json={**batch, "lora_path": ["tuned", None, ""]})
    assert answer.status_code == 200
    assert [one.adapter for one in engine.added] == ["tuned", "", ""]
    answer = http.post("/generate", json={**batch, "lora_path": ["other", None, None]})
    assert answer.status_code == 400
    assert answer.get_json()["error"]["param"] == "lora_path"


def test_a_lora_path_goes_with_the_model_that_is_named_beside_it(
    http: FlaskClient, engine: FakeEngine
) -> None:
    load(http)
    load(http, "other")
    body = {"input_ids": [5], "lora_path": "tuned", "sampling_params": {"max_new_tokens": 1}}
    for model in ("fake", "tuned"):
        assert http.post("/generate", json={**body, "model": model}).status_code == 200
        assert engine.added[-1].adapter == "tuned"
    number = len(engine.added)
    answer = http.post("/generate", json={**body, "model": "nobody"})
    assert answer.status_code == 404 and answer.get_json()["error"]["param"] == "model"
    answer = http.post("/generate", json={**body, "model": "other"})
    assert answer.status_code == 400 and answer.get_json()["error"]["param"] == "lora_path"
    assert len(engine.added) == number


def test_streams_say_the_adapter(http: FlaskClient) -> None:
    load(http)
    for path, body in (("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)):
        answer = http.post(path, json={**body, "model": "tuned", "stream": True})
        assert '"model":"tuned"' in answer.get_data(as_text=True)


def test_what_is_served_lists_adapters(http: FlaskClient) -> None:
    load(http)
    found = http.get("/v1/models").get_json()
    model, adapter = found["data"]
    assert (model["id"], adapter["id"]) == ("fake", "tuned")
    assert (adapter["root"], adapter["parent"]) == ("folder", "fake")
    assert model["parent"] is None and found["last_id"] == "tuned"
    assert http.get("/v1/models/tuned").get_json() == adapter
    assert http.get("/v1/models/other").status_code == 404


def test_an_adapter_that_is_unloaded_is_unknown(http: FlaskClient, engine: FakeEngine) -> None:
    load(http)
    answer = http.post("/v1/unload_lora_adapter", json={"lora_name": "tuned"})
    assert answer.status_code == 200
    assert answer.get_data(as_text=True).endswith("'tuned' removed successfully.")
    assert http.post("/v1/completions", json={**PROMPT, "model": "tuned"}).status_code == 404
    for path, status in (("/v1/unload_lora_adapter", 404), ("/unload_lora_adapter", 400)):
        assert http.post(path, json={"lora_name": "tuned"}).status_code == status
    assert len(http.get("/v1/models").get_json()["data"]) == 1
    assert not engine.is_paused


def test_a_name_that_is_there_gets_new_weights_only_if_that_is_asked_for(
    http: FlaskClient, engine: FakeEngine
) -> None:
    assert load(http).status_code == 200
    answer = load(http)
    assert answer.status_code == 400 and "load_inplace" in answer.get_json()["error"]["message"]
    assert load(http, path="newer", load_inplace=True).status_code == 200
    body = {"lora_name": "tuned", "lora_path": "newest"}
    answer = http.post("/load_lora_adapter", json=body).get_json()
    assert answer["success"] and answer["loaded_adapters"] == {"tuned": "newest"}
    assert [line for line in engine.log if line.startswith("load")] == [
        f"load tuned {folder}" for folder in ("folder", "newer", "newest")
    ]


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/load_lora_adapter"])
@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"lora_path": "folder"}, "lora_name"),
        ({"lora_name": "", "lora_path": "folder"}, "lora_name"),
        ({"lora_name": "fake", "lora_path": "folder"}, "lora_name"),
        ({"lora_name": "a"}, "lora_path"),
        ({"lora_name": "a", "lora_path": ""}, "lora_path"),
        ({"lora_name": "a", "lora_path": "/elsewhere"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "../../elsewhere"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "wrong"}, "lora_path"),
    ],
)
def test_wrong_fields_are_named_and_nothing_is_loaded(
    http: FlaskClient, engine: FakeEngine, path: str, body: dict[str, Any], field: str
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.get_json()["error"]["param"] == field
    assert not engine.adapters and not engine.is_paused
    if not path.startswith("/v1"):
        failed_as_sglang(answer.get_json())


def failed_as_sglang(said: dict[str, Any], words: str = "error_message") -> None:
    """Clients of its look at this instead of the status."""
    assert said["success"] is False and said[words] == said["error"]["message"]


def test_what_fails_on_sglangs_routes_is_said_as_there(
    http: FlaskClient, engine: FakeEngine
) -> None:
    """Also what is noticed before the route is reached; on others only OpenAI's error is there."""
    name, folder = {"lora_name": "a"}, {"lora_path": "nowhere"}
    for path, body in (("load", name | folder), ("unload", name), ("load", {})):
        failed_as_sglang(http.post(f"/{path}_lora_adapter", json=body).get_json())
        said = http.post(f"/v1/{path}_lora_adapter", json=body).get_json()
        assert list(said) == ["error"]
    tensors = "/load_lora_adapter_from_tensors"
    failed_as_sglang(http.post(tensors, json=name | {"config_dict": {}}).get_json())
    failed_as_sglang(http.post("/load_lora_adapter", data="no JSON").get_json())
    for path, body in (
        ("/update_weights_from_disk", {"model_path": "wrong"}),
        ("/update_weights_from_disk", {"model_path": "/elsewhere"}),
        ("/destroy_weights_update_group", {"group_name": "unknown"}),
        ("/continue_generation", {"unknown": 1}),
    ):
        answer = http.post(path, json=body)
        assert answer.status_code == 400, path
        failed_as_sglang(answer.get_json(), "message")


def test_a_folder_that_is_not_there_yet_is_tried_again(http: FlaskClient) -> None:
    """By prime-rl's clients, for which 404 says so."""
    assert load(http, path="nowhere").status_code == 404
    body = {"lora_name": "tuned", "lora_path": "nowhere"}
    assert http.post("/load_lora_adapter", json=body).status_code == 404


def test_tensors_come_from_processes_of_this_machine(http: FlaskClient, engine: FakeEngine) -> None:
    pickled = base64.b64encode(b"pickled").decode()
    body = {"lora_name": "sent", "config_dict": {"r": 4}, "serialized_named_tensors": [pickled]}
    for environment in ({"REMOTE_ADDR": "10.0.0.9"}, {"HTTP_X_FORWARDED_FOR": "10.0.0.9"}):
        answer = http.post(
            "/load_lora_adapter_from_tensors", json=body, environ_overrides=environment
        )
        assert answer.status_code == 403
    assert http.post("/load_lora_adapter_from_tensors", json=body).status_code == 200
    assert engine.adapters == ["sent"]
    assert (
        http.post(
            "/load_lora_adapter_from_tensors", json={"lora_name": "a", "config_dict": {}}
        ).status_code
        == 400
    )
    wrong = {**body, "serialized_named_tensors": ["?"]}
    assert http.post("/load_lora_adapter_from_tensors", json=wrong).status_code == 400
