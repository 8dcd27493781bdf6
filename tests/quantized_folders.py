"""Quantised checkpoints as people download them, made from a tiny one, each with its oracle: the
same model in float32 with what the stored numbers mean.

Written from the formats' descriptions alone: nothing here is shared with the engine.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import quantized_weights as weights
from tests.quantized_configs import CONFIGS, Made, Options, in_4_bits
from tests.quantized_weights import Stored

# Modules that stay in 16 bits: what they are called at the end of their names.
LEAVE = (
    "lm_head", "*.gate", "*.router.layer", "*.router", "*.shared_expert_gate", "*conv1d", "*.conv",
    "*embed*", "*norm*", "*.in_proj_a", "*.in_proj_b", "*.in_proj_ba", "*.dt_proj", "*.x_proj",
    "*.attn_sink_proj",
)  # fmt: skip
# In NVIDIA's mixed files lm_head is quantised too, and Nemotron's latent projections are not.
_LEFT_IN_MIXED = (*LEAVE[1:], "*_latent_proj")
# Experts that are saved as one tensor, and the linears of each: rows of it, one after the other.
_STACKED = {
    "block_sparse_moe.input_linear.weight": ("block_sparse_moe.experts", ("gate_proj", "up_proj")),
    "block_sparse_moe.output_linear.weight": ("block_sparse_moe.experts", ("down_proj",)),
    "experts.gate_up_proj": ("experts", ("gate_proj", "up_proj")),
    "experts.gate_proj": ("experts", ("gate_proj",)),
    "experts.up_proj": ("experts", ("up_proj",)),
    "experts.down_proj": ("experts", ("down_proj",)),
}
_LAST = ("down_proj", "w2", "output_linear", "o_proj", "out_proj")
# A key or value of FP8 times these is what it means.
KEY_SCALE, VALUE_SCALE = 0.03125, 0.015


# Of a module's name, its weight and the options.
Store = Callable[[str, Tensor, Options], Stored]


def input_amax(module: str) -> float:
    """What a static scale of this linear takes for its largest input. Linears that share their
    input share it, those that come last have another. A few inputs of some models are larger: they
    saturate, as with any calibration."""
    return 12.0 if module.rsplit(".", 1)[-1] in _LAST else 8.0


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
    tensors = read(source)
    dtype = next(tensor.dtype for tensor in tensors.values() if tensor.ndim == 2)
    options = Options(block, group, kv, dtype)
    oracle = {name: tensor.float().clone() for name, tensor in tensors.items()}
    stored: dict[str, Tensor] = {}
    kept, done = [], []
    for name, tensor in tensors.items():
        parts = list(linears(name, oracle[name]))
        if not parts:
            stored[name] = tensor
        for module, weight in parts:
            if weight.ndim != 2 or any(fnmatchcase(module, pattern) for pattern in leave):
                kept.append(module)
                stored[f"{module}.weight"] = weight.to(tensor.dtype)
                continue
            made = _STORE[format](module, weight, options)
            stored |= {f"{module}.{last}": part for last, part in made.tensors.items()}
            weight.copy_(made.meaning)
            done.append(module)
    config, hf_quant_config = CONFIGS[family](Made(format, done, kept, leave, options))
    if kv:
        stored |= _kv_scales(done + kept, of_attention=family == "compressed")
    _save(source, dequantized, oracle, {"dtype": "float32"})
    if only_hf_quant_config:
        _save(source, quantized, stored, {})
    else:
        _save(source, quantized, stored, {"quantization_config": config})
    if hf_quant_config is not None:
        (quantized / "hf_quant_config.json").write_text(json.dumps(hf_quant_config, indent=4))


def read(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _save(source: Path, folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.name != "model.safetensors.index.json":
            shutil.copy(file, folder)
    whole = json.loads((source / "config.json").read_text())
    if "dtype" in config:
        whole.pop("torch_dtype", None)
    whole |= config
    (folder / "config.json").write_text(json.dumps(whole, indent=2))
    contiguous = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", {"format": "pt"})


def linears(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The modules whose weights a tensor holds, each with its weight, a view of the tensor."""
    for ending, (module, parts) in _STACKED.items():
        if tensor.ndim == 3 and name.endswith(ending):
            for expert, rows in enumerate(tensor):
                for part, weight in zip(parts, rows.chunk(len(parts)), strict=True):
                    yield f"{name.removesuffix(ending)}{module}.{expert}.{part}", weight
            return
    if name.endswith(".weight"):
        yield name.removesuffix(".weight"), tensor


def stack_experts(quantized: Path, stacked: Path) -> None:
    """The same weights with all experts of a layer in one tensor, the reverse of `linears`."""
    tensors = {}
    experts = defaultdict[tuple[str, str], dict[tuple[int, str], Tensor]](dict)
    for name, tensor in read(quantized).items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.(\w+)", name)
        if match is None:
            tensors[name] = tensor
        elif match[4] != "weight_shape":
            experts[match[1], match[4]][int(match[2]), match[3]] = tensor
    for (found, last), singles in experts.items():
        count = 1 + max(expert for expert, _ in singles)
        left = {part for _, part in singles}
        for ending, (module, parts) in _STACKED.items():
            if found.endswith(module) and left.issuperset(parts):
                left.difference_update(parts)
                each = [torch.cat([singles[i, part] for part in parts]) for i in range(count)]
                name = found.removesuffix(module) + ending + last.removeprefix("weight")
                tensors[name] = torch.stack(each)
    _save(quantized, stacked, tensors, {})


def _kv_scales(modules: list[str], *, of_attention: bool) -> dict[str, Tensor]:
    """`of_attention`: compressed-tensors' are the attention's, ModelOpt's its projections'."""
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


def _fp8_tensor(*shape: int, static: bool) -> Store:
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
    if in_4_bits(module):
        return _modelopt_w4a16_nvfp4(module, weight, options)
    return _STORE["modelopt_fp8"](module, weight, options)


def _compressed_fp8(strategy: str) -> Store:
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


def _compressed_w4a16(*, symmetric: bool, shuffled: bool) -> Store:
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
) -> Store:
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


_STORE: dict[str, Store] = {
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
FORMATS = tuple(_STORE)
