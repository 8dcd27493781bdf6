"""A config.json for a model that only Megatron's arguments describe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.families.raw_config import RawConfig
from megatron_hybrid.models.families.registry import family_of


def with_model_type(config: HybridModelConfig) -> tuple[HybridModelConfig, dict[str, Any] | None]:
    """The configuration with the model_type of the family that has just this model, and the values
    of its config.json; unchanged and None where no family has it."""
    for write in _FAMILIES:
        try:
            values = write(config)
            raw = RawConfig(values, "config.json")
            found = family_of(raw.model_type).config(raw)
        except (ConfigurationError, KeyError, AttributeError, AssertionError, TypeError):
            continue  # not a model of this family
        if _comparable(found) == _comparable(config):
            return found, values
    return config, None


def _comparable(config: HybridModelConfig) -> HybridModelConfig:
    """Without what says nothing about what the model computes from Megatron's weights."""
    delta = config.gated_delta_net
    if delta is not None:
        delta = replace(delta, interleaved=False)
    return replace(
        config, model_type="", gated_delta_net=delta, residual_in_fp32=False, eos_token_ids=()
    )


def _common(config: HybridModelConfig, model_type: str, architecture: str) -> dict[str, Any]:
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "dtype": str(config.dtype).removeprefix("torch."),
        "eos_token_id": list(config.eos_token_ids) or None,
        "bos_token_id": config.bos_token_id,
        "pad_token_id": None,
        "use_cache": True,
    }


def _attention(config: HybridModelConfig) -> dict[str, Any]:
    attention = config.attention
    if attention is None:
        return {"num_attention_heads": 1}
    return {
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "attention_bias": attention.qkv_bias,
        "attention_dropout": 0.0,
    }


def _rope(config: HybridModelConfig) -> dict[str, Any]:
    rope, attention = config.rope, config.attention
    assert rope is not None and attention is not None
    values: dict[str, Any] = {
        "rope_type": rope.kind,
        "rope_theta": rope.theta,
        "partial_rotary_factor": rope.rotary_dim / attention.head_dim,
    }
    if rope.kind != "default":
        values["factor"] = rope.factor
    if rope.kind == "llama3":
        values |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position,
        }
    return {"rope_parameters": values}


def _nemotron_h(config: HybridModelConfig) -> dict[str, Any]:
    kinds = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    values = _common(config, "nemotron_h", "NemotronH") | _attention(config)
    values |= {
        "num_hidden_layers": len(config.pattern),
        "layers_block_type": [kinds[letter] for letter in config.pattern],
        "layer_norm_epsilon": config.norm_eps,
        "mlp_hidden_act": "relu2",
        "mlp_bias": bool(config.mlp and config.mlp.bias),
        "intermediate_size": config.mlp.intermediate_size if config.mlp else config.hidden_size,
    }
    if (mamba := config.mamba) is not None:
        values |= {
            "mamba_num_heads": mamba.num_heads,
            "mamba_head_dim": mamba.head_dim,
            "ssm_state_size": mamba.state_size,
            "n_groups": mamba.num_groups,
            "conv_kernel": mamba.conv_width,
            "chunk_size": mamba.kernel_chunk,
            "use_conv_bias": True,
            "use_bias": False,
            "time_step_min": mamba.dt_limit[0],  # Megatron bounds step sizes by nothing
        }
    if (moe := config.moe) is not None:
        values |= {
            "n_routed_experts": moe.num_experts,
            "num_experts_per_tok": moe.experts_per_token,
            "moe_intermediate_size": moe.expert.intermediate_size,
            "moe_shared_expert_intermediate_size": moe.shared and moe.shared.intermediate_size,
            "n_shared_experts": 1,
            "n_group": moe.num_groups,
            "topk_group": moe.chosen_groups,
            "norm_topk_prob": moe.normalize_weights,
            "routed_scaling_factor": moe.scaling_factor,
            "moe_latent_size": moe.latent_size,
        }
    return values


def _gated(config: HybridModelConfig) -> dict[str, Any]:
    """What the families of a mixer and a gated MLP a layer have in common."""
    mlp = config.mlp
    if mlp is None and config.moe is not None:
        mlp = config.moe.expert
    assert mlp is not None
    return {
        "num_hidden_layers": len(config.pattern) // 2,
        "intermediate_size": mlp.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "mlp_bias": mlp.bias,
        **_attention(config),
        **_rope(config),
    }


def _llama(config: HybridModelConfig) -> dict[str, Any]:
    return _common(config, "llama", "Llama") | _gated(config)


def _qwen3(config: HybridModelConfig) -> dict[str, Any]:
    return _common(config, "qwen3", "Qwen3") | _gated(config) | {"use_sliding_window": False}


def _bamba(config: HybridModelConfig) -> dict[str, Any]:
    mamba = config.mamba
    assert mamba is not None
    return (
        _common(config, "bamba", "Bamba")
        | _gated(config)
        | {
            "attn_layer_indices": [i for i, x in enumerate(config.pattern[::2]) if x == "*"],
            "mamba_n_heads": mamba.num_heads,
            "mamba_d_head": mamba.head_dim,
            "mamba_n_groups": mamba.num_groups,
            "mamba_d_state": mamba.state_size,
            "mamba_d_conv": mamba.conv_width,
            "mamba_expand": mamba.inner_size // config.hidden_size,
            "mamba_chunk_size": mamba.kernel_chunk,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
        }
    )


def _qwen3_next(config: HybridModelConfig) -> dict[str, Any]:
    delta, moe = config.gated_delta_net, config.moe
    assert delta is not None
    kinds = {"G": "linear_attention", "*": "full_attention"}
    values = _common(config, "qwen3_next", "Qwen3Next") | _gated(config)
    values |= {
        "layer_types": [kinds[letter] for letter in config.pattern[::2]],
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.conv_width,
        "num_experts": 0,
        "num_nextn_predict_layers": 0,  # Megatron's head is left out
    }
    if moe is not None:
        values |= {
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.experts_per_token,
            "moe_intermediate_size": moe.expert.intermediate_size,
            "shared_expert_intermediate_size": moe.shared and moe.shared.intermediate_size,
            "norm_topk_prob": moe.normalize_weights,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i, x in enumerate(config.pattern[1::2]) if x == "-"],
        }
    return values


_FAMILIES: tuple[Callable[[HybridModelConfig], dict[str, Any]], ...] = (
    _nemotron_h,
    _llama,
    _qwen3,
    _bamba,
    _qwen3_next,
)
