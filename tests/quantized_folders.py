"""Quantised checkpoints as people download them, made from a tiny one, each with its oracle: the
same model in float32 with what the stored numbers mean.

Written from the formats' descriptions alone: nothing here is shared with the engine.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import quantized_weights as weights
from tests.quantized_weights import Stored

# Modules that stay in 16 bits: what they are called at the end of their names.
LEAVE = (
    "lm_head", "*.gate", "*.router.layer", "*.router", "*.shared_expert_gate", "*conv1d", "*.conv",
    "*embed*", "*norm*", "*.in_proj_a", "*.in_proj_b", "*.in_proj_ba", "*.dt_proj", "*.x_proj",
)  # fmt: skip
# In NVIDIA's mixed files lm_head is quantised too, and Nemotron's latent projections are not.
_LEFT_IN_MIXED = (*LEAVE[1:], "*_latent_proj")
# Experts that are saved as one tensor, and the linears of each: rows of it, one after the other.
_STACKED = {
    "block_sparse_moe.input_linear.weight": ("block_sparse_moe.experts", ("gate_proj", "up_proj")),
    "block_sparse_moe.output_linear.weight": ("block_sparse_moe.experts", ("down_proj",)),
    "experts.gate_up_proj": ("experts", ("gate_proj", "up_proj")),
    "experts.up_proj": ("experts", ("up_proj",)),
    "experts.down_proj": ("experts", ("down_proj",)),
}
_MLP = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "input_linear", "output_linear")
_LAST = ("down_proj", "w2", "output_linear", "o_proj", "out_proj")
# A key or value of FP8 times these is what it means.
KEY_SCALE, VALUE_SCALE = 0.03125, 0.015


@dataclass(frozen=True)
class Options:
    """`block`: rows and columns of a scale; `group`: columns of an integer's; `kv`: scales of keys
    and values too; `dtype`: the source's, which compressed-tensors' scales have."""

    block: tuple[int, int]
    group: int
    kv: bool
    dtype: torch.dtype


def input_amax(module: str) -> float:
    """The largest input that a static scale of this linear has room for. Linears that share their
    input share it, those that come last have another one than those before."""
    return 24.0 if module.rsplit(".", 1)[-1] in _LAST else 8.0


def write(
    source: Path,
    format: str,
    quantized: Path,
    dequantized: Path,
    *,
    leave: Sequence[str] | None = None,
    block: tuple[int, int] = (128, 128),
    group: int = 16,
    kv: bool = False,
    only_hf_quant_config: bool = False,
) -> None:
    """Quantise the model in `source` to `format`, one of FORMATS.

    `leave`: patterns of the modules that stay as they are, else LEAVE. `kv`: keys and values get
    scales where the format has a place for them. `only_hf_quant_config`: ModelOpt's older files,
    whose config.json says nothing. The folder `dequantized` is what transformers loads as the
    oracle, its tensors laid out as the source's.
    """
    family = format.split("_")[0]
    if kv and family not in ("modelopt", "compressed"):
        raise ValueError(f"{format} has no place for the scales of keys and values")
    if leave is None:
        leave = _LEFT_IN_MIXED if format == "modelopt_mixed" else LEAVE
    tensors = _read(source)
    dtype = next(tensor.dtype for tensor in tensors.values() if tensor.ndim == 2)
    options = Options(block, group, kv, dtype)
    oracle = {name: tensor.float().clone() for name, tensor in tensors.items()}
    stored: dict[str, Tensor] = {}
    kept, done = [], []
    for name, tensor in tensors.items():
        parts = list(_linears(name, oracle[name]))
        if not parts:
            stored[name] = tensor
        for module, weight in parts:
            if weight.ndim != 2 or any(fnmatchcase(module, pattern) for pattern in leave):
                kept.append(module)
                stored[f"{module}.weight"] = weight.to(tensor.dtype)
                continue
            made = FORMATS[format](module, weight, options)
            stored |= {f"{module}.{last}": part for last, part in made.tensors.items()}
            weight.copy_(made.meaning)
            done.append(module)
    config, hf_quant_config = _CONFIGS[family](format, done, kept, leave, options)
    if kv:
        stored |= _kv_scales(done, of_attention=family == "compressed")
    _save(source, dequantized, oracle, {"dtype": "float32"})
    if only_hf_quant_config:
        _save(source, quantized, stored, {})
    else:
        _save(source, quantized, stored, {"quantization_config": config})
    if hf_quant_config is not None:
        (quantized / "hf_quant_config.json").write_text(json.dumps(hf_quant_config, indent=4))


def _read(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _save(source: Path, folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.name != "model.safetensors.index.json":
            shutil.copy(file, folder)
    whole = json.loads((source / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(whole, indent=2))
    contiguous = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", {"format": "pt"})


def _linears(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The modules whose weights a tensor holds, each with its weight, a view of the tensor."""
    for ending, (module, parts) in _STACKED.items():
        if tensor.ndim == 3 and name.endswith(ending):
            for expert, rows in enumerate(tensor):
                for part, weight in zip(parts, rows.chunk(len(parts)), strict=True):
                    yield f"{name.removesuffix(ending)}{module}.{expert}.{part}", weight
            return
    if name.endswith(".weight"):
        yield name.removesuffix(".weight"), tensor


