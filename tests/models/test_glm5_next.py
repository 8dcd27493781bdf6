"""What GLM-5.3's config.json may say, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.kernels.contract import IndexShape
from megatron_hybrid.layers.indexed_latent_attention import IndexedLatentConfig
from megatron_hybrid.layers.kimi_delta_attention import KimiDeltaAttentionConfig
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.models.config import HybridModelConfig

SAID: dict[str, Any] = {
    "model_type": "glm5_next_text",
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "q_lora_rank": 20,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}


def read(folder: Path, **values: Any) -> HybridModelConfig:
    said = {key: value for key, value in (SAID | values).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(said))
    return ModelFolder.open(folder).config


def latent(config: HybridModelConfig) -> IndexedLatentConfig:
    found = config.layer("D")
    assert isinstance(found, IndexedLatentConfig)
    return found


def delta(config: HybridModelConfig) -> KimiDeltaAttentionConfig:
    found = config.layer("K")
    assert isinstance(found, KimiDeltaAttentionConfig)
    return found


def test_what_is_not_said_is_as_in_transformers(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.pattern == "K-K-K-DEKEKEKEDE"
    assert latent(config).index == IndexShape(heads=32, dim=128, group=16, chosen=128)
    assert latent(config).norm_eps == config.norm_eps == 1e-5
    assert (delta(config).num_heads, delta(config).lower_bound) == (64, -5.0)
    assert config.streams is not None and config.streams.count == 4
    assert config.mlp is not None and config.mlp.activation == "silu_to_10.0"
    assert config.moe is not None and config.moe.shared is not None
    assert config.moe.expert.activation == config.moe.shared.activation == "silu_to_10.0"


@pytest.mark.parametrize(
    ("values", "pattern"),
    [
        ({"indexer_types": ["full"] * 7 + ["shared"]}, "KKKDKKKJ"),
        ({"index_topk_pattern": "FFFFSSSS"}, "KKKDKKKJ"),
        ({"index_topk_pattern": ["full"] * 8}, "KKKDKKKD"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 2}, "KKKDKKKD"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 0}, "KKKDKKKD"),
        ({"index_topk_freq": 5, "index_skip_topk_offset": 4}, "KKKDKKKJ"),
        ({"layer_types": ["full_attention"] * 8, "index_topk_freq": 3}, "DDJJDJJD"),
    ],
)
def test_which_layers_share_an_index(values: dict[str, Any], pattern: str, tmp_path: Path) -> None:
    assert read(tmp_path, **values).pattern[::2] == pattern


def test_linear_attention_may_be_described_in_a_place_of_its_own(tmp_path: Path) -> None:
    said = {"head_dim": 32, "num_heads": 6, "short_conv_kernel_size": 3, "gate_lower_bound": -2.0}
    found = delta(read(tmp_path, linear_attn_config=said, linear_head_dim=99))
    assert (found.head_dim, found.num_heads, found.conv_width) == (32, 6, 3)
    assert (found.gate_rank, found.lower_bound) == (32, -2.0)
    none = {"gate_lower_bound": None}
    assert delta(read(tmp_path, linear_attn_config=none)).lower_bound == -5.0
    none["safe_gate"] = False
    assert delta(read(tmp_path, linear_attn_config=none)).lower_bound is None
    assert delta(read(tmp_path, linear_lower_bound=None)).lower_bound is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"qk_rope_head_dim": 8}, "qk_rope_head_dim = 8 .* only 0 is"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2 .* only 4 is"),
        ({"q_lora_rank": None}, "has no q_lora_rank"),
        (
            {"index_topk": 40},
            "index_topk in .* is 40, but must be a multiple of index_kpool, .* 16",
        ),
        ({"index_topk": 0}, "index_topk = 0 .* of at least 1"),
        ({"index_kpool_always_select_tail": False}, "the first 15 tokens of a text would see no"),
        ({"indexer_types": ["full"] * 7}, "must have a type for each of the model's 8 layers"),
        ({"index_topk_pattern": "FFFFFFFX"}, "'full' or 'shared'; they have 8 and .*'X'"),
        ({"indexer_types": ["shared"] * 4 + ["full"] * 4}, "first layer with attention share"),
        ({"layer_types": ["sliding_attention"] * 8}, "'sliding_attention' .* not supported"),
        ({"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types in .* must have"),
        ({"swiglu_limit": 0}, "swiglu_limit = 0.0 in .* not a number above 0"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"vocab_size": ...}, "has no 'vocab_size'"),
    ],
)
def test_what_is_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read(tmp_path, **values)


def test_pools_of_one_token_have_no_tail(tmp_path: Path) -> None:
    values = {"index_kpool": 1, "index_kpool_always_select_tail": False}
    assert latent(read(tmp_path, **values)).index.chosen == 2048
