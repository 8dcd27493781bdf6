"""Zamba (Zyphra): Mamba1 layers of a few heads; to the input of some one shared transformer block
adds, as in Zamba2, but without adapters and rotation."""

from __future__ import annotations

import math
from dataclasses import replace

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.layers.mamba1 import Mamba1Config
from megatron_hybrid.layers.mlp import MLPConfig
from megatron_hybrid.layers.shared_transformer import SharedTransformerConfig
from megatron_hybrid.models.config import MAMBA1, HybridModelConfig
from megatron_hybrid.models.families.raw_config import RawConfig
from megatron_hybrid.models.families.zamba2 import Zamba2


class Zamba(Zamba2):
    """Named nearly as its successor."""

    model_types = ("zamba",)
    shared = "shared_transf"
    joins_gates = False

    def config(self, raw: RawConfig) -> HybridModelConfig:
        raw.refuse_unless("hidden_act", "gelu", "silu")
        raw.refuse_unless("hidden_mamba_act", "silu")
        hidden, heads = raw.whole("hidden_size"), raw.whole("num_attention_heads", default=16)
        raw.refuse_unless("attention_hidden_size", 2 * hidden)
        head_dim = raw.whole("attention_head_dim", "head_dim", default=2 * hidden // heads)
        attention = raw.attention(head_dim, bias=False)
        inner = raw.whole("mamba_expand", default=2) * hidden
        parts = raw.whole("n_mamba_heads", default=2)
        if inner % parts:
            raise ConfigurationError(
                f"n_mamba_heads = {parts} in {raw.where} does not divide {inner} Mamba channels."
            )
        activation = raw.get("hidden_act", default="gelu")
        letters = raw.layer_letters({"mamba": MAMBA1, "linear_attention": MAMBA1, "hybrid": "Z"})
        return HybridModelConfig(
            **raw.common(tied=True),
            pattern=letters or self._letters(raw),
            norm_eps=raw.number("rms_norm_eps", default=1e-5),
            mamba1=Mamba1Config(
                inner_size=inner,
                state_size=raw.whole("mamba_d_state", default=16),
                dt_rank=raw.whole_or_auto("mamba_dt_rank", math.ceil(hidden / 16)),
                conv_width=raw.whole("mamba_d_conv", default=4),
                conv_bias=raw.flag("mamba_conv_bias", default=True),
                proj_bias=raw.flag("mamba_proj_bias"),
                heads=parts,
            ),
            shared_transformer=SharedTransformerConfig(
                attention=replace(attention, scale=(head_dim / 2) ** -0.5),
                mlp=MLPConfig(raw.whole("intermediate_size"), gated=True, activation=activation),
                num_blocks=1,
                mixer=MAMBA1,
            ),
        )

    def _letters(self, raw: RawConfig) -> str:
        """Of the folders that count layers instead of listing them."""
        period = raw.whole("attn_layer_period", default=6)
        offset = raw.whole("attn_layer_offset", default=4, least=0)
        later = range(raw.whole("num_hidden_layers", default=76) - 3)
        return "SSZ" + "".join("Z" if i % period == offset else MAMBA1 for i in later)
