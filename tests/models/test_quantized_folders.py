"""The oracles of quantised checkpoints: what the folders hold, and that it means what they say."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config

from tests.quantized_folders import FORMATS, KEY_SCALE, VALUE_SCALE, linears, read, write
from tests.thorough import A_THIRD, usually
from tests.tiny_models import make_tiny_model

FAMILIES = (
    "nemotron_h", "nemotron_h_moe", "qwen3_5_moe", "qwen3_next", "lfm2", "granite_moe_hybrid",
    "falcon_h1",
)  # fmt: skip
NUMBERS = 6  # of each weight that are decoded one by one


class Folders(NamedTuple):
    source: Path
    quantized: Path
    oracle: Path

    def config(self) -> dict[str, Any]:
        whole = json.loads((self.quantized / "config.json").read_text())
        return whole["quantization_config"]

    def weights(self, folder: Path) -> dict[str, Tensor]:
        """Of each linear that may be quantised, [N, K]."""
        every = dict(pair for item in read(folder).items() for pair in linears(*item))
        return {name: weight for name, weight in every.items() if weight.ndim == 2}

    def stored(self) -> dict[str, dict[str, Tensor]]:
        """The tensors of each quantised linear, by the last part of their names."""
        modules: dict[str, dict[str, Tensor]] = {}
        for name, tensor in read(self.quantized).items():
            module, _, last = name.rpartition(".")
            modules.setdefault(module, {})[last] = tensor
        scales = ("weight_scale", "weight_scale_inv", "scales")
        return {m: parts for m, parts in modules.items() if any(s in parts for s in scales)}


Make = Callable[..., Folders]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Folders of a family in a format, made once for the same options."""
    made: dict[Any, Folders] = {}

    def get(family: str, format: str, **options: Any) -> Folders:
        key = (family, format, *options.items())
        if key not in made:
            root = tmp_path_factory.mktemp(f"{family}-{format}")
            source = made[(family,)].source if (family,) in made else root / "source"
            if (family,) not in made:
                make_tiny_model(family, source)
                made[(family,)] = Folders(source, source, source)
            write(source, format, root / "quantized", root / "oracle", **options)
            made[key] = Folders(source, root / "quantized", root / "oracle")
        return made[key]

    return get


EACH = [(family, format) for family in FAMILIES for format in FORMATS]
SOME = [(family, FORMATS[3 * place]) for place, family in enumerate(FAMILIES)]


@pytest.mark.parametrize(("family", "format"), usually(SOME, EACH))
def test_transformers_loads_every_oracle(make: Make, family: str, format: str) -> None:
    folders = make(family, format)
    model, report = AutoModelForCausalLM.from_pretrained(folders.oracle, output_loading_info=True)
    assert not any(report.values()), report
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")


@A_THIRD
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("family", usually(("nemotron_h",), FAMILIES))
def test_stored_numbers_mean_the_oracles_weights(make: Make, family: str, format: str) -> None:
    """Some of each weight, decoded one by one."""
    folders, pick = make(family, format, block=(48, 24)), random.Random(0)
    stored, oracle = folders.stored(), folders.weights(folders.oracle)
    assert len(stored) >= 11
    for module, parts in stored.items():
        rows, columns = oracle[module].shape
        for _ in range(NUMBERS):
            row, column = pick.randrange(rows), pick.randrange(columns)
            expected = decoded(parts, row, column, folders.config())
            actual = float(oracle[module][row, column])
            assert actual == pytest.approx(expected, rel=1e-7), (module, row, column)


