"""Jamba (AI21): Mamba1 or attention without positions, each with an MLP or experts."""

from __future__ import annotations

import math

from megatron_hybrid.layers.mamba1 import Mamba1Config
from megatron_hybrid.layers.moe import MoEConfig
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.families.family import TwoBlockFamily
from megatron_hybrid.models.families.raw_config import RawConfig


class Jamba(TwoBlockFamily):
    """Which layers have attention, and which experts, is said by periods and offsets."""

    model_types = ("jamba",)
    roles = ((r"^(dt|b|c)_norm\.", r"\1_layernorm."),)
    final_norm = "model.final_layernorm.weight"
    second_norm = "pre_ff_layernorm"
    mlp = "feed_forward"

    def config(self, raw: RawConfig) -> HybridModelConfig:
        raw.refuse_unless("hidden_act", "silu")
        raw.refuse_unless("sliding_window")
        experts = raw.whole("num_experts", "num_local_experts", default=16)
        pattern = self._pattern(raw, has_experts=experts != 1)
        hidden, eps = raw.whole("hidden_size"), raw.number("rms_norm_eps", default=1e-6)
        mlp = raw.gated_mlp()
        moe = MoEConfig(
            num_experts=experts,
            experts_per_token=raw.whole("num_experts_per_tok", default=2),
            expert=mlp,
            shared=None,
            normalize_weights=False,
        )
        return HybridModelConfig(
            **raw.common(max_positions=262144),
            pattern=pattern,
            norm_eps=eps,
            attention=raw.attention(bias=False),
            mamba1=Mamba1Config(
                inner_size=int(raw.positive("mamba_expand", default=2) * hidden),
                state_size=raw.whole("mamba_d_state", default=16),
                dt_rank=raw.whole_or_auto("mamba_dt_rank", math.ceil(hidden / 16)),
                conv_width=raw.whole("mamba_d_conv", default=4),
                conv_bias=raw.flag("mamba_conv_bias", default=True),
                proj_bias=raw.flag("mamba_proj_bias"),
                norms="learned",
                norms_eps=eps,
            ),
            mlp=mlp,
            moe=moe if "E" in pattern else None,
        )

    def _pattern(self, raw: RawConfig, *, has_experts: bool) -> str:
        def every(name: str, period: int, offset: int) -> range:
            start = raw.whole(f"{name}_offset", default=offset, least=0)
            return range(start, layers, raw.whole(f"{name}_period", default=period))

        layers = raw.whole("num_hidden_layers")
        attention = every("attn_layer", 8, 4)
        experts = every("expert_layer", 2, 1) if has_experts else range(0)
        return "".join(
            ("*" if i in attention else "S") + ("E" if i in experts else "-") for i in range(layers)
        )
