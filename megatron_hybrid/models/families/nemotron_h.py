"""Nemotron-H (NVIDIA): blocks of Mamba2, attention without positions, MLP or experts."""

from __future__ import annotations

import re

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.layers.attention import AttentionConfig
from megatron_hybrid.layers.mamba2 import Mamba2Config
from megatron_hybrid.layers.mlp import MLPConfig
from megatron_hybrid.layers.moe import MoEConfig
from megatron_hybrid.models.config import HybridModelConfig, MTPConfig
from megatron_hybrid.models.families.family import Family, Location
from megatron_hybrid.models.families.raw_config import RawConfig

_MOE_NAMES = {
    "router.weight": "gate.weight",
    "router.bias": "gate.e_score_correction_bias",
    "shared.": "shared_experts.",
    "to_latent.": "fc1_latent_proj.",
    "from_latent.": "fc2_latent_proj.",
}
_MTP_NAMES = {
    "mtp.embedding_norm.weight": "enorm.weight",
    "mtp.hidden_norm.weight": "hnorm.weight",
    "mtp.fc.weight": "eh_proj.weight",
    "mtp.final_norm.weight": "final_layernorm.weight",
}


class NemotronH(Family):
    model_types = ("nemotron_h",)
    renames = ((r"^backbone\.", "model."), (r"^model\.embedding\.", "model.embeddings."))
    ignored = (*Family.ignored, r"^mtp\.")  # multi-token prediction
    embedding = "model.embeddings.weight"
    final_norm = "model.norm_f.weight"

    def config(self, raw: RawConfig) -> HybridModelConfig:
        raw.refuse_unless("mamba_hidden_act", "silu")
        raw.refuse_unless("mlp_hidden_act", "relu2", "silu")
        raw.refuse_unless("attention_bias", False)
        raw.refuse_unless("sliding_window")
        pattern, mtp = self._pattern(raw), self._mtp(raw)
        letters = pattern + ("" if mtp is None else mtp.pattern)
        heads = int(raw.require("num_attention_heads"))
        # The checkpoints before transformers 5 say attention_head_dim, and 128 by default.
        head_dim = int(raw.get("head_dim", "attention_head_dim", default=128))
        return HybridModelConfig(
            **raw.common(),
            pattern=pattern,
            norm_eps=float(raw.get("layer_norm_epsilon", "rms_norm_eps", default=1e-5)),
            residual_in_fp32=bool(raw.get("residual_in_fp32", default=False)),
            attention=AttentionConfig(
                num_heads=heads,
                num_kv_heads=int(raw.get("num_key_value_heads", default=heads)),
                head_dim=head_dim,
                scale=head_dim**-0.5,
            )
            if "*" in letters
            else None,
            mamba=self._mamba(raw) if "M" in pattern else None,
            mlp=self._mlp(raw, int(raw.require("intermediate_size"))) if "-" in letters else None,
            moe=self._moe(raw) if "E" in letters else None,
            mtp=mtp,
        )

    def _pattern(self, raw: RawConfig) -> str:
        pattern: str | None = raw.layer_letters() or raw.get("hybrid_override_pattern")
        if pattern is None:
            raise ConfigurationError(
                f"{raw.where} has neither layers_block_type nor hybrid_override_pattern."
            )
        if set(pattern) - set("M*-E"):
            raise ConfigurationError(
                f"hybrid_override_pattern {pattern!r} has layers other than M * - E."
            )
        return pattern

    def _mtp(self, raw: RawConfig) -> MTPConfig | None:
        depth = int(raw.get("num_nextn_predict_layers", default=0))
        if not depth:
            return None
        pattern = raw.layer_letters(lists=("mtp_layers_block_type",))
        pattern = pattern or str(raw.require("mtp_hybrid_override_pattern"))
        return MTPConfig.of(pattern, depth, raw.where)

    def _mamba(self, raw: RawConfig) -> Mamba2Config:
        return Mamba2Config(
            num_heads=int(raw.require("mamba_num_heads")),
            head_dim=int(raw.require("mamba_head_dim")),
            state_size=int(raw.require("ssm_state_size")),
            num_groups=int(raw.get("n_groups", "mamba_n_groups", default=8)),
            conv_width=int(raw.get("conv_kernel", "mamba_d_conv", default=4)),
            kernel_chunk=int(raw.get("chunk_size", "mamba_chunk_size", default=128)),
            conv_bias=bool(raw.get("use_conv_bias", "mamba_conv_bias", default=True)),
            proj_bias=bool(raw.get("use_bias", default=False)),
            out_bias=bool(raw.get("use_bias", default=False)),
            # As transformers does: time_step_min bounds the step sizes, time_step_limit does not.
            dt_limit=(
                float(raw.get("time_step_min", "mamba_dt_min", default=0.001)),
                float("inf"),
            ),
        )

    def _mlp(self, raw: RawConfig, size: int) -> MLPConfig:
        return MLPConfig(
            intermediate_size=size,
            gated=False,
            activation=raw.get("mlp_hidden_act", default="relu2"),
            bias=bool(raw.get("mlp_bias", default=False)),
        )

    def _moe(self, raw: RawConfig) -> MoEConfig:
        expert = self._mlp(raw, int(raw.require("moe_intermediate_size")))
        latent = raw.get("moe_latent_size")
        return MoEConfig(
            num_experts=int(raw.require("n_routed_experts", "num_local_experts")),
            experts_per_token=int(raw.require("num_experts_per_tok")),
            expert=expert,
            shared=self._mlp(raw, int(raw.require("moe_shared_expert_intermediate_size"))),
            scoring="sigmoid",
            num_groups=int(raw.get("n_group", default=1)),
            chosen_groups=int(raw.get("topk_group", default=1)),
            normalize_weights=bool(raw.get("norm_topk_prob", default=True)),
            scaling_factor=float(raw.get("routed_scaling_factor", default=1.0)),
            latent_size=None if latent is None else int(latent),
        )

    def locate(self, config: HybridModelConfig, block: int, role: str) -> list[Location]:
        layer = f"model.layers.{block}"
        if block >= len(config.pattern):
            layer = f"mtp.layers.{block - len(config.pattern)}"
        if role.startswith("mtp."):
            return [Location(f"{layer}.{_MTP_NAMES[role]}")]
        if role == "norm.weight":
            return [Location(f"{layer}.norm.weight")]
        role = role.removeprefix("mixer.")
        if config.letter(block) == "E" and config.moe is not None:
            for ours, theirs in _MOE_NAMES.items():
                if role.startswith(ours):
                    role = theirs + role.removeprefix(ours)
            expert = re.fullmatch(r"experts\.(\d+)\.(\w+)\.weight", role)
            if expert:
                stacked = f"{layer}.mixer.experts.{expert[2]}"
                return [
                    Location(f"{layer}.mixer.{role}"),
                    Location(stacked, int(expert[1]), config.moe.num_experts),
                ]
        return [Location(f"{layer}.mixer.{role}")]
