"""Ring-linear 2.0 (inclusionAI, arXiv 2510.19338), Ling 2.5 and 2.6: lightning attention, the last
layer of every group softmax attention, which from 2.5 on is latent, each with an MLP or, past the
first layers, experts of which groups are chosen first."""

from __future__ import annotations

import math
from dataclasses import replace

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.layers.latent_attention import LatentAttentionConfig
from megatron_hybrid.layers.lightning_attention import LightningAttentionConfig
from megatron_hybrid.layers.mixer import LayerConfig
from megatron_hybrid.layers.rope import RopeConfig
from megatron_hybrid.models.config import (
    ATTENTION,
    EXPERTS,
    LATENT_ATTENTION,
    LIGHTNING_ATTENTION,
    HybridModelConfig,
)
from megatron_hybrid.models.families.family import Location
from megatron_hybrid.models.families.kimi_linear import LatentFamily
from megatron_hybrid.models.families.raw_config import RawConfig

_QKV = ("q_proj", "k_proj", "v_proj")


V2_5 = "bailing_moe_v2_5"


class BailingLinear(LatentFamily):
    """q, k and v of softmax attention are one tensor, as those of lightning attention are."""

    model_types = ("bailing_moe_linear", "bailing_moe_linear_v2", V2_5)
    ignored = (*LatentFamily.ignored, r"^model\.mtp\.")
    roles = (
        (r"^router\.bias$", "gate.expert_bias"),
        *LatentFamily.roles,
        (r"^in_proj_qkv\.", "query_key_value."),
        (r"^in_proj_gate\.", "g_proj."),
        (r"^norm\.", "g_norm."),
        (r"^(out|o)_proj\.", "dense."),
        (r"^q_norm\.", "query_layernorm."),
        (r"^k_norm\.", "key_layernorm."),
    )
    attention = recurrent = "attention"
    embedding = "model.word_embeddings.weight"
    dense_layers = 0

    def locate_in(
        self, config: HybridModelConfig, layer: str, block: int, role: str
    ) -> list[Location]:
        name, attention = role.removeprefix("mixer.").removesuffix(".weight"), config.attention
        if config.letter(block) == ATTENTION and name in _QKV and attention is not None:
            queries, keys = (
                heads * attention.head_dim
                for heads in (attention.num_heads, attention.num_kv_heads)
            )
            first = (0, queries, queries + keys)[_QKV.index(name)]
            fused = f"{layer}.{self.attention}.query_key_value.weight"
            return [Location(fused, first=first, total=queries + 2 * keys)]
        return super().locate_in(config, layer, block, role)

    def config(self, raw: RawConfig) -> HybridModelConfig:
        raw.refuse_unless("hidden_act", "silu")
        for name in ("use_bias", "use_qkv_bias", "norm_head", "norm_softmax", "use_sliding_window"):
            raw.refuse_unless(name, False)
        for name in ("use_rmsnorm", "linear_rope"):
            raw.refuse_unless(name, True)
        raw.refuse_unless("num_kv_heads_for_linear_attn", raw.whole("num_attention_heads"))
        attention = raw.attention(bias=False, qk_norm=raw.flag("use_qk_norm"))
        rope = raw.rope(attention.head_dim, 1.0, theta=6e5)
        others: dict[str, LayerConfig] = {}
        if is_latent := raw.get("kv_lora_rank") is not None:
            others[LATENT_ATTENTION] = self._latent(raw)
        else:
            raw.refuse_unless("num_nextn_predict_layers", 0)
        letters = self._letters(raw, LATENT_ATTENTION if is_latent else ATTENTION)
        others[LIGHTNING_ATTENTION] = self._lightning(raw, rope, len(letters))
        pattern = "".join(map("".join, zip(letters, self._mlps(raw, len(letters)), strict=True)))
        return HybridModelConfig(
            **raw.common(),
            pattern=pattern,
            norm_eps=raw.number("rms_norm_eps", default=1e-6),
            attention=None if is_latent else replace(attention, rope=rope),
            mlp=raw.gated_mlp() if "-" in pattern else None,
            moe=self._moe(raw) if EXPERTS in pattern else None,
            others=others,
            mtp=self._mtp(raw),
        )

    def _latent(self, raw: RawConfig) -> LatentAttentionConfig:
        """All of the dimensions that are for positions are rotated, of whatever part others are."""
        turned = raw.whole("qk_rope_head_dim")
        rope = replace(raw.rope(turned, 1.0, theta=6e5), rotary_dim=turned)
        if rope.kind != "default":
            raise ConfigurationError(
                f"RoPE of type {rope.kind!r} in {raw.where} is not supported with latent "
                "attention, only 'default' is."
            )
        return replace(
            self.latent_attention(raw, rope, bias=False),
            norm_eps=raw.number("rms_norm_eps", default=1e-6),
            interleaved=raw.flag("rope_interleave", default=True),
        )

    def _letters(self, raw: RawConfig, softmax: str) -> str:
        """Layers that fill no group have softmax attention, too."""
        layers = raw.whole("num_hidden_layers")
        group = raw.whole("layer_group_size")
        whole = layers // group * group
        return "".join(
            LIGHTNING_ATTENTION if i < whole and (i + 1) % group else softmax for i in range(layers)
        )

    def _lightning(self, raw: RawConfig, rope: RopeConfig, layers: int) -> LightningAttentionConfig:
        attention = raw.attention()
        # As in the released code: layers are counted from 0, and decay as the one before should.
        factors = (1 - (i - 1) / max(layers - 1, 1) + 1e-5 for i in range(layers))
        return LightningAttentionConfig(
            num_heads=attention.num_heads,
            head_dim=attention.head_dim,
            slopes=_slopes(attention.num_heads),
            factors=tuple(factor for factor in factors for _ in range(2)),
            norm_groups=raw.whole("group_norm_size", default=1),
            norm_eps=raw.number("rms_norm_eps", default=1e-6),
            kernel_chunk=raw.whole("block_size", default=64),
            scale=attention.scale,
            silu=raw.flag("linear_silu", "use_linear_silu"),
            qk_norm=raw.flag("use_qk_norm"),
            rope=rope,
        )


def _slopes(heads: int) -> tuple[float, ...]:
    """Press et al., "Train Short, Test Long" (ALiBi), 2022; of a number of heads that is no power
    of two first those of the next smaller one, then every second one of twice as many."""
    power = 1 << int(math.log2(heads))
    first = tuple(2.0 ** (-8 * (head + 1) / power) for head in range(power))
    return first if power == heads else first + _slopes(2 * power)[::2][: heads - power]
