"""Granite 4 hybrid (IBM): Mamba2 or attention, each with a shared MLP and, in some sizes, experts;
constant multipliers on embeddings, residuals, attention and logits."""

from __future__ import annotations

import re

from megatron_hybrid.layers.attention import AttentionConfig
from megatron_hybrid.layers.mlp import MLPConfig
from megatron_hybrid.layers.moe import MoEConfig
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.families.bamba import mamba_config
from megatron_hybrid.models.families.family import GATED, Location, TwoBlockFamily
from megatron_hybrid.models.families.raw_config import RawConfig


class GraniteMoeHybrid(TwoBlockFamily):
    model_types = ("granitemoehybrid",)
    renames = (
        (r"block_sparse_moe\.experts\.gate_up_proj$", "block_sparse_moe.input_linear.weight"),
        (r"block_sparse_moe\.experts\.down_proj$", "block_sparse_moe.output_linear.weight"),
        (r"block_sparse_moe\.router\.weight$", "block_sparse_moe.router.layer.weight"),
    )

    def config(self, raw: RawConfig) -> HybridModelConfig:
        raw.refuse_unless("hidden_act", "silu")
        raw.refuse_unless("position_embedding_type", "rope", "nope")
        letters = raw.layer_letters() or "M" * int(raw.require("num_hidden_layers"))
        heads, kv_heads, head_dim = raw.heads()
        bias = bool(raw.get("attention_bias", default=False))
        shared = MLPConfig(
            intermediate_size=int(raw.require("shared_intermediate_size")),
            gated=True,
            activation="silu",
        )
        experts = int(raw.get("num_local_experts", default=0))
        rotated = raw.get("position_embedding_type") == "rope"
        return HybridModelConfig(
            **raw.common(),
            pattern="".join(letter + ("E" if experts else "-") for letter in letters),
            norm_eps=float(raw.get("rms_norm_eps", default=1e-6)),
            attention=AttentionConfig(
                heads,
                kv_heads,
                head_dim,
                scale=float(raw.get("attention_multiplier", default=1.0)),
                qkv_bias=bias,
                output_bias=bias,
            )
            if "*" in letters
            else None,
            rope=raw.rope(head_dim) if rotated else None,
            mamba=mamba_config(raw) if "M" in letters else None,
            mlp=None if experts else shared,
            moe=MoEConfig(
                num_experts=experts,
                experts_per_token=int(raw.require("num_experts_per_tok")),
                expert=MLPConfig(int(raw.require("intermediate_size")), True, "silu"),
                shared=shared,
            )
            if experts
            else None,
            embedding_multiplier=float(raw.get("embedding_multiplier", default=1.0)),
            residual_multiplier=float(raw.get("residual_multiplier", default=1.0)),
            logits_divisor=float(raw.get("logits_scaling", default=1.0)),
        )

    def locate_mlp(self, config: HybridModelConfig, layer: str, role: str) -> list[Location]:
        if role == "router.weight":
            return [Location(f"{layer}.block_sparse_moe.router.layer.weight")]
        expert = re.fullmatch(r"experts\.(\d+)\.(\w+)\.weight", role)
        projection = role.removeprefix("shared.").removesuffix(".weight")
        if expert and config.moe is not None:
            projection = expert[2]
        tensor = "output_linear" if projection == "down_proj" else "input_linear"
        part, parts = GATED[projection]
        if expert and config.moe is not None:
            name = f"{layer}.block_sparse_moe.{tensor}.weight"
            return [Location(name, int(expert[1]), config.moe.num_experts, part, parts)]
        return [Location(f"{layer}.shared_mlp.{tensor}.weight", part=part, parts=parts)]
