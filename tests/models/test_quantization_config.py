"""What published checkpoints say about their quantisation is read as it is meant, and what cannot
be read is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.models.checkpoints.quantization import Quantization, StoredFormat

FILES = Path(__file__).parent / "quantization_configs"

BLOCK_FP8 = StoredFormat("fp8", "float8_e4m3fn", "block", block=(128, 128), activations="group")
TENSOR_FP8 = StoredFormat("modelopt", "float8_e4m3fn", "tensor", activations="tensor")
NVFP4 = StoredFormat("modelopt", "float4_e2m1", "group", group_size=16)

# By hand, from the files: of each model the file that counts, its KV cache, and single modules.
PUBLISHED: dict[str, tuple[str, str | None, dict[str, StoredFormat | None]] | None] = {
    "Qwen--Qwen3-30B-A3B-FP8": (
        "config.json",
        None,
        {
            "model.layers.0.self_attn.q_proj": BLOCK_FP8,
            "model.layers.47.self_attn.o_proj": BLOCK_FP8,
            "model.layers.0.mlp.experts.127.down_proj": BLOCK_FP8,
            "model.layers.0.mlp.experts.3.gate_proj": BLOCK_FP8,
            "model.layers.0.mlp.gate": None,
            "lm_head": None,
        },
    ),
    "Qwen--Qwen3-32B-FP8-Static-PerTensor": (
        "config.json",
        "fp8_e4m3",
        {
            "model.layers.0.self_attn.q_proj": TENSOR_FP8,
            "model.layers.63.mlp.gate_proj": TENSOR_FP8,
            "lm_head": None,
        },
    ),
    "Qwen--Qwen3.5-35B-A3B": None,
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": None,
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4": (
        "hf_quant_config.json",
        "fp8_e4m3",
        {
            "backbone.layers.0.mixer.in_proj": NVFP4,
            "backbone.layers.0.mixer.out_proj": NVFP4,
            "backbone.layers.4.mixer.in_proj": None,
            "backbone.layers.4.mixer.out_proj": None,
            "backbone.layers.41.mixer.in_proj": None,
            "backbone.layers.44.mixer.in_proj": NVFP4,
            "backbone.layers.0.mixer.conv1d": None,
            "backbone.layers.1.mixer.gate": None,
            "backbone.layers.1.mixer.experts.127.up_proj": NVFP4,
            "backbone.layers.1.mixer.shared_experts.down_proj": NVFP4,
            "backbone.layers.5.mixer.q_proj": None,
            "model.layers.5.mixer.q_proj": None,
            "lm_head": None,
        },
    ),
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8": (
        "hf_quant_config.json",
        "fp8_e4m3",
        {
            "backbone.layers.0.mixer.in_proj": TENSOR_FP8,
            "backbone.layers.1.mixer.experts.511.up_proj": TENSOR_FP8,
            "backbone.layers.1.mixer.gate": None,
            "mtp.layers.0.mixer.q_proj": None,
        },
    ),
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4": (
        "hf_quant_config.json",
        "fp8_e4m3",
        {
            "backbone.layers.1.mixer.experts.511.up_proj": NVFP4,
            "backbone.layers.0.mixer.conv1d": None,
        },
    ),
    "nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": None,
    "nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-FP8": (
        "hf_quant_config.json",
        "fp8_e4m3",
        {
            "backbone.layers.0.mixer.out_proj": TENSOR_FP8,
            "backbone.layers.1.mixer.gate": None,
        },
    ),
    "nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-NVFP4": (
        "hf_quant_config.json",
        "fp8_e4m3",
        {
            "backbone.layers.1.mixer.shared_experts.up_proj": NVFP4,
            "backbone.layers.1.mixer.gate": None,
        },
    ),
    "nvidia--NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4": (
        "hf_quant_config.json",
        "fp8_e4m3",
        {
            "backbone.layers.0.mixer.in_proj": TENSOR_FP8,
            "backbone.layers.4.mixer.in_proj": TENSOR_FP8,
            "backbone.layers.11.mixer.out_proj": TENSOR_FP8,
            "backbone.layers.0.mixer.conv1d": None,
            "backbone.layers.1.mixer.gate": None,
            "backbone.layers.1.mixer.experts.127.down_proj": NVFP4,
            "backbone.layers.51.mixer.experts.0.up_proj": NVFP4,
            "backbone.layers.1.mixer.shared_experts.up_proj": NVFP4,
            "backbone.layers.5.mixer.q_proj": None,
            "backbone.layers.5.mixer.o_proj": None,
            "backbone.embeddings": None,
            "lm_head": NVFP4,
            "mtp.layers.0.mixer.experts.0.up_proj": None,
        },
    ),
    "nvidia--Qwen3.5-122B-A10B-NVFP4": (
        "config.json",
        "fp8_e4m3",
        {
            "model.language_model.layers.0.linear_attn.in_proj_qkv": None,
            "model.language_model.layers.0.linear_attn.in_proj_qkvz": None,
            "model.language_model.layers.0.linear_attn.in_proj_a": None,
            "model.language_model.layers.3.self_attn.q_proj": None,
            "model.language_model.layers.0.mlp.experts.255.up_proj": NVFP4,
            "model.language_model.layers.0.mlp.shared_expert.up_proj": None,
            "model.language_model.layers.0.mlp.shared_expert_gate": None,
            "model.layers.0.mlp.shared_expert.up_proj": None,
            "model.language_model.layers.0.mlp.gate": None,
            "model.visual.blocks.0.attn.qkv": None,
            "lm_head": None,
            "mtp.layers.0.mlp.experts.0.up_proj": None,
            "mtp.fc": None,
        },
    ),
    "nvidia--Qwen3.5-397B-A17B-NVFP4": (
        "config.json",
        "fp8_e4m3",
        {
            "model.language_model.layers.0.linear_attn.out_proj": None,
            "model.language_model.layers.59.self_attn.k_proj": None,
            "model.language_model.layers.59.mlp.experts.511.down_proj": NVFP4,
            "model.language_model.layers.59.mlp.shared_expert.down_proj": None,
            "model.language_model.layers.59.mlp.gate": None,
            "lm_head": None,
            "mtp.layers.0.self_attn.q_proj": None,
            "mtp.fc": None,
        },
    ),
    "nvidia--Qwen3.6-27B-NVFP4": (
        "config.json",
        "fp8_e4m3",
        {
            "model.language_model.layers.0.linear_attn.in_proj_qkv": TENSOR_FP8,
            "model.language_model.layers.0.linear_attn.in_proj_z": TENSOR_FP8,
            "model.language_model.layers.0.linear_attn.out_proj": TENSOR_FP8,
            "model.language_model.layers.0.linear_attn.in_proj_a": None,
            "model.language_model.layers.0.linear_attn.in_proj_b": None,
            "model.language_model.layers.3.self_attn.q_proj": TENSOR_FP8,
            "model.language_model.layers.3.mlp.up_proj": NVFP4,
            "lm_head": NVFP4,
            "mtp.fc": None,
            "mtp.layers.0.mlp.up_proj": None,
        },
    ),
    "nvidia--Qwen3.6-35B-A3B-NVFP4": (
        "config.json",
        "fp8_e4m3",  # only in hf_quant_config.json
        {
            "model.language_model.layers.0.linear_attn.in_proj_qkv": TENSOR_FP8,
            "model.layers.0.linear_attn.in_proj_qkv": TENSOR_FP8,
            "model.language_model.layers.0.linear_attn.in_proj_qkvz": TENSOR_FP8,
            "model.language_model.layers.0.linear_attn.in_proj_ba": None,
            "model.language_model.layers.0.linear_attn.in_proj_a": None,
            "model.language_model.layers.39.self_attn.o_proj": TENSOR_FP8,
            "model.language_model.layers.39.mlp.experts.255.up_proj": NVFP4,
            "model.language_model.layers.39.mlp.experts.gate_up_proj": NVFP4,
            "model.language_model.layers.39.mlp.shared_expert.up_proj": NVFP4,
            "model.language_model.layers.39.mlp.shared_expert_gate": None,
            "model.language_model.layers.39.mlp.gate": None,
            "model.visual.blocks.0.attn.qkv": None,
            "lm_head": NVFP4,
            "mtp.layers.0.mlp.experts.0.up_proj": None,
        },
    ),
    "zai-org--GLM-5-FP8": (
        "config.json",
        None,
        {
            "model.layers.0.mlp.up_proj": BLOCK_FP8,
            "model.layers.3.mlp.experts.0.up_proj": BLOCK_FP8,
            "model.layers.3.mlp.shared_experts.up_proj": BLOCK_FP8,
            "model.layers.3.mlp.gate": None,
            "model.layers.3.self_attn.kv_b_proj": BLOCK_FP8,
            "model.layers.3.self_attn.indexers_proj": None,
            "model.layers.78.eh_proj": None,
            "model.embed_tokens": None,
            "lm_head": None,
        },
    ),
}
REFUSED = "sgl-project--DeepSeek-V4-Flash-FP8"


def published(model: str) -> Quantization | None:
    """What a model's files in this folder say."""
    old = FILES / f"{model}_hf_quant_config.json"
    return Quantization.of(
        json.loads((FILES / f"{model}_config.json").read_text()),
        f"{model}/config.json",
        json.loads(old.read_text()) if old.is_file() else None,
    )


