"""What the tests' tiny models are, by family: the prefix of transformers' classes, and what their
configuration has besides what all have (tests/tiny_models.py)."""

from __future__ import annotations

from typing import Any, NamedTuple


class Tiny(NamedTuple):
    """`classes`: the prefix of transformers' classes; `chunk`: the name of the kernel chunk, where
    the configuration has one; `text`: its configuration is that of a text part."""

    classes: str
    values: dict[str, Any]
    chunk: str | None = None
    text: bool = False
    # The module that has the classes: imported when a model is made, since it takes as long as
    # torch, which ranks that only load one would all wait for.
    source: str = "transformers"
    tied_scale: float = 0.1  # of an embedding that is the head, too


_BAMBA_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
_NEMOTRON: dict[str, Any] = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "head_dim": 16,
    "intermediate_size": 96,
}


_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}
_DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": [
        "linear_attention", "full_attention", "linear_attention", "linear_attention",
    ],
    "head_dim": 16,
    "intermediate_size": 96,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 48,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
_QWEN4: dict[str, Any] = _DELTA_NET | _EXPERTS | {
    "layer_types": [
        "linear_attention", "indexed_attention", "linear_attention", "linear_attention",
    ],
    "output_gate_type": "sigmoid",
    "hc_count": 3,
    "hc_lowrank": 12,
    "ple_layer_ids": [1, 3],
    "ple_embed_dim": 96,
    "ngram_size": 3,
    "heads_per_ngram": 4,
    "ngram_vocab_size_base": 90,
    "make_ngram_vocab_size_divisible_by": 16,
    "split_ngram_parts": 5,
    "eos_token_id": 7,
    "indexer_n_heads": 24,  # so that hardly a group scores 0, like others
    "indexer_kv_heads": 1,
    "indexer_head_dim": 12,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}  # fmt: skip
_OLMO_HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": [
        "linear_attention", "full_attention", "linear_attention", "linear_attention",
    ],
    "intermediate_size": 96,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 48,
    "rope_parameters": {"rope_type": "default", "rope_theta": None},
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "intermediate_size": 96,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
_SHORT_CONV: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "intermediate_size": 96,
}

_RING_LINEAR: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_group_size": 3,
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "norm_topk_prob": True,
    "group_norm_size": 2,
    "linear_silu": False,
    "use_qk_norm": True,
    "rms_norm_eps": 1e-3,  # so that one of another size is noticed
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
}

