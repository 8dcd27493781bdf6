"""A fork of a family's configuration loads, and gives transformers' logits, or is refused by a
sentence: nothing that config.json says is passed over."""

from __future__ import annotations

import contextlib
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.families.raw_config import RawConfig
from megatron_hybrid.models.families.registry import family_of
from megatron_hybrid.parallel import ParallelContext
from tests.models.forks import TRANSFORMERS, Fork, of_some_fields, outcome
from tests.thorough import thorough, usually
from tests.tiny_models import tiny_configuration

_PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
EQUAL: list[tuple[str, Fork]] = [
    ("bailing_hybrid", {"head_dim": 24, "layer_types": ["full_attention"] * 3}),
    ("falcon_h1", {"num_key_value_heads": 1, "mamba_d_conv": 2, "mamba_n_groups": 1}),
    ("glm5_next", {"moe_intermediate_size": 33, "num_experts_per_tok": 1}),
    ("glm5_next", {"moe_renormalize": False, "num_expert_group": 2, "num_experts_per_token": 2}),
    ("lfm2_moe", {"hidden_size": 65, "head_dim": 16, "num_experts": 9}),
    ("lfm3", {"layer_types": ["sliding_attention"] * 5, "sliding_window": 1}),
    ("minimax", {"num_experts_per_tok": 6, "layer_types": ["full_attention"] * 4}),
    ("nemotron_h", {"mamba_num_heads": 2, "n_groups": 2}),  # one head a group
    ("qwen4_exp", {"hidden_size": 21, "linear_value_head_dim": 5}),
    ("rwkv", {"rescale_every": 1}),
    ("rwkv", {"num_hidden_layers": 13}),
    ("xlstm", {"num_heads": 1, "chunk_size": 12}),
    ("zamba", {"layers_block_type": ["linear_attention"] * 6}),  # nobody uses the shared block
    ("zamba2", {"layers_block_type": ["linear_attention"] * 6}),
    ("zamba2", {"num_mem_blocks": 5, "use_conv_bias": False}),
]
REFUSED: list[tuple[str, Fork, str]] = [
    # what transformers passes over, but the releases' own code does not
    ("bailing_hybrid", {"rope_interleave": False}, "rope_interleave = False"),
    ("kimi_linear", {"use_grouped_topk": False}, "use_grouped_topk = False"),
    ("minimax", {"rotary_dim": 3}, "rotary_dim = 3"),
    ("minimax", {"rope_parameters": _PARTIAL}, "partial_rotary_factor = 0.5"),
    ("qwen3_5_moe", {"norm_topk_prob": False}, "norm_topk_prob = False"),
    ("falcon_h1", {"ssm_multipliers": [1.0] * 6}, "ssm_multipliers .* it must be 5 numbers"),
    ("granite_moe_hybrid", {"attention_multiplier": None}, "has no 'attention_multiplier'"),
    ("jamba", {"num_key_value_heads": 3}, "4 attention heads are no multiple of its 3 KV heads"),
    ("lfm2", {"num_attention_heads": 1}, "1 attention heads are no multiple of its 2 KV heads"),
    ("lfm2", {"num_attention_heads": 3}, "21 of the 21 numbers of a head rotated"),
    ("lfm2", {"rope_parameters": _PARTIAL}, "partial_rotary_factor = 0.5"),
    ("lfm2_moe", {"num_experts": 2}, "goes to 3 of the model's experts; .* 2 at most"),
    ("llama", {"head_dim": 1}, "1 of the 1 numbers of a head rotated"),
    ("llama", {"rope_parameters": _PARTIAL}, "partial_rotary_factor = 0.5 .* heads of llama"),
    ("mamba", {"conv_kernel": 1}, "width of 1, which is not supported"),
    ("mamba2", {"n_groups": 3}, "8 Mamba heads are no multiple of its 3 Mamba groups"),
    ("mamba2", {"time_step_limit": [0.0]}, r"time_step_limit .* is \[0.0\]; it must be two"),
    ("nemotron_h_moe", {"n_group": 3}, "8 experts are in 3 groups"),
    ("nemotron_h_moe", {"topk_group": 1}, "goes to 3 of the model's experts; .* 2 at most"),
    ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "type 'sliding_attention'"),
    ("qwen3_next", {"linear_num_value_heads": 3}, "3 value heads are no multiple of its 2 key"),
    ("zamba2", {"hybrid_layer_ids": [2, 4, 5, 6]}, "hybrid_layer_ids = "),
    ("zamba2", {"mamba_headdim": 17}, "mamba_headdim = 17"),
    ("xlstm", {"gate_soft_cap": 0.0}, "gate_soft_cap = 0.0"),
    ("xlstm", {"qk_dim_factor": 0.0}, "qk_dim_factor = 0.0 .* above 0"),
    ("xlstm", {"qk_dim_factor": 0.001}, "does not divide 0 numbers of queries"),
]
# What decides shapes: where it is missing the weights say so.
_SHAPES = {
    "head_dim", "num_experts", "num_hidden_layers", "num_key_value_heads", "num_local_experts",
}  # fmt: skip


