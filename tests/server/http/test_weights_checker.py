"""/weights_checker and /get_world_size, before an engine that has no weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from flask.testing import FlaskClient

from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.link import messages as wire
from tests.server.fake_engine import FakeEngine


def check(http: FlaskClient, action: str) -> tuple[int, dict[str, Any]]:
    answer = http.post("/weights_checker", json={"action": action, "skip_list": []})
    return answer.status_code, answer.get_json()


def test_a_snapshot_is_compared_with_what_is_there_now(
    http: FlaskClient, engine: FakeEngine
) -> None:
    code, said = check(http, "compare")
    assert code == 400 and "no snapshot" in said["error"]["message"]
    for action in ("checksum", "snapshot", "compare"):
        code, said = check(http, action)
        assert (code, said["success"], said["checksum"]) == (200, True, "first")
    engine.change_weights("b", None)
    assert check(http, "checksum")[1]["checksum"] == "b"
    code, said = check(http, "compare")
    assert code == 400 and said["error"]["param"] == "action"
    assert "digest is b, and was first" in said["error"]["message"]
    engine.change_weights("first", None)
    assert check(http, "compare")[0] == 200
    assert not engine.is_paused


def test_reset_gives_the_weights_up_between_two_steps(
    http: FlaskClient, engine: FakeEngine
) -> None:
    code, said = check(http, "reset_tensors")
    assert code == 200 and "checksum" not in said
    assert engine.log == ["pause keep", "sleep weights False", "wake weights", "resume"]
    engine.refuses_to_sleep = True
    assert check(http, "reset_tensors")[0] == 409


def test_weights_that_sleep_or_come_in_pieces_are_not_read(
    http: FlaskClient, engine: FakeEngine
) -> None:
    engine.sleep(("weights",))
    code, said = check(http, "checksum")
    assert code == 409 and "wake them up first" in said["error"]["message"]
    engine.wake_up(("weights",))
    assert http.post("/start_weight_update", json={}).status_code == 200
    code, said = check(http, "snapshot")
    assert code == 400 and "finish that first" in said["error"]["message"]
    assert http.post("/finish_weight_update", json={}).status_code == 200


@pytest.mark.parametrize("action", ["reset", None, 1])
def test_another_action_is_refused(http: FlaskClient, engine: FakeEngine, action: Any) -> None:
    answer = http.post("/weights_checker", json={"action": action})
    assert answer.status_code == 400 and answer.get_json()["error"]["param"] == "action"
    assert engine.log == []


def test_ranks_are_those_of_all_replicas(
    http: FlaskClient, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode = {"parallel": [4, 2, 8, 1], "dtype": "bfloat16", "kv_dtype": "float8_e4m3fn"}
    found = wire.Fingerprint("fp", {"mode": mode, "model": {}})
    monkeypatch.setattr(serving.client, "fingerprints", lambda: {"0": found, "1": found})
    serving.options = dataclasses.replace(
        serving.options, data_parallel_size=3, returns_routed_experts=True
    )
    info = http.get("/server_info").get_json()
    sizes = [info[f"{kind}_size"] for kind in ("tp", "pp", "ep", "dp")]
    assert (sizes, info["num_gpus"]) == ([4, 2, 8, 3], 24)
    assert (info["dtype"], info["kv_cache_dtype"]) == ("bfloat16", "float8_e4m3fn")
    assert (info["quantization"], info["enable_return_routed_experts"]) == (None, True)
    for query, ranks in (("", 24), ("?include_dp=false", 8)):
        assert http.get(f"/get_world_size{query}").get_json() == {"world_size": ranks}


def test_one_rank_is_a_world(http: FlaskClient) -> None:
    info = http.get("/server_info").get_json()
    assert info["num_gpus"] == info["tp_size"] * info["pp_size"] * info["dp_size"] == 1
    for query in ("", "?include_dp=true", "?include_dp=false"):
        assert http.get(f"/get_world_size{query}").get_json() == {"world_size": 1}
    assert http.get("/get_world_size?include_dp=perhaps").status_code == 400
