"""What the engine chooses where flags leave it to it."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from megatron_hybrid.config import EngineConfig
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.execution.capture_schedule import AT_START
from megatron_hybrid.execution.prompt_room import NO_ROOM, PromptRoom
from megatron_hybrid.kernels.contract import FP8
from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.models.config import HybridModelConfig, resolve_dtype
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import ParallelContext

LONG_STEP = 1024  # tokens from which on all-to-all may pay, which waits for counts


def resolve_device(config: EngineConfig) -> torch.device:
    """This rank's device."""
    found = torch.cuda.is_available()
    if config.device == "cuda" and not found:
        raise ConfigurationError("--device is cuda, but torch finds no GPU.")
    if config.device == "cpu" or not found:
        return torch.device("cpu")
    index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= count:
        raise ConfigurationError(
            f"torch finds {count} GPU(s) on this machine, and rank {index} of it (LOCAL_RANK) "
            f"needs one of its own: start at most {count} process(es) there (torchrun's "
            "--nproc-per-node), or look at CUDA_VISIBLE_DEVICES."
        )
    return torch.device("cuda", index)


def captures_later(config: EngineConfig, serves: bool) -> bool:
    """Whether most CUDA graphs are captured while serving. Not with drafts, of which there are as
    many as measured steps say: without their graphs these take longer."""
    given = config.inference_dynamic_batching_cuda_graph_capture
    if given is None:
        return serves and not config.num_speculative_tokens
    return given == "serving"


def captures_at_start(config: EngineConfig, serves: bool) -> int | None:
    """How many CUDA graphs are captured before the first request; None: all."""
    if not captures_later(config, serves):
        return None
    return 2 * AT_START if config.enable_lora else AT_START  # with adapters and without


def all_to_all_from(
    config: EngineConfig, parallel: ParallelContext, model: HybridModelConfig
) -> int | None:
    """ModelRunner's `all_to_all_from`.

    By all-gather each rank gets every token of every other replica; by all-to-all the tensor ranks
    share them out, and a rank gets the share that has chosen one of its experts,
    1 - (1 - 1/owners)^chosen. With few owners that is nearly all, and the rest is overhead.
    """
    if config.moe_token_dispatcher_type == "alltoall":
        return 1
    if config.moe_token_dispatcher_type == "allgather" or model.moe is None:
        return None
    owners = parallel.experts.owners.size
    share = (1 - (1 - 1 / owners) ** model.moe.experts_per_token) / parallel.tensor.size
    return LONG_STEP if share <= 0.5 else None


def prompt_room(
    config: EngineConfig, parallel: ParallelContext, model: HybridModel, kernels: KernelSet
) -> PromptRoom:
    """Of the graphs of long prompts, the same on every rank, which all call it. None of replicas
    that reach experts by all-to-all: that is not captured."""
    replicas = parallel.experts.replicas.size
    if replicas > 1 and all_to_all_from(config, parallel, model.config) is not None:
        return NO_ROOM
    prompts = config.inference_dynamic_batching_cuda_graph_mixed_prefill_count
    block_size = config.inference_dynamic_batching_block_size
    room = PromptRoom.of(model, kernels, prompts, block_size)
    return PromptRoom(*(parallel.lockstep.minimum(value) for value in room))


def max_seq_length_of(config: EngineConfig, model: HybridModelConfig) -> int:
    """Tokens of a prompt and its answer. Raises ConfigurationError for more than the model was made
    for."""
    wanted, limit = config.inference_max_seq_length, model.max_position_embeddings
    if wanted is not None and wanted > limit:
        raise ConfigurationError(
            f"--inference-max-seq-length is {wanted}; the model was made for at most {limit} "
            "tokens (max_position_embeddings in its config.json)."
        )
    return limit if wanted is None else wanted


class Dtypes(NamedTuple):
    """Of weights and activations, of the convolution's states, of the recurrent ones, and of keys
    and values."""

    dtype: torch.dtype
    conv_states_dtype: torch.dtype
    ssm_states_dtype: torch.dtype
    kv_dtype: torch.dtype


def dtypes_of(config: EngineConfig, model: HybridModelConfig, device: torch.device) -> Dtypes:
    """As the flags and the checkpoint have them."""
    dtype = resolve_dtype(config.dtype, model.dtype)
    if config.dtype is None and device.type == "cpu":
        dtype = torch.float32  # small matrix products in 16 bits take several times as long there
    conv = resolve_dtype(config.mamba_inference_conv_states_dtype, dtype)
    ssm = resolve_dtype(config.mamba_inference_ssm_states_dtype)
    return Dtypes(dtype, conv, ssm, dtype if config.kv_cache_dtype == "auto" else FP8)