def of(settings: dict[str, Any], old: dict[str, Any] | None = None) -> Quantization:
    """What a config.json with that quantization_config says."""
    found = Quantization.of({"quantization_config": settings}, "folder/config.json", old)
    assert found is not None
    return found


def refusal(settings: dict[str, Any], old: dict[str, Any] | None = None) -> str:
    """The sentence with which such a config.json is refused."""
    with pytest.raises(ConfigurationError) as caught:
        of(settings, old)
    return str(caught.value)


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_models_are_read_as_their_files_say(model: str) -> None:
    expected, found = PUBLISHED[model], published(model)
    if expected is None:
        assert found is None
        return
    assert found is not None
    where, kv_cache, modules = expected
    assert (found.where, found.kv_cache) == (f"{model}/{where}", kv_cache)
    assert {name: found.format_of(name) for name in modules} == modules


def test_every_published_file_is_in_the_table() -> None:
    files = {path.name for path in FILES.glob("*.json")}
    assert len(files) == 28
    assert {name.rpartition("_config")[0].removesuffix("_hf_quant") for name in files} == {
        *PUBLISHED,
        REFUSED,
    }
    with pytest.raises(ConfigurationError, match=r"scale_fmt = 'ue8m0' is not supported"):
        published(REFUSED)


def test_no_torch_is_imported() -> None:
    module = "megatron_hybrid.models.checkpoints.quantization"
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- where it stands

FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "FP8"}


def test_a_quantization_config_may_be_in_the_text_config() -> None:
    found = Quantization.of({"text_config": {"quantization_config": FP8}}, "config.json")
    assert found is not None and found.format_of("model.layers.0.mlp.up_proj") == BLOCK_FP8
    both = {"quantization_config": FP8, "text_config": {"quantization_config": FP8}}
    assert Quantization.of(both, "config.json") is not None
    other = {"quantization_config": MODELOPT, "text_config": {"quantization_config": FP8}}
    with pytest.raises(ConfigurationError, match="and another in its text part"):
        Quantization.of(other, "config.json")


@pytest.mark.parametrize("prefix", ["language_model.backbone", "language_model.model", "llm.model"])
def test_modules_of_a_text_part_may_have_the_wholes_names(prefix: str) -> None:
    said = MODELOPT | {"ignore": [f"{prefix}.layers.0.mixer.in_proj", "vision_model*", "mlp1*"]}
    found = Quantization.of({"llm_config": {"quantization_config": said}}, "config.json")
    assert found is not None
    assert found.format_of("model.layers.0.mixer.in_proj") is None
    assert found.format_of("model.layers.1.mixer.in_proj") is not None


