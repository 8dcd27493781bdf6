"""Bamba (IBM, Princeton, UIUC): Mamba2 or attention with partial RoPE, each with a gated MLP."""

from __future__ import annotations

from megatron_hybrid.layers.attention import AttentionConfig
from megatron_hybrid.layers.mamba2 import Mamba2Config
from megatron_hybrid.layers.mlp import MLPConfig
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.families.family import TwoBlockFamily
from megatron_hybrid.models.families.raw_config import RawConfig


def mamba_config(raw: RawConfig) -> Mamba2Config:
    """Bamba's and Granite's names for the sizes of Mamba2."""
    heads = int(raw.require("mamba_n_heads"))
    inner = int(raw.get("mamba_expand", default=2)) * int(raw.require("hidden_size"))
    head_dim = raw.get("mamba_d_head", default="auto")
    return Mamba2Config(
        num_heads=heads,
        head_dim=inner // heads if head_dim == "auto" else int(head_dim),
        state_size=int(raw.get("mamba_d_state", default=256)),
        num_groups=int(raw.get("mamba_n_groups", default=1)),
        conv_width=int(raw.get("mamba_d_conv", default=4)),
        kernel_chunk=int(raw.get("mamba_chunk_size", default=256)),
        conv_bias=bool(raw.get("mamba_conv_bias", default=True)),
        proj_bias=bool(raw.get("mamba_proj_bias", default=False)),
        out_bias=bool(raw.get("mamba_proj_bias", default=False)),
        dt_limit=raw.time_step_limit(),
    )


class Bamba(TwoBlockFamily):
    model_types = ("bamba",)
    final_norm = "model.final_layernorm.weight"
    second_norm = "pre_ff_layernorm"
    mlp = "feed_forward"

    def config(self, raw: RawConfig) -> HybridModelConfig:
        raw.refuse_unless("hidden_act", "silu")
        letters = self._letters(raw)
        heads, kv_heads, head_dim = raw.heads()
        bias = bool(raw.get("attention_bias", default=False))
        return HybridModelConfig(
            **raw.common(),
            pattern="".join(letter + "-" for letter in letters),
            norm_eps=float(raw.get("rms_norm_eps", default=1e-5)),
            attention=AttentionConfig(
                heads, kv_heads, head_dim, scale=head_dim**-0.5, qkv_bias=bias, output_bias=bias
            )
            if "*" in letters
            else None,
            # Half of each head is rotated unless the folder says otherwise.
            rope=raw.rope(head_dim, partial_rotary_factor=0.5),
            mamba=mamba_config(raw) if "M" in letters else None,
            mlp=MLPConfig(
                intermediate_size=int(raw.require("intermediate_size")),
                gated=True,
                activation="silu",
                bias=bool(raw.get("mlp_bias", default=False)),
            ),
        )

    def _letters(self, raw: RawConfig) -> str:
        letters = raw.layer_letters()
        if letters is not None:
            return letters
        attention = set(raw.get("attn_layer_indices", default=[]))
        return "".join(
            "*" if i in attention else "M" for i in range(raw.require("num_hidden_layers"))
        )
