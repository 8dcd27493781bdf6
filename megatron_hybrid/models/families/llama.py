"""Llama (Meta) and what has its shape: attention with RoPE, gated MLPs, no recurrent layers."""

from __future__ import annotations

from megatron_hybrid.layers.attention import AttentionConfig
from megatron_hybrid.layers.mlp import MLPConfig
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.families.family import TwoBlockFamily
from megatron_hybrid.models.families.raw_config import RawConfig


class Llama(TwoBlockFamily):
    model_types = ("llama",)

    def config(self, raw: RawConfig) -> HybridModelConfig:
        raw.refuse_unless("hidden_act", "silu")
        heads, kv_heads, head_dim = raw.heads()
        bias = bool(raw.get("attention_bias", default=False))
        return HybridModelConfig(
            **raw.common(),
            pattern="*-" * int(raw.require("num_hidden_layers")),
            norm_eps=float(raw.get("rms_norm_eps", default=1e-6)),
            attention=AttentionConfig(
                heads, kv_heads, head_dim, scale=head_dim**-0.5, qkv_bias=bias, output_bias=bias
            ),
            rope=raw.rope(head_dim),
            mlp=MLPConfig(
                intermediate_size=int(raw.require("intermediate_size")),
                gated=True,
                activation="silu",
                bias=bool(raw.get("mlp_bias", default=False)),
            ),
        )
