"""Bodies of the routes by which adapters come and go."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from megatron_hybrid.server.http.protocol.weights import MAX_NAME_LENGTH, Path, Theirs

AdapterName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_LENGTH)]


class LoadAdapter(Theirs):
    """Of /v1/load_lora_adapter, and of /load_lora_adapter, which always gives new weights.

    lora_name: What requests name as their model.
    lora_path: A folder of PEFT's on the server's machine, below one of --weight-folders.
    load_inplace: New weights for a name that there is already; else it is refused.
    """

    lora_name: AdapterName
    lora_path: Path
    load_inplace: bool | None = False


class UnloadAdapter(Theirs):
    """Of /v1/unload_lora_adapter and /unload_lora_adapter.

    lora_name: No more requests have it; those that do go on to their end.
    """

    lora_name: AdapterName


class LoadAdapterFromTensors(Theirs):
    """Of /load_lora_adapter_from_tensors, from a process on the same machine.

    config_dict: What adapter_config.json would say.
    serialized_named_tensors: For each rank of this server, or one for all: tensors by PEFT's names,
        or handles to them, pickled, in base64. serialized_tensors is the one for all.
    load_format: flattened_bucket: one tensor that holds the others.
    """

    lora_name: AdapterName
    config_dict: dict[str, Any]
    serialized_named_tensors: Annotated[list[str], Meta(min_length=1)] | None = None
    serialized_tensors: str | None = None
    load_format: Literal["flattened_bucket"] | None = None
