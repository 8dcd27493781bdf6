"""What quantised checkpoints of each format say about themselves: tests/quantized_folders.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

# config.json's quantization_config, and ModelOpt's hf_quant_config.json.
Configs = tuple[dict[str, Any], dict[str, Any] | None]
_MLP = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "input_linear", "output_linear")


@dataclass(frozen=True)
class Options:
    """`block`: rows and columns of a scale; `group`: columns of an integer's; `kv`: scales of keys
    and values too; `dtype`: the source's, which compressed-tensors' scales have."""

    block: tuple[int, int]
    group: int
    kv: bool
    dtype: torch.dtype


class Made(NamedTuple):
    """What was quantised, and how."""

    format: str
    quantized: list[str]  # modules
    left: list[str]
    leave: Sequence[str]  # their patterns
    options: Options


def in_4_bits(module: str) -> bool:
    """Of NVIDIA's mixed files."""
    return module == "lm_head" or module.rsplit(".", 1)[-1] in _MLP


def _fp8_config(made: Made) -> Configs:
    """Qwen names every module that is left, norms too; AutoFP8 calls the list ignored_layers."""
    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if made.format == "fp8_block":
        left = [module for module in made.left if "embed" not in module]
        config |= {"fmt": "e4m3", "weight_block_size": list(made.options.block)}
        return config | {"modules_to_not_convert": left}, None
    config["activation_scheme"] = made.format.removeprefix("fp8_tensor_")
    return config | {"ignored_layers": _linears_left(made)}, None


def _modelopt_config(made: Made) -> Configs:
    producer = {"name": "modelopt", "version": "0.44.0"}
    algorithm = {
        "modelopt_fp8": "FP8",
        "modelopt_fp8_channel": "FP8_PER_CHANNEL_PER_TOKEN",
        "modelopt_nvfp4": "NVFP4",
        "modelopt_mixed": "MIXED_PRECISION",
    }[made.format]
    ignore = _patterns_left(made) + ["mtp*"]
    old: dict[str, Any] = {"quant_algo": algorithm}
    old["kv_cache_quant_algo"] = "FP8" if made.options.kv else None
    new: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ignore}
    new["producer"] = producer
    if made.format == "modelopt_mixed":
        layers = _mixed_layers(made.quantized)
        old["quantized_layers"] = new["quantized_layers"] = layers
        groups: dict[str, list[str]] = {}
        for name, layer in layers.items():
            groups.setdefault(layer["quant_algo"], []).append(name)
        new["config_groups"] = {
            f"group_{number}": _modelopt_group(name) | {"targets": sorted(modules)}
            for number, (name, modules) in enumerate(groups.items())
        }
    else:
        new["config_groups"] = {"group_0": _modelopt_group(algorithm) | {"targets": ["Linear"]}}
        if algorithm == "NVFP4":
            old["group_size"] = 16
        if made.options.kv:
            new["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    old["exclude_modules"] = ignore
    return new, {"producer": producer, "quantization": old}


def _modelopt_group(algorithm: str) -> dict[str, Any]:
    if algorithm.endswith("NVFP4"):
        scheme = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        weight_only = {"weights": scheme}
        return weight_only if "W4A16" in algorithm else {"input_activations": scheme, **weight_only}
    scheme = {"dynamic": False, "num_bits": 8, "type": "float"}
    channels = {"strategy": "channel"} if "CHANNEL" in algorithm else {}
    return {"input_activations": scheme, "weights": scheme | channels}


def _mixed_layers(quantized: list[str]) -> dict[str, dict[str, Any]]:
    """Qwen's experts are one entry a layer, Nemotron's one each."""
    layers: dict[str, dict[str, Any]] = {}
    for module in quantized:
        before, experts, _ = module.partition(".mlp.experts")
        if in_4_bits(module):
            layers[before + experts] = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
        else:
            layers[module] = {"quant_algo": "FP8"}
    return layers


def _compressed_config(made: Made) -> Configs:
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    int4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": made.options.group}
    int4 |= {"symmetric": made.format != "compressed_w4a16_asymmetric", "dynamic": False}
    nvfp4 = fp8 | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
    dynamic = {"strategy": "token", "dynamic": True}
    of_group = {"strategy": "group", "dynamic": True, "group_size": made.options.block[1]}
    name, scheme, activations = {
        "fp8_tensor": ("float", fp8 | {"strategy": "tensor"}, fp8 | {"strategy": "tensor"}),
        "fp8_channel": ("float", fp8 | {"strategy": "channel"}, fp8 | dynamic),
        "fp8_block": (
            "float",
            fp8 | {"strategy": "block", "block_structure": list(made.options.block)},
            fp8 | of_group,
        ),
        "int8": (
            "int",
            fp8 | {"type": "int", "strategy": "channel"},
            fp8 | {"type": "int"} | dynamic,
        ),
        "w4a16": ("pack", int4, None),
        "w4a16_asymmetric": ("pack", int4, None),
        "w4a16_actorder": ("pack", int4 | {"actorder": "group"}, None),
        "nvfp4": ("nvfp4-pack", nvfp4, nvfp4 | {"dynamic": "local"}),
    }[made.format.removeprefix("compressed_")]
    group = {
        "targets": ["Linear"],
        "weights": scheme,
        "input_activations": activations,
        "output_activations": None,
    }
    patterns = _patterns_left(made)
    return {
        "quant_method": "compressed-tensors",
        "format": f"{name}-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [f"re:{_regex(p)}" if "*" in p else p for p in patterns],
        "kv_cache_scheme": fp8 | {"strategy": "tensor"} if made.options.kv else None,
    }, None


def _gptq_config(made: Made) -> Configs:
    return {
        "quant_method": "gptq",
        "bits": 8 if made.format == "gptq_8bit" else 4,
        "group_size": made.options.group,
        "desc_act": made.format == "gptq_act_order",
        "sym": made.format in ("gptq", "gptq_8bit"),
        "dynamic": {
            f"-:{_regex(pattern)}": {} for pattern in _patterns_left(made) if pattern != "lm_head"
        },
        "checkpoint_format": "gptq_v2" if made.format == "gptq_v2" else "gptq",
        "lm_head": "lm_head" in made.quantized,
    }, None


def _awq_config(made: Made) -> Configs:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": made.options.group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": _linears_left(made),
    }, None


def _linears_left(made: Made) -> list[str]:
    return [module for module in made.left if "norm" not in module and "embed" not in module]


def _patterns_left(made: Made) -> list[str]:
    left = _linears_left(made)
    return [pattern for pattern in made.leave if any(fnmatchcase(name, pattern) for name in left)]


def _regex(pattern: str) -> str:
    return pattern.replace(".", r"\.").replace("*", ".*") + "$"


CONFIGS: dict[str, Callable[[Made], Configs]] = {
    "fp8": _fp8_config,
    "modelopt": _modelopt_config,
    "compressed": _compressed_config,
    "gptq": _gptq_config,
    "awq": _awq_config,
}
