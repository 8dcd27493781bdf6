"""LFM3 (Liquid AI): gated short convolutions, attention with a sliding window and, every few
layers, to all tokens, each with an MLP; norms before and behind both, gates for heads of
attention."""

from __future__ import annotations

from dataclasses import replace

from megatron_hybrid.layers.short_conv import ShortConvConfig
from megatron_hybrid.models.config import SLIDING_ATTENTION, BlockForm, HybridModelConfig
from megatron_hybrid.models.families.family import TwoBlockFamily
from megatron_hybrid.models.families.raw_config import RawConfig

# By kind of layer, where config.json does not say it.
_ROPE = {
    "full_attention": {
        "rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip


class Lfm3(TwoBlockFamily):
    """Its convolutions and MLPs have the names of LFM2's, its attention the usual ones."""

    model_types = ("lfm3",)
    renames = ((r"\bself_attn\.gate_proj\.", "self_attn.g_proj."),)  # as transformers does
    roles = ((r"\bgate_proj\.", "w1."), (r"\bup_proj\.", "w3."), (r"\bdown_proj\.", "w2."))
    first_norm = "operator_norm"
    second_norm = "ffn_norm"
    first_post_norm = "post_operator_norm"
    second_post_norm = "post_ffn_norm"
    recurrent = "conv"
    mlp = "feed_forward"
    final_norm = "model.embedding_norm.weight"

    def config(self, raw: RawConfig) -> HybridModelConfig:
        if raw.get("rope_parameters") is None:
            raw = replace(raw, values={**raw.values, "rope_parameters": _ROPE})
        letters = self._letters(raw)
        attention = raw.attention(raw.whole("head_dim", default=128), qk_norm=True)
        attention = replace(attention, head_gate=raw.flag("use_attention_gate", default=True))
        if attention.head_gate:  # which has none, while it is one product with q, k and v
            raw.refuse_unless("attention_bias", False)
        full, sliding = (
            replace(attention, rope=raw.rope(attention.head_dim, layers=kind)) for kind in _ROPE
        )
        sliding = replace(sliding, window=raw.whole("sliding_window", default=256))
        form = BlockForm(post_norm=raw.flag("use_sandwich_norm", default=True))
        return HybridModelConfig(
            **raw.common(max_positions=128_000, tied=True),
            pattern="".join(letter + "-" for letter in letters),
            forms=(form,) * 2 * len(letters),
            norm_eps=raw.number("norm_eps", default=1e-5),
            attention=full,
            others={SLIDING_ATTENTION: sliding},
            short_conv=ShortConvConfig(
                conv_width=raw.whole("conv_L_cache", default=7), bias=raw.flag("conv_bias")
            ),
            mlp=raw.gated_mlp(),
        )

    def _letters(self, raw: RawConfig) -> str:
        letters = raw.layer_letters({"conv": "C", "sliding_attention": SLIDING_ATTENTION})
        if letters is not None:
            return letters
        layers = range(raw.whole("num_hidden_layers"))
        return "".join("*" if i % 4 == 2 else "L" if i % 4 == 0 and i else "C" for i in layers)
