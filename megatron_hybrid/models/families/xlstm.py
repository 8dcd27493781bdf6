"""xLSTM (NXAI): layers of mLSTM, each with a gated MLP, gates and logits under a soft cap (Beck et
al., "xLSTM 7B", 2025, arXiv 2503.13427)."""

from __future__ import annotations

import math

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.layers.mlp import MLPConfig
from megatron_hybrid.layers.mlstm import MLSTMConfig
from megatron_hybrid.models.config import DENSE_MLP, MLSTM, HybridModelConfig
from megatron_hybrid.models.families.family import Family, Location
from megatron_hybrid.models.families.raw_config import RawConfig

_NORMS = ("norm_mlstm", "norm_ffn")
_MLP = {"gate_proj": "proj_up_gate", "up_proj": "proj_up", "down_proj": "proj_down"}


class XLSTM(Family):
    """A layer of Hugging Face's is two blocks. It has no positions, and no longest sequence."""

    model_types = ("xlstm",)
    embedding = "backbone.embeddings.weight"
    final_norm = "backbone.out_norm.weight"

    def config(self, raw: RawConfig) -> HybridModelConfig:
        raw.refuse_unless("weight_mode", "single")
        for name, supported in (("use_bias", False), ("add_out_norm", True)):
            raw.refuse_unless(name, supported)
        raw.refuse_unless("norm_reduction_force_float32", True)
        hidden = raw.whole("hidden_size", "embedding_dim")
        heads = raw.whole("num_heads", default=8)
        sizes = [
            int(hidden * raw.positive(name, default=default))
            for name, default in (("qk_dim_factor", 0.5), ("v_dim_factor", 1.0))
        ]
        if any(size % heads or not size for size in sizes):
            raise ConfigurationError(
                f"num_heads = {heads} in {raw.where} does not divide {sizes[0]} numbers of queries "
                f"and {sizes[1]} of values."
            )
        step = raw.whole("ffn_round_up_to_multiple_of", default=64)
        size = math.ceil(int(hidden * raw.positive("ffn_proj_factor", default=2.667)) / step) * step
        return HybridModelConfig(
            **raw.common(max_positions=32_768),
            pattern=(MLSTM + DENSE_MLP) * raw.whole("num_hidden_layers", "num_blocks", default=32),
            norm_eps=raw.number("norm_eps", default=1e-6),
            mlp=MLPConfig(size, gated=True, activation="silu"),
            others={
                MLSTM: MLSTMConfig(
                    heads,
                    sizes[0] // heads,
                    sizes[1] // heads,
                    gate_cap=raw.positive("gate_soft_cap", default=15.0),
                    eps=raw.number("eps", default=1e-6),
                    chunk=raw.whole("chunk_size", default=64),
                )
            },
            logits_soft_cap=raw.positive("output_logit_soft_cap", default=30.0),
        )

    def locate(self, config: HybridModelConfig, block: int, role: str) -> list[Location]:
        layer, second = f"backbone.blocks.{block // 2}", block % 2
        if role == "norm.weight":
            return [Location(f"{layer}.{_NORMS[second]}.weight")]
        role = role.removeprefix("mixer.")
        if not second:
            return [Location(f"{layer}.mlstm_layer.{role}")]
        projection, dot, rest = role.partition(".")
        return [Location(f"{layer}.ffn.{_MLP[projection]}{dot}{rest}")]
