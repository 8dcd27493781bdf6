"""Inkling 2 (Thinking Machines Lab): attention with a bias by distance and with sinks, in most
layers with a sliding window, and experts behind each; short convolutions, in the other layers with
taps that tokens give; attention residuals. Of models that also see the text part."""

from __future__ import annotations

import re
from typing import Any

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.layers.attention_residuals import AttentionResidualsConfig
from megatron_hybrid.layers.convolutions import ConvolvedConfig
from megatron_hybrid.layers.mlp import MLPConfig
from megatron_hybrid.layers.moe import MoEConfig
from megatron_hybrid.layers.relative_attention import LogScaling
from megatron_hybrid.layers.sink_attention import SinkAttentionConfig
from megatron_hybrid.models.config import (
    ATTENTION,
    EXPERTS,
    SLIDING_ATTENTION,
    BlockForm,
    HybridModelConfig,
)
from megatron_hybrid.models.families.family import GATED, Location, TwoBlockFamily
from megatron_hybrid.models.families.raw_config import RawConfig
from megatron_hybrid.models.families.text_part import USUAL_NAMES, Names

_LAYERS = {"hybrid": ATTENTION, "hybrid_sliding": SLIDING_ATTENTION}
# What releases say of themselves, or those of Inkling did; None: what must not be there.
_SAID: dict[str, Any] = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    **dict.fromkeys(("attention_bias", "q_bias", "o_bias"), False),
    **dict.fromkeys(("use_embed_norm", "use_sconv", "use_gate_bias", "norm_after_topk"), True),
    "inference_moe_w13_interleaved": True,
    **dict.fromkeys(("n_shared_experts", "dense_mlp_idx"), 0),
    **dict.fromkeys(("mlp_layer_types", "local_layer_ids", "logits_mup_width_multiplier")),
}
_BOUNDS = {
    "qk_l2_clip_threshold": 22.627416997969522,
    "rel_l2_clip_threshold": 8.0,
    "mlp_gate_softcap": 4.0,
    "mlp_up_softcap": 25.0,
    "final_logit_softcapping": 30.0,
}
_EXPERT = re.compile(r"experts\.(\d+)\.(\w+)\.weight")
_QUERY_OF_ATTENTION = re.compile(r"^model\.(?:llm\.)?attn_res\.attn_queries\.(\d+)$")
# The text's weights in a checkpoint of the whole.
INKLING2_NAMES: Names = (
    (r"^(model\.llm|model\.final_input)\.", r"\1."),
    *USUAL_NAMES,
)


