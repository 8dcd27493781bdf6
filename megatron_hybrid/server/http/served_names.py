"""What requests name as their model: the one that is served, or an adapter of it."""

from __future__ import annotations

from dataclasses import replace

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.server.http.prepared import UnknownModel
from megatron_hybrid.server.http.protocol.generation_request import GenerationRequest
from megatron_hybrid.server.link.messages import EngineReady
from megatron_hybrid.server.options import ServerOptions


def adapter_called(name: str | None, options: ServerOptions, engine: EngineReady) -> str:
    """The adapter that is asked for as the model, "" for none. Raises UnknownModel for a name of
    neither."""
    if name in (None, *options.model_names, options.tokenizer_folder):
        return ""
    if name in engine.adapters:
        return str(name)
    known = ", ".join(map(repr, (options.model_name, *engine.adapters)))
    raise UnknownModel(f"The model {name!r} is not served here; this server has {known}.")


def with_adapter(
    request: GenerationRequest, options: ServerOptions, engine: EngineReady
) -> GenerationRequest:
    """With the adapter that its model stands for, unless it names one itself, as lora_path. Raises
    UnknownModel, and InvalidRequestError for a lora_path that is not there, or beside a model that
    is another adapter."""
    called, own = adapter_called(request.model, options, engine), request.adapter
    if own and own not in engine.adapters:
        raise InvalidRequestError(
            "lora_path", f"lora_path is {own!r}, of which no adapter is loaded."
        )
    if own and called not in ("", own):
        raise InvalidRequestError(
            "lora_path", f"lora_path is {own!r} and model is {called!r}, another adapter."
        )
    return replace(request, adapter=own or called)
