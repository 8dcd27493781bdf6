"""What --enable-return-routed-experts adds to an engine."""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import Tensor

from megatron_hybrid.config import EngineConfig
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.execution.routed_reader import RoutedReader
from megatron_hybrid.layers.inputs import RoutedSpec
from megatron_hybrid.models.config import EXPERTS, WITH_KV, HybridModelConfig
from megatron_hybrid.models.families.registry import family_of
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.routed_experts import FLAG

_LAYER = re.compile(r"\.layers\.(\d+)\.")


def check_routed_experts(config: EngineConfig, model: HybridModelConfig) -> None:
    """Raise ConfigurationError for what experts cannot be kept of."""
    if not config.enable_return_routed_experts:
        return
    if EXPERTS not in model.pattern:
        raise ConfigurationError(
            f"{FLAG} is given, but the model ({model.model_type}) has no experts; leave it out."
        )
    if not set(model.pattern) & WITH_KV:
        raise ConfigurationError(
            f"{FLAG} is given, but the model ({model.model_type}) has no attention to all tokens, "
            "beside whose keys and values experts are kept; leave it out."
        )
    if config.pipeline_model_parallel_size > 1:
        raise ConfigurationError(
            f"{FLAG} does not go together with --pipeline-model-parallel-size "
            f"{config.pipeline_model_parallel_size}: each stage knows its own experts alone. Leave "
            "one of them out."
        )
    if config.role != "both":
        raise ConfigurationError(
            f"{FLAG} does not go together with --role {config.role}: what is handed over has no "
            "experts. Leave one of them out."
        )


def routed_spec(config: EngineConfig, model: HybridModelConfig) -> RoutedSpec | None:
    """What is kept of each token; None: nothing."""
    if not config.enable_return_routed_experts or model.moe is None:
        return None
    dtype = torch.uint8 if model.moe.num_choices <= 256 else torch.int16
    return RoutedSpec(model.pattern.count(EXPERTS), model.moe.experts_per_token, dtype)


def keep_routed(model: HybridModel, spec: RoutedSpec | None) -> None:
    """Have every token go through the last experts, too: not only those whose logits are wanted."""
    if spec is not None:
        last = model.config.pattern.rindex(EXPERTS)
        model.stages = replace(model.stages, last_routed=last)


def routed_reader(routed: Tensor | None, model: HybridModelConfig) -> RoutedReader | None:
    """Of what caches keep; None: nothing."""
    if routed is None:
        return None
    numbers = [_number_in_config(model, block) for block in range(len(model.pattern))]
    experts = [n for n, letter in zip(numbers, model.pattern, strict=True) if letter == EXPERTS]
    return RoutedReader(routed, experts, numbers[-1] + 1)


def _number_in_config(model: HybridModelConfig, block: int) -> int:
    """Of the layer whose part the block is, as the names of its weights have it."""
    place, *_ = family_of(model.model_type).locate(model, block, "norm.weight")
    found = _LAYER.search(place.name)
    assert found is not None, place.name
    return int(found[1])
