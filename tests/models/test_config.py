"""config.json of any age is read alike; what is not supported is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.layers.attention import AttentionConfig
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.models.checkpoints.weights import load_model
from megatron_hybrid.models.config import resolve_dtype
from megatron_hybrid.parallel import ParallelContext
from tests.models.conftest import TinyModel
from tests.parallel.pretend import first_of

Tiny = Callable[[str], TinyModel]


def write(folder: Path, values: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def values_of(model: TinyModel) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((model.folder / "config.json").read_text())
    return values


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def test_patterns_and_sizes(tiny: Tiny) -> None:
    nemotron = ModelFolder.open(tiny("nemotron_h").folder).config
    assert nemotron.pattern == "M-*M-"
    assert nemotron.mamba is not None and nemotron.mamba.kernel_chunk == 16
    granite = ModelFolder.open(tiny("granite_moe_hybrid").folder).config
    assert granite.pattern == "MEME*EME" and granite.rope is None
    assert granite.embedding_multiplier == 3.0 and granite.logits_divisor == 2.0
    assert granite.tie_word_embeddings
    bamba = ModelFolder.open(tiny("bamba").folder).config
    assert bamba.pattern == "M-M-*-M-"
    assert bamba.rope is not None and bamba.rope.rotary_dim == 8  # half of a head
    llama = ModelFolder.open(tiny("llama").folder).config
    assert llama.pattern == "*-*-*-" and llama.mamba is None


def test_specs_of_the_caches(tiny: Tiny) -> None:
    model = tiny("bamba").ours
    assert sorted(model.kv_specs) == [4] and sorted(model.state_specs) == [0, 2, 6]
    kv, state = model.kv_specs[4], model.state_specs[0]
    assert (kv.num_kv_heads, kv.head_dim, kv.dtype) == (2, 16, torch.float32)
    assert state.conv_shape == (128 + 2 * 2 * 16, 3) and state.ssm_shape == (8, 16, 16)
    assert state.kernel_chunk == 16 and state.writes_checkpoints


def test_old_nemotron_configurations(tiny: Tiny, tmp_path: Path) -> None:
    values = values_of(tiny("nemotron_h"))
    for name in ("layers_block_type", "layer_types", "dtype", "head_dim"):
        values.pop(name, None)
    values |= {
        "hybrid_override_pattern": "M-*M-",
        "attention_head_dim": 16,
        "torch_dtype": "bfloat16",
        "num_hidden_layers": 5,
    }
    old = ModelFolder.open(write(tmp_path, values)).config
    new = ModelFolder.open(tiny("nemotron_h").folder).config
    assert old.dtype == torch.bfloat16
    assert (old.pattern, old.attention, old.mamba) == (new.pattern, new.attention, new.mamba)


def test_old_granite_and_bamba_configurations(tiny: Tiny, tmp_path: Path) -> None:
    for family in ("granite_moe_hybrid", "bamba"):
        values = values_of(tiny(family))
        new = ModelFolder.open(tiny(family).folder).config
        for name in ("layer_types", "layers_block_type", "rope_parameters", "time_step_limit"):
            values.pop(name, None)
        values["rope_theta"] = 10000.0
        if family == "granite_moe_hybrid":
            values["layer_types"] = ["mamba", "mamba", "attention", "mamba"]
        assert ModelFolder.open(write(tmp_path, values)).config == new


def test_old_rope_scaling_equals_rope_parameters(tmp_path: Path) -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": scaling | {"rope_type": "llama3"}}
    new = LLAMA | {"rope_parameters": scaling | {"rope_type": "llama3", "rope_theta": 5e5}}
    first = ModelFolder.open(write(tmp_path, old)).config
    assert first == ModelFolder.open(write(tmp_path, new)).config
    assert first.rope is not None and first.rope.kind == "llama3" and first.rope.theta == 5e5


def test_end_tokens_of_both_files(tmp_path: Path) -> None:
    write(tmp_path, LLAMA | {"eos_token_id": 7})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert ModelFolder.open(tmp_path).config.eos_token_ids == (7, 9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mixtral"}, "type 'mixtral' are not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "RoPE of type 'yarn'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5e2}}}, "of kinds of layers"),
        ({"rope_parameters": ["linear"]}, "rope_parameters in .* are no object"),
        ({"rope_parameters": {"rope_type": "linear"}}, "has no 'factor'"),
        ({"num_attention_heads": "four"}, "num_attention_heads = 'four' .* not a whole number"),
        ({"num_attention_heads": 4.5}, "num_attention_heads = 4.5 .* not a whole number"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({"vocab_size": None}, "has no 'vocab_size'"),
        ({"dtype": "float8"}, "dtype 'float8'"),
        ({"model_type": "qwen3", "use_sliding_window": True}, "use_sliding_window = True"),
    ],
)
def test_what_is_not_supported_is_refused_before_any_weight_is_read(
    tmp_path: Path, parallel: ParallelContext, change: dict[str, Any], message: str
) -> None:
    """The folder holds no weights at all: looking for them would be another error."""
    write(tmp_path, LLAMA | change)
    with pytest.raises(ConfigurationError, match=message):
        load_model(tmp_path, device=torch.device("cpu"), dtype=None, parallel=parallel)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers_block_type": ["conv"]}, "type 'conv'"),
        ({"layers_block_type": None, "hybrid_override_pattern": "MXM"}, "'MXM' has layers"),
        ({"layers_block_type": None}, "neither layers_block_type"),
        ({"mlp_hidden_act": "gelu"}, "mlp_hidden_act = 'gelu'"),
        ({"sliding_window": 128}, "sliding_window = 128"),
    ],
)
def test_nemotron_options_that_are_refused(
    tiny: Tiny, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    values = values_of(tiny("nemotron_h"))
    values.pop("layer_types", None)
    with pytest.raises(ConfigurationError, match=message):
        _ = ModelFolder.open(write(tmp_path, values | change)).config


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("mamba", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("mamba2", {"hidden_act": "relu"}, "hidden_act = 'relu'"),
        ("jamba", {"sliding_window": 128}, "sliding_window = 128"),
        ("falcon_h1", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("recurrent_gemma", {"hidden_activation": "relu"}, "hidden_activation = 'relu'"),
        (
            "recurrent_gemma",
            {"embeddings_scale_by_sqrt_dim": False},
            "embeddings_scale_by_sqrt_dim = False",
        ),
        ("recurrent_gemma", {"block_types": ["mamba"]}, "type 'mamba'"),
        ("recurrent_gemma", {"lru_width": 90}, "num_attention_heads = 4 .* not divide lru_width"),
        ("xlstm", {"weight_mode": "fused"}, "weight_mode = 'fused'"),
        ("xlstm", {"use_bias": True}, "use_bias = True"),
        ("xlstm", {"num_heads": 3}, "num_heads = 3 .* does not divide 32 numbers of queries"),
        ("rwkv", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon = 1e-06"),
        ("zamba", {"hidden_mamba_act": "gelu"}, "hidden_mamba_act = 'gelu'"),
        ("zamba", {"attention_hidden_size": 96}, "attention_hidden_size = 96"),
        ("zamba", {"n_mamba_heads": 3}, "n_mamba_heads = 3 .* does not divide 128"),
        ("zamba2", {"use_long_context": True}, "use_long_context = True"),
        ("zamba2", {"add_bias_linear": True}, "add_bias_linear = True"),
        ("zamba2", {"num_key_value_heads": 2}, "use_shared_attention_adapter with 2 KV heads"),
        ("qwen3_next", {"layer_types": ["mamba"]}, "type 'mamba'"),
        ("qwen3_5", {"rope_parameters": {"rope_type": "yarn"}}, "'yarn'"),
        ("qwen4_exp", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("qwen4_exp", {"layer_types": ["conv"]}, "type 'conv'"),
        ("qwen4_exp", {"num_hidden_layers": 5}, "has 4 layers, num_hidden_layers is 5"),
        ("qwen4_exp", {"output_gate_type": "tanh"}, "output_gate_type = 'tanh'"),
        ("qwen4_exp", {"ple_layer_ids": [2]}, "layer 2 is none"),
        ("qwen4_exp", {"ple_layer_ids": [9]}, "layer 9 is none"),
        ("qwen4_exp", {"ple_layer_ids": [0]}, "layer 0 is none"),
        ("qwen4_exp", {"ple_embed_dim": 90}, "90, which 8 heads"),
        ("qwen4_exp", {"ngram_size": 1}, "96, which 0 heads"),
        ("qwen4_exp", {"eos_token_id": None}, "has no 'eos_token_id'"),
        ("qwen4_exp", {"hc_count": 1}, "hc_count .* is 1"),
        ("qwen4_exp", {"indexer_kv_heads": 2}, "indexer_kv_heads = 2"),
        ("qwen4_exp", {"indexer_n_heads": None}, "has no 'indexer_n_heads'"),
        ("qwen4_exp", {"indexer_budget": 18}, "18; it must be a multiple of .* 4"),
        ("qwen4_exp", {"indexer_head_dim": 2}, "2; it must be at least the 4 numbers"),
        ("olmo_hybrid", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("olmo_hybrid", {"layer_types": ["conv"]}, "type 'conv'"),
        ("olmo_hybrid", {"linear_use_gate": False}, "linear_use_gate = False"),
        ("bailing_moe_linear", {"use_bias": True}, "use_bias = True"),
        ("bailing_moe_linear", {"linear_rope": False}, "linear_rope = False"),
        ("bailing_moe_linear", {"score_function": "softmax"}, "score_function = 'softmax'"),
        ("bailing_moe_linear", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers = 1"),
        ("bailing_moe_linear", {"layer_group_size": None}, "has no 'layer_group_size'"),
        ("bailing_moe_v2_5", {"num_kv_heads_for_linear_attn": 2}, "num_kv_heads_for_linear_attn"),
        ("bailing_moe_v2_5", {"rope_scaling": {"type": "linear", "factor": 2}}, "RoPE of type"),
        ("minimax", {"sliding_window": 128}, "sliding_window = 128"),
        ("minimax", {"attention_bias": True}, "attention_bias = True"),
        ("minimax", {"postnorm": False}, "postnorm = False"),
        ("minimax", {"mlp_alpha_factor": 0}, "mlp_alpha_factor = 0.0"),
        ("minimax", {"shared_intermediate_size": 64}, "shared_intermediate_size = 64"),
        ("minimax", {"model_type": "minimax_m1"}, "has no 'postnorm'"),
        ("lfm2", {"layer_types": None}, "neither layer_types nor full_attn_idxs"),
        ("lfm2", {"layer_types": ["sliding_attention"]}, "type 'sliding_attention'"),
        ("lfm3", {"attention_bias": True}, "attention_bias = True"),
        (
            "lfm3",
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "RoPE of type 'yarn'",
        ),
        ("inkling", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("inkling", {"tie_word_embeddings": True}, "tie_word_embeddings = True"),
        ("inkling", {"q_bias": True}, "q_bias = True"),
        ("inkling", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ("inkling", {"use_sconv": False}, "use_sconv = False"),
        ("inkling", {"shared_expert_sink": False}, "shared_expert_sink = False"),
        ("inkling", {"gate_activation": "softmax"}, "gate_activation = 'softmax'"),
        ("inkling", {"inference_moe_w13_interleaved": False}, "w13_interleaved = False"),
        ("inkling", {"layer_types": ["hybrid"] * 3}, "for each of the model's 4 layers"),
        ("inkling", {"layer_types": ["full_attention"] * 4}, "'hybrid' or 'hybrid_sliding'"),
        ("inkling", {"mlp_layer_types": ["moe"] * 4}, "'dense' or 'sparse'"),
        ("inkling", {"swa_num_attention_heads": 5}, "is 5, which is no multiple of swa_num_key"),
        ("inkling", {"num_key_value_heads": 3}, "is 4, which is no multiple of num_key_value"),
        ("inkling", {"conv_kernel_size": 1}, "conv_kernel_size = 1 .* at least 2"),
        ("inkling", {"sliding_window_size": 0}, "sliding_window_size = 0 .* at least 1"),
        ("inkling", {"n_shared_experts": 0}, "n_shared_experts = 0 .* at least 1"),
        ("inkling", {"log_scaling_n_floor": 0}, "log_scaling_n_floor = 0 .* at least 1"),
        ("inkling2", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("inkling2", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("inkling2", {"tie_word_embeddings": True}, "tie_word_embeddings = True"),
        ("inkling2", {"n_shared_experts": 2}, "n_shared_experts = 2"),
        ("inkling2", {"local_layer_ids": [0]}, r"local_layer_ids = \[0\] .* only nothing is"),
        ("inkling2", {"layer_types": ["hybrid"] * 3}, "for each of the model's 5 layers"),
        ("inkling2", {"layer_types": ["full_attention"] * 5}, "'hybrid' or 'hybrid_sliding'"),
        ("inkling2", {"swa_num_attention_heads": 5}, "is 5, which is no multiple of swa_num_key"),
        ("inkling2", {"num_key_value_heads": 3}, "is 4, which is no multiple of num_key_value"),
        ("inkling2", {"conv_kernel_size": 1}, "conv_kernel_size = 1 .* at least 2"),
        ("inkling2", {"n_layers_per_attn_res_block": 0}, "res_block = 0 .* at least 1"),
        ("inkling2", {"mlp_up_softcap": 0.0}, "mlp_up_softcap = 0.0 .* a number above 0"),
        ("inkling2", {"qk_l2_clip_threshold": -1}, "qk_l2_clip_threshold = -1.0 .* above 0"),
        ("inkling2", {"model_type": "inkling2_loop"}, "type 'inkling2_loop' are not supported"),
        ("zaya", {"num_experts_per_tok": 2}, "num_experts_per_tok = 2"),
        ("zaya", {"lm_head_bias": True}, "lm_head_bias = True"),
        ("zaya", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("zaya", {"layer_types": ["full_attention"]}, "type 'full_attention'"),
        ("zaya", {"layer_types": ["hybrid_sliding"] * 3}, "has no 'sliding_window'"),
        ("zaya", {"num_attention_heads": 3}, "3 heads of queries and 2 of keys, of 16 numbers"),
        ("zaya", {"cca_time1": 0}, "cca_time1 = 0 .* not a whole number of at least 1"),
        ("zaya", {"rope_parameters": {"rope_theta": 1e4}}, "nothing of layers of kind 'hybrid'"),
        ("zaya", {"moe_intermediate_size": None}, "has no 'moe_intermediate_size'"),
    ],
)
def test_options_of_other_families_that_are_refused(
    tiny: Tiny, tmp_path: Path, family: str, change: dict[str, Any], message: str
) -> None:
    values = values_of(tiny(family)) | change
    with pytest.raises(ConfigurationError, match=message):
        _ = ModelFolder.open(write(tmp_path, values)).config


def test_layers_that_old_folders_count_instead_of_listing(tiny: Tiny, tmp_path: Path) -> None:
    zamba = values_of(tiny("zamba")) | {"layers_block_type": None, "num_hidden_layers": 10}
    zamba.pop("layer_types", None)
    zamba |= {"attn_layer_period": 3, "attn_layer_offset": 1}
    assert ModelFolder.open(write(tmp_path, zamba)).config.pattern == "SSZSZSSZSS"
    lfm2 = values_of(tiny("lfm2")) | {"layer_types": None, "full_attn_idxs": [1]}
    lfm2 |= {"block_ff_dim": lfm2.pop("intermediate_size")}
    qwen = values_of(tiny("qwen3_next")) | {"layer_types": None, "full_attention_interval": 2}
    read = [ModelFolder.open(write(tmp_path, values)).config for values in (lfm2, qwen)]
    assert read[0] == ModelFolder.open(tiny("lfm2").folder).config
    assert read[1].pattern == "GE*-GE*E"


def test_a_qwen4_that_says_little_has_the_usual_layers(tiny: Tiny, tmp_path: Path) -> None:
    """Attention always has an index, and a head that is there gives no drafts."""
    values = values_of(tiny("qwen4_exp"))
    expected = ModelFolder.open(tiny("qwen4_exp").folder).config
    assert expected.pattern == "PGEQEPGEGE" and expected.mtp is None
    kinds = [name.replace("indexed", "full") for name in values["layer_types"]]
    again = values | {"layer_types": kinds, "eos_token_id": [7, 3]}
    read = ModelFolder.open(write(tmp_path, again)).config
    assert replace(read, eos_token_ids=(7,)) == expected
    short = values | {"layer_types": None, "num_hidden_layers": 6, "ple_layer_ids": None}
    short |= {"mtp_num_hidden_layers": 1, "output_gate_type": None}
    read = ModelFolder.open(write(tmp_path, short)).config
    assert read.pattern == "GEGEGEQEGEGE" and read.mtp is not None
    assert "residual streams" in read.mtp.unsupported
    net = read.gated_delta_net
    assert net is not None and net.gate_activation == "silu"


def test_an_lfm3_that_says_little_has_the_usual_layers_and_rotations(
    tiny: Tiny, tmp_path: Path
) -> None:
    values = values_of(tiny("lfm3"))
    expected = ModelFolder.open(tiny("lfm3").folder).config
    read = ModelFolder.open(write(tmp_path, values | {"rope_parameters": None})).config
    assert read == expected and read.pattern == "C-L-*-L-C-"
    short = values | {"layer_types": None, "num_hidden_layers": 9, "sliding_window": None}
    read = ModelFolder.open(write(tmp_path, short)).config
    assert read.pattern == "C-C-*-C-L-C-*-C-L-"
    sliding = read.others["L"]
    assert isinstance(sliding, AttentionConfig) and sliding.window == 256 and read.attention
    assert sliding.rope != read.attention.rope and not read.attention.window


def test_a_zaya_that_says_little_has_the_usual_layers_and_rotations(
    tiny: Tiny, tmp_path: Path
) -> None:
    """Beside rotations by kind of layer the hub's has a type for all, which means nothing."""
    values, expected = values_of(tiny("zaya")), ModelFolder.open(tiny("zaya").folder).config
    assert expected.pattern == "VEVEVE" and expected.residual_in_fp32
    for rope in (None, {**values["rope_parameters"], "rope_type": "default"}):
        few = {name: value for name, value in values.items() if not name.startswith("cca_")}
        few |= {"layer_types": None, "rope_parameters": rope, "partial_rotary_factor": 0.5}
        assert ModelFolder.open(write(tmp_path, few)).config == expected
    layers = ["hybrid", "hybrid_sliding", "hybrid"]
    sliding = values | {"layer_types": layers, "sliding_window": 21}
    read = ModelFolder.open(write(tmp_path, sliding)).config
    assert read.pattern == "VEYEVE"
    full, window = (read.others[letter].attention for letter in "VY")  # type: ignore[attr-defined]
    assert (full.window, full.rope.theta, full.rope.rotary_dim) == (0, 5e6, 8)
    assert (window.window, window.rope.theta, window.rope.rotary_dim) == (21, 1e4, 8)


