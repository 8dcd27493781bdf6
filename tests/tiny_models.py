"""Tiny random models, made with transformers: the oracle of the tests and their checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES = ("nemotron_h", "nemotron_h_moe", "bamba", "granite_moe_hybrid", "llama", "qwen3")

_COMMON: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
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


def make_tiny_model(
    family: str, folder: str | Path, *, seed: int = 0, chunk_size: int = 16, **overrides: Any
) -> PreTrainedModel:
    """Save a random model of `family` (one of FAMILIES) in `folder` and return it, in eval mode.

    `chunk_size` is the Mamba2 kernel chunk; `overrides` go to the family's configuration. Weights
    are drawn so that activations neither vanish nor saturate: transformers' own initialisation
    gives nearly constant logits.
    """
    model = _build(family, chunk_size, overrides)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_draw(name, parameter, generator))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
    model = model.eval()
    model.save_pretrained(folder)
    return model


def _build(family: str, chunk_size: int, overrides: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    if family == "nemotron_h":
        layers = ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]
        values = _COMMON | _NEMOTRON | {"layers_block_type": layers, "chunk_size": chunk_size}
        return NemotronHForCausalLM(NemotronHConfig(**(values | overrides)))
    if family == "nemotron_h_moe":
        layers = ["linear_attention", "moe", "full_attention", "linear_attention", "moe"]
        experts = {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "moe_latent_size": 32,
        }
        values = _COMMON | _NEMOTRON | experts
        values |= {"layers_block_type": layers, "chunk_size": chunk_size}
        return NemotronHForCausalLM(NemotronHConfig(**(values | overrides)))
    if family == "bamba":
        values = _COMMON | _BAMBA_MAMBA
        values |= {"attn_layer_indices": [2], "intermediate_size": 96}
        values |= {"mamba_chunk_size": chunk_size}
        return BambaForCausalLM(BambaConfig(**(values | overrides)))
    if family == "granite_moe_hybrid":
        values = _COMMON | _BAMBA_MAMBA
        values |= {
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
        return GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**(values | overrides)))
    if family == "llama":
        values = _COMMON | {"num_hidden_layers": 3, "intermediate_size": 96}
        return LlamaForCausalLM(LlamaConfig(**(values | overrides)))
    if family == "qwen3":
        values = _COMMON | {"num_hidden_layers": 3, "intermediate_size": 96, "head_dim": 16}
        return Qwen3ForCausalLM(Qwen3Config(**(values | overrides)))
    raise ValueError(f"family {family!r} is not one of {', '.join(FAMILIES)}")


def _draw(name: str, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
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
    if "conv1d" in name:
        return 0.5 * normal
    if "embed" in name:
        return normal
    return normal * 0.5 / math.sqrt(shape[-1])
