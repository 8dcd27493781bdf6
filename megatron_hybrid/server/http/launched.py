"""How the engine behind this server was started, as trainers and routers ask for it."""

from __future__ import annotations

from typing import Any

from megatron_hybrid import __version__
from megatron_hybrid.server.http.serving import Serving


def launched(serving: Serving) -> dict[str, Any]:
    """By SGLang's names: what slime compares with what it expects, and how many ranks a group with
    a trainer has. Empty while no replica is there."""
    options = serving.options
    for one in serving.client.fingerprints().values():
        mode = one.parts.get("mode", {})
        tensor, pipeline, expert, _ = mode.get("parallel", (1, 1, 1, 1))
        return {
            "version": __version__,
            "model_path": options.tokenizer_folder,
            "tp_size": tensor,
            "pp_size": pipeline,
            "ep_size": expert,
            "dp_size": options.data_parallel_size,
            "num_gpus": tensor * pipeline * options.data_parallel_size,
            "dtype": mode.get("dtype"),
            "kv_cache_dtype": mode.get("kv_dtype"),
            "quantization": mode.get("quantization"),
            "enable_return_routed_experts": options.returns_routed_experts,
        }
    return {}