def test_ling_as_old_as_2_6_is_known_by_its_architecture(tiny: Tiny, tmp_path: Path) -> None:
    """Its model type is that of Ling 3.0. Of its head no drafts come."""
    values = values_of(tiny("bailing_moe_v2_5"))
    later = {"architectures": ["BailingMoeV2_5ForCausalLM"], "model_type": "bailing_hybrid"}
    expected = ModelFolder.open(tiny("bailing_moe_v2_5").folder).config
    read = ModelFolder.open(write(tmp_path, values | later)).config
    assert read == expected and read.pattern == "N-NEAEAE"
    with_head = ModelFolder.open(write(tmp_path, values | {"num_nextn_predict_layers": 1})).config
    assert with_head.mtp is not None and with_head.mtp.unsupported


def test_minimax_as_it_was_released_first(tiny: Tiny, tmp_path: Path) -> None:
    """Layers by number, and other names of the factors; half of a head is rotated."""
    new = values_of(tiny("minimax"))
    old = {name: value for name, value in new.items() if not name.endswith("_factor")}
    old |= {
        "model_type": "minimax_m1",
        "layer_types": None,
        "attn_type_list": [0, 1, 0, 0],
        "postnorm": True,
        "rotary_dim": 8,
        "layernorm_full_attention_alpha": 1.7,
        "layernorm_full_attention_beta": 0.8,
        "layernorm_linear_attention_alpha": 2.5,
        "layernorm_linear_attention_beta": 1.2,
        "layernorm_mlp_alpha": 3.5,
        "layernorm_mlp_beta": 1.1,
    }
    first = ModelFolder.open(tiny("minimax").folder).config
    read = ModelFolder.open(write(tmp_path, old)).config
    assert read.rope is not None and read.rope.rotary_dim == 8
    assert (read.pattern, read.forms) == (first.pattern, first.forms) and read.pattern == "NE*ENENE"
    assert read.others == first.others
    multipliers = [(form.stream_multiplier, form.multiplier) for form in read.forms]
    assert multipliers[:4] == [(2.5, 1.2), (3.5, 1.1), (1.7, 0.8), (3.5, 1.1)]


