"""Models for which a GPU has no kernels of ours: they run on the reference's there, in plain torch.
And what does not go together with them."""

from __future__ import annotations

import logging

import torch

from megatron_hybrid.config import EngineConfig
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.models.config import IN_PLAIN_TORCH, WITH_EXPONENTS, HybridModelConfig

log = logging.getLogger(__name__)

WIDEST_HEAD = 256  # of attention, that kernels on a GPU are tested with


def kernels_for(config: EngineConfig, model: HybridModelConfig, device: torch.device) -> str:
    """--kernels, or on a GPU the reference's for such a model. Raises ConfigurationError for
    kernels of libraries, and for states with exponents that are not in float32."""
    kinds, head = set(model.pattern), _head_size(model)
    if kinds & WITH_EXPONENTS:
        _check_states(config, model)
    reason = None
    if kinds & IN_PLAIN_TORCH:
        reason = "recurrences that are computed in plain torch alone"
    elif head > WIDEST_HEAD and device.type == "cuda":
        reason = f"attention heads of {head} numbers, more than {WIDEST_HEAD}"
    if reason is not None and config.kernels == "libraries":
        raise ConfigurationError(
            f"--kernels is libraries, but the model ({model.model_type}) has {reason}; use "
            "--kernels auto or reference."
        )
    if reason is not None and device.type == "cuda" and config.kernels == "auto":
        log.warning(
            "The model (%s) has %s: it runs on --kernels reference, without CUDA graphs.",
            model.model_type,
            reason,
        )
        return "reference"
    return config.kernels


def _head_size(model: HybridModelConfig) -> int:
    shared = model.shared_transformer
    attention = model.attention if shared is None else shared.attention
    return 0 if attention is None else attention.head_dim


def _check_states(config: EngineConfig, model: HybridModelConfig) -> None:
    for flag, name in (
        ("--mamba-inference-ssm-states-dtype", config.mamba_inference_ssm_states_dtype),
        ("--mamba-inference-cached-states-dtype", config.mamba_inference_cached_states_dtype),
        ("--prefix-caching-host-states-dtype", config.prefix_caching_host_states_dtype),
    ):
        if name not in (None, "auto", "float32", "fp32"):
            raise ConfigurationError(
                f"{flag} is {name}, but states of the model ({model.model_type}) hold exponents, "
                "which must be in float32."
            )