def test_what_is_not_quantised_is_none() -> None:
    for config in ({}, {"quantization_config": None}, {"text_config": {}}):
        assert Quantization.of(config, "config.json") is None
    nothing = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": None}}
    assert Quantization.of({}, "config.json", nothing) is None
    with pytest.raises(ConfigurationError, match="that is no object"):
        Quantization.of({"quantization_config": "fp8"}, "config.json")


def test_a_cache_alone_may_be_quantised() -> None:
    old = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    found = Quantization.of({}, "folder/config.json", old)
    assert found is not None and found.kv_cache == "fp8_e4m3"
    assert found.format_of("model.layers.0.mlp.up_proj") is None
    newer = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_scheme": "FP8"}
    assert of(newer).kv_cache == "fp8_e4m3" and of(newer).format_of("a.up_proj") is None


@pytest.mark.parametrize(
    "method", ["bitsandbytes", "gguf", "mxfp4", "torchao", "quark", "hqq", "exl2", "fbgemm_fp8"]
)
def test_other_methods_are_refused_with_those_that_are_read(method: str) -> None:
    assert refusal({"quant_method": method}) == (
        f"folder/config.json says that the weights were quantised with '{method}', which is not "
        "read; those that are: fp8, modelopt, compressed-tensors, gptq, auto-round, awq."
    )


def test_a_method_has_to_be_named() -> None:
    assert refusal({"load_in_8bit": True}) == (
        "folder/config.json has a quantization_config without a quant_method; those that are "
        "read: fp8, modelopt, compressed-tensors, gptq, auto-round, awq."
    )


def test_the_two_files_must_not_contradict_each_other() -> None:
    nvfp4 = {"quantization": {"quant_algo": "NVFP4"}}
    assert refusal(MODELOPT, nvfp4) == (
        "folder/config.json says that quant_algo is FP8, and folder/hf_quant_config.json that it "
        "is NVFP4; remove what is wrong."
    )
    assert refusal(FP8, nvfp4) == (
        "folder/config.json says that the weights were quantised with 'fp8', and "
        "folder/hf_quant_config.json that they were with 'modelopt'; remove what is wrong."
    )
    of(FP8, {"producer": {"name": "modelopt"}, "quantization": {"exclude_modules": []}})
    of(MODELOPT, {"quantization": {"quant_algo": "fp8"}})
    blocks = {"quantization": {"quant_algo": "fp8_pb_wo"}}
    of(MODELOPT | {"quant_algo": "FP8_BLOCK_SCALES"}, blocks)


def test_what_only_the_older_file_says_is_refused_in_its_name() -> None:
    old = {"quantization": {"quant_algo": "MXFP8"}}
    with pytest.raises(ConfigurationError, match="^folder/hf_quant_config.json: .*MXFP8"):
        Quantization.of({}, "folder/config.json", old)


def test_what_config_json_does_not_say_the_older_file_does() -> None:
    old = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["*.o_proj"]}
    found = of(MODELOPT, {"quantization": old})
    assert found.kv_cache == "fp8_e4m3" and found.format_of("layers.0.o_proj") is None
    found = of(MODELOPT | {"ignore": ["lm_head"]}, {"quantization": old})
    assert found.format_of("layers.0.o_proj") == TENSOR_FP8


# --- fp8


def test_fp8_without_blocks_has_a_scale_for_each_weight() -> None:
    settings = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}
    static = StoredFormat("fp8", "float8_e4m3fn", "tensor", activations="tensor")
    assert of(settings).format_of("model.layers.0.mlp.up_proj") == static
    dynamic = replace(static, activations="token")
    settings["activation_scheme"] = "dynamic"
    assert of(settings).format_of("model.layers.0.mlp.up_proj") == dynamic


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"fmt": "e5m2"}, "fmt = 'e5m2' is not supported, only 'e4m3' is."),
        ({"scale_fmt": "ue8m0"}, "scale_fmt = 'ue8m0' is not supported, only 'float' is."),
        ({"expert_dtype": "fp4"}, "expert_dtype = 'fp4' is not supported, only 'fp8' is."),
        (
            {"activation_scheme": "static"},
            "activation_scheme = 'static' is not supported, only 'dynamic' is.",
        ),
        (
            {"weight_block_size": [128]},
            "weight_block_size = [128] is not supported, it has to be [rows, columns].",
        ),
        (
            {"weight_block_size": [0, 128]},
            "weight_block_size = [0, 128] is not supported, it has to be [rows, columns].",
        ),
        (
            {"modules_to_convert": ["embed_tokens"]},
            "modules_to_convert = ['embed_tokens'] is not supported.",
        ),
        (
            {"ignored_layers": "lm_head"},
            "ignored_layers = 'lm_head' is not supported, it has to be a list of names.",
        ),
    ],
)
def test_fp8_of_another_kind_is_refused(wrong: dict[str, Any], sentence: str) -> None:
    assert refusal(FP8 | wrong) == f"folder/config.json: the quantisation's {sentence}"


def test_fp8_keeps_heads_routers_and_embeddings_that_nobody_listed() -> None:
    found = of(FP8)
    for kept in (
        "lm_head",
        "model.language_model.embed_tokens",
        "model.layers.0.mlp.gate",
        "model.layers.0.mlp.shared_expert_gate",
        "model.layers.0.feed_forward.router",
        "model.layers.0.block_sparse_moe.router.layer",
    ):
        assert found.format_of(kept) is None
    for quantised in ("model.layers.0.mlp.gate_proj", "model.layers.0.linear_attn.in_proj_z"):
        assert found.format_of(quantised) == BLOCK_FP8


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
@pytest.mark.parametrize(
    ("entry", "kept", "quantised"),
    [
        ("in_proj_a", "model.layers.0.linear_attn.in_proj_a", "model.layers.0.x.in_proj_ab"),
        ("in_proj_a", "in_proj_a", "model.layers.0.linear_attn.big_in_proj_a"),
        ("linear_attn.in_proj_a", "model.layers.0.linear_attn.in_proj_a", "model.x.in_proj_a"),
        ("model.visual", "model.visual.blocks.0.attn.qkv", "model.visuals.blocks.0.attn.qkv"),
        ("mtp", "mtp.layers.0.mlp.up_proj", "mtp2.layers.0.mlp.up_proj"),
        ("mtp.fc", "mtp.fc", "mtp.fc2"),
        ("model.layers.1", "model.layers.1.mlp.up_proj", "model.layers.10.mlp.up_proj"),
        ("model.layers.1.mlp.up_proj", "model.layers.1.mlp.up_proj", "mtp.layers.1.mlp.up_proj"),
        ("model.layers.*.mlp.up_proj", "model.layers.7.mlp.up_proj", "model.layers.7.mlp.up"),
        (r"model\.layers\.[01]\.mlp", "model.layers.1.mlp.up_proj", "model.layers.2.mlp.up_proj"),
        ("model.layers.[01]", "model.language_model.layers.1.x", "model.layers.12.x"),
    ],
)
def test_names_in_a_list_match_whole_components(
    key: str, entry: str, kept: str, quantised: str
) -> None:
    found = of(FP8 | {key: [entry]})
    assert found.format_of(kept) is None
    assert found.format_of(quantised) == BLOCK_FP8


