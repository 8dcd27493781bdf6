"""slime's engines by our server: slime's own `SGLangEngine`, which starts our server in SGLang's
place. All that it calls afterwards are routes that ours has.

    "worker_process_setup_hook": "slime_engine.install"     in the job's --runtime-env-json, and in
    "env_vars": {"PYTHONPATH": "DIR/examples/rl:..."}        its environment

Written for slime 624b824a. It is needed where slime starts the engines, as with --colocate; engines
that run already take --rollout-external-engine-addrs alone (docs/rl.md). Flags of ours beside
--sglang-...: MEGATRON_HYBRID_ROLLOUT_FLAGS, a JSON object of names with underscores.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Mapping
from typing import Any

from rollout_server import RolloutServer
from sglang.srt.server_args import ServerArgs
from slime.backends.sglang_utils import sglang_engine

logger = logging.getLogger(__name__)

FLAGS = "MEGATRON_HYBRID_ROLLOUT_FLAGS"
_BATCHING = "inference_dynamic_batching_"
# By SGLang's names: those of ours that mean the same.
_SAME = {
    "model_path": "load",
    "tokenizer_path": "tokenizer_model",
    "random_seed": "seed",
    "enable_memory_saver": "enable_sleep_mode",
    "tp_size": "tensor_model_parallel_size",
    "pp_size": "pipeline_model_parallel_size",
    "ep_size": "expert_model_parallel_size",
    "context_length": "inference_max_seq_length",
    "mem_fraction_static": "gpu_memory_utilization",
    "max_running_requests": f"{_BATCHING}max_requests",
    "chunked_prefill_size": f"{_BATCHING}max_tokens",
    "max_loras_per_batch": "max_loras",
    "enable_deterministic_inference": "batch_invariant",
    **{
        name: name
        for name in (
            *("dtype", "kv_cache_dtype", "quantization", "load_format", "served_model_name"),
            *("enable_lora", "max_lora_rank", "enable_return_routed_experts"),
        )
    },
}
# Read below, or said by what else is here, or of no need to ours.
_ELSEWHERE = {
    *("host", "port", "nccl_port", "dist_init_addr", "nnodes", "node_rank", "dp_size"),
    *("base_gpu_id", "gpu_id_step", "trust_remote_code", "skip_server_warmup", "enable_metrics"),
    *("enable_draft_weights_cpu_backup", "cuda_graph_backend_prefill", "disaggregation_mode"),
    *("disable_radix_cache", "disable_cuda_graph"),
}


class HybridEngine(sglang_engine.SGLangEngine):
    """A rank of slime's. `process`: our server."""

    def _init_normal(self, server_args_dict: dict[str, Any]) -> None:
        folders = [getattr(self.args, "update_weight_disk_dir", None)]
        flags = {
            **server_flags(server_args_dict, ServerArgs),
            "weight_folders": [one for one in folders if one] or None,
            **json.loads(os.environ.get(FLAGS) or "{}"),
        }
        base = server_args_dict["base_gpu_id"]
        ranks = server_args_dict["tp_size"] * server_args_dict["pp_size"]
        seen = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
        gpus = (seen or [str(one) for one in range(base + ranks)])[base : base + ranks]
        self.process = RolloutServer(self.server_host, self.server_port, flags, ",".join(gpus))
        self.process.wait_until_up(1800.0)
        self._register_to_router(server_args_dict)

    def shutdown(self) -> None:
        """Leave the router, end the server, and what is left of it."""
        super().shutdown()
        if not self.args.rollout_external:
            self.process.end()


def server_flags(given: Mapping[str, Any], defaults: type) -> dict[str, Any]:
    """What slime's server arguments say, by our flags' names. defaults: SGLang's dataclass of them.
    Raises NotImplementedError for engines that ours can't be."""
    for name, why in (
        ("nnodes", "over several nodes torchrun starts it: examples/launch/two_nodes.sh"),
        ("dp_size", "start more engines of fewer GPUs"),
    ):
        if given.get(name, 1) > 1:
            raise NotImplementedError(f"{name} is {given[name]}, and 1 is supported here: {why}.")
    if (role := given.get("disaggregation_mode", "null")) != "null":
        raise NotImplementedError(f"An engine for {role} alone is not supported here.")
    flags = {}
    for name, ours in _SAME.items():
        value = given.get(name)
        if value is not None and value is not False and value != "auto":
            flags[ours] = value
    if given.get("disable_radix_cache"):
        flags[f"{_BATCHING}prefix_caching"] = False
    if given.get("disable_cuda_graph"):
        flags[f"{_BATCHING}num_cuda_graphs"] = 0
    usual = {field.name: field.default for field in dataclasses.fields(defaults)}
    known = {*_SAME, *_ELSEWHERE}
    for name, value in given.items():
        if name not in known and value != usual.get(name):
            logger.warning("SGLang's %s = %r has no effect on this server.", name, value)
    return flags


def install() -> None:
    """Have slime, in this process, start these."""
    sglang_engine.SGLangEngine = HybridEngine
