"""The arguments of a Megatron training job, as its checkpoints keep them, and our configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.layers.attention import AttentionConfig
from megatron_hybrid.layers.gated_delta_net import GatedDeltaNetConfig
from megatron_hybrid.layers.mamba2 import Mamba2Config
from megatron_hybrid.layers.mlp import MLPConfig
from megatron_hybrid.layers.moe import MoEConfig
from megatron_hybrid.layers.rope import RopeConfig
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.families.raw_config import ModelSettings

MODEL_TYPE = "megatron"  # of a model that no Hugging Face family of ours describes
# What --use-rope-scaling does, besides its factor.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192}


def has_zero_centered_norms(arguments: Mapping[str, Any] | None) -> bool | None:
    """Whether the checkpoint has weight - 1 of its norms (--apply-layernorm-1p); None: unknown."""
    if arguments is None:
        return None
    for name in ("apply_layernorm_1p", "layernorm_zero_centered_gamma"):
        if arguments.get(name) is not None:
            return bool(arguments[name])
    return None


class MegatronArguments(ModelSettings):
    """Megatron's arguments by their names in Python, and what they say of the model."""

    def missing(self, name: str) -> str:
        """The sentence for an argument that is not there."""
        return (
            f"The arguments in {self.where} have no {name!r}; put a config.json of Hugging "
            "Face's beside the checkpoint, which describes the model instead of them."
        )

    def shown(self, name: str, value: str) -> str:
        """By the flag that sets it."""
        return f"The checkpoint's argument --{name.replace('_', '-')} is {value}"

    # ------------------------------------------------------------------ the model

    def config(self) -> HybridModelConfig:
        """Raises ConfigurationError for a model that we have not."""
        for name in ("multi_latent_attention", "heterogeneous_layers_config_path", "use_mup"):
            self.refuse_unless(name, False, "")
        for name in (
            "window_size", "softmax_scale", "moe_apply_probs_on_input", "qk_l2_norm",
            "no_rope_freq", "glu_linear_offset", "activation_func_clamp_value",
            "moe_router_topk_limited_devices",
        ):  # fmt: skip
            self.refuse_unless(name, False)
        self.refuse_unless("softmax_type", "vanilla")
        self.refuse_unless("rotary_interleaved", False)
        self.refuse_unless("normalization", "RMSNorm")
        self.refuse_unless("position_embedding_type", "rope", "none")
        pattern = self._pattern()
        centered = bool(has_zero_centered_norms(self.values))
        mlp = self._mlp("ffn_hidden_size") if "-" in pattern else None
        return HybridModelConfig(
            model_type=MODEL_TYPE,
            pattern=pattern,
            vocab_size=self.whole("vocab_size", "padded_vocab_size"),
            hidden_size=self.whole("hidden_size"),
            max_position_embeddings=self.whole("max_position_embeddings", "seq_length"),
            norm_eps=self.number("norm_epsilon", "layernorm_epsilon", default=1e-5),
            dtype=self._dtype(),
            attention=self._attention(centered) if "*" in pattern else None,
            mamba=self._mamba() if "M" in pattern else None,
            gated_delta_net=self._gated_delta_net() if "G" in pattern else None,
            mlp=mlp,
            moe=self._moe() if "E" in pattern else None,
            tie_word_embeddings=not self.get("untie_embeddings_and_output_weights", default=False),
            zero_centered_norm=centered,
        )

    def _pattern(self) -> str:
        pattern = self.get("hybrid_layer_pattern", "hybrid_override_pattern")
        if pattern is not None:
            # Pipeline stages are between |, what follows / predicts several tokens.
            pattern = str(pattern).split("/")[0].replace("|", "")
            if unknown := set(pattern) - set("M*-EG"):
                raise ConfigurationError(
                    f"Layers of kind {sorted(unknown)[0]!r} in the layer pattern {pattern!r} "
                    f"({self.where}) are not supported."
                )
            return str(pattern)
        layers = self.whole("num_layers")
        if self.get("is_hybrid_model") or "mamba" in str(self.get("spec", default="")):
            for name in ("hybrid_attention_ratio", "hybrid_mlp_ratio"):
                self.refuse_unless(name, 0.0)
            return "M" * layers
        self.refuse_unless("experimental_attention_variant", "gated_delta_net")
        linear = self._frequency("linear_attention_freq", layers, lambda i, n: (i + 1) % n != 0)
        experts = self._frequency("moe_layer_freq", layers, lambda i, n: i % n == 0)
        if self.get("experimental_attention_variant") is None:
            linear = [False] * layers
        if self.get("num_experts", "num_moe_experts") is None:
            experts = [False] * layers
        return "".join(
            ("G" if is_linear else "*") + ("E" if has_experts else "-")
            for is_linear, has_experts in zip(linear, experts, strict=True)
        )

    def _frequency(self, name: str, layers: int, every: Any) -> list[bool]:
        """A list of 0 and 1, or of every how many layers one is of the kind."""
        value = self.get(name, default=1)
        if isinstance(value, list) and len(value) == layers:
            return [bool(one) for one in value]
        if isinstance(value, int):
            return [every(i, value) for i in range(layers)]
        raise ConfigurationError(
            f"The checkpoint's argument {name} is {value!r} ({self.where}): neither a number nor "
            f"a list of {layers}."
        )

    def _dtype(self) -> torch.dtype:
        dtype = self.get("params_dtype")
        if isinstance(dtype, torch.dtype):
            return dtype
        if self.get("bf16"):
            return torch.bfloat16
        return torch.float16 if self.get("fp16") else torch.float32

    def _attention(self, centered: bool) -> AttentionConfig:
        heads = self.whole("num_attention_heads")
        grouped = self.get("group_query_attention", default=True)
        kv_heads = self.whole("num_query_groups", default=heads) if grouped else heads
        dim = self._head_dim()
        bias = self._has_bias()
        return AttentionConfig(
            heads,
            kv_heads,
            dim,
            scale=dim**-0.5,
            rope=self._rope(),
            qkv_bias=bias or self.flag("add_qkv_bias"),
            output_bias=bias,
            qk_norm=self.flag("qk_layernorm"),
            zero_centered_norm=centered and self.flag("qk_layernorm"),
            output_gate=self.flag("attention_output_gate"),
        )

    def _head_dim(self) -> int:
        default = self.require("hidden_size") // self.require("num_attention_heads")
        return self.whole("kv_channels", default=default)

    def _has_bias(self) -> bool:
        if self.get("disable_bias_linear") is not None:
            return not self.get("disable_bias_linear")
        return self.flag("add_bias_linear", default=True)

    def _rope(self) -> RopeConfig | None:
        if self.get("position_embedding_type", default="rope") == "none":
            return None
        dim = self._head_dim()
        theta = self.number("rotary_base", default=10000)
        rotated = int(dim * self.number("rotary_percent", default=1.0))
        if self.get("use_rope_scaling", "rope_scaling", default=False):
            factor = self.number("rope_scaling_factor", default=8.0)
            return RopeConfig(theta, rotated, "llama3", factor, **LLAMA3)  # type: ignore[arg-type]
        factor = self.get("rotary_seq_len_interpolation_factor")
        if factor is not None:
            return RopeConfig(theta, rotated, "linear", float(factor))
        return RopeConfig(theta, rotated)

    def _mamba(self) -> Mamba2Config:
        dim = self.whole("mamba_head_dim", default=64)
        heads = self.get("mamba_num_heads", default=2 * self.require("hidden_size") // dim)
        return Mamba2Config(
            num_heads=int(heads),
            head_dim=dim,
            state_size=self.whole("mamba_state_dim", default=128),
            num_groups=self.whole("mamba_num_groups", default=8),
            conv_width=4,
            kernel_chunk=128,
        )

    def _gated_delta_net(self) -> GatedDeltaNetConfig:
        return GatedDeltaNetConfig(
            key_heads=self.whole("linear_num_key_heads"),
            value_heads=self.whole("linear_num_value_heads"),
            key_dim=self.whole("linear_key_head_dim"),
            value_dim=self.whole("linear_value_head_dim"),
            conv_width=self.whole("linear_conv_kernel_dim", default=4),
        )

    def _mlp(self, size: str) -> MLPConfig:
        gated = self.flag("swiglu")
        if not gated and not self.get("squared_relu", default=False):
            raise ConfigurationError(
                f"The checkpoint's MLPs have neither --swiglu nor --squared-relu ({self.where}); "
                "other activations are not supported."
            )
        return MLPConfig(
            int(self.require(size)), gated, "silu" if gated else "relu2", self._has_bias()
        )

    def _moe(self) -> MoEConfig:
        size = "moe_ffn_hidden_size" if self.get("moe_ffn_hidden_size") else "ffn_hidden_size"
        expert, shared = self._mlp(size), self.get("moe_shared_expert_intermediate_size")
        if expert.bias:
            raise ConfigurationError(
                f"The checkpoint's experts have biases ({self.where}: --disable-bias-linear was "
                "not given), which is not supported."
            )
        score = self.get("moe_router_score_function", default="softmax")
        self.refuse_unless("moe_router_score_function", "softmax", "sigmoid")
        if score == "softmax":
            self.refuse_unless("moe_router_group_topk", False)
        chosen_groups = self.get("moe_router_group_topk")  # Megatron has no groups without it
        groups = self.get("moe_router_num_groups") if chosen_groups else None
        top = self.whole("moe_router_topk", default=2)
        pre_softmax = self.flag("moe_router_pre_softmax")
        latent = self.get("moe_latent_size")
        return MoEConfig(
            num_experts=self.whole("num_experts", "num_moe_experts"),
            experts_per_token=top,
            expert=expert,
            shared=self._mlp("moe_shared_expert_intermediate_size") if shared else None,
            scoring=str(score),
            num_groups=int(groups or 1),
            chosen_groups=int(chosen_groups or 1),
            normalize_weights=top > 1 if score == "sigmoid" else not pre_softmax,
            router_bias=self.flag("moe_router_enable_expert_bias") if score == "sigmoid" else True,
            shared_gate=self.flag("moe_shared_expert_gate"),
            scaling_factor=float(self.get("moe_router_topk_scaling_factor") or 1.0),
            latent_size=None if latent is None else int(latent),
        )


def with_family(config: HybridModelConfig) -> HybridModelConfig:
    """With the model_type of the Hugging Face family that has just this model, so that its names
    can be used to update the weights; unchanged where no family has it."""
    name = _family(config)
    delta = config.gated_delta_net
    if name == "qwen3_next" and delta is not None:
        delta = replace(delta, interleaved=True)
    return replace(config, model_type=name, gated_delta_net=delta)


def _family(config: HybridModelConfig) -> str:
    pattern, attention, moe = config.pattern, config.attention, config.moe
    mlp = config.mlp or (None if moe is None else moe.expert)
    gated, has_bias = mlp is not None and mlp.gated, mlp is not None and mlp.bias
    if attention is not None and attention.qkv_bias != attention.output_bias:
        return MODEL_TYPE
    if "G" in pattern:
        if attention is None or not (attention.qk_norm and attention.output_gate):
            return MODEL_TYPE
        experts = moe is None or _is_qwens(moe)
        fits = config.zero_centered_norm and config.rope and gated and not has_bias and experts
        return "qwen3_next" if fits else MODEL_TYPE
    if config.zero_centered_norm or (attention is not None and attention.output_gate):
        return MODEL_TYPE
    if config.rope is None:
        plain = attention is None or not (attention.qk_norm or attention.qkv_bias)
        return "nemotron_h" if plain and not gated and _is_nemotrons(moe) else MODEL_TYPE
    if attention is None or not gated:
        return MODEL_TYPE
    if re.fullmatch(r"(\*-)+", pattern):
        if config.rope.rotary_dim != attention.head_dim:
            return MODEL_TYPE
        return "qwen3" if attention.qk_norm else "llama"
    is_bamba = "M" in pattern and re.fullmatch("([M*]-)+", pattern) and not attention.qk_norm
    return "bamba" if is_bamba else MODEL_TYPE


def _is_qwens(moe: MoEConfig) -> bool:
    return moe.shared is not None and moe == MoEConfig(
        moe.num_experts, moe.experts_per_token, moe.expert, moe.shared,
        normalize_weights=moe.normalize_weights, shared_gate=True,
    )  # fmt: skip


def _is_nemotrons(moe: MoEConfig | None) -> bool:
    return moe is None or (
        moe.scoring == "sigmoid" and moe.router_bias and not moe.shared_gate and bool(moe.shared)
    )