@pytest.mark.parametrize(
    ("entry", "module"),
    [
        ("model.language_model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"),
        ("language_model.model.layers.0.mlp.up_proj", "model.language_model.layers.0.mlp.up_proj"),
        ("backbone.layers.0.mixer.in_proj", "model.layers.0.mixer.in_proj"),
        ("layers.0.mixer.in_proj", "backbone.layers.0.mixer.in_proj"),
        ("model.layers.0.mixer", "layers.0.mixer.in_proj"),
        ("language_model.lm_head", "lm_head"),
    ],
)
def test_prefixes_of_names_do_not_matter(entry: str, module: str) -> None:
    assert of(FP8 | {"ignored_layers": [entry]}).format_of(module) is None
    assert of(MODELOPT | {"ignore": [entry + "*"]}).format_of(module) is None
    regex = "re:^" + entry.replace(".", r"\.")
    assert of(COMPRESSED | {"ignore": [regex]}).format_of(module) is None


def test_a_regular_expression_that_denies_a_name_is_not_asked_for_others() -> None:
    """Without its prefix every name would be another than the one that is denied."""
    found = of(COMPRESSED | {"ignore": [r"re:^(?!model\.layers).*"]})
    assert found.format_of("model.layers.0.mlp.up_proj") is not None
    assert found.format_of("model.visual.merger") is None


# --- modelopt


@pytest.mark.parametrize(
    ("algo", "stored"),
    [
        ("FP8", TENSOR_FP8),
        ("fp8", TENSOR_FP8),
        ("NVFP4", NVFP4),
        ("W4A16_NVFP4", NVFP4),
        ("w4a16_nvfp4", NVFP4),
        ("FP8_PER_CHANNEL_PER_TOKEN", replace(TENSOR_FP8, scales="channel", activations="token")),
        (
            "FP8_PB_WO",
            replace(TENSOR_FP8, scales="block", block=(128, 128), activations="group"),
        ),
        (
            "fp8_block_scales",
            replace(TENSOR_FP8, scales="block", block=(128, 128), activations="group"),
        ),
    ],
)
def test_algorithms_of_modelopt(algo: str, stored: StoredFormat) -> None:
    settings = {"quant_method": "modelopt", "quant_algo": algo}
    assert of(settings).format_of("model.layers.0.mlp.up_proj") == stored
    mixed = {
        "quant_method": "modelopt",
        "quant_algo": "mixed_precision",
        "quantized_layers": {"model.layers.0.mlp.up_proj": {"quant_algo": algo}},
    }
    assert of(mixed).format_of("model.layers.0.mlp.up_proj") == stored
    assert of(mixed).format_of("model.layers.0.mlp.down_proj") is None


_ALGOS = "FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, NVFP4, W4A16_NVFP4 and MIXED_PRECISION are"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"quant_algo": "MXFP8"}, f"quant_algo = 'MXFP8' is not supported, only {_ALGOS}."),
        ({"quant_algo": None}, f"quant_algo = None is not supported, only {_ALGOS}."),
        (
            {"quant_algo": "NVFP4", "group_size": 32},
            "group_size = 32 is not supported, only 16 is.",
        ),
        (
            {"quant_algo": "NVFP4", "config_groups": {"g": {"weights": {"group_size": 32}}}},
            "config_groups.g.weights.group_size = 32 is not supported, only 16 is.",
        ),
        (
            {"quant_algo": "FP8", "config_groups": {"g": {"weights": {"num_bits": 4}}}},
            "config_groups.g.weights.num_bits = 4 is not supported, only 8 is.",
        ),
        (
            {"quant_algo": "MIXED_PRECISION"},
            "quantized_layers = None is not supported, with MIXED_PRECISION it has to name every "
            "layer.",
        ),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.b": {"quant_algo": "INT4"}}},
            f"quantized_layers.a.b.quant_algo = 'INT4' is not supported, only {_ALGOS}.",
        ),
        (
            {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "nvfp4", "group_size": 64}},
            },
            "quantized_layers.a.group_size = 64 is not supported, only 16 is.",
        ),
    ],
)
def test_modelopt_of_another_kind_is_refused(settings: dict[str, Any], sentence: str) -> None:
    found = refusal({"quant_method": "modelopt"} | settings)
    assert found == f"folder/config.json: the quantisation's {sentence}"


def test_a_file_without_a_method_is_modelopts_where_it_names_the_producer() -> None:
    settings = {"quant_algo": "FP8", "producer": {"name": "modelopt"}, "ignore": ["lm_head"]}
    assert of(settings).format_of("model.layers.0.mlp.up_proj") == TENSOR_FP8
    settings["producer"] = {"name": "somebody"}
    assert "without a quant_method" in refusal(settings)


