"""What an engine's weights are called, and how trainers send new ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_hybrid.config import EngineConfig
from megatron_hybrid.engine.build_fingerprint import build_fingerprint
from megatron_hybrid.engine.weights import EngineWeights
from megatron_hybrid.models.checkpoints.weights import rounded_weights
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.rank_layout import RankLayout
from megatron_hybrid.weight_transfer.transfers import WeightTransfers


def bytes_of_copies(config: EngineConfig, model: HybridModel) -> int:
    """In FP8, that Transformer Engine keeps beside weights."""
    if config.fp8_format is None:
        return 0
    return sum(weight.numel() for weight in rounded_weights(model))


def complete(
    weights: EngineWeights,
    config: EngineConfig,
    model: HybridModel,
    device: torch.device,
    chosen: Mapping[str, Any],
) -> None:
    """Once the model is there; all ranks call it. chosen: as of `build_fingerprint`."""
    weights.fingerprint = build_fingerprint(config, model, device, chosen)
    rank = RankLayout.from_environment(config.parallel_sizes).rank
    weights.transfers = WeightTransfers(device, rank, config.weight_transfer_timeout)
