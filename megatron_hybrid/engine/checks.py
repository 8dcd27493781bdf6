"""What a configuration, a model and a device have to do with one another: ConfigurationError with a
sentence where they do not go together."""

from __future__ import annotations

import torch

from megatron_hybrid.config import EngineConfig
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.kernels import kernel_set
from megatron_hybrid.models.hybrid_model import HybridModel


def check_quantized(config: EngineConfig, shapes: HybridModel, device: torch.device) -> None:
    """Raise ConfigurationError where the device has no kernels for quantised weights."""
    if device.type != "cuda" or config.kernels == "reference" or not shapes.is_quantized:
        return
    found = torch.cuda.get_device_capability(device)
    if found < (9, 0):
        raise ConfigurationError(
            "The kernels for quantised weights need a GPU of compute capability 9.0 (Hopper) or "
            f"newer; {device} has {found[0]}.{found[1]}. --kernels reference computes them in "
            "plain torch, slowly."
        )


def check_transformer_engine(
    config: EngineConfig, shapes: HybridModel, device: torch.device
) -> None:
    """Raise ConfigurationError where Transformer Engine is wanted and cannot be used."""
    if config.transformer_impl == "local":
        return
    wanted = "--transformer-impl is transformer_engine, but "
    if device.type != "cuda":
        raise ConfigurationError(f"{wanted}the device is a {device.type}; it needs a GPU.")
    if shapes.is_quantized:
        raise ConfigurationError(
            f"{wanted}the checkpoint is quantised; leave the flag out: our own layers compute with "
            "weights as they are stored."
        )
    if not kernel_set.has_transformer_engine():
        raise ConfigurationError(
            f"{wanted}it is not installed; `pip install transformer-engine[pytorch]` brings it."
        )


def check_kv_dtype(config: EngineConfig, shapes: HybridModel, device: torch.device) -> None:
    """Raise ConfigurationError where keys and values can't be stored as wanted."""
    if config.kv_cache_dtype == "auto":
        return
    wanted = f"--kv-cache-dtype is {config.kv_cache_dtype}, but "
    if not shapes.stages.kv_specs:
        kind = shapes.config.model_type
        raise ConfigurationError(f"{wanted}the model ({kind}) has no attention, so it stores none.")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        raise ConfigurationError(
            f"{wanted}GPUs convert FP8 from compute capability 8.9 on; {device} has {capability}."
        )
