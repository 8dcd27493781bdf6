"""Tiny models that megatron-core makes and saves: each one way that its checkpoints may look."""

from __future__ import annotations

from typing import Any

TOKENS = [(7 * i * i + 3 * i + 1) % 160 for i in range(24)]

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "ffn_hidden_size": 96,
    "layernorm_epsilon": 1e-5,
    "add_bias_linear": False,
}
_MAMBA: dict[str, Any] = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_num_groups": 2,
    "mamba_state_dim": 16,
}
_EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_token_dispatcher_type": "allgather",
    "moe_router_load_balancing_type": "none",
    "moe_shared_expert_intermediate_size": 48,
}
_DELTA_NET: dict[str, Any] = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
}


def _arguments(config: dict[str, Any], **others: Any) -> dict[str, Any]:
    """What the training job's arguments would be."""
    values = dict(config)
    values["norm_epsilon"] = values.pop("layernorm_epsilon")
    if "num_moe_experts" in values:
        values["num_experts"] = values.pop("num_moe_experts")
    if values.pop("layernorm_zero_centered_gamma", False):
        values["apply_layernorm_1p"] = True
    return values | {
        "squared_relu": not values["swiglu"],
        "normalization": "RMSNorm",
        "padded_vocab_size": 160,
        "max_position_embeddings": 64,
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
        "group_query_attention": True,
        "params_dtype": "an unusual value",
        **others,
    }


_GPT = _SIZES | {"num_layers": 2, "swiglu": True}
_HYBRID = _SIZES | _MAMBA | {"num_layers": 5, "swiglu": False}
_HYBRID_MOE = _HYBRID | _EXPERTS | {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 1.5,
}  # fmt: skip
_QWEN = _SIZES | _DELTA_NET | _EXPERTS | {
    "num_layers": 2,
    "swiglu": True,
    "qk_layernorm": True,
    "attention_output_gate": True,
    "linear_attention_freq": [1, 0],
    "moe_layer_freq": [1, 0],
    "moe_shared_expert_gate": True,
    "layernorm_zero_centered_gamma": False,  # of torch's norms; the worker has its own
}  # fmt: skip

MODELS: dict[str, dict[str, Any]] = {
    # Layers of one kind as one tensor: what older checkpoints are.
    "gpt_tp2": {
        "kind": "gpt",
        "tp": 2,
        "pattern": "*-*-",
        "vocab_size": 160,
        "config": _GPT | {"qk_layernorm": True, "add_qkv_bias": True},
        "arguments": _arguments(_GPT, qk_layernorm=True, add_qkv_bias=True),
        "family": "megatron",
    },
    "gpt_pp2": {
        "kind": "gpt",
        "pp": 2,
        "pattern": "*-*-",
        "vocab_size": 160,
        "config": _GPT,
        "metadata": {"non_homogeneous_layers": True},
        "arguments": _arguments(_GPT),
        "family": "llama",
    },
    "gpt_ep2": {
        "kind": "gpt",
        "ep": 2,
        "pattern": "*-*E",
        "vocab_size": 160,
        "tied": True,
        "config": _GPT | _EXPERTS | {"moe_layer_freq": [0, 1]},
        "arguments": _arguments(
            _GPT | _EXPERTS, moe_layer_freq=[0, 1], untie_embeddings_and_output_weights=False
        ),
        "family": "megatron",
    },
    # Experts and the halves of gated projections as tensors of their own.
    "gpt_ep2_singles": {
        "kind": "gpt",
        "ep": 2,
        "pattern": "*E*E",
        "vocab_size": 160,
        "config": _GPT | _EXPERTS | {"moe_router_pre_softmax": True},
        "metadata": {"singleton_local_shards": True},
        "arguments": _arguments(_GPT | _EXPERTS, moe_router_pre_softmax=True),
        "family": "megatron",
    },
    "qwen_tp2": {
        "kind": "gpt",
        "tp": 2,
        "pattern": "GE*-",
        "vocab_size": 160,
        "rotary_percent": 0.25,
        "config": _QWEN,
        "arguments": _arguments(_QWEN, apply_layernorm_1p=True, rotary_percent=0.25),
        "family": "qwen3_next",
    },
    "hybrid_tp2": {
        "kind": "hybrid",
        "tp": 2,
        "pattern": "M-*M-",
        "vocab_size": 160,
        "positions": "none",
        "config": _HYBRID,
        "arguments": _arguments(
            _HYBRID, position_embedding_type="none", hybrid_override_pattern="M-*M-"
        ),
        "family": "nemotron_h",
    },
    "hybrid_pp2": {
        "kind": "hybrid",
        "pp": 2,
        "pattern": "M*-M",
        "vocab_size": 160,
        "positions": "none",
        "config": _HYBRID | {"num_layers": 4},
        "arguments": _arguments(
            _HYBRID, position_embedding_type="none", hybrid_layer_pattern="M*|-M/MM"
        ),
        "family": "nemotron_h",
    },
    "hybrid_ep2": {
        "kind": "hybrid",
        "ep": 2,
        "pattern": "ME*EM",
        "vocab_size": 160,
        "positions": "none",
        "config": _HYBRID_MOE,
        "arguments": _arguments(
            _HYBRID_MOE,
            position_embedding_type="none",
            hybrid_layer_pattern="ME*EM",
        ),
        "family": "nemotron_h",
    },
}
# Written by us, megatron-core reads these.
READ_BACK = ("hybrid_tp2", "hybrid_ep2")
