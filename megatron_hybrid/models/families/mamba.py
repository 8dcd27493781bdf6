"""Mamba (Gu, Dao) and Falcon-Mamba (TII): Mamba1 layers alone. Falcon-Mamba normalises the step
sizes, B and C, without weights."""

from __future__ import annotations

import math
from typing import ClassVar

from megatron_hybrid.layers.mamba1 import Mamba1Config
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.families.family import Family, Location
from megatron_hybrid.models.families.raw_config import RawConfig

# Nothing in a purely recurrent model depends on how long a sequence is.
MAX_POSITIONS = 1 << 20


class Mamba(Family):
    model_types: ClassVar[tuple[str, ...]] = ("mamba", "falcon_mamba")
    renames = ((r"^backbone\.embedding\.", "backbone.embeddings."),)
    roles = ((r"^(dt|b|c)_norm\.", r"\1_layernorm."),)
    embedding = "backbone.embeddings.weight"
    final_norm = "backbone.norm_f.weight"

    def config(self, raw: RawConfig) -> HybridModelConfig:
        raw.refuse_unless("hidden_act", "silu")
        hidden, is_falcon = int(raw.require("hidden_size")), raw.model_type == "falcon_mamba"
        rank = raw.get("time_step_rank", default="auto")
        inner = int(raw.get("expand", default=2) * hidden)
        return HybridModelConfig(
            **raw.common(max_positions=MAX_POSITIONS, tied=True),
            pattern="S" * int(raw.require("num_hidden_layers")),
            norm_eps=float(raw.get("layer_norm_epsilon", default=1e-5)),
            residual_in_fp32=bool(raw.get("residual_in_fp32", default=True)),
            mamba1=Mamba1Config(
                inner_size=int(raw.get("intermediate_size", default=inner)),
                state_size=int(raw.get("state_size", default=16)),
                dt_rank=math.ceil(hidden / 16) if rank == "auto" else int(rank),
                conv_width=int(raw.get("conv_kernel", default=4)),
                conv_bias=bool(raw.get("use_conv_bias", default=True)),
                proj_bias=bool(raw.get("use_bias", default=False)),
                norms="plain" if is_falcon else "none",
                norms_eps=float(raw.get("mixer_rms_eps", default=1e-6)),
            ),
        )

    def locate(self, config: HybridModelConfig, block: int, role: str) -> list[Location]:
        layer = f"backbone.layers.{block}"
        if role == "norm.weight":
            return [Location(f"{layer}.norm.weight")]
        return [Location(f"{layer}.mixer.{self.name_of(role)}")]
