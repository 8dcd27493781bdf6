"""Inkling (Thinking Machines Lab): attention without positions but with a bias by distance, in most
layers with a sliding window, each with an MLP or experts; short convolutions of keys, of values,
and of what every layer gives. Of models that also see and hear the text part."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.layers.convolutions import ConvolvedConfig
from megatron_hybrid.layers.moe import MoEConfig
from megatron_hybrid.layers.relative_attention import LogScaling, RelativeAttentionConfig
from megatron_hybrid.models.config import (
    ATTENTION,
    DENSE_MLP,
    EXPERTS,
    SLIDING_ATTENTION,
    BlockForm,
    HybridModelConfig,
    MTPConfig,
)
from megatron_hybrid.models.families.family import GATED, Location, TwoBlockFamily
from megatron_hybrid.models.families.raw_config import RawConfig
from megatron_hybrid.models.families.text_part import USUAL_NAMES, Names

_LAYERS = {"hybrid": ATTENTION, "hybrid_sliding": SLIDING_ATTENTION}
_MLPS = {"dense": DENSE_MLP, "sparse": EXPERTS}
# What releases say of themselves, beside sizes; None: what must not be there.
_SAID: dict[str, Any] = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "q_bias": False,
    "o_bias": False,
    "final_logit_softcapping": None,
    "use_embed_norm": True,
    "use_sconv": True,
    "use_global_scale": True,
    "use_gate_bias": True,
    "gate_activation": "sigmoid",
    "norm_after_topk": True,
    "shared_expert_sink": True,
    "inference_moe_w13_interleaved": True,
}
_EXPERT = re.compile(r"(sinks\.)?experts\.(\d+)\.(\w+)\.weight")
# The text's weights in a checkpoint of the whole.
INKLING_NAMES: Names = (
    (r"^model\.llm\.unembed\.", "lm_head."),
    (r"^model\.llm\.embed_norm\.", "model.embed_tokens.embed_norm."),
    (r"^model\.llm\.embed\.", "model.embed_tokens."),
    (r"^model\.llm\.", "model."),
    *USUAL_NAMES,
)


class Inkling(TwoBlockFamily):
    """By transformers' names; those of the releases are others, and have gates and up projections
    in one tensor, row by row in turn. Heads for multi-token prediction are not read."""

    model_types = ("inkling_text",)
    renames = (
        (r"\.attn\.w([qkvro])_(?:du|dv|ud)\.", r".self_attn.\1_proj."),
        (r"\.attn\.", ".self_attn."),
        (r"(_sconv)\.conv1d\.", r"\1."),
        (r"\.attn_norm\.", ".input_layernorm."),
        (r"\.mlp_norm\.", ".post_attention_layernorm."),
        (r"\.mlp\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),
        (r"\.mlp\.w2_md\.", ".mlp.down_proj."),
        (r"\.mlp\.experts\.w2_weight$", ".mlp.experts.down_proj"),
        (r"\.mlp\.shared_experts\.shared_w2_weight$", ".mlp.shared_experts.down_proj"),
    )
    ignored = (*TwoBlockFamily.ignored, r"^model\.mtp\.")
    roles = (
        (r"^bank$", "rel_logits_proj.proj"),
        (r"^router\.bias$", "gate.e_score_correction_bias"),
        (r"^router\.scale$", "gate.global_scale"),
        (r"^router\.", "gate."),
        (r"^sinks\.experts\.", "shared_experts."),
    )

    def locate_in(
        self, config: HybridModelConfig, layer: str, block: int, role: str
    ) -> list[Location]:
        if role == "embedding_norm.weight":
            return [Location("model.embed_tokens.embed_norm.weight")]
        if role == "mixer.sconv.weight":  # of what the layer gives
            return [Location(f"{layer}.{'mlp' if block % 2 else 'attn'}_sconv.weight")]
        return super().locate_in(config, layer, block, role)

    def locate_mlp(self, config: HybridModelConfig, layer: str, role: str) -> list[Location]:
        places = super().locate_mlp(config, layer, role)
        if (expert := _EXPERT.fullmatch(role)) is None:
            w13, number, count = f"{layer}.mlp.w13_dn.weight", None, 1
            part, parts = GATED.get(role.removesuffix(".weight"), (0, 1))
        else:
            assert config.moe is not None
            number, count = int(expert[2]), config.moe.num_experts
            part, parts = GATED[expert[3]]
            w13 = f"{layer}.mlp.experts.w13_weight"
            if expert[1]:
                count, w13 = config.moe.sinks, f"{layer}.mlp.shared_experts.shared_w13_weight"
                places.append(Location(f"{layer}.mlp.shared_experts.{expert[3]}", number, count))
        if parts > 1:
            places.append(Location(w13, number, count, part, parts, interleaved=True))
        return places

    def config(self, raw: RawConfig) -> HybridModelConfig:
        for name, supported in _SAID.items():
            raw.refuse_unless(name, supported)
        raw = _with_widths(raw)
        letters, mlps = self._letters(raw)
        pattern = "".join(map("".join, zip(letters, mlps, strict=True)))
        width = raw.whole("conv_kernel_size", "sconv_kernel_size", default=4, least=2)
        mlp = replace(raw.gated_mlp(), global_scale=True) if DENSE_MLP in mlps else None
        moe = self._moe(raw) if EXPERTS in mlps else None
        convolved = {
            letter: ConvolvedConfig(inner, width)
            for letter, inner in ((DENSE_MLP, mlp), (EXPERTS, moe))
            if inner is not None
        }
        sliding = {}
        if SLIDING_ATTENTION in letters:
            sliding = {SLIDING_ATTENTION: self._attention(raw, width, "swa_")}
        positions = raw.whole("max_position_embeddings", "model_max_length", default=131_072)
        vocab = raw.whole("vocab_size")
        tokens = min(raw.whole("unpadded_vocab_size", default=vocab), vocab)
        common = {**raw.common(), "vocab_size": tokens, "max_position_embeddings": positions}
        return HybridModelConfig(
            **common,
            pattern=pattern,
            forms=(BlockForm(whole=True),) * len(pattern),
            norm_eps=raw.number("rms_norm_eps", default=1e-6),
            attention=self._attention(raw, width),
            mlp=mlp,
            moe=moe,
            others={**sliding, **convolved},
            embedding_norm=True,
            logits_divisor=raw.number(
                "logits_mup_width_multiplier", "embedding_multiplier", default=24.0
            ),
            padded_vocab_size=vocab if vocab != tokens else None,
            mtp=self._mtp(raw),
        )

    def _letters(self, raw: RawConfig) -> tuple[str, str]:
        """A letter for the attention of each Hugging Face layer, and for its MLP."""
        count = raw.whole("num_hidden_layers")
        usual = [i for i in range(count) if (i + 1) % 6]
        local = raw.listed("local_layer_ids", default=usual, of=int)
        dense = raw.whole("dense_mlp_idx", default=0, least=0)
        names = raw.listed(
            "layer_types",
            default=["hybrid_sliding" if i in local else "hybrid" for i in range(count)],
        )
        mlps = raw.listed(
            "mlp_layer_types", default=["dense" if i < dense else "sparse" for i in range(count)]
        )
        lists = (names, _LAYERS, "layer_types"), (mlps, _MLPS, "mlp_layer_types")
        for said, kinds, name in lists:
            unknown = [one for one in said if one not in kinds]
            if unknown or len(said) != count:
                wanted = " or ".join(map(repr, kinds))
                raise ConfigurationError(
                    f"{name} in {raw.where} must have {wanted} for each of the model's {count} "
                    f"layers; it is {said}."
                )
        return "".join(_LAYERS[one] for one in names), "".join(_MLPS[one] for one in mlps)

    def _attention(self, raw: RawConfig, width: int, kind: str = "") -> RelativeAttentionConfig:
        """`kind`: the prefix of what sliding layers have of their own."""
        heads, kv_heads, dim = raw.head_sizes(kind, (64, 16 if kind else 8, 128))
        window = raw.whole("sliding_window_size", "sliding_window", default=512) if kind else 0
        floor, scaling = raw.whole_or_none("log_scaling_n_floor"), None
        if floor is not None and not kind:
            scaling = LogScaling(floor, raw.number("log_scaling_alpha", default=0.1))
        return RelativeAttentionConfig(
            heads,
            kv_heads,
            dim,
            scale=1 / dim,
            qk_norm=True,
            window=window,
            profiles=raw.whole("d_rel", default=16),
            extent=window or raw.whole("rel_extent", default=1024),
            log_scaling=scaling,
            conv_width=width,
        )

    def _moe(self, raw: RawConfig) -> MoEConfig:
        return MoEConfig(
            num_experts=raw.whole("n_routed_experts", "num_local_experts", default=256),
            experts_per_token=raw.whole("num_experts_per_tok", default=6),
            expert=raw.gated_mlp("moe_intermediate_size"),
            shared=None,
            scoring="sigmoid",
            scaling_factor=raw.number("route_scale", default=8.0),
            global_scale=True,
            sinks=raw.whole("n_shared_experts", default=2),
        )

    def _mtp(self, raw: RawConfig) -> MTPConfig | None:
        said = raw.inside("mtp_config").whole("num_nextn_predict_layers", default=0, least=0)
        if not raw.whole("num_mtp_layers", default=said, least=0):
            return None
        return MTPConfig(
            "",
            f"The heads that {raw.where} describes have short convolutions, from which no drafts "
            "come yet.",
        )


def _with_widths(raw: RawConfig) -> RawConfig:
    """With the widths of dense MLPs and of experts under one name each: where config.json gives the
    dense one a name of its own, the usual one is the experts'."""
    dense = raw.get("dense_intermediate_size")
    if dense is None:
        defaults = {"intermediate_size": 24576, "moe_intermediate_size": 3072}
        return replace(raw, values={**defaults, **raw.values})
    experts = raw.whole("intermediate_size", default=24576)
    widths = {"intermediate_size": dense, "moe_intermediate_size": experts}
    return replace(raw, values={**raw.values, **widths})
