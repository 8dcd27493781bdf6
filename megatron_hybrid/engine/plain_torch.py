"""Models with layers whose recurrences are in plain torch alone: on which kernels they run, and
what does not go together with them."""

from __future__ import annotations

import logging

import torch

from megatron_hybrid.config import EngineConfig
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.models.config import IN_PLAIN_TORCH, TIME_MIX, HybridModelConfig

log = logging.getLogger(__name__)


def kernels_for(config: EngineConfig, model: HybridModelConfig, device: torch.device) -> str:
    """--kernels, or on a GPU the reference's for such a model. Raises ConfigurationError for
    kernels of libraries, and for states of RWKV that are not in float32."""
    if not set(model.pattern) & IN_PLAIN_TORCH:
        return config.kernels
    if config.kernels == "libraries":
        raise ConfigurationError(
            f"--kernels is libraries, but the model ({model.model_type}) has layers of which "
            "mamba-ssm and causal-conv1d have no kernel; use --kernels auto or reference."
        )
    cached = config.mamba_inference_cached_states_dtype
    for flag, name in (
        ("--mamba-inference-ssm-states-dtype", config.mamba_inference_ssm_states_dtype),
        ("--mamba-inference-cached-states-dtype", cached),
        ("--prefix-caching-host-states-dtype", config.prefix_caching_host_states_dtype),
    ):
        if TIME_MIX in model.pattern and name not in (None, "auto", "float32", "fp32"):
            raise ConfigurationError(
                f"{flag} is {name}, but states of the model ({model.model_type}) hold exponents, "
                "which must be in float32."
            )
    if device.type == "cuda" and config.kernels == "auto":
        log.warning(
            "The model (%s) has layers that are computed in plain torch alone: it runs on "
            "--kernels reference, without CUDA graphs.",
            model.model_type,
        )
        return "reference"
    return config.kernels