def _kv_scales(modules: list[str], *, of_attention: bool) -> dict[str, Tensor]:
    """`of_attention`: compressed-tensors' are the attention's [1], ModelOpt's its projections' []."""
    scales = {}
    for module in modules:
        attention, _, last = module.rpartition(".")
        for projection, name, value in (
            ("k_proj", "k_scale", KEY_SCALE),
            ("v_proj", "v_scale", VALUE_SCALE),
        ):
            if last == projection and of_attention:
                scales[f"{attention}.{name}"] = torch.tensor([value])
            elif last == projection:
                scales[f"{module}.{name}"] = torch.tensor(value)
    return scales


# What is stored for a linear's weight, by format.


def _fp8_block(module: str, weight: Tensor, options: Options) -> Stored:
    made = weights.fp8(weight, *options.block)
    return Stored({"weight": made.numbers, "weight_scale_inv": made.scale}, made.meaning)


def _fp8_tensor(*shape: int, static: bool) -> Callable[[str, Tensor, Options], Stored]:
    def store(module: str, weight: Tensor, options: Options) -> Stored:
        made = weights.fp8(weight, *weight.shape)
        tensors = {"weight": made.numbers, "weight_scale": made.scale.reshape(shape)}
        if static:
            tensors["input_scale"] = torch.full(shape, input_amax(module) / weights.E4M3_MAX)
        return Stored(tensors, made.meaning)

    return store


def _modelopt_fp8_channel(module: str, weight: Tensor, options: Options) -> Stored:
    made = weights.fp8(weight, 1, weight.shape[1])
    return Stored({"weight": made.numbers, "weight_scale": made.scale[:, 0]}, made.meaning)


def _modelopt_nvfp4(module: str, weight: Tensor, options: Options) -> Stored:
    made = _modelopt_w4a16_nvfp4(module, weight, options)
    input_scale = torch.tensor(input_amax(module) / (6 * weights.E4M3_MAX))
    return Stored(made.tensors | {"input_scale": input_scale}, made.meaning)


def _modelopt_w4a16_nvfp4(module: str, weight: Tensor, options: Options) -> Stored:
    packed, scale, whole, meaning = weights.nvfp4(weight)
    return Stored({"weight": packed, "weight_scale": scale, "weight_scale_2": whole}, meaning)


def _modelopt_mixed(module: str, weight: Tensor, options: Options) -> Stored:
    if _in_4_bits(module):
        return _modelopt_w4a16_nvfp4(module, weight, options)
    return FORMATS["modelopt_fp8"](module, weight, options)


def _in_4_bits(module: str) -> bool:
    return module == "lm_head" or module.rsplit(".", 1)[-1] in _MLP


def _compressed_fp8(strategy: str) -> Callable[[str, Tensor, Options], Stored]:
    def store(module: str, weight: Tensor, options: Options) -> Stored:
        blocks = {"tensor": tuple(weight.shape), "channel": (1, weight.shape[1])}
        rows, columns = blocks.get(strategy, options.block)
        made = weights.fp8(weight, rows, columns, options.dtype)
        tensors = {"weight": made.numbers, "weight_scale": made.scale}
        if strategy == "tensor":
            tensors["weight_scale"] = made.scale.reshape(1)
            input_scale = input_amax(module) / weights.E4M3_MAX
            tensors["input_scale"] = torch.tensor([input_scale], dtype=options.dtype)
        return Stored(tensors, made.meaning)

    return store