def decoded(parts: dict[str, Tensor], n: int, k: int, config: dict[str, Any]) -> float:
    """One weight, as the format's description says."""
    if "qweight" in parts:
        return _decoded_qweight(parts, n, k, config)
    scale = parts.get("weight_scale", parts.get("weight_scale_inv"))
    assert scale is not None
    if scale.dtype == torch.float8_e4m3fn:
        packed = parts["weight_packed"] if "weight_packed" in parts else parts["weight"]
        code = int(packed[n, k // 2]) >> 4 * (k % 2) & 15
        exponent, mantissa = code >> 1 & 3, code & 1
        size = 2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2
        number = -size if code & 8 else size
        if "weight_scale_2" in parts:
            whole = float(parts["weight_scale_2"])
        else:
            whole = 1 / float(parts["weight_global_scale"])
        return number * float(scale[n, k // 16]) * whole
    if "weight_packed" in parts:
        number = (int(parts["weight_packed"][n, k // 8]) >> 4 * (k % 8) & 15) - 8.0
        group = int(parts["weight_g_idx"][k]) if "weight_g_idx" in parts else k // 16
        if "weight_zero_point" in parts:
            word = int(parts["weight_zero_point"][n // 8, group])
            number -= (word >> 4 * (n % 8) & 15) - 8
        return number * float(scale[n, group])
    number = float(parts["weight"][n, k])
    if scale.numel() == 1:
        return number * float(scale)
    if scale.ndim == 1:
        return number * float(scale[n])
    if scale.shape[1] == 1 and scale.shape[0] == parts["weight"].shape[0]:
        return number * float(scale[n, 0])
    return number * float(scale[n // 48, k // 24])


def _decoded_qweight(parts: dict[str, Tensor], n: int, k: int, config: dict[str, Any]) -> float:
    bits = config["bits"]
    each, largest = 32 // bits, 2**bits - 1
    group = int(parts["g_idx"][k]) if "g_idx" in parts else k // 16
    if config["quant_method"] == "awq":
        place = [0, 4, 1, 5, 2, 6, 3, 7][n % 8]
        number = int(parts["qweight"][k, n // 8]) >> 4 * place & 15
        zero = int(parts["qzeros"][group, n // 8]) >> 4 * place & 15
    else:
        number = int(parts["qweight"][k // each, n]) >> bits * (k % each) & largest
        zero = int(parts["qzeros"][group, n // each]) >> bits * (n % each) & largest
        zero += config["checkpoint_format"] == "gptq"
    return (number - zero) * float(parts["scales"][group, n])


@A_THIRD
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("family", usually(("qwen3_5_moe",), FAMILIES))
def test_weights_change_by_the_formats_rounding_alone(make: Make, family: str, format: str) -> None:
    folders = make(family, format)
    stored = folders.stored()
    before, after = folders.weights(folders.source), folders.weights(folders.oracle)
    for module, weight in before.items():
        error = (after[module] - weight).abs()
        if module in stored:
            assert (error > 0).float().mean() > 0.5  # a copy would be no quantisation
            assert (error <= 1.02 * largest_error(format, module, weight, stored[module])).all()
        else:
            assert not error.any()


def largest_error(format: str, module: str, weight: Tensor, parts: dict[str, Tensor]) -> Tensor:
    """Half a step around each weight [N, K]; the steps follow from the weights themselves."""
    size = weight.abs()
    if "nvfp4" in format or parts.get("weight_scale_2") is not None:
        # Steps of 0.5, 1 and 2 times a scale that e4m3 has rounded by at most 1/16.
        scale = over_groups(size, 16) / 6
        return scale * 17 / 16 * (0.25 + 0.25 * (size > 1.8 * scale) + 0.5 * (size > 3.7 * scale))
    if format == "gptq_8bit":
        # Of the largest, 127.5 steps, float16 may round the scale down by as much as 1/2048.
        return over_groups(size, 16) / 127.5 * (1 / 2 + 127.5 / 2048)
    if format.startswith(("gptq", "awq", "compressed_w4a16")):
        # Groups of any columns have steps as large as the row's largest weight makes them.
        group = weight.shape[1] if "act" in format else 16
        return over_groups(size, group) / 7.5 / 2
    if format == "compressed_int8":
        return over_groups(size, weight.shape[1]) / 127 / 2
    # e4m3: three bits behind the leading one, and no steps finer than 1/512 of a scale.
    largest = over_groups(size, weight.shape[1]) if "channel" in format else size.amax()
    return torch.maximum(size / 16, largest / 448 / 1024)


def over_groups(size: Tensor, columns: int) -> Tensor:
    """The largest of each group, for each of its members."""
    return torch.cat(
        [part.amax(1, keepdim=True).expand_as(part) for part in size.split(columns, 1)], 1
    )


F8, F16, F32 = torch.float8_e4m3fn, torch.float16, torch.float32
I8, I32, I64, U8 = torch.int8, torch.int32, torch.int64, torch.uint8
Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
PACKED: Layout = {"weight_packed": (I32, (328, 8)), "weight_scale": (F32, (328, 4))}
PACKED |= {"weight_shape": (I64, (2,))}
GPTQ: Layout = {"qweight": (I32, (8, 328)), "qzeros": (I32, (4, 41)), "scales": (F16, (4, 328))}
GPTQ |= {"g_idx": (I32, (64,))}
# Of a weight [328, 64]: 2.56 blocks of 128 rows, half a block of columns.
LAYOUTS: dict[str, Layout] = {
    "fp8_block": {"weight": (F8, (328, 64)), "weight_scale_inv": (F32, (3, 1))},
    "fp8_tensor_static": {
        "weight": (F8, (328, 64)), "weight_scale": (F32, (1,)), "input_scale": (F32, (1,)),
    },
    "fp8_tensor_dynamic": {"weight": (F8, (328, 64)), "weight_scale": (F32, (1,))},
    "modelopt_fp8": {
        "weight": (F8, (328, 64)), "weight_scale": (F32, ()), "input_scale": (F32, ()),
    },
    "modelopt_fp8_channel": {"weight": (F8, (328, 64)), "weight_scale": (F32, (328,))},
    "modelopt_nvfp4": {
        "weight": (U8, (328, 32)), "weight_scale": (F8, (328, 4)), "weight_scale_2": (F32, ()),
        "input_scale": (F32, ()),
    },
    "modelopt_mixed": {
        "weight": (F8, (328, 64)), "weight_scale": (F32, ()), "input_scale": (F32, ()),
    },
    "compressed_fp8_tensor": {
        "weight": (F8, (328, 64)), "weight_scale": (F32, (1,)), "input_scale": (F32, (1,)),
    },
    "compressed_fp8_channel": {"weight": (F8, (328, 64)), "weight_scale": (F32, (328, 1))},
    "compressed_fp8_block": {"weight": (F8, (328, 64)), "weight_scale": (F32, (3, 1))},
    "compressed_int8": {"weight": (I8, (328, 64)), "weight_scale": (F32, (328, 1))},
    "compressed_w4a16": PACKED,
    "compressed_w4a16_asymmetric": PACKED | {"weight_zero_point": (I32, (41, 4))},
    "compressed_w4a16_actorder": PACKED | {"weight_g_idx": (I32, (64,))},
    "compressed_nvfp4": {
        "weight_packed": (U8, (328, 32)), "weight_scale": (F8, (328, 4)),
        "weight_global_scale": (F32, (1,)), "input_global_scale": (F32, (1,)),
    },
    "gptq": GPTQ,
    "gptq_v2": GPTQ,
    "gptq_act_order": GPTQ,
    "gptq_8bit": GPTQ | {"qweight": (I32, (16, 328)), "qzeros": (I32, (4, 82))},
    "awq": {"qweight": (I32, (64, 41)), "qzeros": (I32, (4, 41)), "scales": (F16, (4, 328))},
}  # fmt: skip


@pytest.mark.parametrize("format", FORMATS)
def test_a_linears_tensors_are_those_of_the_format(make: Make, format: str) -> None:
    parts = make("nemotron_h", format).stored()["backbone.layers.0.mixer.in_proj"]
    assert {name: (t.dtype, tuple(t.shape)) for name, t in parts.items()} == LAYOUTS[format]


@pytest.mark.parametrize("format", ["gptq_act_order", "compressed_w4a16_actorder"])
def test_groups_in_the_order_of_activations_are_of_any_columns(make: Make, format: str) -> None:
    parts = make("nemotron_h", format).stored()["backbone.layers.0.mixer.out_proj"]
    groups = (parts["g_idx"] if "g_idx" in parts else parts["weight_g_idx"]).tolist()
    assert groups != sorted(groups)
    assert [groups.count(group) for group in range(8)] == [16] * 8


@A_THIRD
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("family", usually(("qwen3_5_moe",), FAMILIES))
def test_what_is_left_is_what_the_config_leaves(make: Make, family: str, format: str) -> None:
    folders = make(family, format)
    config, stored = folders.config(), folders.stored()
    source, plain = folders.weights(folders.source), read(folders.quantized)
    for module, weight in source.items():
        if "embed" not in module:
            assert leaves(config, module) == (module not in stored), module
        if module not in stored:
            assert torch.equal(plain[f"{module}.weight"], weight)
    left = {module.rsplit(".", 1)[-1] for module in source if module not in stored}
    assert left <= {
        "lm_head", "gate", "layer", "shared_expert_gate", "in_proj_a", "in_proj_b", "in_proj_ba",
        "embed_tokens", "embeddings", "fc1_latent_proj", "fc2_latent_proj",
    }  # fmt: skip


def leaves(config: dict[str, Any], module: str) -> bool:
    if "quantized_layers" in config:
        return re.sub(r"(mlp\.experts)\..*", r"\1", module) not in config["quantized_layers"]
    if "dynamic" in config:
        patterns = [name.removeprefix("-:") for name in config["dynamic"]]
        return module == "lm_head" or any(re.match(pattern, module) for pattern in patterns)
    names = next(
        config[key]
        for key in ("ignore", "modules_to_not_convert", "ignored_layers")
        if key in config
    )
    return any(
        re.match(name[3:], module) if name.startswith("re:") else fnmatchcase(module, name)
        for name in names
    )


def test_nvidias_mixed_files_name_experts_as_theirs_do(make: Make) -> None:
    qwen = make("qwen3_5_moe", "modelopt_mixed")
    layers = qwen.config()["quantized_layers"]
    prefix, four_bits = "model.layers.1.", {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    assert {name.removeprefix(prefix): layers[name] for name in layers if prefix in name} == {
        "mlp.experts": four_bits,
        **{f"mlp.shared_expert.{name}_proj": four_bits for name in ("gate", "up", "down")},
        **{f"self_attn.{name}_proj": {"quant_algo": "FP8"} for name in "qkvo"},
    }
    assert layers["lm_head"] == four_bits
    assert "model.layers.0.linear_attn.in_proj_a" not in layers
    assert qwen.stored()[prefix + "mlp.experts.3.up_proj"]["weight"].dtype == torch.uint8
    nemotron = make("nemotron_h_moe", "modelopt_mixed").config()["quantized_layers"]
    assert nemotron["backbone.layers.1.mixer.experts.3.up_proj"] == four_bits
    assert "backbone.layers.1.mixer.fc1_latent_proj" not in nemotron


def test_modelopts_older_files_speak_in_a_file_of_their_own(make: Make) -> None:
    folders = make("nemotron_h_moe", "modelopt_nvfp4", only_hf_quant_config=True, kv=True)
    assert "quantization_config" not in json.loads((folders.quantized / "config.json").read_text())
    quantization = json.loads((folders.quantized / "hf_quant_config.json").read_text())
    assert quantization["quantization"] == {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head", "*.gate", "*conv1d", "mtp*"],
    }


def test_keys_and_values_have_scales_where_each_format_puts_them(make: Make) -> None:
    modelopt = read(make("qwen3_next", "modelopt_fp8", kv=True).quantized)
    assert float(modelopt["model.layers.1.self_attn.k_proj.k_scale"]) == KEY_SCALE
    assert float(modelopt["model.layers.1.self_attn.v_proj.v_scale"]) == pytest.approx(VALUE_SCALE)
    compressed = make("nemotron_h", "compressed_fp8_channel", kv=True)
    scales = {name: t for name, t in read(compressed.quantized).items() if "_scale" in name[-8:]}
    assert scales["backbone.layers.2.mixer.k_scale"].tolist() == [KEY_SCALE]
    assert scales["backbone.layers.2.mixer.v_scale"].shape == (1,)
    assert compressed.config()["kv_cache_scheme"]["num_bits"] == 8
    with pytest.raises(ValueError, match="gptq has no place for the scales of keys and values"):
        make("nemotron_h", "gptq", kv=True)


def test_experts_that_are_saved_as_one_tensor_become_linears(make: Make, tmp_path: Path) -> None:
    granite = make("granite_moe_hybrid", "modelopt_fp8")
    before, after = read(granite.source), granite.stored()
    whole = before["model.layers.2.block_sparse_moe.input_linear.weight"]
    parts = after["model.layers.2.block_sparse_moe.experts.5.up_proj"]
    assert parts["weight"].shape == (32, 64)
    assert float(parts["weight_scale"]) == pytest.approx(float(whole[5, 32:].abs().max()) / 448)
    assert not any("input_linear" in name and "moe" in name for name in after)
    # As transformers holds them: the same linears, however they were saved.
    qwen, stacked = make("qwen3_next", "awq"), tmp_path / "stacked"
    model = AutoModelForCausalLM.from_pretrained(qwen.source)
    model.save_pretrained(stacked, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in read(stacked)
    write(stacked, "awq", tmp_path / "quantized", tmp_path / "oracle")
    again, expected = read(tmp_path / "quantized"), read(qwen.quantized)
    assert again.keys() == expected.keys()
    assert all(torch.equal(again[name], expected[name]) for name in again)
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "oracle", output_loading_info=True)
    assert not any(report.values()), report


def test_compressed_tensors_scales_have_the_sources_dtype(make: Make, tmp_path: Path) -> None:
    """Which is bfloat16 in what people download."""
    source = make("lfm2", "compressed_w4a16").source
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "source")
    assert json.loads((tmp_path / "source" / "config.json").read_text())["dtype"] == "bfloat16"
    for format in ("compressed_w4a16", "compressed_fp8_channel", "modelopt_fp8", "gptq"):
        folders = Folders(tmp_path / "source", tmp_path / format, tmp_path / f"{format}-oracle")
        write(folders.source, format, folders.quantized, folders.oracle)
        parts = folders.stored()["model.layers.0.conv.in_proj"]
        scale = parts["scales"] if format == "gptq" else parts["weight_scale"]
        expected = {"modelopt_fp8": torch.float32, "gptq": torch.float16}
        assert scale.dtype == expected.get(format, torch.bfloat16)
        assert read(folders.quantized)["lm_head.weight"].dtype == torch.bfloat16
        assert {tensor.dtype for tensor in read(folders.oracle).values()} == {torch.float32}
        assert AutoModelForCausalLM.from_pretrained(folders.oracle).dtype == torch.float32
        before, after = folders.weights(folders.source), folders.weights(folders.oracle)
        size = before["model.layers.0.conv.in_proj"].float()
        error = (after["model.layers.0.conv.in_proj"] - size).std() / size.std()
        assert 0.005 < error < 0.15


# What libraries make of the folders.


@pytest.mark.parametrize("family", usually(("nemotron_h", "qwen3_5_moe"), FAMILIES[:5]))
def test_transformers_reads_the_same_from_fp8_blocks(
    make: Make, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that divide every weight: transformers spreads the scales of ragged ones evenly."""
    # It asks for a library that it does not use here.
    quantizer = "transformers.quantizers.quantizer_finegrained_fp8"
    monkeypatch.setattr(f"{quantizer}.is_accelerate_available", lambda: True)
    folders = make(family, "fp8_block", block=(8, 16))
    config = FineGrainedFP8Config(dequantize=True, weight_block_size=(8, 16))
    same_weights(folders, config)


@pytest.mark.parametrize("family", usually(("nemotron_h",), ("nemotron_h", "lfm2", "falcon_h1")))
@pytest.mark.parametrize("format", [f for f in FORMATS if f.startswith("compressed")])
def test_transformers_decompresses_the_same(make: Make, family: str, format: str) -> None:
    """Families without experts: of stacked ones it can read but few formats."""
    pytest.importorskip("compressed_tensors")
    if format == "compressed_w4a16_actorder":
        pytest.skip("compressed-tensors no longer reads groups in the order of activations")
    same_weights(
        make(family, format),
        CompressedTensorsConfig(dequantize=True),
        # It unpacks these to bfloat16.
        tolerance=2**-7 if format == "compressed_nvfp4" else 0,
    )


def same_weights(folders: Folders, config: Any, tolerance: float = 0) -> None:
    actual = AutoModelForCausalLM.from_pretrained(folders.quantized, quantization_config=config)
    expected = AutoModelForCausalLM.from_pretrained(folders.oracle).state_dict()
    found = actual.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name].float(), tensor, rtol=tolerance, atol=0)


@pytest.mark.parametrize("family", usually(("qwen3_5_moe",), FAMILIES))
@pytest.mark.parametrize(
    "format", [f for f in FORMATS if f.startswith(("compressed", "awq", "modelopt_nvfp4"))]
)
def test_compressed_tensors_decompresses_the_same(make: Make, family: str, format: str) -> None:
    """Each linear by itself, experts too; it converts AWQ's and ModelOpt's to its own."""
    pytest.importorskip("compressed_tensors")
    if format == "compressed_w4a16_actorder":
        pytest.skip("compressed-tensors no longer reads groups in the order of activations")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.entrypoints.convert import AutoAWQConverter, ModelOptNvfp4Converter
    from compressed_tensors.quantization import QuantizationConfig

    folders = make(family, format)
    config, oracle = folders.config(), folders.weights(folders.oracle)
    tensors = {
        f"{m}.{last}": t for m, parts in folders.stored().items() for last, t in parts.items()
    }
    if format.startswith("compressed"):
        whole = QuantizationConfig.model_validate(config)
    else:
        converter = (
            AutoAWQConverter.from_autoawq_config(config)
            if format == "awq"
            else ModelOptNvfp4Converter(targets=["re:.*"])
        )
        tensors = converter.process(tensors)
        whole = converter.update_config(None)
    (scheme,) = whole.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(whole.format)
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        modules.setdefault(module, {})[last] = tensor
    for module, parts in modules.items():
        weight = compressor.decompress(parts, scheme)["weight"]
        if "nvfp4" in format:  # unpacked to bfloat16
            torch.testing.assert_close(weight.float(), oracle[module], rtol=2**-7, atol=0)
        else:
            assert torch.equal(weight, oracle[module].to(weight.dtype)), module
