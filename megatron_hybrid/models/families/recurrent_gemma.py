"""RecurrentGemma (Google): Griffin's recurrent blocks and local attention, each with a gated MLP;
norms with weights around zero, logits under a soft cap (arXiv 2404.07839)."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.layers.mlp import MLPConfig
from megatron_hybrid.layers.rg_lru import RGLRUConfig
from megatron_hybrid.models.config import RG_LRU, SLIDING_ATTENTION, HybridModelConfig
from megatron_hybrid.models.families.family import TwoBlockFamily
from megatron_hybrid.models.families.raw_config import RawConfig

_LETTERS = {"recurrent": RG_LRU, "attention": SLIDING_ATTENTION}
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "silu": "silu"}


class RecurrentGemma(TwoBlockFamily):
    """Its attention sees a window: what it keeps does not grow with a sequence, either."""

    model_types = ("recurrent_gemma",)
    first_norm = "temporal_pre_norm"
    second_norm = "channel_pre_norm"
    attention = "temporal_block"
    recurrent = "temporal_block"
    mlp = "mlp_block"
    final_norm = "model.final_norm.weight"

    def config(self, raw: RawConfig) -> HybridModelConfig:
        raw.refuse_unless("hidden_activation", *_ACTIVATIONS)
        raw.refuse_unless("embeddings_scale_by_sqrt_dim", True)
        hidden, heads = raw.whole("hidden_size"), raw.whole("num_attention_heads", default=10)
        activation = _ACTIVATIONS[raw.get("hidden_activation", default="gelu_pytorch_tanh")]
        channels = raw.whole("lru_width", default=hidden)
        if channels % heads:
            raise ConfigurationError(
                f"num_attention_heads = {heads} in {raw.where} does not divide lru_width, "
                f"{channels}."
            )
        return HybridModelConfig(
            # of which config.json says nothing: of the text that it was trained on
            **raw.common(max_positions=8192, tied=True),
            pattern="".join(letter + "-" for letter in self._letters(raw)),
            norm_eps=raw.number("rms_norm_eps", default=1e-6),
            zero_centered_norm=True,
            mlp=MLPConfig(
                raw.whole("intermediate_size", least=2) // 2, True, activation, bias=True
            ),
            others={
                RG_LRU: RGLRUConfig(
                    channels, heads, raw.whole("conv1d_width", default=4), activation
                ),
                SLIDING_ATTENTION: replace(
                    raw.attention(),
                    output_bias=True,
                    rope=raw.rope(raw.attention().head_dim, partial_rotary_factor=0.5),
                    window=self._window(raw),
                ),
            },
            # transformers keeps it in bfloat16.
            embedding_multiplier=float(torch.tensor(hidden**0.5, dtype=torch.bfloat16)),
            logits_soft_cap=raw.positive("logits_soft_cap", default=30.0),
        )

    def _window(self, raw: RawConfig) -> int:
        return raw.whole("attention_window_size", "sliding_window", default=2048)

    def _letters(self, raw: RawConfig) -> str:
        kinds = raw.listed("block_types", default=["recurrent", "recurrent", "attention"])
        if unknown := [kind for kind in kinds or [""] if kind not in _LETTERS]:
            raise ConfigurationError(
                f"Layers of type {unknown[0]!r} in {raw.where} are not supported."
            )
        count = raw.whole("num_hidden_layers", default=26)
        return "".join(_LETTERS[kinds[i % len(kinds)]] for i in range(count))
