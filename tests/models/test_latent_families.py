"""Kimi Linear's and Ling's configurations and weights as the hub has them: other names than those
that transformers writes, for the same model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.layers.latent_attention import LatentAttentionConfig
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.models.config import LATENT_ATTENTION, HybridModelConfig
from megatron_hybrid.parallel import ParallelContext
from tests.models.conftest import TinyModel, load
from tests.models.driver import run_in_segments

Tiny = Callable[[str], TinyModel]

# As their files say it, for the tiny models' sizes and chunks.
KIMI: dict[str, Any] = {
    "model_type": "kimi_linear",
    "vocab_size": 160,
    "hidden_size": 64,
    "head_dim": 16,  # which nothing reads
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "linear_attn_config": {
        "kda_layers": [1, 3],
        "full_attn_layers": [2],
        "num_heads": 4,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
    },
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "mla_use_nope": True,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 4,
    "topk_group": 3,
    "use_grouped_topk": True,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "model_max_length": 2048,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "chunk_size": 16,
}
LING: dict[str, Any] = {
    "model_type": "bailing_hybrid",
    "vocab_size": 160,
    "hidden_size": 64,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "layer_group_size": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 32,
    "qk_head_dim": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "rope_theta": 6000000.0,
    "rope_scaling": None,
    "rope_interleave": True,
    "partial_rotary_factor": 0.5,
    "rotary_dim": 8,
    "use_mla_nope": False,
    "gated_attention_proj_granularity_type": "head_wise",
    "no_kda_lora": True,
    "kda_safe_gate": True,
    "kda_lower_bound": -5.0,
    "short_conv_kernel_size": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "moe_router_enable_expert_bias": True,
    "norm_topk_prob": True,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "score_function": "sigmoid",
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "num_nextn_predict_layers": 1,
    "use_qkv_bias": False,
    "use_bias": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "chunk_size": 16,
}
HUB = {"kimi_linear": KIMI, "bailing_hybrid": LING}


def config_of(folder: Path, values: dict[str, Any]) -> HybridModelConfig:
    (folder / "config.json").write_text(json.dumps(values))
    return ModelFolder.open(folder).config


def latent_of(config: HybridModelConfig) -> LatentAttentionConfig:
    found = config.others[LATENT_ATTENTION]
    assert isinstance(found, LatentAttentionConfig)
    return found


def test_kimi_as_the_hub_says_it_is_what_transformers_writes(tiny: Tiny, tmp_path: Path) -> None:
    assert config_of(tmp_path, KIMI) == ModelFolder.open(tiny("kimi_linear").folder).config


def test_ling_as_the_hub_says_it_is_what_transformers_writes(
    tmp_path: Path, parallel: ParallelContext
) -> None:
    theirs = TinyModel(
        "bailing_hybrid", tmp_path / "tiny", parallel, num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention"] * 2,
        mlp_layer_types=["dense", *["sparse"] * 3],
    )  # fmt: skip
    own = config_of(tmp_path, LING)
    theirs_read = ModelFolder.open(theirs.folder).config
    assert own.mtp is not None and "no drafts" in own.mtp.unsupported
    assert replace(own, mtp=None) == replace(theirs_read, mtp=None)
    rope = latent_of(own).rope
    assert rope is not None and rope.rotary_dim == 8  # all that is to be rotated


def test_weights_by_the_names_of_the_hub(tmp_path: Path, parallel: ParallelContext) -> None:
    """transformers saves dense MLPs and outputs of attention by one name each; the hub has two. The
    layers of a head for multi-token prediction are left out."""
    for family, renames in (
        ("kimi_linear", ((r"layers\.0\.block_sparse_moe\.", "layers.0.mlp."),)),
        ("bailing_hybrid", ((r"(layers\.[02])\.attention\.dense\.", r"\1.attention.o_proj."),)),
    ):
        model = TinyModel(family, tmp_path / family, parallel)
        file = model.folder / "model.safetensors"
        tensors = load_file(file)
        renamed = {}
        for name, tensor in tensors.items():
            for pattern, replacement in renames:
                name = re.sub(pattern, replacement, name)
            renamed[name] = tensor
        assert renamed.keys() != tensors.keys()
        renamed["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)
        save_file(renamed, file, metadata={"format": "pt"})
        tokens = torch.randint(0, 160, (40,), generator=torch.Generator().manual_seed(0)).tolist()
        found = run_in_segments(load(model.folder, parallel), tokens, [20, 19, 1])
        torch.testing.assert_close(found, model.expected(tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope = False"),
        ("kimi_linear", {"mla_use_output_gate": True}, "mla_use_output_gate = True"),
        ("kimi_linear", {"hidden_act": "situ"}, "hidden_act = 'situ'"),
        ("kimi_linear", {"num_key_value_heads": 2}, "num_key_value_heads = 2"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "_activation_func = 'softmax'"),
        ("kimi_linear", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ("kimi_linear", {"mlp_layer_types": ["dense", "sparse"]}, "each of the model's 3 layers"),
        ("bailing_hybrid", {"use_mla_nope": True}, "use_mla_nope = True"),
        ("bailing_hybrid", {"use_bias": True}, "use_bias = True"),
        ("bailing_hybrid", {"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ("bailing_hybrid", {"layer_group_size": 3}, "is 3, which does not divide the model's 4"),
        (
            "bailing_hybrid",
            {"gated_attention_proj_granularity_type": "element_wise"},
            "granularity_type = 'element_wise'",
        ),
        (
            "bailing_hybrid",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "'linear' .* with latent attention",
        ),
    ],
)
def test_options_that_are_refused(
    tmp_path: Path, family: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        config_of(tmp_path, HUB[family] | change)


def test_layers_have_to_be_named_once(tmp_path: Path) -> None:
    layers = KIMI["linear_attn_config"]
    for wrong in ({"kda_layers": [1]}, {"kda_layers": [1, 2, 3]}, {"full_attn_layers": [2, 4]}):
        with pytest.raises(ConfigurationError, match="each of the layers 1 to 3 once"):
            config_of(tmp_path, KIMI | {"linear_attn_config": layers | wrong})


def test_what_hub_files_say_otherwise(tmp_path: Path) -> None:
    alone = {"use_grouped_topk": False, "num_expert_group": 1, "topk_group": 1}
    config = config_of(tmp_path, KIMI | alone | {"num_shared_experts": 0})
    assert config.moe is not None and config.moe.shared is None
    assert (config.moe.num_groups, config.moe.chosen_groups) == (1, 1)
    other = {
        "use_qkv_bias": True,
        "gated_attention_proj_granularity_type": None,
        "moe_router_enable_expert_bias": False,
        "moe_shared_expert_intermediate_size": 48,
        "num_shared_experts": 2,
    }
    config = config_of(tmp_path, LING | other)
    latent, moe = latent_of(config), config.moe
    assert latent.latent_bias and latent.output_bias
    assert latent.interleaved and not latent.head_gate
    assert moe is not None and not moe.router_bias
    assert moe.shared is not None and moe.shared.intermediate_size == 96


def test_a_layers_latents_are_all_that_is_cached(tiny: Tiny) -> None:
    spec = tiny("kimi_linear").ours.kv_specs[2]
    assert spec.bytes_per_token() == (32 + 8) * 4 and spec.dims == (40, 0)
