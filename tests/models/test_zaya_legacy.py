"""ZAYA's legacy folders give the logits of the same weights by transformers' names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.parallel import ParallelContext
from tests.models.conftest import TinyModel, load, random_tokens
from tests.models.driver import run_in_segments
from tests.models.test_logits import close

ATTENTION = {
    "input_layernorm.": "input_norm.",
    "self_attn.qkv_proj.q_proj.": "self_attn.qkv.linear_q.",
    "self_attn.qkv_proj.k_proj.": "self_attn.qkv.linear_k.",
    "self_attn.qkv_proj.v_proj_current.": "self_attn.qkv.val_proj1.",
    "self_attn.qkv_proj.v_proj_delayed.": "self_attn.qkv.val_proj2.",
    "self_attn.qkv_proj.conv_qk_depthwise.": "self_attn.qkv.conv_qk.0.",
    "self_attn.qkv_proj.conv_qk_grouped.": "self_attn.qkv.conv_qk.1.",
    "self_attn.qk_norm.temp": "self_attn.qkv.temp",
    "self_attn.o_proj.": "self_attn.o_proj.",
}
EXPERTS = {
    "post_attention_layernorm.": "input_norm.",
    "post_attention_residual_scale.": "res_scale.",
    "mlp.gate.router_mlp.norm.": "zaya_block.router.rmsnorm_eda.",
    "mlp.gate.router_mlp.fc1.": "zaya_block.router.router_mlp.0.",
    "mlp.gate.router_mlp.fc2.": "zaya_block.router.router_mlp.2.",
    "mlp.gate.router_mlp.out_proj.": "zaya_block.router.router_mlp.4.",
    "mlp.gate.": "zaya_block.router.",
}
# Of all layers and, as the first releases have some of it, layer by layer.
EACH = {
    "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 64, "num_experts": 8,
    "zaya_mlp_expansion": 24,
}  # fmt: skip
LISTED = {
    "num_attention_heads": 8, "cca_num_q_heads": [4, 0] * 3, "num_query_groups": 4,
    "num_query_groups_list": [2, 0] * 3, "ffn_hidden_size": 1, "ffn_hidden_size_list": [0, 64] * 3,
    "zaya_mlp_expansion": [0, 24] * 3, "zaya_layers": ["a", 8] * 3,
}  # fmt: skip


def by_old_names(weights: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """The weights of a folder as it was saved by transformers."""
    found = {}
    for name, value in weights.items():
        layer = re.match(r"model\.layers\.(\d+)\.(.*)", name)
        if layer is None:
            name = name.replace("model.norm.", "model.final_norm.")
            name = name.replace("model.input_hidden", "model.layers.0.res_scale.hidden")
            found[name] = value
            continue
        number, rest = int(layer[1]), layer[2]
        if rest.startswith("mlp.experts."):
            old = {"gate_up_proj": "linear_fc1", "down_proj": "linear_fc2"}[rest.split(".")[2]]
            place = f"model.layers.{2 * number + 1}.zaya_block.experts.local_experts"
            found |= {f"{place}.{e}.{old}.weight": one.clone() for e, one in enumerate(value)}
        elif rest.startswith("post_mlp_residual_scale."):
            place = "model" if number + 1 == layers else f"model.layers.{2 * number + 2}"
            found[f"{place}.res_scale.{rest.split('.')[1]}"] = value
        else:
            names, half = (ATTENTION, 0)
            if not rest.startswith(tuple(ATTENTION)):
                names, half = EXPERTS, 1
            new = next(one for one in names if rest.startswith(one))
            old = names[new] + rest.removeprefix(new)
            found[f"model.layers.{2 * number + half}.{old}"] = value
    return found


def make_legacy(folder: Path, values: dict[str, Any]) -> None:
    """Of a tiny model's folder."""
    layers = 3
    kept = {
        name: json.loads((folder / "config.json").read_text())[name]
        for name in ("architectures", "model_type", "vocab_size", "hidden_size", "attention_bias",
                     "max_position_embeddings", "tie_word_embeddings")
    }  # fmt: skip
    old = {
        "cca": True,
        "kv_channels": 16,
        "num_hidden_layers": 2 * layers,
        "norm_epsilon": 1e-5,
        "partial_rotary_factor": 0.5,
        "rope_theta": 5e6,
        "rope_scaling": False,
        "zaya_use_eda": True,
        "moe_router_topk": 1,
    }
    (folder / "config.json").write_text(json.dumps(kept | old | values))
    file = folder / "model.safetensors"
    save_file(by_old_names(load_file(file), layers), file, {"format": "pt"})


@pytest.mark.parametrize(
    ("values", "overrides"),
    [
        (EACH, {"attention_bias": True}),
        (LISTED, {"tie_word_embeddings": True}),
        (
            EACH | {"swa_layers": [0, 0, 20, 0, 0, 0], "swa_rotary_base": 1e4},
            {"layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "sliding_window": 21},
        ),
    ],
    ids=["once", "layer by layer", "with a window"],
)
def test_logits_are_those_of_the_same_weights(
    values: dict[str, Any], overrides: dict[str, Any], tmp_path: Path, parallel: ParallelContext
) -> None:
    model = TinyModel("zaya", tmp_path, parallel, **overrides)
    new = ModelFolder.open(tmp_path).config
    make_legacy(tmp_path, values)
    old = ModelFolder.open(tmp_path).config
    assert old.model_type == "zaya_legacy" and (old.pattern, old.others) == (
        new.pattern,
        new.others,
    )
    tokens = random_tokens(50)
    close(run_in_segments(load(tmp_path, parallel), tokens, [20, 28]), model.expected(tokens))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"zaya_use_mod": False}, "zaya_use_mod = False"),
        ({"clamp_temp": True}, "clamp_temp = True"),
        ({"activation_func": "gelu"}, "activation_func = 'gelu'"),
        ({"zaya_layers": ["a", "a", 8, 8]}, "must be attention .* in turn"),
        ({"zaya_layers": ["a", 8, "a", 16]}, "must be attention .* in turn"),
        ({"zaya_mlp_expansion": [0, 24, 0, 48]}, "zaya_mlp_expansion .* same in all layers"),
        ({"moe_router_topk": 2}, "num_experts_per_tok = 2"),
    ],
)
def test_what_transformers_cannot_say_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    values = {
        "model_type": "zaya", "cca": True, "vocab_size": 160, "hidden_size": 64, "head_dim": 16,
        "num_hidden_layers": 6,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values | EACH | change))
    with pytest.raises(ConfigurationError, match=message):
        _ = ModelFolder.open(tmp_path).config
