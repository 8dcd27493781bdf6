"""Bamba (IBM, Princeton, UIUC): Mamba2 or attention with partial RoPE, each with a gated MLP."""

from __future__ import annotations

from dataclasses import replace

from megatron_hybrid.layers.mamba2 import Mamba2Config
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.families.family import TwoBlockFamily
from megatron_hybrid.models.families.raw_config import RawConfig


def mamba_config(raw: RawConfig) -> Mamba2Config:
    """Mamba2 by the names that Bamba, Granite and Falcon-H1 have for its sizes."""
    heads, bias = raw.whole("mamba_n_heads"), raw.flag("mamba_proj_bias")
    inner = raw.whole("mamba_expand", default=2) * raw.whole("hidden_size")
    return Mamba2Config(
        num_heads=heads,
        head_dim=raw.whole_or_auto("mamba_d_head", inner // heads),
        state_size=raw.whole("mamba_d_state", default=256),
        num_groups=raw.whole("mamba_n_groups", default=1),
        conv_width=raw.whole("mamba_d_conv", default=4),
        kernel_chunk=raw.whole("mamba_chunk_size", default=256),
        conv_bias=raw.flag("mamba_conv_bias", default=True),
        proj_bias=bias,
        out_bias=bias,
        dt_limit=raw.time_step_limit(),
    )


class Bamba(TwoBlockFamily):
    """Half of each head is rotated unless the folder says otherwise."""

    model_types = ("bamba",)
    final_norm = "model.final_layernorm.weight"
    second_norm = "pre_ff_layernorm"
    mlp = "feed_forward"

    def config(self, raw: RawConfig) -> HybridModelConfig:
        raw.refuse_unless("hidden_act", "silu")
        attention = raw.attention()
        rope = raw.rope(attention.head_dim, partial_rotary_factor=0.5)
        letters = raw.layer_letters()
        if letters is None:
            indices = raw.listed("attn_layer_indices", default=[], of=int)
            layers = range(raw.whole("num_hidden_layers"))
            letters = "".join("*" if i in indices else "M" for i in layers)
        return HybridModelConfig(
            **raw.common(),
            pattern="".join(letter + "-" for letter in letters),
            norm_eps=raw.number("rms_norm_eps", default=1e-5),
            attention=replace(attention, rope=rope) if "*" in letters else None,
            mamba=mamba_config(raw) if "M" in letters else None,
            mlp=raw.gated_mlp(bias=raw.flag("mlp_bias")),
        )
