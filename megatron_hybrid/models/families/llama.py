"""Llama (Meta) and what has its shape: attention with RoPE, gated MLPs, no recurrent layers; Qwen3
(Alibaba), dense, also has a norm on each head of q and k."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.families.family import TwoBlockFamily
from megatron_hybrid.models.families.raw_config import RawConfig


class Llama(TwoBlockFamily):
    """The usual names: the shortest example of a family."""

    model_types: ClassVar[tuple[str, ...]] = ("llama",)
    qk_norm: ClassVar[bool] = False

    def config(self, raw: RawConfig) -> HybridModelConfig:
        raw.refuse_unless("hidden_act", "silu")
        for kind in raw.listed("layer_types", default=[]):
            if kind != "full_attention":
                raise ConfigurationError(
                    f"Layers of type {kind!r} in {raw.where} are not supported."
                )
        attention = raw.attention(qk_norm=self.qk_norm)
        return HybridModelConfig(
            **raw.common(),
            pattern="*-" * raw.whole("num_hidden_layers"),
            norm_eps=raw.number("rms_norm_eps", default=1e-6),
            attention=replace(attention, rope=raw.rope(attention.head_dim)),
            mlp=raw.gated_mlp(bias=raw.flag("mlp_bias")),
        )


class Qwen3(Llama):
    """Without sliding windows."""

    model_types = ("qwen3",)
    qk_norm = True

    def config(self, raw: RawConfig) -> HybridModelConfig:
        raw.refuse_unless("use_sliding_window", False)
        return super().config(raw)
