"""Mamba2 (Dao, Gu), also Mamba-Codestral: Mamba2 layers alone."""

from __future__ import annotations

from megatron_hybrid.layers.mamba2 import Mamba2Config
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.families.mamba import MAX_POSITIONS, Mamba
from megatron_hybrid.models.families.raw_config import RawConfig


class Mamba2(Mamba):
    model_types = ("mamba2",)

    def config(self, raw: RawConfig) -> HybridModelConfig:
        raw.refuse_unless("hidden_act", "silu")
        bias = bool(raw.get("use_bias", default=False))
        return HybridModelConfig(
            **raw.common(max_positions=MAX_POSITIONS),
            pattern="M" * int(raw.require("num_hidden_layers")),
            norm_eps=float(raw.get("layer_norm_epsilon", default=1e-5)),
            residual_in_fp32=bool(raw.get("residual_in_fp32", default=True)),
            mamba=Mamba2Config(
                num_heads=int(raw.get("num_heads", default=128)),
                head_dim=int(raw.get("head_dim", default=64)),
                state_size=int(raw.get("state_size", default=128)),
                num_groups=int(raw.get("n_groups", default=8)),
                conv_width=int(raw.get("conv_kernel", default=4)),
                kernel_chunk=int(raw.get("chunk_size", default=256)),
                conv_bias=bool(raw.get("use_conv_bias", default=True)),
                proj_bias=bias,
                out_bias=bias,
                dt_limit=raw.time_step_limit(),
            ),
        )
