"""Falcon-H1 (TII): attention and Mamba2 side by side in every layer, then an MLP; constant
multipliers nearly everywhere, which become part of the weights."""

from __future__ import annotations

from dataclasses import replace

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.models.config import SIDE_BY_SIDE, HybridModelConfig
from megatron_hybrid.models.families.bamba import mamba_config
from megatron_hybrid.models.families.family import Location, TwoBlockFamily
from megatron_hybrid.models.families.raw_config import RawConfig


class FalconH1(TwoBlockFamily):
    """Its attention and Mamba2 are named in the layer itself."""

    model_types = ("falcon_h1",)
    final_norm = "model.final_layernorm.weight"
    second_norm = "pre_ff_layernorm"
    mlp = "feed_forward"

    def config(self, raw: RawConfig) -> HybridModelConfig:
        raw.refuse_unless("hidden_act", "silu")
        gate, down = _multipliers(raw, "mlp_multipliers", 2)
        z, x, b, c, dt = _multipliers(raw, "ssm_multipliers", 5)
        attention, mamba = raw.attention(), mamba_config(raw)
        norm_first = raw.flag("mamba_norm_before_gate", default=True)
        normed = raw.flag("mamba_rms_norm")

        def multiplier(name: str) -> float:
            return raw.number(f"{name}_multiplier", default=1.0)

        return HybridModelConfig(
            **raw.common(max_positions=8192),
            pattern="H-" * raw.whole("num_hidden_layers"),
            norm_eps=raw.number("rms_norm_eps", default=1e-5),
            attention=replace(
                attention,
                rope=raw.rope(attention.head_dim),
                scale=attention.scale * multiplier("key"),  # keys need not be scaled themselves
                key_multiplier=multiplier("key"),
                input_multiplier=multiplier("attention_in"),
                out_multiplier=multiplier("attention_out"),
            ),
            mamba=replace(
                mamba,
                head_dim=raw.whole("mamba_d_ssm", default=mamba.inner_size) // mamba.num_heads,
                out_bias=raw.flag("projectors_bias"),
                norm=("norm_first" if norm_first else "gate_first") if normed else "none",
                in_multipliers=(z, x, b, c, dt),
                input_multiplier=multiplier("ssm_in"),
                out_multiplier=multiplier("ssm_out"),
            ),
            mlp=replace(
                raw.gated_mlp(bias=raw.flag("mlp_bias")),
                gate_multiplier=gate,
                out_multiplier=down,
            ),
            embedding_multiplier=multiplier("embedding"),
            logits_divisor=1.0 / raw.positive("lm_head_multiplier", default=1.0),
        )

    def locate(self, config: HybridModelConfig, block: int, role: str) -> list[Location]:
        if config.pattern[block] == SIDE_BY_SIDE and role.startswith("mixer."):
            return [Location(f"model.layers.{block // 2}.{role.removeprefix('mixer.')}")]
        return super().locate(config, block, role)


def _multipliers(raw: RawConfig, name: str, count: int) -> tuple[float, ...]:
    said = raw.listed(name, default=[1.0] * count, of=float)
    if len(said) != count:
        raise ConfigurationError(f"{name} in {raw.where} is {said}; it must be {count} numbers.")
    return tuple(map(float, said))