class Inkling2(TwoBlockFamily):
    """By transformers' names; those of the releases are others, and have gates and up projections
    in one tensor, row by row in turn."""

    model_types = ("inkling2_text",)
    renames = (
        (r"^model\.llm\.unembed\.", "lm_head."),
        (r"^model\.llm\.", "model."),
        (r"^model\.embed_norm\.", "model.embed_tokens.embed_norm."),
        (r"^model\.embed\.", "model.embed_tokens."),
        (r"^model\.attn_res\.mlp_queries\.(\d+)$", r"model.layers.\1.mlp_input.query"),
        (r"^model\.attn_res\.output_query$", "model.final_input.query"),
        (r"\.mlp\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),
        (r"\.mlp\.experts\.w2_weight$", ".mlp.experts.down_proj"),
        (r"\.attn\.", ".self_attn."),
        (r"\.w([qkv])_(?:du|dv)\.", r".\1_proj.linear."),
        (r"\.([kv])_sconv\.", r".\1_proj.sconv."),
        (r"\.rel_logits_proj\.", ".relative_position_bias."),
        (r"\.wr_du\.", ".relative_position_bias.linear."),
        (r"\.q_l2_clip\.", ".q_proj.norm."),
        (r"\.rel_l2_clip\.", ".relative_position_bias.norm."),
        (r"\.wo_ud\.", ".o_proj.linear."),
        (r"\.gate_attn\.", ".o_proj.gate_proj."),
        (r"\.attn_sink_proj\.", ".sink_proj."),
        (r"\.attn_sconv\.", ".post_attention_convolution."),
        (r"\.mlp_sconv\.", ".post_mlp_convolution."),
        (r"(convolution|sconv)\.weight$", r"\1.conv1d.weight"),
        (r"(convolution|sconv)\.static_w$", r"\1.static_weight"),
        (r"(convolution|sconv)\.weight_proj$", r"\1.weight_proj.weight"),
        (r"\.mlp_norm\.", ".post_attention_layernorm."),
        (r"\.attn_norm\.", ".input_layernorm."),
        (r"\.([qkv])_input_norm\.", r".\1_input_layernorm."),
    )
    roles = (
        (r"^bank$", "relative_position_bias.proj"),
        (r"^q_scale$", "q_proj.norm.scale"),
        (r"^r_scale$", "relative_position_bias.norm.scale"),
        (r"^r_proj\.", "relative_position_bias.linear."),
        (r"^g_proj\.", "o_proj.gate_proj."),
        (r"^([qkvo]_proj)\.weight$", r"\1.linear.weight"),
        (r"^([kv])_sconv\.weight$", r"\1_proj.sconv.conv1d.weight"),
        (r"^([kv])_sconv\.", r"\1_proj.sconv."),
        (r"^router\.bias$", "gate.e_score_correction_bias"),
        (r"^router\.", "gate."),
    )

    def canonical(self, name: str) -> str:
        if query := _QUERY_OF_ATTENTION.match(name):  # the first layer has none
            return f"model.layers.{int(query[1]) + 1}.attention_input.query"
        return super().canonical(name)

    def places(self, config: HybridModelConfig, block: int | None, role: str) -> list[Location]:
        if role == "final_norm.query":
            return [Location("model.final_input.query")]
        return super().places(config, block, role)

    def locate_in(
        self, config: HybridModelConfig, layer: str, block: int, role: str
    ) -> list[Location]:
        if (inner := role.removeprefix("streams.")) == role:
            if role == "mixer.sconv.weight":  # of what the layer gives
                kind = "mlp" if block % 2 else "attention"
                return [Location(f"{layer}.post_{kind}_convolution.conv1d.weight")]
            return super().locate_in(config, layer, block, role)
        if inner == "embedding_norm.weight":
            return [Location("model.embed_tokens.embed_norm.weight")]
        if inner == "query":
            return [Location(f"{layer}.{'mlp' if block % 2 else 'attention'}_input.query")]
        if inner == "norm.weight":
            return super().locate_in(config, layer, block, inner)
        return [Location(f"{layer}.{inner[0]}_input_layernorm.weight")]

    def locate_mlp(self, config: HybridModelConfig, layer: str, role: str) -> list[Location]:
        places = super().locate_mlp(config, layer, role)
        expert = _EXPERT.fullmatch(role)
        if expert is not None and (part := GATED[expert[2]])[1] > 1:
            assert config.moe is not None
            count, name = config.moe.num_experts, f"{layer}.mlp.experts.w13_weight"
            places.append(Location(name, int(expert[1]), count, *part, interleaved=True))
        return places

    def config(self, raw: RawConfig) -> HybridModelConfig:
        for name, supported in _SAID.items():
            raw.refuse_unless(name, supported)
        bounds = {name: raw.positive(name, default=usual) for name, usual in _BOUNDS.items()}
        letters = self._letters(raw)
        pattern = "".join(letter + EXPERTS for letter in letters)
        attention, sliding = self._attention(raw, bounds), self._attention(raw, bounds, "swa_")
        moe = self._moe(raw, bounds)
        others = {EXPERTS: ConvolvedConfig(moe, attention.conv_width, attention.conv_scales[0])}
        vocab = raw.whole("vocab_size", default=201_024)
        tokens = min(raw.whole("unpadded_vocab_size", default=min(200_058, vocab)), vocab)
        positions = raw.whole("max_position_embeddings", "model_max_length", default=1_048_576)
        inputs = tuple(3 if letter == ATTENTION else 1 for letter in pattern)
        run = raw.whole("n_layers_per_attn_res_block", default=6)
        common = {**raw.common(), "vocab_size": tokens, "max_position_embeddings": positions}
        return HybridModelConfig(
            **common,
            pattern=pattern,
            forms=(BlockForm(whole=True),) * len(pattern),
            norm_eps=raw.number("rms_norm_eps", default=1e-6),
            attention=attention,
            moe=moe,
            others={SLIDING_ATTENTION: sliding, **others},
            logits_soft_cap=bounds["final_logit_softcapping"],
            padded_vocab_size=vocab if vocab != tokens else None,
            streams=AttentionResidualsConfig(inputs, run),
        )

    def _letters(self, raw: RawConfig) -> str:
        """A letter for the attention of each Hugging Face layer."""
        count = raw.whole("num_hidden_layers", default=48)
        usual = ["hybrid_sliding" if (i + 1) % 6 else "hybrid" for i in range(count)]
        names = raw.listed("layer_types", default=usual)
        if len(names) != count or not set(names) <= set(_LAYERS):
            raise ConfigurationError(
                f"layer_types in {raw.where} must have {' or '.join(map(repr, _LAYERS))} for each "
                f"of the model's {count} layers; it is {names}."
            )
        return "".join(_LAYERS[name] for name in names)

    def _attention(
        self, raw: RawConfig, bounds: dict[str, float], kind: str = ""
    ) -> SinkAttentionConfig:
        """`kind`: the prefix of what sliding layers have of their own."""
        heads, kv_heads, dim = raw.head_sizes(kind, (48, 8, 128))
        window = raw.whole("sliding_window_size", "sliding_window", default=1024) if kind else 0
        floor = raw.whole("log_scaling_n_floor", default=128_000)
        scaling = LogScaling(floor, raw.number("log_scaling_alpha", default=0.1))
        return SinkAttentionConfig(
            heads,
            kv_heads,
            dim,
            scale=dim**-0.5,
            window=window,
            profiles=raw.whole("d_rel", default=16),
            extent=window or raw.whole("rel_extent", default=1024),
            log_scaling=None if kind else scaling,
            conv_width=raw.whole("conv_kernel_size", "sconv_kernel_size", default=4, least=2),
            longest=bounds["qk_l2_clip_threshold"],
            longest_mixing=bounds["rel_l2_clip_threshold"],
            dynamic=not kind,
        )

    def _moe(self, raw: RawConfig, bounds: dict[str, float]) -> MoEConfig:
        size = raw.whole("moe_intermediate_size", "intermediate_size", default=2304)
        caps = f"{bounds['mlp_gate_softcap']!r}_{bounds['mlp_up_softcap']!r}"
        return MoEConfig(
            num_experts=raw.whole("n_routed_experts", "num_local_experts", default=384),
            experts_per_token=raw.whole("num_experts_per_tok", default=8),
            expert=MLPConfig(size, gated=True, activation=f"silu_capped_{caps}"),
            shared=None,
            scoring="sigmoid",
            router_in_fp32=True,
            scaling_factor=raw.number("route_scale", "routed_scaling_factor", default=8.0),
        )
