"""ZAYA (Zyphra): attention over convolved queries and keys, each with experts, of which a token has
one or none; learned scales of the residual stream and of what is added to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.layers.attention import AttentionConfig
from megatron_hybrid.layers.carried_router import CarriedRouterConfig
from megatron_hybrid.layers.convolved_attention import ConvolvedAttentionConfig
from megatron_hybrid.layers.moe import MoEConfig
from megatron_hybrid.models.config import (
    CONVOLVED_ATTENTION,
    SLIDING_CONVOLVED_ATTENTION,
    BlockForm,
    HybridModelConfig,
)
from megatron_hybrid.models.families import zaya_legacy
from megatron_hybrid.models.families.family import Location, TwoBlockFamily
from megatron_hybrid.models.families.raw_config import RawConfig

_LETTERS = {"hybrid": CONVOLVED_ATTENTION, "hybrid_sliding": SLIDING_CONVOLVED_ATTENTION}
# By kind of layer, where config.json does not say it.
_ROPE: dict[str, dict[str, Any]] = {
    "hybrid": {"rope_theta": 5e6, "partial_rotary_factor": 0.5},
    "hybrid_sliding": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
}


class Zaya(TwoBlockFamily):
    """Its checkpoints have transformers' names, or those of zaya_legacy.py."""

    model_types = ("zaya", zaya_legacy.LEGACY)
    roles = ((r"^router\.", "gate."),)
    recurrent = "self_attn"

    def config(self, raw: RawConfig) -> HybridModelConfig:
        if raw.model_type == "zaya" and zaya_legacy.is_legacy(raw):
            raw = zaya_legacy.renamed(raw)
        raw.refuse_unless("hidden_act", "silu")
        raw.refuse_unless("num_experts_per_tok", 1)
        raw.refuse_unless("lm_head_bias", False)
        usual = ["hybrid"] * raw.whole("num_hidden_layers", default=40)
        layers = raw.listed("layer_types", default=usual)
        if unknown := [layer for layer in layers if layer not in _LETTERS]:
            raise ConfigurationError(
                f"Layers of type {unknown[0]!r} in {raw.where} are not supported."
            )
        raw.check_count("layer_types", layers)
        letters = [_LETTERS[layer] for layer in layers]
        return HybridModelConfig(
            **raw.common(max_positions=131072, tied=True),
            pattern="".join(letter + "E" for letter in letters),
            forms=(BlockForm(scaled=True),) * 2 * len(letters),
            norm_eps=raw.number("rms_norm_eps", default=1e-5),
            residual_in_fp32=True,
            embedding_scale=True,
            moe=MoEConfig(
                num_experts=raw.whole("num_experts", default=16),
                experts_per_token=1,
                expert=raw.gated_mlp("moe_intermediate_size"),
                shared=None,
                router=CarriedRouterConfig(raw.whole("router_hidden_size", default=256), first=1),
            ),
            others={
                letter: self._attention(raw, kind)
                for kind, letter in _LETTERS.items()
                if letter in letters
            },
        )

    def _attention(self, raw: RawConfig, kind: str) -> ConvolvedAttentionConfig:
        dim, widths = raw.whole("head_dim", default=128), ("cca_time0", "cca_time1")
        attention = raw.attention(dim)
        heads, kv_heads = attention.num_heads, attention.num_kv_heads
        if heads % kv_heads or kv_heads * dim % 2:
            raise ConfigurationError(
                f"{raw.where} has {heads} heads of queries and {kv_heads} of keys, of {dim} "
                "numbers; each key must be that of equally many queries, and the values have two "
                "halves."
            )
        depthwise, grouped = (raw.whole(name, default=2) for name in widths)
        attention = replace(attention, rope=self._rope(raw, kind, attention))
        if kind == "hybrid_sliding":
            attention = replace(attention, window=raw.whole("sliding_window"))
        return ConvolvedAttentionConfig(attention, depthwise, grouped)

    def _rope(self, raw: RawConfig, kind: str, attention: AttentionConfig) -> Any:
        said = raw.get("rope_parameters", default=_ROPE)
        raw = replace(raw, values={**raw.values, "rope_parameters": said})
        return raw.rope(attention.head_dim, 1.0, layers=kind)

    def places(self, config: HybridModelConfig, block: int | None, role: str) -> list[Location]:
        if role == "final_norm" and config.model_type == zaya_legacy.LEGACY:
            return [Location("model.final_norm.weight")]
        return super().places(config, block, role)

    def locate(self, config: HybridModelConfig, block: int, role: str) -> list[Location]:
        if config.model_type == zaya_legacy.LEGACY:
            return zaya_legacy.locate(config, block, role)
        kind, _, name = role.partition(".")
        if kind == "embedding_norm":
            return [Location(f"model.input_hidden_states_{name}")]
        if kind == "scaling":
            place = "mlp" if block % 2 else "attention"
            return [Location(f"model.layers.{block // 2}.post_{place}_residual_scale.{name}")]
        return super().locate(config, block, role)