@pytest.mark.parametrize(("family", "fork"), EQUAL, ids=str)
def test_a_fork_has_the_logits_of_transformers(
    family: str, fork: Fork, tmp_path: Path, parallel: ParallelContext
) -> None:
    assert outcome(family, fork, tmp_path, parallel) == "equal"


@pytest.mark.parametrize(("family", "fork", "sentence"), REFUSED, ids=str)
def test_a_fork_that_does_not_fit_is_refused(
    family: str, fork: Fork, sentence: str, tmp_path: Path, parallel: ParallelContext
) -> None:
    assert re.search(sentence, outcome(family, fork, tmp_path, parallel))


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_what_is_not_said_is_what_transformers_makes_of_it(family: str) -> None:
    """Whichever one field config.json leaves out; or a sentence says that it has to be there."""
    usual = tiny_configuration(family)
    values = usual.to_dict()
    for name in set(values) - _SHAPES:
        said = {key: value for key, value in values.items() if key != name}
        with contextlib.suppress(ConfigurationError):
            ours = _read(said)
            try:
                whole = type(usual).from_dict(dict(said)).to_dict()
            except Exception:  # of transformers, which needs it, too
                continue
            assert ours == _read(whole), name


# No field can have each of them.
_STRANGE: list[Any] = [-1, "x", [None], {"a": 1}, float("nan")]
# What some say instead of a list of layers, and beside what a tiny model says.
_INSTEAD = """
    attn_layer_indices attn_type_list full_attn_idxs hybrid_override_pattern index_topk_pattern
    linear_attn_config local_layer_ids mtp_config rope_scaling swa_layers zaya_layers
    """.split()


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_a_value_of_another_kind_is_read_or_refused_by_a_sentence(family: str) -> None:
    usual = tiny_configuration(family).to_dict()
    lists = ("layer_types", "layers_block_type", "mlp_layer_types", "indexer_types")
    few = {key: value for key, value in usual.items() if key not in (*lists, "rope_parameters")}
    places = [(usual, name) for name in usual if name != "model_type"]
    for others, name in [*places, *((few, name) for name in _INSTEAD)]:
        for value in usually(_STRANGE, [*_STRANGE, 0, 1.5, "", [], {}, [{}], True]):
            with contextlib.suppress(ConfigurationError):
                _read(others | {name: value})


def _read(values: dict[str, Any]) -> HybridModelConfig:
    """What changes logits."""
    raw = RawConfig(values, "config.json")
    read = family_of(raw.model_type).config(raw)
    others: dict[str, Any] = {"eos_token_ids": (), "bos_token_id": None, "mtp": None}
    return replace(read, **others, max_position_embeddings=0)


@thorough
@pytest.mark.parametrize("family", TRANSFORMERS)
def test_no_fork_differs_silently(family: str, tmp_path: Path, parallel: ParallelContext) -> None:
    different = []
    for number, fork in enumerate(of_some_fields(family, 60)):
        folder = tmp_path / str(number)
        if outcome(family, fork, folder, parallel) == "different":
            different.append(fork)
        shutil.rmtree(folder, ignore_errors=True)
    assert different == []
