"""Ling 3.0 (inclusionAI, "BailingMoeV3"): Kimi delta attention, the last layer of every group
multi-head latent attention with a gate for each head, each with an MLP or, past the first layers,
experts of which groups are chosen first."""

from __future__ import annotations

from dataclasses import replace

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.layers.kimi_delta_attention import KimiDeltaAttentionConfig
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.families.bailing_linear import V2_5, BailingLinear
from megatron_hybrid.models.families.family import Location
from megatron_hybrid.models.families.kimi_linear import LAYERS, LatentFamily
from megatron_hybrid.models.families.raw_config import RawConfig


class BailingHybrid(LatentFamily):
    """With names of their own for much of it."""

    model_types = ("bailing_hybrid",)
    # as transformers has them in memory
    renames = (
        (r"^model\.embed_tokens\.", "model.word_embeddings."),
        (r"\.self_attn\.", ".attention."),
        (r"\.gate\.e_score_correction_bias$", ".gate.expert_bias"),
        (r"\.forget_gate\.", "."),
    )
    roles = ((r"^router\.bias$", "gate.expert_bias"), *LatentFamily.roles)
    attention = recurrent = "attention"
    embedding = "model.word_embeddings.weight"
    dense_layers = 2
    expert_groups = (8, 4)
    scaling_factor = 2.5

    def locate_in(
        self, config: HybridModelConfig, layer: str, block: int, role: str
    ) -> list[Location]:
        places = super().locate_in(config, layer, block, role)
        if role.startswith("mixer.o_proj."):
            other = replace(places[0], name=places[0].name.replace(".o_proj.", ".dense."))
            return [other, *places]
        return places

    def config(self, raw: RawConfig) -> HybridModelConfig:
        if "BailingMoeV2_5ForCausalLM" in raw.listed("architectures", default=[]):
            # Ling 2.6 says the same of itself, and has no Kimi delta attention.
            older = replace(raw, values={**raw.values, "model_type": V2_5})
            return BailingLinear().config(older)
        raw.refuse_unless("use_bias", False)
        raw.refuse_unless("use_mla_nope", False)
        raw.refuse_unless("rope_interleave", True)
        gate = "gated_attention_proj_granularity_type"
        raw.refuse_unless(gate, "head_wise")
        turned = raw.whole("qk_rope_head_dim")
        # partial_rotary_factor is of heads that are wider
        rope = replace(raw.rope(turned, 1.0, theta=6e6), rotary_dim=turned)
        if rope.kind != "default":
            raise ConfigurationError(
                f"RoPE of type {rope.kind!r} in {raw.where} is not supported with latent "
                "attention, only 'default' is."
            )
        bias = raw.flag("attention_bias", "use_qkv_bias")
        latent = replace(
            self.latent_attention(raw, rope, bias),
            interleaved=True,
            head_gate=raw.values.get(gate, "") is not None,
        )
        bound = raw.number("kda_lower_bound", default=-5.0)
        delta = KimiDeltaAttentionConfig(
            num_heads=latent.num_heads,
            head_dim=raw.whole("linear_head_dim", "head_dim", default=128),
            conv_width=raw.whole("short_conv_kernel_size", default=4),
            kernel_chunk=raw.whole("chunk_size", default=64),
            lower_bound=bound if raw.flag("kda_safe_gate", default=True) else None,
        )
        return self.built(raw, self._layers(raw), latent, delta, 1e-6)

    def _layers(self, raw: RawConfig) -> str:
        letters = raw.layer_letters(LAYERS)
        if letters is not None:
            return letters
        count = raw.whole("num_hidden_layers")
        group = raw.whole("layer_group_size", default=6)
        if count % group:
            raise ConfigurationError(
                f"layer_group_size in {raw.where} is {group}, which does not divide the model's "
                f"{count} layers; it must, or layer_types say what each layer is."
            )
        last = LAYERS["full_attention"]
        return (LAYERS["linear_attention"] * (group - 1) + last) * (count // group)
