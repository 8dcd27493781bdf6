"""Megatron's arguments for a model of ours, for --use-checkpoint-args."""

from __future__ import annotations

from typing import Any

import torch

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.models.checkpoints.megatron_arguments import LLAMA3
from megatron_hybrid.models.checkpoints.megatron_names import is_gpt_pattern
from megatron_hybrid.models.config import HybridModelConfig


def arguments_of(config: HybridModelConfig) -> dict[str, Any]:
    """Megatron's arguments for a model that `check_expressible` accepts.

    Raises ConfigurationError for the little that only arguments cannot say.
    """
    is_gpt = is_gpt_pattern(config.pattern)
    layers = len(config.pattern) // (2 if is_gpt else 1)
    mlp = config.mlp or (config.moe.expert if config.moe else None)
    values: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": mlp.intermediate_size if mlp else 4 * config.hidden_size,
        "seq_length": config.max_position_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "normalization": "RMSNorm",
        "norm_epsilon": config.norm_eps,
        "apply_layernorm_1p": config.zero_centered_norm,
        "add_bias_linear": _bias(config),
        "add_qkv_bias": bool(config.attention and config.attention.qkv_bias),
        "swiglu": bool(mlp and mlp.gated),
        "squared_relu": bool(mlp and not mlp.gated),
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "vocab_size": config.vocab_size,
        "padded_vocab_size": config.vocab_size,
        "position_embedding_type": "none" if config.rope is None else "rope",
        "use_rotary_position_embeddings": config.rope is not None,
        "bf16": config.dtype is torch.bfloat16,
        "fp16": config.dtype is torch.float16,
        "params_dtype": config.dtype,
        "tokenizer_type": "HuggingFaceTokenizer",
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "ckpt_format": "torch_dist",
        "no_save_optim": True,
        "no_save_rng": True,
    }
    if not is_gpt:
        values |= {"is_hybrid_model": True}
        values |= dict.fromkeys(("hybrid_layer_pattern", "hybrid_override_pattern"), config.pattern)
        values["spec"] = ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"]
    values |= _attention_arguments(config)
    if (mamba := config.mamba) is not None:
        values |= {
            "mamba_num_heads": mamba.num_heads,
            "mamba_head_dim": mamba.head_dim,
            "mamba_state_dim": mamba.state_size,
            "mamba_num_groups": mamba.num_groups,
        }
        if mamba.conv_width != 4:
            raise ConfigurationError(
                f"Megatron's Mamba layers have convolutions of width 4, not {mamba.conv_width}."
            )
    if (delta := config.gated_delta_net) is not None:
        values |= {
            "experimental_attention_variant": "gated_delta_net",
            "linear_num_key_heads": delta.key_heads,
            "linear_num_value_heads": delta.value_heads,
            "linear_key_head_dim": delta.key_dim,
            "linear_value_head_dim": delta.value_dim,
            "linear_conv_kernel_dim": delta.conv_width,
        }
        if is_gpt:
            values["linear_attention_freq"] = [int(x == "G") for x in config.pattern[::2]]
    if (moe := config.moe) is not None:
        values |= {
            "num_experts": moe.num_experts,
            "moe_ffn_hidden_size": moe.expert.intermediate_size,
            "moe_router_topk": moe.experts_per_token,
            "moe_router_score_function": moe.scoring,
            "moe_router_pre_softmax": moe.scoring == "softmax" and not moe.normalize_weights,
            "moe_router_enable_expert_bias": moe.scoring == "sigmoid" and moe.router_bias,
            "moe_router_topk_scaling_factor": moe.scaling_factor,
            "moe_shared_expert_intermediate_size": moe.shared and moe.shared.intermediate_size,
            "moe_shared_expert_gate": moe.shared_gate,
            "moe_latent_size": moe.latent_size,
            "moe_grouped_gemm": True,
        }
        if moe.num_groups > 1:
            values["moe_router_num_groups"] = moe.num_groups
            values["moe_router_group_topk"] = moe.chosen_groups
        if is_gpt:
            values["moe_layer_freq"] = [int(x == "E") for x in config.pattern[1::2]]
    return values


def _attention_arguments(config: HybridModelConfig) -> dict[str, Any]:
    attention, rope = config.attention, config.rope
    if attention is None:
        return {"num_attention_heads": 1, "kv_channels": config.hidden_size}
    values: dict[str, Any] = {
        "num_attention_heads": attention.num_heads,
        "group_query_attention": attention.num_kv_heads != attention.num_heads,
        "num_query_groups": attention.num_kv_heads,
        "kv_channels": attention.head_dim,
        "qk_layernorm": attention.qk_norm,
        "attention_output_gate": attention.output_gate,
    }
    if rope is not None:
        values["rotary_base"] = int(rope.theta)
        values["rotary_percent"] = rope.rotary_dim / attention.head_dim
        if rope.kind == "linear":
            values["rotary_seq_len_interpolation_factor"] = rope.factor
        if rope.kind == "llama3":
            if any(getattr(rope, name) != value for name, value in LLAMA3.items()):
                raise ConfigurationError(
                    "Megatron's --use-rope-scaling has low_freq_factor 1, high_freq_factor 4 and "
                    "original_max_position_embeddings 8192 only; the model's are "
                    f"{rope.low_freq_factor}, {rope.high_freq_factor} and "
                    f"{rope.original_max_position}."
                )
            values |= {"use_rope_scaling": True, "rope_scaling_factor": rope.factor}
    return values


def _bias(config: HybridModelConfig) -> bool:
    """Whether all linear layers have biases, but for q, k and v, which may have them alone."""
    found = {mlp.bias for mlp in (config.mlp, config.moe and config.moe.expert) if mlp}
    if config.attention is not None:
        found.add(config.attention.output_bias)
        if config.attention.output_bias and not config.attention.qkv_bias:
            found.add(False)
    if len(found) > 1:
        raise ConfigurationError(
            "Megatron has biases in all linear layers of attention and MLPs (--add-bias-linear) or "
            "in none but those of q, k and v; the model has them in some."
        )
    return found == {True}