def test_olmo_hybrids_without_lists_or_sizes_have_the_usual_ones(
    tiny: Tiny, tmp_path: Path
) -> None:
    """The last of few layers has attention; keys have three quarters of the hidden size."""
    values = values_of(tiny("olmo_hybrid")) | {"layer_types": None, "num_hidden_layers": 3}
    values = {name: value for name, value in values.items() if not name.startswith("linear_")}
    config = ModelFolder.open(write(tmp_path, values)).config
    assert config.pattern == "G-G-*-" and config.rope is None
    net = config.gated_delta_net
    assert net is not None and net.beta_scale == 2.0
    assert (net.key_heads, net.value_heads, net.key_dim, net.value_dim) == (4, 4, 12, 24)
    forms = [(form.norm, form.post_norm) for form in config.forms]
    assert forms == [(True, False)] * 4 + [(False, True)] * 2
    longer = values | {"num_hidden_layers": 5, "rope_parameters": {"rope_theta": 5e5}}
    config = ModelFolder.open(write(tmp_path, longer)).config
    assert config.pattern == "G-G-G-*-G-" and config.rope is not None


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no config.json"):
        _ = ModelFolder.open(tmp_path).config
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match="not valid JSON"):
        _ = ModelFolder.open(tmp_path).config


def test_dtypes_by_name() -> None:
    assert resolve_dtype("bf16") == resolve_dtype("torch.bfloat16") == torch.bfloat16
    assert resolve_dtype(None, torch.float16) == resolve_dtype("auto", torch.float16)
    assert resolve_dtype(torch.float32, torch.float16) == torch.float32
    with pytest.raises(ConfigurationError, match="'int8'"):
        resolve_dtype("int8")


