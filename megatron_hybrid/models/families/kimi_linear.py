"""Kimi Linear (Moonshot AI, arXiv 2510.26692): Kimi delta attention, every few layers multi-head
latent attention without positions, each with an MLP or, past the first layers, experts."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import ClassVar

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.layers.kimi_delta_attention import KimiDeltaAttentionConfig
from megatron_hybrid.layers.latent_attention import LatentAttentionConfig
from megatron_hybrid.layers.moe import MoEConfig
from megatron_hybrid.layers.rope import RopeConfig
from megatron_hybrid.models.config import (
    EXPERTS,
    KIMI_DELTA_ATTENTION,
    LATENT_ATTENTION,
    HybridModelConfig,
    MTPConfig,
)
from megatron_hybrid.models.families.family import Location, TwoBlockFamily
from megatron_hybrid.models.families.raw_config import ModelSettings, RawConfig

LAYERS = {"full_attention": LATENT_ATTENTION, "linear_attention": KIMI_DELTA_ATTENTION}
_OF_LINEAR = {"kda_layers", "full_attn_layers", "head_dim", "num_heads", "short_conv_kernel_size"}
_MLPS = {"dense": "-", "sparse": EXPERTS}


class LatentFamily(TwoBlockFamily):
    """What families with latent attention and DeepSeek-V3's experts have in common. Layers past the
    model's last one in a checkpoint are those of heads for multi-token prediction."""

    recurrent = "self_attn"
    roles: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"^router\.bias$", "gate.e_score_correction_bias"),
        (r"^router\.", "gate."),
        (r"^shared\.", "shared_experts."),
    )
    # Where config.json does not say it: layers without experts, groups of experts, how many of them
    # are chosen, and what weights of experts are multiplied with.
    dense_layers: ClassVar[int]
    expert_groups: ClassVar[tuple[int, int]] = (1, 1)
    scaling_factor: ClassVar[float] = 1.0

    def ignores(self, config: HybridModelConfig, name: str) -> bool:
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        is_behind = layer is not None and int(layer[1]) >= len(config.pattern) // 2
        return is_behind or super().ignores(config, name)

    def locate_in(
        self, config: HybridModelConfig, layer: str, block: int, role: str
    ) -> list[Location]:
        places = super().locate_in(config, layer, block, role)
        if convolved := re.search(r"([qkv])_conv1d\.weight$", role):
            # transformers has all three in one tensor in memory
            name = places[0].name.replace(convolved[0], "conv1d.weight")
            places.append(Location(name, part="qkv".index(convolved[1]), parts=3))
        return places

    def built(
        self,
        raw: RawConfig,
        layers: str,
        latent: LatentAttentionConfig,
        delta: KimiDeltaAttentionConfig,
        eps: float,
    ) -> HybridModelConfig:
        """The model. layers: a letter for each Hugging Face layer."""
        raw.refuse_unless("hidden_act", "silu")
        raw.refuse_unless("num_key_value_heads", latent.num_heads)
        pattern = "".join(map("".join, zip(layers, self._mlps(raw, len(layers)), strict=True)))
        positions = raw.whole("model_max_length", "max_position_embeddings", default=4096)
        return HybridModelConfig(
            **{**raw.common(), "max_position_embeddings": positions},
            pattern=pattern,
            norm_eps=raw.number("rms_norm_eps", default=eps),
            mlp=raw.gated_mlp() if "-" in pattern else None,
            moe=self._moe(raw) if EXPERTS in pattern else None,
            others={LATENT_ATTENTION: latent, KIMI_DELTA_ATTENTION: delta},
            mtp=self._mtp(raw),
        )

    def latent_attention(
        self, raw: RawConfig, rope: RopeConfig | None, bias: bool
    ) -> LatentAttentionConfig:
        """By DeepSeek's names."""
        nope, turned = raw.whole("qk_nope_head_dim"), raw.whole("qk_rope_head_dim", least=0)
        return LatentAttentionConfig(
            num_heads=raw.whole("num_attention_heads"),
            kv_lora_rank=raw.whole("kv_lora_rank"),
            qk_nope_head_dim=nope,
            qk_rope_head_dim=turned,
            v_head_dim=raw.whole("v_head_dim"),
            scale=(nope + turned) ** -0.5,
            rope=rope,
            q_lora_rank=raw.whole_or_none("q_lora_rank"),
            latent_bias=bias,
            output_bias=bias,
        )

    def _mlps(self, raw: RawConfig, layers: int) -> str:
        """A letter for each Hugging Face layer."""
        dense = raw.whole("first_k_dense_replace", default=self.dense_layers, least=0)
        usual = ["dense" if i < dense else "sparse" for i in range(layers)]
        names = raw.listed("mlp_layer_types", default=usual)
        unknown = [name for name in names if name not in _MLPS]
        if unknown or len(names) != layers:
            raise ConfigurationError(
                f"mlp_layer_types in {raw.where} must have 'dense' or 'sparse' for each of the "
                f"model's {layers} layers; it is {names}."
            )
        return "".join(_MLPS[name] for name in names)

    def _mtp(self, raw: RawConfig) -> MTPConfig | None:
        if not raw.whole("num_nextn_predict_layers", "num_mtp_layers", default=0, least=0):
            return None
        return MTPConfig(
            "",
            f"The head that {raw.where} describes has latent attention, from which no drafts come "
            "yet.",
        )

    def _moe(self, raw: RawConfig) -> MoEConfig:
        for name in ("moe_router_activation_func", "scoring_func", "score_function"):
            raw.refuse_unless(name, "sigmoid")
        raw.refuse_unless("topk_method", "noaux_tc")
        raw.refuse_unless("moe_layer_freq", 1)
        raw.refuse_unless("routing_group_score_top_k", 2)
        expert = raw.gated_mlp("moe_intermediate_size")
        shared = raw.whole("num_shared_experts", "n_shared_experts", default=1, least=0)
        shared *= raw.whole("moe_shared_expert_intermediate_size", default=expert.intermediate_size)
        groups, chosen = self.expert_groups
        groups = raw.whole("n_group", "num_expert_group", default=groups)
        if groups > 1:  # transformers, unlike the releases' code, does not look at it
            raw.refuse_unless("use_grouped_topk", True)
        return MoEConfig(
            num_experts=raw.whole("num_experts", "num_local_experts", "n_routed_experts"),
            experts_per_token=raw.whole("num_experts_per_tok", "num_experts_per_token"),
            expert=expert,
            shared=replace(expert, intermediate_size=shared) if shared else None,
            scoring="sigmoid",
            num_groups=groups,
            chosen_groups=raw.whole("topk_group", default=chosen),
            normalize_weights=raw.flag("norm_topk_prob", "moe_renormalize", default=True),
            router_bias=raw.flag("moe_router_enable_expert_bias", default=True),
            scaling_factor=raw.number("routed_scaling_factor", default=self.scaling_factor),
        )


