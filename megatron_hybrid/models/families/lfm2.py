"""LFM2 and LFM2-MoE (Liquid AI): gated short convolutions and attention, each with an MLP or, past
the first layers, experts."""

from __future__ import annotations

from dataclasses import replace

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.layers.mlp import MLPConfig
from megatron_hybrid.layers.moe import MoEConfig
from megatron_hybrid.layers.short_conv import ShortConvConfig
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.families.family import TwoBlockFamily
from megatron_hybrid.models.families.raw_config import RawConfig


class Lfm2(TwoBlockFamily):
    """Its layers have names of their own for nearly everything."""

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
        attention = raw.attention(bias=False, qk_norm=True)
        has_experts = raw.model_type == "lfm2_moe"
        dense = raw.whole("num_dense_layers", default=2, least=0) if has_experts else len(letters)
        return HybridModelConfig(
            **raw.common(max_positions=128_000, tied=raw.flag("tie_embedding", default=True)),
            pattern="".join(c + ("-" if i < dense else "E") for i, c in enumerate(letters)),
            norm_eps=raw.number("norm_eps", default=1e-5),
            attention=replace(attention, rope=raw.rope(attention.head_dim, theta=1e6)),
            short_conv=ShortConvConfig(
                conv_width=raw.whole("conv_L_cache", default=3), bias=raw.flag("conv_bias")
            ),
            mlp=MLPConfig(self._mlp_size(raw), gated=True, activation="silu"),
            moe=self._moe(raw) if dense < len(letters) else None,
        )

    def _letters(self, raw: RawConfig) -> str:
        letters = raw.layer_letters({"conv": "C"})
        if letters is not None:
            return letters
        if raw.get("full_attn_idxs") is None:
            raise ConfigurationError(f"{raw.where} has neither layer_types nor full_attn_idxs.")
        attention = raw.listed("full_attn_idxs", of=int)
        layers = range(raw.whole("num_hidden_layers"))
        return "".join("*" if i in attention else "C" for i in layers)

    def _mlp_size(self, raw: RawConfig) -> int:
        size = raw.whole("block_ff_dim", "intermediate_size")
        if raw.model_type == "lfm2_moe" or not raw.flag("block_auto_adjust_ff_dim", default=True):
            return size
        size = int(raw.positive("block_ffn_dim_multiplier", default=1.0) * int(2 * size / 3))
        multiple = raw.whole("block_multiple_of", default=256)
        return -(-size // multiple) * multiple

    def _moe(self, raw: RawConfig) -> MoEConfig:
        return MoEConfig(
            num_experts=raw.whole("num_experts"),
            experts_per_token=raw.whole("num_experts_per_tok"),
            expert=raw.gated_mlp("moe_intermediate_size"),
            shared=None,
            scoring="sigmoid",
            normalize_weights=raw.flag("norm_topk_prob", default=True),
            weights_eps=1e-6,
            router_bias=raw.flag("use_expert_bias", default=True),
            scaling_factor=raw.number("routed_scaling_factor", default=1.0),
        )
