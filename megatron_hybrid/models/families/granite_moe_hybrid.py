"""Granite 4 hybrid (IBM): Mamba2 or attention, each with a shared MLP and, in some sizes, experts;
constant multipliers on embeddings, residuals, attention and logits."""

from __future__ import annotations

import re
from dataclasses import replace

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.layers.moe import MoEConfig
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.families.bamba import mamba_config
from megatron_hybrid.models.families.family import GATED, Location, TwoBlockFamily
from megatron_hybrid.models.families.raw_config import RawConfig


class GraniteMoeHybrid(TwoBlockFamily):
    """Its experts are stacked, gates and up projections one tensor; but where they are quantised,
    they may be single."""

    model_types = ("granitemoehybrid",)
    renames = (
        (r"block_sparse_moe\.experts\.gate_up_proj$", "block_sparse_moe.input_linear.weight"),
        (r"block_sparse_moe\.experts\.down_proj$", "block_sparse_moe.output_linear.weight"),
        (r"block_sparse_moe\.router\.weight$", "block_sparse_moe.router.layer.weight"),
    )

    def config(self, raw: RawConfig) -> HybridModelConfig:
        raw.refuse_unless("hidden_act", "silu")
        raw.refuse_unless("position_embedding_type", "rope", "nope")
        letters = raw.layer_letters() or "M" * raw.whole("num_hidden_layers")
        attention = raw.attention()
        rotated = raw.get("position_embedding_type") == "rope"
        if raw.values.get("attention_multiplier", 1.0) is None:
            raise ConfigurationError(raw.missing("attention_multiplier"))
        attention = replace(
            attention,
            scale=raw.number("attention_multiplier", default=1.0),
            rope=raw.rope(attention.head_dim) if rotated else None,
        )
        shared, moe = raw.gated_mlp("shared_intermediate_size"), None
        if experts := raw.whole("num_local_experts", default=0, least=0):
            chosen = raw.whole("num_experts_per_tok")
            moe = MoEConfig(experts, chosen, expert=raw.gated_mlp(), shared=shared)
        return HybridModelConfig(
            **raw.common(),
            pattern="".join(letter + ("E" if experts else "-") for letter in letters),
            norm_eps=raw.number("rms_norm_eps", default=1e-6),
            attention=attention if "*" in letters else None,
            mamba=mamba_config(raw) if "M" in letters else None,
            mlp=None if experts else shared,
            moe=moe,
            embedding_multiplier=raw.number("embedding_multiplier", default=1.0),
            residual_multiplier=raw.number("residual_multiplier", default=1.0),
            logits_divisor=raw.number("logits_scaling", default=1.0),
        )

    def locate_mlp(self, config: HybridModelConfig, layer: str, role: str) -> list[Location]:
        if role == "router.weight":
            return [Location(f"{layer}.block_sparse_moe.router.layer.weight")]
        expert = re.fullmatch(r"experts\.(\d+)\.(\w+)\.weight", role)
        projection = expert[2] if expert else role.removeprefix("shared.").removesuffix(".weight")
        tensor = "output_linear" if projection == "down_proj" else "input_linear"
        part, parts = GATED[projection]
        if expert and config.moe is not None:
            name = f"{layer}.block_sparse_moe.{tensor}.weight"
            return [
                Location(name, int(expert[1]), config.moe.num_experts, part, parts),
                Location(f"{layer}.block_sparse_moe.{role}"),
            ]
        return [Location(f"{layer}.shared_mlp.{tensor}.weight", part=part, parts=parts)]