def _compressed_int8(module: str, weight: Tensor, options: Options) -> Stored:
    made = weights.int8(weight, options.dtype)
    return Stored({"weight": made.numbers, "weight_scale": made.scale}, made.meaning)


def _compressed_w4a16(
    *, symmetric: bool, shuffled: bool
) -> Callable[[str, Tensor, Options], Stored]:
    def store(module: str, weight: Tensor, options: Options) -> Stored:
        g_idx = weights.shuffled_groups(weight.shape[1], options.group) if shuffled else None
        made = weights.integers(
            weight, 4, options.group, options.dtype, symmetric=symmetric, g_idx=g_idx
        )
        tensors = {
            "weight_packed": weights.pack(made.numbers, 4),
            "weight_scale": made.scale,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = weights.pack(made.zero.T, 4).T
        if shuffled:
            tensors["weight_g_idx"] = made.g_idx.to(torch.int32)
        return Stored(tensors, made.meaning)

    return store


def _compressed_nvfp4(module: str, weight: Tensor, options: Options) -> Stored:
    packed, scale, whole, meaning = weights.nvfp4(weight, reciprocal=True)
    tensors = {
        "weight_packed": packed,
        "weight_scale": scale,
        "weight_global_scale": whole.reshape(1),
        "input_global_scale": torch.tensor([6 * weights.E4M3_MAX / input_amax(module)]),
    }
    return Stored(tensors, meaning)


def _gptq(
    bits: int = 4, *, symmetric: bool = True, shuffled: bool = False, first_version: bool = True
) -> Callable[[str, Tensor, Options], Stored]:
    def store(module: str, weight: Tensor, options: Options) -> Stored:
        g_idx = weights.shuffled_groups(weight.shape[1], options.group) if shuffled else None
        made = weights.integers(
            weight, bits, options.group, torch.float16, symmetric=symmetric, g_idx=g_idx
        )
        return weights.gptq(made, bits, first_version=first_version)

    return store


def _awq(module: str, weight: Tensor, options: Options) -> Stored:
    made = weights.integers(weight, 4, options.group, torch.float16, symmetric=False)
    return weights.awq(made)


FORMATS: dict[str, Callable[[str, Tensor, Options], Stored]] = {
    "fp8_block": _fp8_block,
    "fp8_tensor_static": _fp8_tensor(1, static=True),
    "fp8_tensor_dynamic": _fp8_tensor(1, static=False),
    "modelopt_fp8": _fp8_tensor(static=True),
    "modelopt_fp8_channel": _modelopt_fp8_channel,
    "modelopt_nvfp4": _modelopt_nvfp4,
    "modelopt_mixed": _modelopt_mixed,
    "compressed_fp8_tensor": _compressed_fp8("tensor"),
    "compressed_fp8_channel": _compressed_fp8("channel"),
    "compressed_fp8_block": _compressed_fp8("block"),
    "compressed_int8": _compressed_int8,
    "compressed_w4a16": _compressed_w4a16(symmetric=True, shuffled=False),
    "compressed_w4a16_asymmetric": _compressed_w4a16(symmetric=False, shuffled=False),
    "compressed_w4a16_actorder": _compressed_w4a16(symmetric=True, shuffled=True),
    "compressed_nvfp4": _compressed_nvfp4,
    "gptq": _gptq(),
    "gptq_v2": _gptq(symmetric=False, first_version=False),
    "gptq_act_order": _gptq(symmetric=False, shuffled=True),
    "gptq_8bit": _gptq(8),
    "awq": _awq,
}


# What config.json says of them, and ModelOpt's hf_quant_config.json.

Configs = tuple[dict[str, Any], dict[str, Any] | None]


def _fp8_config(
    format: str, done: list[str], kept: list[str], leave: Sequence[str], options: Options
) -> Configs:
    """Qwen names every module that is left, norms too; AutoFP8 calls the list ignored_layers."""
    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if format == "fp8_block":
        left = [module for module in kept if "embed" not in module]
        config |= {"fmt": "e4m3", "weight_block_size": list(options.block)}
        return config | {"modules_to_not_convert": left}, None
    config["activation_scheme"] = format.removeprefix("fp8_tensor_")
    return config | {"ignored_layers": _linears_left(kept)}, None


def _modelopt_config(
    format: str, done: list[str], kept: list[str], leave: Sequence[str], options: Options
) -> Configs:
    producer = {"name": "modelopt", "version": "0.44.0"}
    algorithm = {
        "modelopt_fp8": "FP8",
        "modelopt_fp8_channel": "FP8_PER_CHANNEL_PER_TOKEN",
        "modelopt_nvfp4": "NVFP4",
        "modelopt_mixed": "MIXED_PRECISION",
    }[format]
    ignore = [p for p in leave if any(fnmatchcase(m, p) for m in _linears_left(kept))] + ["mtp*"]
    old: dict[str, Any] = {"quant_algo": algorithm}
    old["kv_cache_quant_algo"] = "FP8" if options.kv else None
    new: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ignore}
    new["producer"] = producer
    if format == "modelopt_mixed":
        layers = _mixed_layers(done)
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
        if options.kv:
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


