"""Qwen3 (Alibaba), dense: Llama's shape, with a norm on each head of q and k."""

from __future__ import annotations

from dataclasses import replace

from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.families.llama import Llama
from megatron_hybrid.models.families.raw_config import RawConfig


class Qwen3(Llama):
    model_types = ("qwen3",)

    def config(self, raw: RawConfig) -> HybridModelConfig:
        raw.refuse_unless("use_sliding_window", False)
        config = super().config(raw)
        assert config.attention is not None
        return replace(config, attention=replace(config.attention, qk_norm=True))