TINY: dict[str, Tiny] = {
    "nemotron_h": Tiny(
        "NemotronH",
        _NEMOTRON
        | {
            "layers_block_type": [
                "linear_attention", "mlp", "full_attention", "linear_attention", "mlp",
            ],
        },
        "chunk_size",
    ),
    "nemotron_h_moe": Tiny(
        "NemotronH",
        _NEMOTRON
        | {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "moe_latent_size": 32,
            "layers_block_type": [
                "linear_attention", "moe", "full_attention", "linear_attention", "moe",
            ],
        },
        "chunk_size",
    ),
    "bamba": Tiny(
        "Bamba", _BAMBA_MAMBA | {"attn_layer_indices": [2], "intermediate_size": 96},
        "mamba_chunk_size",
    ),
    "granite_moe_hybrid": Tiny(
        "GraniteMoeHybrid",
        _BAMBA_MAMBA
        | {
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "intermediate_size": 32,
            "shared_intermediate_size": 48,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.0,
            "attention_multiplier": 0.15,
            "tie_word_embeddings": True,
        },
        "mamba_chunk_size",
    ),
    "falcon_h1": Tiny(
        "FalconH1",
        _BAMBA_MAMBA
        | {
            "num_hidden_layers": 2,
            "mamba_d_ssm": 128,
            "intermediate_size": 96,
            "embedding_multiplier": 1.5,
            "lm_head_multiplier": 0.7,
            "key_multiplier": 0.8,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 1.5,
            "ssm_in_multiplier": 1.3,
            "ssm_out_multiplier": 2.0,
            "ssm_multipliers": [0.7, 1.1, 0.9, 1.2, 0.8],
            "mlp_multipliers": [0.8, 1.4],
        },
        "mamba_chunk_size",
    ),
    "zamba2": Tiny(
        "Zamba2",
        {
            "num_hidden_layers": 6,
            "layers_block_type": [
                "linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid", "hybrid",
            ],
            "mamba_d_state": 16,
            "n_mamba_heads": 8,
            "mamba_ngroups": 2,
            "intermediate_size": 96,
            "num_key_value_heads": 4,
            "num_mem_blocks": 2,
            "use_shared_attention_adapter": True,
            "adapter_rank": 8,
            "use_mem_rope": True,
            "tie_word_embeddings": True,  # else transformers does not share the blocks either
        },
        "chunk_size",
    ),
    "zamba": Tiny(
        "Zamba",
        {
            "num_hidden_layers": 6,
            "layers_block_type": [
                "linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid",
                "hybrid",
            ],
            "n_mamba_heads": 4,
            "mamba_d_state": 16,
            "intermediate_size": 96,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
        tied_scale=0.015,
    ),
    "mamba": Tiny("Mamba", {"num_hidden_layers": 3, "state_size": 16}),
    "falcon_mamba": Tiny("FalconMamba", {"num_hidden_layers": 3, "state_size": 16}),
    "mamba2": Tiny(
        "Mamba2",
        {
            "num_hidden_layers": 3,
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 2,
            "state_size": 16,
        },
        "chunk_size",
    ),
    "jamba": Tiny(
        "Jamba",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "intermediate_size": 96,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen3_next": Tiny(
        "Qwen3Next", _DELTA_NET | _EXPERTS | {"mlp_only_layers": [1]}, "chunk_size"
    ),
    "qwen3_5": Tiny("Qwen3_5", _DELTA_NET, "chunk_size", text=True),
    "qwen3_5_moe": Tiny("Qwen3_5Moe", _DELTA_NET | _EXPERTS, "chunk_size", text=True),
    "qwen4_exp": Tiny("Qwen4Exp", _QWEN4, "chunk_size", text=True),
    "olmo_hybrid": Tiny("OlmoHybrid", _OLMO_HYBRID, "chunk_size"),
    "minimax": Tiny(
        "MiniMax",
        {
            "num_hidden_layers": 4,
            "layer_types": [
                "linear_attention", "full_attention", "linear_attention", "linear_attention",
            ],
            "intermediate_size": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "full_attn_alpha_factor": 1.7,
            "full_attn_beta_factor": 0.8,
            "linear_attn_alpha_factor": 2.5,
            "linear_attn_beta_factor": 1.2,
            "mlp_alpha_factor": 3.5,
            "mlp_beta_factor": 1.1,
        },
        "block_size",
    ),
    "bailing_moe_linear": Tiny(
        "RingLinear", _RING_LINEAR, "block_size", source="tests.ring_linear"
    ),
    "bailing_moe_v2_5": Tiny(
        "RingLinear",
        _RING_LINEAR
        | {
            "model_type": "bailing_moe_v2_5",
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "rope_interleave": True,
        },
        "block_size",
        source="tests.ring_linear",
    ),
    "lfm2": Tiny("Lfm2", _SHORT_CONV | {"block_multiple_of": 8}),
    "lfm2_moe": Tiny(
        "Lfm2Moe", _SHORT_CONV | _EXPERTS | {"num_dense_layers": 1, "routed_scaling_factor": 1.5}
    ),
    "lfm3": Tiny(
        "Lfm3",
        {
            "num_hidden_layers": 5,
            "layer_types": [
                "conv", "sliding_attention", "full_attention", "sliding_attention", "conv",
            ],
            "intermediate_size": 96,
            "head_dim": 16,
            "sliding_window": 21,
        },
    ),
    "inkling": Tiny(
        "Inkling",
        {
            "num_hidden_layers": 4,
            "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
            "head_dim": 16,
            "swa_num_attention_heads": 6,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 8,
            "sliding_window_size": 21,
            "d_rel": 8,
            "rel_extent": 37,
            "log_scaling_n_floor": 24,
            "log_scaling_alpha": 0.5,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "route_scale": 1.5,
            "logits_mup_width_multiplier": 2.0,
        },
        text=True,
    ),
    "inkling2": Tiny(
        "Inkling2",
        {
            "num_hidden_layers": 5,
            "layer_types": [
                "hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid_sliding", "hybrid",
            ],
            "n_layers_per_attn_res_block": 2,
            "unpadded_vocab_size": 160,
            "head_dim": 16,
            "swa_num_attention_heads": 6,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 8,
            "sliding_window_size": 21,
            "d_rel": 8,
            "rel_extent": 37,
            "log_scaling_n_floor": 24,
            "log_scaling_alpha": 0.5,
            "qk_l2_clip_threshold": 1.5,
            "rel_l2_clip_threshold": 1.5,
            "mlp_gate_softcap": 0.6,
            "mlp_up_softcap": 0.8,
            "final_logit_softcapping": 2.0,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "route_scale": 0.5,
        },
        text=True,
    ),
    "recurrent_gemma": Tiny(
        "RecurrentGemma",
        {"num_hidden_layers": 4, "lru_width": 96, "intermediate_size": 192,
         "num_key_value_heads": 1, "attention_window_size": 27},
    ),
    "xlstm": Tiny(
        "xLSTM",
        {"num_hidden_layers": 3, "num_heads": 4, "ffn_proj_factor": 1.5, "chunk_size": 16,
         "autocast_kernel_dtype": "float32", "gate_soft_cap": 3.0},
    ),
    "rwkv": Tiny(
        "Rwkv",
        {"num_hidden_layers": 3, "attention_hidden_size": 96, "intermediate_size": 112,
         "context_length": 2048},
    ),
    "zaya": Tiny(
        "Zaya",
        {"num_hidden_layers": 3, "head_dim": 16, "num_experts": 8, "moe_intermediate_size": 32,
         "router_hidden_size": 24},
    ),
    "llama": Tiny("Llama", {"num_hidden_layers": 3, "intermediate_size": 96}),
    "qwen3": Tiny("Qwen3", {"num_hidden_layers": 3, "intermediate_size": 96, "head_dim": 16}),
    "kimi_linear": Tiny(
        "KimiLinear",
        _LATENT
        | _EXPERTS
        | {"topk_group": 3, "linear_num_heads": 4, "linear_head_dim": 16},
        "chunk_size",
    ),
    "glm5_next": Tiny(
        "Glm5NextText",
        _LATENT
        | {
            "num_hidden_layers": 5,
            "layer_types": [
                "linear_attention", "indexed_attention", "indexed_attention", "linear_attention",
                "indexed_attention",
            ],
            "indexer_types": ["full", "full", "shared", "full", "full"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "qk_rope_head_dim": 0,
            "q_lora_rank": 20,
            "linear_num_heads": 4,
            "linear_head_dim": 16,
            "index_topk": 12,
            "index_kpool": 4,
            "index_n_heads": 24,  # of few, some groups have equal scores: 0
            "index_head_dim": 8,
            "swiglu_limit": 0.5,  # so that it is noticed
            "hc_mult": 3,
            "hc_sinkhorn_iters": 5,
        },
        "chunk_size",
        source="tests.glm5_next",
    ),
    "bailing_hybrid": Tiny(
        "BailingHybrid", _LATENT | _EXPERTS | {"q_lora_rank": 20, "head_dim": 16}, "chunk_size"
    ),
}  # fmt: skip