@pytest.mark.parametrize(
    ("family", "ranks", "message"),
    [
        ("nemotron_h", 3, "--tensor-model-parallel-size 3 does not divide .* 8 Mamba heads"),
        ("llama", 3, "--tensor-model-parallel-size 3 does not divide .* 4 attention heads"),
        ("mamba", 3, "--tensor-model-parallel-size 3 does not divide .* 128 Mamba channels"),
        ("qwen3_5", 4, "--tensor-model-parallel-size 4 does not divide .* 2 key heads"),
        ("lfm2", 3, "--tensor-model-parallel-size 3 does not divide .* 64 channels"),
        ("qwen4_exp", 8, "--tensor-model-parallel-size 8 does not divide"),
        ("zamba", 8, "--tensor-model-parallel-size 8 does not divide .* 4 Mamba heads"),
        ("recurrent_gemma", 3, "--tensor-model-parallel-size 3 does not divide .* 4 heads of the"),
        ("xlstm", 8, "--tensor-model-parallel-size 8 does not divide .* 4 heads of the mLSTM"),
        ("zaya", 4, "--tensor-model-parallel-size 4 does not divide .* 2 KV heads with convolved"),
        ("rwkv", 5, "--tensor-model-parallel-size 5 does not divide .* 96 channels of time"),
        ("nemotron_h", 16, "16 does not divide"),
    ],
)
def test_models_that_do_not_split_are_refused_before_any_weight_is_read(
    tiny: Tiny,
    tmp_path: Path,
    parallel: ParallelContext,
    family: str,
    ranks: int,
    message: str,
) -> None:
    write(tmp_path, values_of(tiny(family)))
    several = first_of(parallel, ranks)
    with pytest.raises(ConfigurationError, match=message):
        load_model(tmp_path, device=torch.device("cpu"), dtype=None, parallel=several)
