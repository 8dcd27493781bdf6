"""Mamba layers alone: Mamba (Gu, Dao), Falcon-Mamba (TII), and Mamba2 (Dao, Gu), also
Mamba-Codestral."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from megatron_hybrid.layers.mamba1 import Mamba1Config
from megatron_hybrid.layers.mamba2 import Mamba2Config
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.families.family import Family
from megatron_hybrid.models.families.raw_config import RawConfig

# Nothing in a purely recurrent model depends on how long a sequence is.
MAX_POSITIONS = 1 << 20


class Mamba(Family):
    """Mamba1. Falcon-Mamba normalises the step sizes, B and C, without weights."""

    model_types: ClassVar[tuple[str, ...]] = ("mamba", "falcon_mamba")
    renames = ((r"^backbone\.embedding\.", "backbone.embeddings."),)
    embedding = "backbone.embeddings.weight"
    final_norm = "backbone.norm_f.weight"
    layers = "backbone.layers"

    def config(self, raw: RawConfig) -> HybridModelConfig:
        hidden, is_falcon = raw.whole("hidden_size"), raw.model_type == "falcon_mamba"
        inner = int(raw.positive("expand", default=2) * hidden)
        return HybridModelConfig(
            **self._common(raw, "S", tied=True),
            mamba1=Mamba1Config(
                inner_size=raw.whole("intermediate_size", default=inner),
                state_size=raw.whole("state_size", default=16),
                dt_rank=raw.whole_or_auto("time_step_rank", math.ceil(hidden / 16)),
                conv_width=raw.whole("conv_kernel", default=4),
                conv_bias=raw.flag("use_conv_bias", default=True),
                proj_bias=raw.flag("use_bias"),
                norms="plain" if is_falcon else "none",
                norms_eps=raw.number("mixer_rms_eps", default=1e-6),
            ),
        )

    def _common(self, raw: RawConfig, letter: str, *, tied: bool) -> dict[str, Any]:
        raw.refuse_unless("hidden_act", "silu")
        return {
            **raw.common(max_positions=MAX_POSITIONS, tied=tied),
            "pattern": letter * raw.whole("num_hidden_layers"),
            "norm_eps": raw.number("layer_norm_epsilon", default=1e-5),
            "residual_in_fp32": raw.flag("residual_in_fp32", default=True),
        }


class Mamba2(Mamba):
    """The same with Mamba2 layers."""

    model_types = ("mamba2",)

    def config(self, raw: RawConfig) -> HybridModelConfig:
        bias = raw.flag("use_bias")
        return HybridModelConfig(
            **self._common(raw, "M", tied=False),
            mamba=Mamba2Config(
                num_heads=raw.whole("num_heads", default=128),
                head_dim=raw.whole("head_dim", default=64),
                state_size=raw.whole("state_size", default=128),
                num_groups=raw.whole("n_groups", default=8),
                conv_width=raw.whole("conv_kernel", default=4),
                kernel_chunk=raw.whole("chunk_size", default=256),
                conv_bias=raw.flag("use_conv_bias", default=True),
                proj_bias=bias,
                out_bias=bias,
                dt_limit=raw.time_step_limit(),
            ),
        )
