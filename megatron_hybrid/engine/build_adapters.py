"""What --enable-lora and the flags beside it add to an engine."""

from __future__ import annotations

import torch

from megatron_hybrid.config import EngineConfig
from megatron_hybrid.engine.engine import DynamicInferenceEngine
from megatron_hybrid.errors import ConfigurationError, InvalidRequestError, WeightsError
from megatron_hybrid.layers.adapters import AdapterSlots, widen
from megatron_hybrid.layers.moe import MoE
from megatron_hybrid.models.hybrid_model import HybridModel


def check_adapters(config: EngineConfig, shapes: HybridModel, device: torch.device) -> None:
    """Raise ConfigurationError for what adapters do not go together with."""
    if config.lora_experts:
        if config.batch_invariant and device.type == "cuda":
            raise ConfigurationError(
                "--lora-experts does not go together with --batch-invariant on a GPU; leave one of "
                "them out."
            )
        if any(isinstance(layer, MoE) and layer.dispatch.travels for layer in shapes.modules()):
            raise ConfigurationError(
                "--lora-experts does not go together with experts that several replicas share "
                f"(--expert-model-parallel-size {config.expert_model_parallel_size}): tokens reach "
                "them without their adapters. Leave one of the flags out."
            )
    if config.enable_lora and config.transformer_impl != "local":
        raise ConfigurationError(
            "--enable-lora does not go together with --transformer-impl transformer_engine; leave "
            "one of them out."
        )


def make_room(config: EngineConfig, model: HybridModel, device: torch.device) -> None:
    """For A behind the weights of a model that one engine has for itself."""
    if config.enable_lora and saves_launches(device):
        for _ in widen(model.adapted_parts(), config.max_loras, config.max_lora_rank):
            torch.cuda.empty_cache()  # of what the weight was in before


def saves_launches(device: torch.device) -> bool:
    """Which is what that is for: a CPU does better with the A of a step's adapters alone."""
    return device.type == "cuda"


def adapter_slots(
    config: EngineConfig, model: HybridModel, device: torch.device | str
) -> AdapterSlots | None:
    """Memory for --max-loras adapters of a model on this rank; None without --enable-lora."""
    if not config.enable_lora:
        return None
    parts = model.adapted_parts(config.lora_experts)
    slots, rank = config.max_loras, config.max_lora_rank
    return AdapterSlots(parts, slots, rank, device, stays=config.enable_sleep_mode)


def adapter_bytes(config: EngineConfig, shapes: HybridModel) -> int:
    """What that will take, of a model without weights."""
    slots = adapter_slots(config, shapes, "meta")
    return 0 if slots is None else slots.nbytes


def load_adapters(config: EngineConfig, engine: DynamicInferenceEngine) -> None:
    """Those of --lora-modules. Raises ConfigurationError for one that cannot be loaded."""
    for name, folder in config.adapter_folders.items():
        try:
            engine.load_adapter(name, folder)
        except (WeightsError, InvalidRequestError) as error:
            raise ConfigurationError(f"--lora-modules {name}={folder}: {error}") from error
