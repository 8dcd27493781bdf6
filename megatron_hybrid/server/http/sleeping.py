"""The routes by which a trainer on the same device has the engine's memory meanwhile, under vLLM's
and SGLang's names: see docs/rl.md."""

from __future__ import annotations

from collections.abc import Sequence

from flask import Flask, Response, request

from megatron_hybrid.server.http.control import check_page
from megatron_hybrid.server.http.http_errors import json_response
from megatron_hybrid.server.http.protocol import weights as bodies
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.http.weights import Control, done
from megatron_hybrid.server.link import messages as wire

TAGS = ("weights", "kv_cache")


def install(app: Flask, serving: Serving) -> None:
    """All of them."""
    control = Control(serving)
    _install_vllm(app, control)
    _install_sglang(app, control)


def _install_vllm(app: Flask, control: Control) -> None:
    @app.post("/sleep")
    def sleep() -> Response:
        said = control.query(bodies.SleepQuery)
        mode = "finish" if said.mode == "wait" else said.mode or ""
        if said.level == 0:
            return done(control.ask(wire.Pause, mode or "abort"))
        keeps = said.level != 2
        return done(control.ask(wire.Sleep, list(TAGS), keeps, mode or "abort", field="tags"))

    @app.post("/release_kv_cache_memory")
    def release_kv_cache_memory() -> Response:
        control.check_allowed()
        return done(control.ask(wire.Sleep, ["kv_cache"], True, "keep", field="tags"))

    @app.post("/wake_up")
    def wake_up() -> Response:
        control.query(bodies.WakeUpQuery)  # which looks at the last tag
        tags = request.args.getlist("tags")
        values = control.ask(wire.WakeUp, _known(tags or TAGS), field="tags")
        return done(control.ask(wire.Resume) if "scheduling" in tags else values)

    @app.get("/is_sleeping")
    def is_sleeping() -> Response:
        control.check_allowed()
        return json_response({"is_sleeping": bool(control.stats()["paused"])})


def _install_sglang(app: Flask, control: Control) -> None:
    @app.route("/release_memory_occupation", methods=["GET", "POST"])
    def release_memory_occupation() -> Response:
        check_page()
        said = control.body(bodies.MemoryRequest)
        if tags := _known(said.tags or TAGS):
            control.ask(wire.Sleep, tags, bool(said.keep_weights), "keep", field="tags")
        return json_response(None)

    @app.route("/resume_memory_occupation", methods=["GET", "POST"])
    def resume_memory_occupation() -> Response:
        check_page()
        if tags := _known(control.body(bodies.MemoryRequest).tags or TAGS):
            control.ask(wire.WakeUp, tags, field="tags")
        return json_response(None)


def _known(tags: Sequence[str]) -> list[str]:
    """Those of memory: graphs, SGLang's third, stay, since what they read is where it was."""
    return [tag for tag in TAGS if tag in tags]
