"""Jamba (AI21): Mamba1 or attention without positions, each with an MLP or experts."""

from __future__ import annotations

import math

from megatron_hybrid.layers.attention import AttentionConfig
from megatron_hybrid.layers.mamba1 import Mamba1Config
from megatron_hybrid.layers.mlp import MLPConfig
from megatron_hybrid.layers.moe import MoEConfig
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.families.family import TwoBlockFamily
from megatron_hybrid.models.families.raw_config import RawConfig


class Jamba(TwoBlockFamily):
    model_types = ("jamba",)
    roles = ((r"^(dt|b|c)_norm\.", r"\1_layernorm."),)
    final_norm = "model.final_layernorm.weight"
    second_norm = "pre_ff_layernorm"
    mlp = "feed_forward"

    def config(self, raw: RawConfig) -> HybridModelConfig:
        raw.refuse_unless("hidden_act", "silu")
        raw.refuse_unless("sliding_window")
        pattern = self._pattern(raw)
        heads, kv_heads, head_dim = raw.heads()
        hidden, eps = int(raw.require("hidden_size")), float(raw.get("rms_norm_eps", default=1e-6))
        rank = raw.get("mamba_dt_rank", default="auto")
        mlp = MLPConfig(int(raw.require("intermediate_size")), gated=True, activation="silu")
        return HybridModelConfig(
            **raw.common(max_positions=262144),
            pattern=pattern,
            norm_eps=eps,
            attention=AttentionConfig(heads, kv_heads, head_dim, scale=head_dim**-0.5),
            mamba1=Mamba1Config(
                inner_size=int(raw.get("mamba_expand", default=2) * hidden),
                state_size=int(raw.get("mamba_d_state", default=16)),
                dt_rank=math.ceil(hidden / 16) if rank == "auto" else int(rank),
                conv_width=int(raw.get("mamba_d_conv", default=4)),
                conv_bias=bool(raw.get("mamba_conv_bias", default=True)),
                proj_bias=bool(raw.get("mamba_proj_bias", default=False)),
                norms="learned",
                norms_eps=eps,
            ),
            mlp=mlp,
            moe=MoEConfig(
                num_experts=int(raw.get("num_experts", "num_local_experts", default=16)),
                experts_per_token=int(raw.get("num_experts_per_tok", default=2)),
                expert=mlp,
                shared=None,
                normalize_weights=False,
            )
            if "E" in pattern
            else None,
        )

    def _pattern(self, raw: RawConfig) -> str:
        def every(name: str, period: int, offset: int) -> range:
            start = int(raw.get(f"{name}_offset", default=offset))
            return range(start, layers, int(raw.get(f"{name}_period", default=period)))

        layers = int(raw.require("num_hidden_layers"))
        attention = every("attn_layer", 8, 4)
        experts = every("expert_layer", 2, 1)
        if int(raw.get("num_experts", "num_local_experts", default=16)) == 1:
            experts = range(0)
        return "".join(
            ("*" if i in attention else "S") + ("E" if i in experts else "-") for i in range(layers)
        )
