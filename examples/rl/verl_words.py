"""verl's words and ours: its configuration as our flags, its sampling parameters as a body of
/generate, and the answer as its TokenOutput."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

NAME = "megatron_hybrid"
MOST_REQUESTS = 256  # that our engine runs at a time, unless a flag says more
_ENDS = {"stop": "completed", "length": "completed", "abort": "aborted"}
_OURS = {"seed": "sampling_seed", "min_tokens": "min_new_tokens"}  # of vLLM's sampling parameters
_VERSION = re.compile(r"global step (\d+)")

RolloutConfig = Any  # verl's; its tests need no more of it than its fields


def version_of(step: int) -> str:
    """What answers call the weights of a step of the trainer."""
    return f"global step {step}"


def server_flags(config: RolloutConfig, model: str, rank: int, on_gpu: bool) -> dict[str, Any]:
    """What verl's configuration says, by our flags' names."""
    if config.data_parallel_size > 1:
        raise NotImplementedError(
            f"data_parallel_size is {config.data_parallel_size}: verl itself starts a replica for "
            f"every {ranks_of(config) // config.data_parallel_size} GPUs if it is 1."
        )
    batching = "inference_dynamic_batching_"
    return {
        "load": model,
        "load_format": "dummy" if config.load_format.startswith("dummy") else "auto",
        "dtype": config.dtype,
        "quantization": config.quantization,
        # Replicas that got the same prompt have to differ.
        "seed": config.seed + rank,
        "tensor_model_parallel_size": config.tensor_model_parallel_size,
        "pipeline_model_parallel_size": config.pipeline_model_parallel_size,
        "expert_model_parallel_size": config.expert_parallel_size,
        "inference_max_seq_length": config.max_model_len,
        f"{batching}max_tokens": config.max_num_batched_tokens,
        f"{batching}max_requests": most if (most := config.max_num_seqs) < MOST_REQUESTS else None,
        f"{batching}num_cuda_graphs": 0 if config.enforce_eager else None,
        f"{batching}prefix_caching": config.enable_prefix_caching,
        "gpu_memory_utilization": config.gpu_memory_utilization if on_gpu else None,
        "enable_sleep_mode": config.free_cache_engine,
        "enable_return_routed_experts": config.enable_rollout_routing_replay,
        **(config.engine_kwargs.get(NAME) or {}),
    }


def generate_body(
    config: RolloutConfig, prompt: Sequence[int], params: Mapping[str, Any], name: str
) -> dict[str, Any]:
    """Of /generate. params: vLLM's or SGLang's names; a longest answer that is left out is what
    verl's tensors have room for."""
    sampling = {_OURS.get(key, key): value for key, value in params.items()}
    has_logprobs = bool(sampling.pop("logprobs", False))
    longest = sampling.pop("max_tokens", None)
    if (longest := sampling.pop("max_new_tokens", longest)) is None:
        room = config.prompt_length + config.response_length - len(prompt)
        longest = min(config.response_length, room)
    if config.max_model_len is not None:
        longest = min(longest, config.max_model_len - len(prompt))
    return {
        "rid": name,
        "input_ids": list(prompt),
        "sampling_params": {
            "repetition_penalty": config.repetition_penalty,
            "ignore_eos": config.ignore_eos,
            **sampling,
            "max_new_tokens": max(0, longest),
        },
        "return_logprob": has_logprobs,
        "return_routed_experts": config.enable_rollout_routing_replay,
    }


def output_of(answer: Mapping[str, Any], layers: int = 0) -> dict[str, Any]:
    """A TokenOutput's fields, of /generate's answer. `global_steps`: of the trainer's steps whose
    weights have computed it, the last one; and the first. layers: of the model (num_hidden_layers),
    if experts were asked for, which are [tokens, layers, top_k]."""
    meta = answer["meta_info"]
    versions = [span["version"] for span in meta["weight_versions"]] or [meta["weight_version"]]
    steps = [int(found[1]) if (found := _VERSION.fullmatch(one)) else None for one in versions]
    logprobs = meta.get("output_token_logprobs")
    return {
        "token_ids": answer["output_ids"],
        "log_probs": None if logprobs is None else [logprob for logprob, *_ in logprobs],
        "routed_experts": _experts(meta, layers),
        "stop_reason": _ENDS[meta["finish_reason"]["type"]],
        "extra_fields": {
            "global_steps": steps[-1],
            "min_global_steps": steps[0],
            "max_global_steps": steps[-1],
            "num_cached_tokens": meta.get("cached_tokens"),
        },
    }


def _experts(meta: Mapping[str, Any], layers: int) -> npt.NDArray[np.int32] | None:
    if (data := meta.get("routed_experts")) is None:
        return None
    tokens = meta["prompt_tokens"] + meta["completion_tokens"] - 1  # the last one was not computed
    ids = np.frombuffer(base64.b64decode(data), dtype=np.int32)
    return ids.reshape(tokens, layers, ids.size // (tokens * layers))


def ranks_of(config: RolloutConfig) -> int:
    """Of a replica."""
    sizes = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    product: int = sizes[0] * sizes[1] * config.data_parallel_size
    return product