def _mixed_layers(done: list[str]) -> dict[str, dict[str, Any]]:
    """Qwen's experts are one entry a layer, Nemotron's one each."""
    layers: dict[str, dict[str, Any]] = {}
    for module in done:
        before, experts, _ = module.partition(".mlp.experts")
        in_4_bits = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
        layers[before + experts] = in_4_bits if _in_4_bits(module) else {"quant_algo": "FP8"}
    return layers


def _compressed_config(
    format: str, done: list[str], kept: list[str], leave: Sequence[str], options: Options
) -> Configs:
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    int4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": options.group}
    int4 |= {"symmetric": format != "compressed_w4a16_asymmetric", "dynamic": False}
    nvfp4 = fp8 | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
    dynamic = {"strategy": "token", "dynamic": True}
    of_group = {"strategy": "group", "dynamic": True, "group_size": options.block[1]}
    name, scheme, activations = {
        "fp8_tensor": ("float", fp8 | {"strategy": "tensor"}, fp8 | {"strategy": "tensor"}),
        "fp8_channel": ("float", fp8 | {"strategy": "channel"}, fp8 | dynamic),
        "fp8_block": (
            "float",
            fp8 | {"strategy": "block", "block_structure": list(options.block)},
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
    }[format.removeprefix("compressed_")]
    group = {
        "targets": ["Linear"],
        "weights": scheme,
        "input_activations": activations,
        "output_activations": None,
    }
    patterns = [p for p in leave if any(fnmatchcase(m, p) for m in _linears_left(kept))]
    return {
        "quant_method": "compressed-tensors",
        "format": f"{name}-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [f"re:{_regex(p)}" if "*" in p else p for p in patterns],
        "kv_cache_scheme": fp8 | {"strategy": "tensor"} if options.kv else None,
    }, None


def _gptq_config(
    format: str, done: list[str], kept: list[str], leave: Sequence[str], options: Options
) -> Configs:
    return {
        "quant_method": "gptq",
        "bits": 8 if format == "gptq_8bit" else 4,
        "group_size": options.group,
        "desc_act": format == "gptq_act_order",
        "sym": format in ("gptq", "gptq_8bit"),
        "dynamic": {
            f"-:{_regex(p)}": {} for p in leave if any(fnmatchcase(m, p) for m in kept if "." in m)
        },
        "checkpoint_format": "gptq_v2" if format == "gptq_v2" else "gptq",
        "lm_head": "lm_head" in done,
    }, None


def _awq_config(
    format: str, done: list[str], kept: list[str], leave: Sequence[str], options: Options
) -> Configs:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": options.group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": _linears_left(kept),
    }, None


def _linears_left(kept: list[str]) -> list[str]:
    return [module for module in kept if "norm" not in module and "embed" not in module]


def _regex(pattern: str) -> str:
    return pattern.replace(".", r"\.").replace("*", ".*") + "$"


_CONFIGS: dict[str, Callable[..., Configs]] = {
    "fp8": _fp8_config,
    "modelopt": _modelopt_config,
    "compressed": _compressed_config,
    "gptq": _gptq_config,
    "awq": _awq_config,
}