class KimiLinear(LatentFamily):
    """Its experts have names of their own, and lie apart from the dense MLPs."""

    model_types = ("kimi_linear",)
    renames = (
        # as transformers has them in memory, and its dense MLPs as it saves them
        (r"\.mlp\.(experts|gate|shared_experts)(?=\.)", r".block_sparse_moe.\1"),
        (r"\.block_sparse_moe\.((?:gate|up|down)_proj)\.", r".mlp.\1."),
        (r"\.forget_gate\.", "."),
    )
    roles = (
        *LatentFamily.roles,
        (r"^(experts\.\d+)\.gate_proj\.", r"\1.w1."),
        (r"^(experts\.\d+)\.up_proj\.", r"\1.w3."),
        (r"^(experts\.\d+)\.down_proj\.", r"\1.w2."),
    )
    dense_layers = 1
    scaling_factor = 2.446

    def locate_in(
        self, config: HybridModelConfig, layer: str, block: int, role: str
    ) -> list[Location]:
        places = super().locate_in(config, layer, block, role)
        if config.letter(block) != EXPERTS:
            return places
        return [replace(p, name=p.name.replace(".mlp.", ".block_sparse_moe.")) for p in places]

    def config(self, raw: RawConfig) -> HybridModelConfig:
        raw.refuse_unless("mla_use_nope", True)
        raw.refuse_unless("mla_use_output_gate", False)
        latent = self.latent_attention(raw, None, raw.flag("attention_bias"))
        said = self._linear(raw)
        dim = said.whole("head_dim", default=raw.whole("linear_head_dim", default=128))
        delta = KimiDeltaAttentionConfig(
            num_heads=said.whole("num_heads", default=raw.whole("linear_num_heads", default=32)),
            head_dim=dim,
            conv_width=said.whole(
                "short_conv_kernel_size", default=raw.whole("linear_conv_kernel_dim", default=4)
            ),
            gate_rank=dim,
            kernel_chunk=raw.whole("chunk_size", default=64),
            nested_A_log=True,
        )
        return self.built(raw, self._layers(raw, said), latent, delta, 1e-5)

    def _linear(self, raw: RawConfig) -> ModelSettings:
        """What config.json says of KDA in a place of its own."""
        said = raw.inside("linear_attn_config")
        if unknown := sorted(set(said.values) - _OF_LINEAR):
            raise ConfigurationError(f"{said.where} has {unknown[0]!r}, which is not supported.")
        return said

    def _layers(self, raw: RawConfig, said: ModelSettings) -> str:
        count = raw.whole("num_hidden_layers")
        if said.get("full_attn_layers") is None or said.get("kda_layers") is None:
            every = (
                LATENT_ATTENTION if i and i % 4 == 0 else KIMI_DELTA_ATTENTION for i in range(count)
            )
            return raw.layer_letters(LAYERS) or "".join(every)
        # counted from 1
        latent, delta = (said.listed(f"{kind}_layers", of=int) for kind in ("full_attn", "kda"))
        if sorted([*latent, *delta]) != list(range(1, count + 1)):
            raise ConfigurationError(
                f"{said.where} must name each of the layers 1 to {count} "
                f"once; its full_attn_layers are {latent}, its kda_layers {delta}."
            )
        return "".join(
            LATENT_ATTENTION if i in latent else KIMI_DELTA_ATTENTION for i in range(1, count + 1)
        )
