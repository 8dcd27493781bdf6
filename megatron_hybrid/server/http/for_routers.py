"""What routers in front of several servers ask for: what is served, how much there is to do, and
prompts as token ids. Paths and fields are SGLang's and vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from flask import Flask, Response, g

from megatron_hybrid.server.http.answering import request_body
from megatron_hybrid.server.http.generation import new_id
from megatron_hybrid.server.http.http_errors import json_response
from megatron_hybrid.server.http.launched import launched
from megatron_hybrid.server.http.prepared import PreparedChat, PreparedCompletion
from megatron_hybrid.server.http.protocol.generation_request import GenerationRequest
from megatron_hybrid.server.http.serving import Serving


def install(app: Flask, serving: Serving) -> None:
    """Of SGLang's names with and without `get_`, routers try the one and then the other."""
    _install_model(app, serving)
    _install_loads(app, serving)
    _install_rendering(app, serving)


def _install_model(app: Flask, serving: Serving) -> None:
    @app.get("/server_info")
    @app.get("/get_server_info")
    def server_info() -> Response:
        info: dict[str, Any] = {"served_model_name": serving.options.model_name}
        for figures in serving.client.stats_by_engine().values():
            info["weight_bytes"] = figures["weight_bytes"]
            info["enable_memory_saver"] = bool(figures["sleeping"])
            break
        # What comes from the engine unasked is there before its figures.
        return json_response({**info, **launched(serving), **_fingerprint(serving)})

    @app.get("/model_info")
    @app.get("/get_model_info")
    def model_info() -> Response:
        folder = serving.options.tokenizer_folder
        return json_response(
            {
                "model_path": folder,
                "tokenizer_path": folder,
                "is_generation": True,
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "weight_version": serving.client.weight_version(),
            }
        )


def _fingerprint(serving: Serving) -> dict[str, Any]:
    """Of all replicas that are there."""
    each = serving.client.fingerprints()
    if not each:
        return {}
    first = next(iter(each.values()))
    is_one = all(one.short == first.short for one in each.values())
    common = {"system_fingerprint": first.short if is_one else None, "fingerprint": first.parts}
    if len(each) == 1:
        return common
    engines = {replica: {"system_fingerprint": one.short} for replica, one in each.items()}
    return {**common, "engines": engines}


def _install_loads(app: Flask, serving: Serving) -> None:
    @app.get("/get_load")
    def get_load() -> Response:
        figures = serving.client.stats()
        return json_response({"load": figures["requests_running"] + figures["requests_waiting"]})

    @app.get("/v1/loads")
    def loads() -> Response:
        figures, ready = serving.client.stats(), serving.client.ready
        block_size = 0 if ready is None else ready.cache.block_size
        each = figures.get("engines", {"0": figures})
        ranks = [_load(int(rank), one, block_size) for rank, one in each.items()]
        now = datetime.now(UTC).isoformat()
        return json_response({"timestamp": now, "dp_rank_count": len(ranks), "loads": ranks})


def _load(rank: int, figures: dict[str, Any], block_size: int) -> dict[str, Any]:
    """One replica's, in requests and tokens of KV. Its usage, 0-1, is that of the pool which is
    nearer to its end: KV blocks or recurrent states."""
    running, waiting = figures["requests_running"], figures["requests_waiting"]
    pools = (("kv_used", "kv_blocks"), ("state_used", "state_slots"))
    return {
        "dp_rank": rank,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_total_reqs": running + waiting,
        "num_used_tokens": figures["kv_used"] * block_size,
        "max_total_num_tokens": figures["kv_blocks"] * block_size,
        "token_usage": max(figures[used] / max(1, figures[pool]) for used, pool in pools),
    }


def _install_rendering(app: Flask, serving: Serving) -> None:
    """The prompts that the routes beside these would answer, each refused as it is there."""

    @app.post("/v1/chat/completions/render")
    def render_chat() -> Response:
        chat: PreparedChat = serving.prepare("chat", request_body(), g.caller)
        return json_response(rendered(new_id("chatcmpl-"), chat.generation, chat.prompt))

    @app.post("/v1/completions/render")
    def render_completion() -> Response:
        found: PreparedCompletion = serving.prepare("completion", request_body(), g.caller)
        return json_response(
            [rendered(new_id("cmpl-"), found.generation, prompt) for prompt in found.prompts]
        )

    def rendered(name: str, asked: GenerationRequest, prompt: Sequence[int]) -> dict[str, Any]:
        return {
            "request_id": name,
            "token_ids": list(prompt),
            "model": asked.adapter or serving.options.model_name,
            "stream": asked.stream,
            "cache_salt": asked.cache_salt or None,
            "priority": asked.priority,
        }
