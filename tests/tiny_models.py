"""Tiny random models, made with transformers: the oracle of the tests and their checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

# Of transformers: the prefix of a family's classes.
_CLASSES = {
    "nemotron_h": "NemotronH",
    "nemotron_h_moe": "NemotronH",
    "bamba": "Bamba",
    "granite_moe_hybrid": "GraniteMoeHybrid",
    "falcon_h1": "FalconH1",
    "zamba2": "Zamba2",
    "mamba": "Mamba",
    "falcon_mamba": "FalconMamba",
    "mamba2": "Mamba2",
    "jamba": "Jamba",
    "qwen3_next": "Qwen3Next",
    "qwen3_5": "Qwen3_5",
    "qwen3_5_moe": "Qwen3_5Moe",
    "lfm2": "Lfm2",
    "lfm2_moe": "Lfm2Moe",
    "llama": "Llama",
    "qwen3": "Qwen3",
}
FAMILIES = tuple(_CLASSES)
ATTENTION_ONLY = ("llama", "qwen3")

_COMMON: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
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
_SHORT_CONV: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "intermediate_size": 96,
}


def make_tiny_model(
    family: str, folder: str | Path, *, seed: int = 0, chunk_size: int = 16, **overrides: Any
) -> PreTrainedModel:
    """Save a random model of `family` (one of FAMILIES) in `folder` and return it, in eval mode.

    `chunk_size` is the kernel chunk of Mamba2 and of gated delta nets; `overrides` go to the
    family's configuration. Weights are drawn so that activations neither vanish nor saturate:
    transformers' own initialisation gives nearly constant logits.
    """
    torch.manual_seed(0)
    values = _COMMON | _values(family, chunk_size) | overrides
    model = _model_class(family)(_config_class(family)(**values))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = draw(name, parameter, generator)
            if "embed" in name and model.config.tie_word_embeddings:
                drawn *= 0.1  # or the likeliest token were always the last one again
            parameter.copy_(drawn)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
    model = model.eval()
    model.save_pretrained(folder)
    return model


def _config_class(family: str) -> Any:
    name = _CLASSES[family]
    text = "Text" if name.startswith("Qwen3_5") else ""
    return getattr(transformers, f"{name}{text}Config")


def _model_class(family: str) -> Any:
    return getattr(transformers, f"{_CLASSES[family]}ForCausalLM")


def _values(family: str, chunk_size: int) -> dict[str, Any]:
    """A family's own configuration."""
    if family == "nemotron_h":
        layers = ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]
        return _NEMOTRON | {"layers_block_type": layers, "chunk_size": chunk_size}
    if family == "nemotron_h_moe":
        layers = ["linear_attention", "moe", "full_attention", "linear_attention", "moe"]
        return _NEMOTRON | {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "moe_latent_size": 32,
            "layers_block_type": layers,
            "chunk_size": chunk_size,
        }
    if family == "bamba":
        return _BAMBA_MAMBA | {
            "attn_layer_indices": [2],
            "intermediate_size": 96,
            "mamba_chunk_size": chunk_size,
        }
    if family == "granite_moe_hybrid":
        return _BAMBA_MAMBA | {
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "intermediate_size": 32,
            "shared_intermediate_size": 48,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "mamba_chunk_size": chunk_size,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.0,
            "attention_multiplier": 0.15,
            "tie_word_embeddings": True,
        }
    if family == "falcon_h1":
        return _BAMBA_MAMBA | {
            "num_hidden_layers": 2,
            "mamba_d_ssm": 128,
            "mamba_chunk_size": chunk_size,
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
        }
    if family == "zamba2":
        return {
            "num_hidden_layers": 6,
            "layers_block_type": [
                "linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid", "hybrid",
            ],
            "mamba_d_state": 16,
            "n_mamba_heads": 8,
            "mamba_ngroups": 2,
            "chunk_size": chunk_size,
            "intermediate_size": 96,
            "num_key_value_heads": 4,
            "num_mem_blocks": 2,
            "use_shared_attention_adapter": True,
            "adapter_rank": 8,
            "use_mem_rope": True,
            "tie_word_embeddings": True,  # else transformers does not share the blocks either
        }  # fmt: skip
    if family in ("mamba", "falcon_mamba"):
        return {"num_hidden_layers": 3, "state_size": 16}
    if family == "mamba2":
        return {
            "num_hidden_layers": 3,
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 2,
            "state_size": 16,
            "chunk_size": chunk_size,
        }
    if family == "jamba":
        return {
            "num_hidden_layers": 4,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "intermediate_size": 96,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        }
    if family == "qwen3_next":
        return _DELTA_NET | _EXPERTS | {"chunk_size": chunk_size, "mlp_only_layers": [1]}
    if family == "qwen3_5":
        return _DELTA_NET | {"chunk_size": chunk_size}
    if family == "qwen3_5_moe":
        return _DELTA_NET | _EXPERTS | {"chunk_size": chunk_size}
    if family == "lfm2":
        return _SHORT_CONV | {"block_multiple_of": 8}
    if family == "lfm2_moe":
        return _SHORT_CONV | _EXPERTS | {"num_dense_layers": 1, "routed_scaling_factor": 1.5}
    if family == "llama":
        return {"num_hidden_layers": 3, "intermediate_size": 96}
    if family == "qwen3":
        return {"num_hidden_layers": 3, "intermediate_size": 96, "head_dim": 16}
    raise ValueError(f"family {family!r} is not one of {', '.join(FAMILIES)}")


def draw(name: str, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    shape, last = like.shape, name.rsplit(".", 1)[-1]
    normal = torch.randn(shape, generator=generator)
    if last == "A_log":
        return (1 + 15 * torch.rand(shape, generator=generator)).log()
    if last == "dt_bias":
        return normal - 2.0
    if last == "D" or "norm" in name and like.ndim == 1:
        return 1 + 0.2 * normal
    if last == "bias":
        return 0.2 * normal
    if "conv" in name and like.ndim == 3:
        return 0.5 * normal
    if "embed" in name:
        return normal
    return normal * 0.5 / math.sqrt(shape[-1])
