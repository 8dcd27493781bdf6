"""Olmo-Hybrid (Ai2): gated delta nets whose beta may go up to 2, every few layers attention, most
often without positions. Around attention, and the MLP behind it, norms are behind the layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron_hybrid.layers.gated_delta_net import GatedDeltaNetConfig
from megatron_hybrid.layers.rope import RopeConfig
from megatron_hybrid.models.config import BlockForm, HybridModelConfig
from megatron_hybrid.models.families.family import TwoBlockFamily
from megatron_hybrid.models.families.raw_config import RawConfig

_O_NORM_EPS = 1e-5  # whatever config.json says of the other norms
_BEHIND = BlockForm(norm=False, post_norm=True)


class OlmoHybrid(TwoBlockFamily):
    """The names of a layer's norms say where they are, but differ between the two kinds of layers;
    checkpoints have others for those in front of delta nets."""

    model_types = ("olmo_hybrid",)
    renames = (
        (r"\battention_layer_norm\b", "input_layernorm"),
        (r"\bfeedforward_layer_norm\b", "post_attention_layernorm"),
    )
    ignored = (*TwoBlockFamily.ignored, r"^mtp")
    roles = (
        (r"^in_proj_z\.", "g_proj."),
        (r"^in_proj_([qkvab])\.", r"\1_proj."),
        (r"^out_proj\.", "o_proj."),
        (r"^norm\.", "o_norm."),
    )
    recurrent = "linear_attn"

    def config(self, raw: RawConfig) -> HybridModelConfig:
        raw.refuse_unless("hidden_act", "silu")
        raw.refuse_unless("sliding_window")
        raw.refuse_unless("linear_use_gate", True)  # of configurations before the release
        letters = self._letters(raw)
        attention = raw.attention(qk_norm=True)
        attention = replace(
            attention, norm_over_heads=True, rope=self._rope(raw, attention.head_dim)
        )
        forms = [_BEHIND if letter == "*" else BlockForm() for letter in letters]
        return HybridModelConfig(
            **raw.common(max_positions=65536),
            pattern="".join(letter + "-" for letter in letters),
            forms=tuple(form for form in forms for _ in range(2)),
            norm_eps=raw.number("rms_norm_eps", default=1e-6),
            attention=attention,
            gated_delta_net=self._delta_net(raw),
            mlp=raw.gated_mlp(),
        )

    def _letters(self, raw: RawConfig) -> str:
        letters = raw.layer_letters({"linear_attention": "G"})
        if letters is not None:
            return letters
        layers = range(raw.whole("num_hidden_layers"))
        letters = "".join("*" if i % 4 == 3 else "G" for i in layers)
        return letters if "*" in letters else letters[:-1] + "*"

    def _rope(self, raw: RawConfig, head_dim: int) -> RopeConfig | None:
        """None where theta is null, as in the released checkpoints."""
        given = raw.get("rope_parameters", default={})
        theta = raw.values.get("rope_theta", 1e4)
        if isinstance(given, Mapping):
            theta = given.get("rope_theta", theta)
        return None if theta is None else raw.rope(head_dim)

    def _delta_net(self, raw: RawConfig) -> GatedDeltaNetConfig:
        heads, hidden = raw.whole("num_attention_heads"), raw.whole("hidden_size")
        key_heads = raw.whole("linear_num_key_heads", default=heads)
        key_dim = raw.whole("linear_key_head_dim", default=int(0.75 * hidden / key_heads))
        return GatedDeltaNetConfig(
            key_heads=key_heads,
            value_heads=raw.whole("linear_num_value_heads", default=heads),
            key_dim=key_dim,
            value_dim=raw.whole("linear_value_head_dim", default=2 * key_dim),
            conv_width=raw.whole("linear_conv_kernel_dim", default=4),
            kernel_chunk=raw.whole("chunk_size", default=64),
            separate=True,
            beta_scale=2.0 if raw.flag("linear_allow_neg_eigval", default=True) else 1.0,
            norm_eps=_O_NORM_EPS,
        )
