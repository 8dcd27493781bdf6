"""Qwen3-Next and Qwen3.5 (Alibaba), dense and with experts: gated delta nets, every few layers
gated attention; norms with weights around zero. Of a model with vision the text part is read."""

from __future__ import annotations

from typing import ClassVar

from megatron_hybrid.layers.attention import AttentionConfig
from megatron_hybrid.layers.gated_delta_net import GatedDeltaNetConfig
from megatron_hybrid.layers.mlp import MLPConfig
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
    model_types: ClassVar[tuple[str, ...]] = ("qwen3_next",)
    ignored = (*TwoBlockFamily.ignored, r"^mtp\.", r"^model\.visual\.")
    roles = (
        (r"^router\.", "gate."),
        (r"^shared_gate\.", "shared_expert_gate."),
        (r"^shared\.", "shared_expert."),
    )
    recurrent = "linear_attn"
    says_heads: ClassVar[bool] = False  # whether config.json says how many heads there are

    def locate(self, config: HybridModelConfig, block: int, role: str) -> list[Location]:
        first = len(config.pattern)
        if block < first:
            return super().locate(config, block, role)
        if role.startswith("mtp."):
            return [Location(_MTP_NAMES[role])]
        return self.locate_in(config, "mtp.layers.0", block, role)

    def config(self, raw: RawConfig) -> HybridModelConfig:
        raw = raw.part("text_config")
        raw.refuse_unless("hidden_act", "silu")
        pattern, mtp = self._pattern(raw), self._mtp(raw)
        letters = pattern + ("" if mtp is None else mtp.pattern)
        heads, kv_heads, _ = raw.heads()
        head_dim = int(raw.get("head_dim", default=256))
        bias = bool(raw.get("attention_bias", default=False))
        return HybridModelConfig(
            **raw.common(max_positions=32768),
            pattern=pattern,
            norm_eps=float(raw.get("rms_norm_eps", default=1e-6)),
            zero_centered_norm=True,
            attention=AttentionConfig(
                heads,
                kv_heads,
                head_dim,
                scale=head_dim**-0.5,
                qkv_bias=bias,
                output_bias=bias,
                qk_norm=True,
                zero_centered_norm=True,
                output_gate=True,
            ),
            rope=raw.rope(head_dim, partial_rotary_factor=0.25),
            gated_delta_net=GatedDeltaNetConfig(
                key_heads=int(raw.get("linear_num_key_heads", default=16)),
                value_heads=int(raw.get("linear_num_value_heads", default=32)),
                key_dim=int(raw.get("linear_key_head_dim", default=128)),
                value_dim=int(raw.get("linear_value_head_dim", default=128)),
                conv_width=int(raw.get("linear_conv_kernel_dim", default=4)),
                kernel_chunk=int(raw.get("chunk_size", default=64)),
                interleaved=raw.model_type == "qwen3_next",
            ),
            mlp=MLPConfig(int(raw.require("intermediate_size")), gated=True, activation="silu")
            if "-" in letters
            else None,
            moe=self._moe(raw) if "E" in letters else None,
            mtp=mtp,
        )

    def _pattern(self, raw: RawConfig) -> str:
        layers = int(raw.require("num_hidden_layers"))
        letters = raw.layer_letters({"linear_attention": "G"})
        if letters is None:
            every = int(raw.get("full_attention_interval", default=4))
            letters = "".join("G" if (i + 1) % every else "*" for i in range(layers))
        dense = set(raw.get("mlp_only_layers", default=[]))
        step = int(raw.get("decoder_sparse_step", default=1))
        experts = int(raw.get("num_experts", default=0))
        return "".join(
            letter + ("E" if experts and i not in dense and (i + 1) % step == 0 else "-")
            for i, letter in enumerate(letters)
        )

    def _mtp(self, raw: RawConfig) -> MTPConfig | None:
        default = 0 if self.says_heads else 1
        depth = int(raw.get("mtp_num_hidden_layers", "num_nextn_predict_layers", default=default))
        pattern = "*E" if int(raw.get("num_experts", default=0)) else "*-"
        if depth and raw.get("mtp_use_dedicated_embeddings", default=False):
            reason = f"The head that {raw.where} describes has an embedding of its own."
            return MTPConfig("", reason)
        return MTPConfig.of(pattern, depth, raw.where)

    def _moe(self, raw: RawConfig) -> MoEConfig:
        return MoEConfig(
            num_experts=int(raw.require("num_experts")),
            experts_per_token=int(raw.require("num_experts_per_tok")),
            expert=MLPConfig(int(raw.require("moe_intermediate_size")), True, "silu"),
            shared=MLPConfig(int(raw.require("shared_expert_intermediate_size")), True, "silu"),
            shared_gate=True,
            normalize_weights=bool(raw.get("norm_topk_prob", default=True)),
        )


class Qwen35(Qwen3Next):
    model_types = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
    renames = ((r"^model\.language_model\.", "model."),)
    says_heads = True
