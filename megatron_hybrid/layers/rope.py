"""The frequencies of the rotary position embedding; kernels/rope rotates."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeConfig:
    """`kind` is "default", "linear" (positions divided by `factor`), "llama3" (low frequencies
    divided by `factor`, high ones kept) or "proportional" (only the highest `rotated` part of the
    frequencies turns anything)."""

    theta: float
    rotary_dim: int
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    rotated: float = 1.0


def inverse_frequencies(config: RopeConfig) -> Tensor:
    """[rotary_dim / 2] float32."""
    device = torch.get_default_device()
    with torch.device("cpu"):  # arithmetic on the meta device loads torch's compiler
        return _inverse_frequencies(config).to(device)


def _inverse_frequencies(config: RopeConfig) -> Tensor:
    exponent = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    frequencies = 1.0 / (config.theta**exponent)
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "proportional":
        frequencies[int(config.rotated * config.rotary_dim // 2) :] = 0.0
        return frequencies / config.factor
    if config.kind == "llama3":
        # As in the Llama 3.1 release: between the two wavelengths the two are blended.
        wavelengths = 2 * math.pi / frequencies
        turns = config.original_max_position / wavelengths
        blend = (turns - config.low_freq_factor) / (
            config.high_freq_factor - config.low_freq_factor
        )
        blend = blend.clamp(0.0, 1.0)
        return (1 - blend) * frequencies / config.factor + blend * frequencies
    return frequencies