@pytest.mark.parametrize(
    ("scheme", "kv_cache"),
    [
        ({"dynamic": False, "num_bits": 8, "type": "float"}, "fp8_e4m3"),
        ({"dynamic": False, "num_bits": 8, "type": "float", "strategy": "tensor"}, "fp8_e4m3"),
        ("FP8", "fp8_e4m3"),
        ("NVFP4", None),
        ({"dynamic": False, "num_bits": 8, "type": "float", "strategy": "attn_head"}, None),
        ({"dynamic": True, "num_bits": 8, "type": "float"}, None),
        ({"dynamic": False, "num_bits": 8, "type": "int"}, None),
        ({"dynamic": False, "num_bits": 4, "type": "float"}, None),
        (None, None),
    ],
)
def test_caches_with_one_fp8_scale_for_a_layer_are_known(scheme: Any, kv_cache: str | None) -> None:
    assert of(MODELOPT | {"kv_cache_scheme": scheme}).kv_cache == kv_cache
    assert of(COMPRESSED | {"kv_cache_scheme": scheme}).kv_cache == kv_cache
    assert of(FP8).kv_cache is None


@pytest.mark.parametrize(
    ("glob", "kept", "quantised"),
    [
        ("mtp*", "mtp2.layers.0.mlp.up_proj", "model.layers.0.mtp_proj"),
        ("*.shared_expert.*", "model.layers.3.mlp.shared_expert.up_proj", "model.shared_expert"),
        ("model.layers.?.mixer", "model.layers.3.mixer", "model.layers.31.mixer"),
        ("*.mlp.gate", "model.layers.3.mlp.gate", "model.layers.3.mlp.gate_proj"),
        ("model.layers.1.linear_attn*", "model.layers.1.linear_attn.x", "model.layersX1.linear_a"),
        ("lm_head", "lm_head", "model.layers.0.lm_head_2"),
    ],
)
def test_globs_match_whole_names(glob: str, kept: str, quantised: str) -> None:
    found = of(MODELOPT | {"ignore": [glob, "*nothing*"]})
    assert found.format_of(kept) is None
    assert found.format_of(quantised) == TENSOR_FP8


def mixed(*ignore: str, **layers: str) -> Quantization:
    """MIXED_PRECISION of single modules inside "a"."""
    named = {f"a.{name}": {"quant_algo": algo} for name, algo in layers.items()}
    settings = {"quant_algo": "MIXED_PRECISION", "quantized_layers": named, "ignore": list(ignore)}
    return of(MODELOPT | settings)


def test_one_entry_counts_for_all_experts_and_ignore_for_more() -> None:
    found = mixed("a.experts.1*", experts="NVFP4")
    assert found.format_of("a.experts.0.up_proj") == NVFP4
    assert found.format_of("a.experts.12.up_proj") is None
    assert found.format_of("a.expert.0.up_proj") is None


@pytest.mark.parametrize(
    ("whole", "parts"),
    [
        ("qkv_proj", ["q_proj", "k_proj", "v_proj"]),
        ("gate_up_proj", ["gate_proj", "up_proj"]),
        ("in_proj_qkvz", ["in_proj_qkv", "in_proj_z"]),
        ("in_proj_ba", ["in_proj_b", "in_proj_a"]),
    ],
)
def test_fused_names_count_for_their_parts_and_the_other_way_round(
    whole: str, parts: list[str]
) -> None:
    fused = mixed(**{whole: "NVFP4"})
    assert {fused.format_of(f"a.{part}") for part in parts} == {NVFP4}
    split = mixed(**dict.fromkeys(parts, "FP8"))
    assert split.format_of(f"a.{whole}") == TENSOR_FP8
    kept = of(MODELOPT | {"ignore": [f"a.{part}" for part in parts]})
    assert kept.format_of(f"a.{whole}") is None and kept.format_of(f"b.{whole}") == TENSOR_FP8
    for found in (
        mixed(**dict.fromkeys(parts[1:], "FP8")),
        mixed(**dict.fromkeys(parts[1:], "FP8"), **{parts[0]: "NVFP4"}),
        of(MODELOPT | {"ignore": [f"a.{parts[0]}"]}),
    ):
        with pytest.raises(ConfigurationError) as caught:
            found.format_of(f"a.{whole}")
        assert str(caught.value) == (
            f"folder/config.json says different things of {', '.join(parts)} in a, which are one "
            f"weight, {whole}, in the checkpoint."
        )


def test_a_pattern_for_one_part_says_nothing_of_the_others() -> None:
    """Although it matches the name of the fused weight too."""
    found = of(COMPRESSED | {"ignore": ["re:.*gate", "re:.*[.]q.*"]})
    assert found.format_of("a.gate_proj") is None and found.format_of("a.up_proj") == FLOAT
    assert found.format_of("a.q_proj") is None and found.format_of("a.k_proj") == FLOAT


# --- compressed-tensors


