"""The routes by which adapters come and go, under vLLM's, SGLang's and prime-rl's names."""

from __future__ import annotations

import os
from typing import Any

from flask import Flask, Response

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.server.http.http_errors import json_response
from megatron_hybrid.server.http.protocol import adapters as bodies
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.http.sglang_failures import failing_as_sglang
from megatron_hybrid.server.http.weights import Control, check_from_here, read_base64
from megatron_hybrid.server.link import messages as wire
from megatron_hybrid.server.link.engine_client import QueryFailed
from megatron_hybrid.weight_transfer.requests import FromHandles


def install(app: Flask, serving: Serving) -> None:
    """All of them."""
    control = Control(serving)

    def check_name(name: str) -> None:
        if name in serving.options.model_names:
            raise InvalidRequestError(
                "lora_name", f"lora_name is {name!r}, which the model itself is served as."
            )

    def load(wanted: bodies.LoadAdapter, *, in_place: bool) -> dict[str, Any]:
        check_name(wanted.lora_name)
        source = control.folder(wanted.lora_path, "lora_path")
        if not os.path.isfile(f"{source.path}/adapter_config.json"):
            words = f"Loading lora {wanted.lora_name} failed: No adapter found for {source.path}"
            raise InvalidRequestError("lora_path", words, 404)
        return control.ask(
            wire.LoadAdapter, wanted.lora_name, source, None, in_place, field="lora_path"
        )

    def loaded(values: dict[str, Any]) -> Response:
        """As SGLang has it."""
        said = {"success": True, "error_message": None, "loaded_adapters": values["adapters"]}
        return json_response({"status": "ok", **said})

    @app.post("/v1/load_lora_adapter")
    def load_as_vllm() -> Response:
        wanted = control.body(bodies.LoadAdapter)
        load(wanted, in_place=bool(wanted.load_inplace))
        words = f"Success: LoRA adapter '{wanted.lora_name}' added successfully."
        return Response(words, mimetype="text/plain")

    @app.post("/v1/unload_lora_adapter")
    def unload_as_vllm() -> Response:
        name = control.body(bodies.UnloadAdapter).lora_name
        control.ask(wire.UnloadAdapter, name)
        words = f"Success: LoRA adapter '{name}' removed successfully."
        return Response(words, mimetype="text/plain")

    sglang = failing_as_sglang("sglang_adapters", "error_message")

    @sglang.post("/load_lora_adapter")
    def load_in_place() -> Response:
        return loaded(load(control.body(bodies.LoadAdapter), in_place=True))

    @sglang.post("/unload_lora_adapter")
    def unload() -> Response:
        name = control.body(bodies.UnloadAdapter).lora_name
        try:
            return loaded(control.ask(wire.UnloadAdapter, name))
        except QueryFailed as error:
            if error.status != 404:
                raise
            raise InvalidRequestError("lora_name", str(error)) from error  # 400, as there

    @sglang.post("/load_lora_adapter_from_tensors")
    def load_from_tensors() -> Response:
        wanted = control.body(bodies.LoadAdapterFromTensors)
        check_from_here()
        check_name(wanted.lora_name)
        field = "serialized_named_tensors"
        given = wanted.serialized_named_tensors or []
        if wanted.serialized_tensors is not None:
            given = [wanted.serialized_tensors]
        if not given:
            raise InvalidRequestError(field, f"{field} is missing: the adapter's tensors.")
        pickled = tuple(read_base64(one, field) for one in given)
        source = FromHandles(pickled, in_one=wanted.load_format is not None)
        asked = (wanted.lora_name, source, wanted.config_dict, True)
        return loaded(control.ask(wire.LoadAdapter, *asked, field=field))

    app.register_blueprint(sglang)
