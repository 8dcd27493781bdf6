"""LFM2 and LFM2-MoE (Liquid AI): gated short convolutions and attention, each with an MLP or, past
the first layers, experts."""

from __future__ import annotations

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.layers.attention import AttentionConfig
from megatron_hybrid.layers.mlp import MLPConfig
from megatron_hybrid.layers.moe import MoEConfig
from megatron_hybrid.layers.short_conv import ShortConvConfig
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.families.family import TwoBlockFamily
from megatron_hybrid.models.families.raw_config import RawConfig


class Lfm2(TwoBlockFamily):
    model_types = ("lfm2", "lfm2_moe")
    roles = (
        (r"\bgate_proj\.", "w1."),
        (r"\bup_proj\.", "w3."),
        (r"\bdown_proj\.", "w2."),
        (r"^o_proj\.", "out_proj."),
        (r"^(q|k)_norm\.", r"\1_layernorm."),
        (r"^router\.bias$", "expert_bias"),
        (r"^router\.", "gate."),
    )
    first_norm = "operator_norm"
    second_norm = "ffn_norm"
    recurrent = "conv"
    mlp = "feed_forward"
    final_norm = "model.embedding_norm.weight"

    def config(self, raw: RawConfig) -> HybridModelConfig:
        letters = self._letters(raw)
        heads, kv_heads, head_dim = raw.heads()
        has_experts = raw.model_type == "lfm2_moe"
        dense = int(raw.get("num_dense_layers", default=2)) if has_experts else len(letters)
        tied = bool(raw.get("tie_embedding", default=True))
        return HybridModelConfig(
            **raw.common(max_positions=128_000, tied=tied),
            pattern="".join(c + ("-" if i < dense else "E") for i, c in enumerate(letters)),
            norm_eps=float(raw.get("norm_eps", default=1e-5)),
            attention=AttentionConfig(
                heads, kv_heads, head_dim, scale=head_dim**-0.5, qk_norm=True
            ),
            rope=raw.rope(head_dim, theta=1e6),
            short_conv=ShortConvConfig(
                conv_width=int(raw.get("conv_L_cache", default=3)),
                bias=bool(raw.get("conv_bias", default=False)),
            ),
            mlp=MLPConfig(self._mlp_size(raw), gated=True, activation="silu"),
            moe=self._moe(raw) if dense < len(letters) else None,
        )

    def _letters(self, raw: RawConfig) -> str:
        letters = raw.layer_letters({"conv": "C"})
        if letters is not None:
            return letters
        layers = range(int(raw.require("num_hidden_layers")))
        attention = raw.get("full_attn_idxs")
        if attention is None:
            raise ConfigurationError(f"{raw.where} has neither layer_types nor full_attn_idxs.")
        return "".join("*" if i in attention else "C" for i in layers)

    def _mlp_size(self, raw: RawConfig) -> int:
        size = int(raw.get("block_ff_dim", "intermediate_size"))
        if raw.model_type == "lfm2_moe" or not raw.get("block_auto_adjust_ff_dim", default=True):
            return size
        size = int(raw.get("block_ffn_dim_multiplier", default=1.0) * int(2 * size / 3))
        multiple = int(raw.get("block_multiple_of", default=256))
        return -(-size // multiple) * multiple

    def _moe(self, raw: RawConfig) -> MoEConfig:
        return MoEConfig(
            num_experts=int(raw.require("num_experts")),
            experts_per_token=int(raw.require("num_experts_per_tok")),
            expert=MLPConfig(int(raw.require("moe_intermediate_size")), True, "silu"),
            shared=None,
            scoring="sigmoid",
            normalize_weights=bool(raw.get("norm_topk_prob", default=True)),
            weights_eps=1e-6,
            router_bias=bool(raw.get("use_expert_bias", default=True)),
            scaling_factor=float(raw.get("routed_scaling_factor", default=1.0)),
        )
