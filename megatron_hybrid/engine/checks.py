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
    if shapes.dtype == torch.float32:
        raise ConfigurationError(
            f"{wanted}the model is in float32, of which its products keep 10 bits; give --dtype "
            "bfloat16 or float16."
        )
    if not kernel_set.has_transformer_engine():
        raise ConfigurationError(
            f"{wanted}it is not installed; `pip install --no-build-isolation "
            "transformer-engine[pytorch]` brings it."
        )
    try:
        kernel_set.import_transformer_engine()
    except Exception as error:  # whatever its own libraries miss
        raise ConfigurationError(
            f"{wanted}it cannot be imported ({type(error).__name__}: {error}); is it installed "
            "with its extension for torch, transformer-engine[pytorch], and for this torch?"
        ) from error
    found = torch.cuda.get_device_capability(device)
    needed = (9, 0) if config.transformer_engine_recipe == "blockwise" else (8, 9)
    if config.fp8_format is not None and found < needed:
        recipe = f" --fp8-recipe {config.fp8_recipe}" if config.fp8_recipe else ""
        raise ConfigurationError(
            f"--fp8-format {config.fp8_format}{recipe} needs a GPU of compute capability "
            f"{needed[0]}.{needed[1]} or newer; {device} has {found[0]}.{found[1]}."
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