def weights(kind: str, bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    """Arguments of llm-compressor."""
    return {"type": kind, "num_bits": bits, "strategy": strategy, "symmetric": True} | more


def compressed(
    form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """A quantization_config of one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    } | more


def inputs(kind: str, strategy: str, dynamic: Any = True, **more: Any) -> dict[str, Any]:
    return weights(kind, 8, strategy, dynamic=dynamic, **more)


FLOAT = StoredFormat("compressed_tensors", "float8_e4m3fn", "channel", activations="token")
COMPRESSED = compressed("float-quantized", weights("float", 8, "channel"), inputs("float", "token"))
PACKED = StoredFormat("compressed_tensors", "uint4", "group", group_size=128)


@pytest.mark.parametrize(
    ("settings", "stored"),
    [
        (COMPRESSED, FLOAT),
        (
            compressed("naive-quantized", weights("float", 8, "tensor"), inputs("float", "tensor")),
            replace(FLOAT, scales="tensor", activations="tensor_dynamic"),
        ),
        (
            compressed(
                "float-quantized",
                weights("float", 8, "tensor"),
                inputs("float", "tensor", dynamic=False),
            ),
            replace(FLOAT, scales="tensor", activations="tensor"),
        ),
        (
            compressed(
                "float-quantized",
                weights("float", 8, "block", block_structure=[128, 128]),
                inputs("float", "group", group_size=128),
            ),
            replace(FLOAT, scales="block", block=(128, 128), activations="group"),
        ),
        (
            compressed("float-quantized", weights("float", 8, "block", block_structure="64x128")),
            replace(FLOAT, scales="block", block=(64, 128), activations="none"),
        ),
        (
            compressed("int-quantized", weights("int", 8, "channel"), inputs("int", "token")),
            replace(FLOAT, numbers="int8"),
        ),
        (compressed("pack-quantized", weights("int", 4, "group", group_size=128)), PACKED),
        (
            compressed("pack-quantized", weights("int", 8, "channel")),
            replace(PACKED, numbers="uint8", scales="channel", group_size=None),
        ),
        (
            compressed(
                "pack-quantized",
                weights("int", 4, "group", group_size=32, symmetric=False, actorder="static"),
            ),
            replace(PACKED, group_size=32, symmetric=False),
        ),
        (
            compressed(
                "pack-quantized", weights("int", 4, "group", group_size=128, actorder="weight")
            ),
            PACKED,
        ),
        (
            compressed(
                "pack-quantized", weights("int", 4, "group", group_size=128, actorder="group")
            ),
            replace(PACKED, act_order=True),
        ),
        (
            compressed("pack-quantized", weights("int", 4, "group", group_size=128, actorder=True)),
            replace(PACKED, act_order=True),
        ),
        (
            compressed(
                "nvfp4-pack-quantized",
                weights("float", 4, "tensor_group", group_size=16),
                {"type": "float", "num_bits": 4, "strategy": "tensor_group", "dynamic": "local"},
            ),
            replace(PACKED, numbers="float4_e2m1", group_size=16),
        ),
        (
            compressed("pack-quantized", {"num_bits": 4, "group_size": 64}),
            replace(PACKED, group_size=64),
        ),
    ],
)
def test_formats_of_compressed_tensors(settings: dict[str, Any], stored: StoredFormat) -> None:
    found = of(settings)
    assert found.format_of("model.layers.0.mlp.up_proj") == stored
    assert found.format_of("lm_head") is None


def test_groups_have_targets_and_formats_of_their_own() -> None:
    groups = {
        "group_0": {
            "targets": [r"re:.*self_attn\.(q|k|v|o)_proj$", "model.layers.7.mlp.down_proj"],
            "weights": weights("float", 8, "channel"),
            "input_activations": inputs("float", "token"),
            "format": "float-quantized",
        },
        "group_1": {
            "targets": ["re:.*mlp.*"],
            "weights": weights("int", 4, "group", group_size=128),
            "format": "pack-quantized",
        },
    }
    settings = COMPRESSED | {
        "format": "mixed-precision",
        "config_groups": groups,
        "ignore": ["re:.*mlp.gate$", "model.layers.3.self_attn.q_proj"],
    }
    found = of(settings)
    assert found.format_of("model.layers.0.self_attn.q_proj") == FLOAT
    assert found.format_of("model.layers.3.self_attn.q_proj") is None
    assert found.format_of("model.layers.7.mlp.down_proj") == FLOAT  # a name before a pattern
    assert found.format_of("model.layers.6.mlp.down_proj") == PACKED
    assert found.format_of("model.layers.6.mlp.gate") is None
    assert found.format_of("model.layers.6.mlp.gate_proj") == PACKED
    assert found.format_of("model.layers.0.linear_attn.out_proj") is None
    everything = {"targets": ["Linear"], "weights": weights("float", 8, "tensor")}
    groups["group_2"] = everything | {"format": "float-quantized"}
    other = of(settings | {"config_groups": groups}).format_of("model.layers.0.linear_attn.z")
    assert other == replace(FLOAT, scales="tensor", activations="none")
    del groups["group_1"]["format"]
    assert "the quantisation's format = 'mixed-precision' is not supported" in refusal(settings)


GROUP = COMPRESSED["config_groups"]["group_0"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            COMPRESSED | {"quantization_status": "calibration"},
            "quantization_status = 'calibration' is not supported, only 'compressed' or 'frozen' "
            "is.",
        ),
        (
            COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.format = 'sparse-24-bitmask' is not supported, only 'dense' is.",
        ),
        (
            COMPRESSED | {"transform_config": {"config_groups": {"R1": {}}}},
            "transform_config = {'config_groups': {'R1': {}}} is not supported.",
        ),
        (
            COMPRESSED | {"config_groups": {}},
            "config_groups = {} is not supported, they have to say what is quantised.",
        ),
        (
            COMPRESSED | {"config_groups": {"W4A16": ["Linear"]}},
            "config_groups.W4A16 = ['Linear'] is not supported, it has to be an object.",
        ),
        (
            COMPRESSED | {"config_groups": {"g": GROUP | {"targets": ["Embedding"]}}},
            "config_groups.g.targets = ['Embedding'] is not supported, of the classes of modules "
            "only 'Linear' is.",
        ),
        (
            COMPRESSED | {"config_groups": {"g": GROUP | {"output_activations": {"num_bits": 8}}}},
            "config_groups.g.output_activations = {'num_bits': 8} is not supported.",
        ),
        (
            compressed("pack-quantized", weights("int", 2, "group", group_size=32)),
            "config_groups.group_0.weights.num_bits = 2 is not supported, in the format "
            "'pack-quantized' only 4 of type 'int' or 8 of type 'int' is.",
        ),
        (
            compressed("int-quantized", weights("float", 8, "channel")),
            "config_groups.group_0.weights.num_bits = 8 is not supported, in the format "
            "'int-quantized' only 8 of type 'int' is.",
        ),
        (
            compressed("pack-quantized", weights("int", 4, "group")),
            "config_groups.group_0.weights.group_size = None is not supported, it has to be the "
            "columns of a group, or -1.",
        ),
        (
            compressed("pack-quantized", weights("int", 4, "group", group_size=8, actorder="x")),
            "config_groups.group_0.weights.actorder = 'x' is not supported, only 'static' or "
            "'weight' or 'group' or 'dynamic' or True is.",
        ),
        (
            compressed("float-quantized", weights("float", 8, "attn_head")),
            "config_groups.group_0.weights.strategy = 'attn_head' is not supported, only 'tensor' "
            "or 'channel' or 'block' or 'group' or 'tensor_group' is.",
        ),
        (
            compressed("float-quantized", weights("float", 8, "block")),
            "config_groups.group_0.weights.block_structure = None is not supported, it has to be "
            "[rows, columns].",
        ),
        (
            compressed("float-quantized", weights("float", 8, "channel", symmetric=False)),
            "config_groups.group_0.weights.symmetric = False is not supported, only True is.",
        ),
        (
            compressed("nvfp4-pack-quantized", weights("float", 4, "tensor_group", group_size=32)),
            "config_groups.group_0.weights.group_size = 32 is not supported, only 16 is.",
        ),
        (
            compressed("float-quantized", weights("float", 8, "channel", dynamic=True)),
            "config_groups.group_0.weights.dynamic = True is not supported.",
        ),
        (
            compressed(
                "int-quantized",
                weights("int", 8, "channel"),
                inputs("int", "token") | {"num_bits": 4},
            ),
            "config_groups.group_0.input_activations.num_bits = 4 is not supported, only 8 is.",
        ),
        (
            compressed(
                "float-quantized",
                weights("float", 8, "channel"),
                inputs("float", "group", group_size=128),
            ),
            "config_groups.group_0.input_activations.group_size = 128 is not supported, it has to "
            "be the columns of the weights' blocks.",
        ),
        (
            compressed("float-quantized", weights("float", 8, "tensor"), inputs("int", "token")),
            "config_groups.group_0.input_activations.type = 'int' is not supported, only 'float' "
            "is.",
        ),
        (
            compressed(
                "int-quantized",
                weights("int", 8, "channel"),
                inputs("int", "token", symmetric=False),
            ),
            "config_groups.group_0.input_activations.symmetric = False is not supported, only "
            "True is.",
        ),
        (
            compressed(
                "float-quantized",
                weights("float", 8, "channel"),
                inputs("float", "token", dynamic=False),
            ),
            "config_groups.group_0.input_activations.strategy = 'token' is not supported, only "
            "'tensor' is.",
        ),
        (
            compressed(
                "float-quantized",
                weights("float", 8, "block", block_structure=[128, 128]),
                inputs("float", "group", group_size=64),
            ),
            "config_groups.group_0.input_activations.group_size = 64 is not supported, it has to "
            "be the columns of the weights' blocks.",
        ),
        (
            compressed(
                "pack-quantized",
                weights("int", 4, "group", group_size=128),
                inputs("int", "token"),
            ),
            "config_groups.group_0.input_activations.num_bits = 8 is not supported, before packed "
            "weights inputs have to stay in 16 bits.",
        ),
    ],
)
def test_compressed_tensors_of_another_kind_are_refused(
    settings: dict[str, Any], sentence: str
) -> None:
    assert refusal(settings) == f"folder/config.json: the quantisation's {sentence}"


def test_unknown_formats_of_compressed_tensors_are_refused() -> None:
    for form in ("mxfp4-pack-quantized", "marlin-24", "dense", None):
        sentence = refusal(compressed("x", weights("float", 4, "group", group_size=32)))
        assert "format = 'x' is not supported, only 'float-quantized' or" in sentence
        assert f"format = {form!r} is not" in refusal(COMPRESSED | {"format": form})


def test_a_name_that_is_no_regular_expression_is_refused() -> None:
    assert refusal(COMPRESSED | {"ignore": ["re:*.gate"]}) == (
        "folder/config.json names modules by '*.gate', which is no regular expression: nothing to "
        "repeat at position 0."
    )


def test_only_one_group_is_for_every_linear_layer() -> None:
    settings = COMPRESSED | {"config_groups": {"one": GROUP, "two": GROUP}}
    assert refusal(settings).endswith("two is the second for every 'Linear'.")


# --- gptq, auto-round, awq

GPTQ_FORMAT = StoredFormat("gptq", "uint4", "group", group_size=128, version="gptq")
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}


@pytest.mark.parametrize(
    ("more", "stored"),
    [
        ({}, GPTQ_FORMAT),
        ({"bits": 8}, replace(GPTQ_FORMAT, numbers="uint8")),
        ({"group_size": -1}, replace(GPTQ_FORMAT, group_size=None)),
        ({"desc_act": True}, replace(GPTQ_FORMAT, act_order=True)),
        ({"sym": False}, replace(GPTQ_FORMAT, symmetric=False)),
        ({"checkpoint_format": "gptq_v2"}, replace(GPTQ_FORMAT, version="gptq_v2")),
    ],
)
def test_formats_of_gptq(more: dict[str, Any], stored: StoredFormat) -> None:
    found = of(GPTQ | more)
    assert found.format_of("model.layers.0.mlp.up_proj") == stored
    for kept in ("lm_head", "model.layers.0.mlp.gate", "model.layers.0.mlp.shared_expert_gate"):
        assert found.format_of(kept) is None
    assert of(GPTQ | more | {"lm_head": True}).format_of("lm_head") == stored


def test_dynamic_rules_of_gptq_match_from_the_start_and_the_first_counts() -> None:
    rules: dict[str, Any] = {
        r"-:.*\.linear_attn\.": {},
        r"+:model\.layers\.1\.": {"bits": 8, "group_size": 64},
        r"model\.layers\.2\.": {"desc_act": True, "sym": False},
        "-:mlp": {},
        r"+:.*\.1\..*": {"group_size": 32},
    }
    found = of(GPTQ | {"dynamic": rules})
    assert found.format_of("model.layers.1.linear_attn.out_proj") is None
    eight = replace(GPTQ_FORMAT, numbers="uint8", group_size=64)
    assert found.format_of("model.layers.1.mlp.up_proj") == eight
    ordered = replace(GPTQ_FORMAT, act_order=True, symmetric=False)
    assert found.format_of("model.layers.2.mlp.up_proj") == ordered
    assert found.format_of("model.layers.3.mlp.up_proj") == GPTQ_FORMAT
    assert found.format_of("mlp.up_proj") is None
    assert found.format_of("mtp.layers.1.up_proj") == replace(GPTQ_FORMAT, group_size=32)
    assert refusal(GPTQ | {"dynamic": {"+:x": {"bits": 3}}}) == (
        "folder/config.json: the quantisation's dynamic.+:x.bits = 3 is not supported, only 4 or "
        "8 is."
    )


def test_gptq_may_name_the_modules_of_a_block() -> None:
    names = [["self_attn.k_proj", "self_attn.q_proj"], ["mlp.down_proj"]]
    found = of(GPTQ | {"modules_in_block_to_quantize": names})
    assert found.format_of("model.layers.4.self_attn.q_proj") == GPTQ_FORMAT
    assert found.format_of("model.layers.4.mlp.down_proj") == GPTQ_FORMAT
    assert found.format_of("model.layers.4.mlp.up_proj") is None


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"bits": 3}, "bits = 3 is not supported, only 4 or 8 is."),
        ({"bits": 2}, "bits = 2 is not supported, only 4 or 8 is."),
        (
            {"group_size": None},
            "group_size = None is not supported, it has to be the columns of a group, or -1.",
        ),
        (
            {"checkpoint_format": "marlin"},
            "checkpoint_format = 'marlin' is not supported, only 'gptq' or 'gptq_v2' is.",
        ),
        ({"is_marlin_format": True}, "is_marlin_format = True is not supported."),
        ({"pack_dtype": "int16"}, "pack_dtype = 'int16' is not supported, only 'int32' is."),
        ({"dynamic": ["x"]}, "dynamic = ['x'] is not supported, it has to be an object."),
    ],
)
def test_gptq_of_another_kind_is_refused(wrong: dict[str, Any], sentence: str) -> None:
    assert refusal(GPTQ | wrong) == f"folder/config.json: the quantisation's {sentence}"


AUTO_ROUND = GPTQ | {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}


def test_auto_round_is_gptq_with_single_layers_of_their_own() -> None:
    settings = AUTO_ROUND | {
        "block_name_to_quantize": "model.layers, model.mtp",
        "extra_config": {
            "model.layers.0.mlp.up_proj": {"bits": 16, "data_type": "float"},
            "model.layers.1.mlp.up_proj": {"bits": 8},
            r".*\.linear_attn\.in_proj_[ab]": {"bits": 16},
            "lm_head": {"bits": 8, "group_size": 64},
        },
    }
    found = of(settings)
    assert found.format_of("model.layers.2.mlp.up_proj") == GPTQ_FORMAT
    assert found.format_of("model.mtp.fc") == GPTQ_FORMAT
    assert found.format_of("model.layers.0.mlp.up_proj") is None
    assert found.format_of("model.layers.1.mlp.up_proj") == replace(GPTQ_FORMAT, numbers="uint8")
    assert found.format_of("model.layers.1.linear_attn.in_proj_a") is None
    assert found.format_of("model.layers.1.mlp.gate") is None
    assert found.format_of("model.visual.blocks.0.mlp.up_proj") is None
    eight = replace(GPTQ_FORMAT, numbers="uint8", group_size=64)
    assert found.format_of("lm_head") == eight
    assert of(AUTO_ROUND).format_of("lm_head") is None
    listed = AUTO_ROUND | {"to_quant_block_names": [["model.layers.0"], ["model.layers.2"]]}
    assert of(listed).format_of("model.layers.2.mlp.up_proj") == GPTQ_FORMAT
    assert of(listed).format_of("model.layers.20.mlp.up_proj") is None


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            {"packing_format": "auto_round:auto_awq"},
            "packing_format = 'auto_round:auto_awq' is not supported, only 'auto_round:auto_gptq' "
            "or 'auto_round:gptq' is.",
        ),
        ({"data_type": "mx_fp"}, "data_type = 'mx_fp' is not supported, only 'int' is."),
        ({"act_bits": 8}, "act_bits = 8 is not supported, only 16 or 32 is."),
        ({"bits": 2}, "bits = 2 is not supported, only 4 or 8 is."),
    ],
)
def test_auto_round_of_another_kind_is_refused(wrong: dict[str, Any], sentence: str) -> None:
    assert refusal(AUTO_ROUND | wrong) == f"folder/config.json: the quantisation's {sentence}"


AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
AWQ_FORMAT = StoredFormat("awq", "uint4", "group", group_size=128, symmetric=False)


def test_formats_of_awq() -> None:
    found = of(AWQ | {"zero_point": True})
    assert found.format_of("model.layers.0.mlp.up_proj") == AWQ_FORMAT
    for kept in ("lm_head", "model.layers.0.mlp.gate"):
        assert found.format_of(kept) is None
    whole = of(AWQ | {"zero_point": False, "group_size": -1, "version": "GEMM"})
    stored = replace(AWQ_FORMAT, symmetric=True, group_size=None)
    assert whole.format_of("model.layers.0.mlp.up_proj") == stored


def test_awq_keeps_what_a_name_is_anywhere_in() -> None:
    names = ["visual", "linear_attn.in_proj", "model.layers.1", "language_model.layers.7.mlp"]
    names.append("art.fc1")
    found = of(AWQ | {"modules_to_not_convert": names})
    for kept in (
        "model.visual_tower.x",
        "model.part.fc1",
        "model.layers.5.linear_attn.in_proj_qkvz",
        "model.layers.1.mlp.up_proj",
        "model.layers.7.mlp.up_proj",
    ):
        assert found.format_of(kept) is None
    for quantised in ("model.layers.10.mlp.up_proj", "model.layers.5.linear_attn.out_proj"):
        assert found.format_of(quantised) == AWQ_FORMAT


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"bits": 8}, "bits = 8 is not supported, only 4 is."),
        ({"version": "gemv"}, "version = 'gemv' is not supported, only 'gemm' is."),
        (
            {"group_size": 0},
            "group_size = 0 is not supported, it has to be the columns of a group, or -1.",
        ),
    ],
)
def test_awq_of_another_kind_is_refused(wrong: dict[str, Any], sentence: str) -> None:
    assert refusal(AWQ | wrong) == f"folder/config.json: the quantisation's {sentence}"


def test_long_values_are_cut_in_a_sentence() -> None:
    sentence = refusal(FP8 | {"modules_to_convert": ["model.layers.0.mlp.up_proj"] * 1000})
    assert len(sentence) < 160 and "... is not supported" in sentence
