"""Nemotron-H (NVIDIA): blocks of Mamba2, attention without positions, MLP or experts."""

from __future__ import annotations

import re
from dataclasses import replace

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.layers.mamba2 import Mamba2Config
from megatron_hybrid.layers.mlp import MLPConfig
from megatron_hybrid.layers.moe import MoEConfig
from megatron_hybrid.models.config import HybridModelConfig, MTPConfig
from megatron_hybrid.models.families.family import Family, Location
from megatron_hybrid.models.families.raw_config import RawConfig

_MTP_NAMES = {
    "mtp.embedding_norm.weight": "enorm.weight",
    "mtp.hidden_norm.weight": "hnorm.weight",
    "mtp.fc.weight": "eh_proj.weight",
    "mtp.final_norm.weight": "final_layernorm.weight",
}
_NEMO_EXPERTS = {"up_proj": "gate_and_up_projs", "down_proj": "down_projs"}


class NemotronH(Family):
    """A Hugging Face layer is one block."""

    model_types = ("nemotron_h",)
    renames = (
        (r"^backbone\.", "model."),
        (r"^model\.embedding\.", "model.embeddings."),
        (r"\.mixer\._fp32_params\.", ".mixer."),  # NeMo's
    )
    # Multi-token prediction; Transformer Engine's notes.
    ignored = (*Family.ignored, r"^mtp\.", r"\._extra_state$")
    roles = (
        (r"^router\.bias$", "gate.e_score_correction_bias"),
        (r"^router\.", "gate."),
        (r"^shared\.", "shared_experts."),
        (r"^to_latent\.", "fc1_latent_proj."),
        (r"^from_latent\.", "fc2_latent_proj."),
    )
    embedding = "model.embeddings.weight"
    final_norm = "model.norm_f.weight"

    def config(self, raw: RawConfig) -> HybridModelConfig:
        raw.refuse_unless("mamba_hidden_act", "silu")
        raw.refuse_unless("mlp_hidden_act", "relu2", "silu")
        raw.refuse_unless("attention_bias", False)
        raw.refuse_unless("sliding_window")
        pattern, mtp = self._pattern(raw), self._mtp(raw)
        letters = pattern + ("" if mtp is None else mtp.pattern)
        # The checkpoints before transformers 5 say attention_head_dim, and 128 by default.
        head_dim = raw.whole("head_dim", "attention_head_dim", default=128)
        return HybridModelConfig(
            **raw.common(),
            pattern=pattern,
            norm_eps=raw.number("layer_norm_epsilon", "rms_norm_eps", default=1e-5),
            residual_in_fp32=raw.flag("residual_in_fp32"),
            attention=raw.attention(head_dim) if "*" in letters else None,
            mamba=self._mamba(raw) if "M" in pattern else None,
            mlp=self._mlp(raw, "intermediate_size") if "-" in letters else None,
            moe=self._moe(raw) if "E" in letters else None,
            mtp=mtp,
        )

    def _pattern(self, raw: RawConfig) -> str:
        pattern = raw.layer_letters() or raw.get("hybrid_override_pattern")
        if pattern is None:
            raise ConfigurationError(
                f"{raw.where} has neither layers_block_type nor hybrid_override_pattern."
            )
        if not isinstance(pattern, str) or set(pattern) - set("M*-E"):
            raise ConfigurationError(
                f"hybrid_override_pattern {pattern!r} has layers other than M * - E."
            )
        return pattern

    def _mtp(self, raw: RawConfig) -> MTPConfig | None:
        depth = raw.whole("num_nextn_predict_layers", default=0, least=0)
        if not depth:
            return None
        pattern = raw.layer_letters(lists=("mtp_layers_block_type",))
        pattern = pattern or str(raw.require("mtp_hybrid_override_pattern"))
        return MTPConfig.of(pattern, depth, raw.where)

    def _mamba(self, raw: RawConfig) -> Mamba2Config:
        # As transformers does: time_step_min bounds the step sizes, time_step_limit does not.
        least = raw.number("time_step_min", "mamba_dt_min", default=0.001)
        return Mamba2Config(
            num_heads=raw.whole("mamba_num_heads"),
            head_dim=raw.whole("mamba_head_dim"),
            state_size=raw.whole("ssm_state_size"),
            num_groups=raw.whole("n_groups", "mamba_n_groups", default=8),
            conv_width=raw.whole("conv_kernel", "mamba_d_conv", default=4),
            kernel_chunk=raw.whole("chunk_size", "mamba_chunk_size", default=128),
            conv_bias=raw.flag("use_conv_bias", "mamba_conv_bias", default=True),
            proj_bias=raw.flag("use_bias"),
            out_bias=raw.flag("use_bias"),
            dt_limit=(least, float("inf")),
        )

    def _mlp(self, raw: RawConfig, size: str) -> MLPConfig:
        activation = raw.get("mlp_hidden_act", default="relu2")
        mlp = raw.gated_mlp(size, bias=raw.flag("mlp_bias"))
        return replace(mlp, gated=False, activation=activation)

    def _moe(self, raw: RawConfig) -> MoEConfig:
        return MoEConfig(
            num_experts=raw.whole("n_routed_experts", "num_local_experts"),
            experts_per_token=raw.whole("num_experts_per_tok"),
            expert=self._mlp(raw, "moe_intermediate_size"),
            shared=self._mlp(raw, "moe_shared_expert_intermediate_size"),
            scoring="sigmoid",
            num_groups=raw.whole("n_group", default=1),
            chosen_groups=raw.whole("topk_group", default=1),
            normalize_weights=raw.flag("norm_topk_prob", default=True),
            scaling_factor=raw.number("routed_scaling_factor", default=1.0),
            latent_size=raw.whole_or_none("moe_latent_size"),
        )

    def locate(self, config: HybridModelConfig, block: int, role: str) -> list[Location]:
        layer = f"model.layers.{block}"
        if block >= len(config.pattern):
            layer = f"mtp.layers.{block - len(config.pattern)}"
        if role in _MTP_NAMES:
            return [Location(f"{layer}.{_MTP_NAMES[role]}")]
        places = [Location(self.name_in(layer, role))]
        expert = re.fullmatch(r"mixer\.experts\.(\d+)\.(\w+)\.weight", role)
        if expert and config.moe is not None:  # single, or stacked, or as NeMo has them
            number, count = int(expert[1]), config.moe.num_experts
            stacked = f"{layer}.mixer.experts"
            places.append(Location(f"{stacked}.{expert[2]}", number, count))
            if (nemo := _NEMO_EXPERTS.get(expert[2])) is not None:
                places.append(Location(f"{stacked}.{nemo}", number, count, transposed=True))
        return places
