"""Qwen3-Next and Qwen3.5 (Alibaba), dense and with experts: gated delta nets, every few layers
gated attention; norms with weights around zero."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from megatron_hybrid.layers.gated_delta_net import GatedDeltaNetConfig
from megatron_hybrid.layers.moe import MoEConfig
from megatron_hybrid.models.config import HybridModelConfig, MTPConfig
from megatron_hybrid.models.families.family import Location, TwoBlockFamily
from megatron_hybrid.models.families.raw_config import RawConfig

_MTP_NAMES = {
    "mtp.embedding_norm.weight": "mtp.pre_fc_norm_embedding.weight",
    "mtp.hidden_norm.weight": "mtp.pre_fc_norm_hidden.weight",
    "mtp.fc.weight": "mtp.fc.weight",
    "mtp.final_norm.weight": "mtp.norm.weight",
}


class Qwen3Next(TwoBlockFamily):
    """With a head for multi-token prediction, of which its config.json says nothing."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_next",)
    ignored = (*TwoBlockFamily.ignored, r"^mtp\.")
    roles = (
        (r"^router\.", "gate."),
        (r"^shared_gate\.", "shared_expert_gate."),
        (r"^shared\.", "shared_expert."),
    )
    recurrent = "linear_attn"
    says_heads: ClassVar[bool] = False  # whether config.json says how many heads there are

    def locate(self, config: HybridModelConfig, block: int, role: str) -> list[Location]:
        if block < len(config.pattern):
            return super().locate(config, block, role)
        if role.startswith("mtp."):
            return [Location(_MTP_NAMES[role])]
        return self.locate_in(config, "mtp.layers.0", block, role)

    def config(self, raw: RawConfig) -> HybridModelConfig:
        raw.refuse_unless("hidden_act", "silu")
        experts = raw.whole("num_experts", default=0, least=0)
        pattern, mtp = self._pattern(raw, experts), self._mtp(raw, experts)
        letters = pattern + ("" if mtp is None else mtp.pattern)
        attention = raw.attention(raw.whole("head_dim", default=256), qk_norm=True)
        rope = raw.rope(attention.head_dim, partial_rotary_factor=0.25)
        return HybridModelConfig(
            **raw.common(max_positions=32768),
            pattern=pattern,
            norm_eps=raw.number("rms_norm_eps", default=1e-6),
            zero_centered_norm=True,
            attention=replace(attention, rope=rope, zero_centered_norm=True, output_gate=True),
            gated_delta_net=GatedDeltaNetConfig(
                key_heads=raw.whole("linear_num_key_heads", default=16),
                value_heads=raw.whole("linear_num_value_heads", default=32),
                key_dim=raw.whole("linear_key_head_dim", default=128),
                value_dim=raw.whole("linear_value_head_dim", default=128),
                conv_width=raw.whole("linear_conv_kernel_dim", default=4),
                kernel_chunk=raw.whole("chunk_size", default=64),
                interleaved=raw.model_type == "qwen3_next",
            ),
            mlp=raw.gated_mlp() if "-" in letters else None,
            moe=self._moe(raw) if "E" in letters else None,
            mtp=mtp,
        )

    def _pattern(self, raw: RawConfig, experts: int) -> str:
        letters = raw.layer_letters({"linear_attention": "G"})
        if letters is None:
            every = raw.whole("full_attention_interval", default=4)
            layers = range(raw.whole("num_hidden_layers"))
            letters = "".join("G" if (i + 1) % every else "*" for i in layers)
        dense = raw.listed("mlp_only_layers", default=[], of=int)
        step = raw.whole("decoder_sparse_step", default=1)
        return "".join(
            letter + ("E" if experts and i not in dense and (i + 1) % step == 0 else "-")
            for i, letter in enumerate(letters)
        )

    def _mtp(self, raw: RawConfig, experts: int) -> MTPConfig | None:
        default = 0 if self.says_heads else 1
        depth = raw.whole(
            "mtp_num_hidden_layers", "num_nextn_predict_layers", default=default, least=0
        )
        if depth and raw.flag("mtp_use_dedicated_embeddings"):
            reason = f"The head that {raw.where} describes has an embedding of its own."
            return MTPConfig("", reason)
        return MTPConfig.of("*E" if experts else "*-", depth, raw.where)

    def _moe(self, raw: RawConfig) -> MoEConfig:
        return MoEConfig(
            num_experts=raw.whole("num_experts"),
            experts_per_token=raw.whole("num_experts_per_tok"),
            expert=raw.gated_mlp("moe_intermediate_size"),
            shared=raw.gated_mlp("shared_expert_intermediate_size"),
            shared_gate=True,
            normalize_weights=raw.flag("norm_topk_prob", default=True),
        )


class Qwen35(Qwen3Next):
    """How many heads it has is said. With vision it is a text part: see the registry."""

    model_types = ("qwen3_5_text", "qwen3_5_moe_text")
    says_heads = True

    def config(self, raw: RawConfig) -> HybridModelConfig:
        raw.refuse_unless("norm_topk_prob", True)
        return super().config(raw)
