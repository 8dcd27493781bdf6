"""A Hugging Face folder in 16 or 32 bits -> the same model as compressed-tensors stores it, rounded
to the nearest without calibration: what vLLM, transformers and the engine read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from convert.conversion import copy_description, make_folder, whole_tensor
from convert.shards import Shards
from megatron_hybrid import ConfigurationError
from megatron_hybrid.kernels.linear.formats import FP8_MAX, WeightFormat
from megatron_hybrid.layers.linear import LinearPart
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.models.checkpoints.weight_source import FolderSource, open_folder
from megatron_hybrid.models.checkpoints.weights import NEVER_ROUNDED
from megatron_hybrid.models.families.family import Location
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import initialize

SCHEMES = ("fp8", "w4a16")
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}


def quantize_folder(
    source: Path,
    target: Path,
    scheme: str,
    *,
    group_size: int = 128,
    max_shard_bytes: int = 5 << 30,
    progress: bool = True,
) -> None:
    """`scheme`: "fp8", a scale for each row and inputs rounded for each token while it runs, or
    "w4a16", symmetric 4 bits with a scale for `group_size` columns. The head, the embedding,
    routers, convolutions and what gates a recurrence stay as they are.

    Memory: a file of `max_shard_bytes`. Raises ConfigurationError for a folder that is quantised
    already or that nothing of can be, WeightsError for one that cannot be read.
    """
    folder = ModelFolder.open(source)
    if folder.is_megatron or folder.quantization is not None:
        raise ConfigurationError(f"{source} must be a Hugging Face folder in 16 or 32 bits.")
    make_folder(target)
    config = folder.config
    with open_folder(folder, config) as opened:
        linears = {
            name: (places, shape)
            for name, places, shape in _linears(folder, opened)
            if scheme != "w4a16" or not (shape[1] % group_size or shape[1] % 16)
        }
        if not linears:
            raise ConfigurationError(
                f"No layer of {source} has columns that --group-size {group_size} divides."
            )
        writer = Shards(target, max_shard_bytes)
        inside = {place.name for places, _ in linears.values() for place in places}
        left = []
        for name in tqdm(sorted(opened.names), unit="tensor", disable=not progress):
            if name in inside:
                continue
            own = opened.names[name]
            writer.add(own, whole_tensor(opened, Location(name)))
            if own.endswith(".weight") and len(opened.shape(name)) == 2:
                left.append(own.removesuffix(".weight"))
        for module, (places, shape) in tqdm(
            linears.items(), unit="layer", desc="rounding", disable=not progress
        ):
            weight = _part(opened, places[0], shape)
            for name, tensor in _stored(weight, scheme, group_size).items():
                writer.add(f"{module}.{name}", tensor)
        writer.end()
    _describe(folder, target, scheme, group_size, left)


def _linears(
    folder: ModelFolder, source: FolderSource
) -> Iterator[tuple[str, list[Location], tuple[int, int]]]:
    """By name, one by one where that is usual: where the weights are, and their shapes. Those of a
    shared layer may be in several places."""
    config = folder.config
    with torch.device("meta"):
        model = HybridModel(
            config, initialize(), config.dtype, config.dtype, torch.float32,
            mtp=config.mtp is not None and not config.mtp.unsupported,
        )  # fmt: skip
    for block, part in model.weight_parts():
        if not isinstance(part, LinearPart) or NEVER_ROUNDED.search(part.role):
            continue
        places = source.places(block, part.role)
        there = [place for place in places if place.name in source.names]
        if not there:
            continue
        rows, columns = part.shape
        single = next((place for place in places if place.index is None), there[0])
        if single.parts > 1:  # whole, as everybody has it
            there = [Location(place.name) for place in there]
            rows *= single.parts
        own = _own_name(single.name, there[0].name, source)
        yield own.removesuffix(".weight"), there, (rows, columns)


def _own_name(wanted: str, name: str, source: FolderSource) -> str:
    """The name of a weight in the spelling of the checkpoint, which has it in tensor `name`."""
    own = source.names[name]
    if wanted == name:
        return own
    common = []  # "model.layers.0.mlp", of which authors spell the beginning in other ways
    for ours, theirs in zip(wanted.split("."), name.split("."), strict=False):
        if ours != theirs:
            break
        common.append(ours)
    ends = (".".join(common[start:]) + "." for start in range(len(common)))
    end = next(end for end in ends if end in own)
    return own[: own.index(end)] + end + wanted.removeprefix(".".join(common) + ".")


def _part(source: FolderSource, place: Location, shape: tuple[int, int]) -> Tensor:
    rows = slice(place.part * shape[0], (place.part + 1) * shape[0])
    index = (rows, slice(0, shape[1]))
    return source.read(place.name, index if place.index is None else (place.index, *index))


def _stored(weight: Tensor, scheme: str, group_size: int) -> dict[str, Tensor]:
    """As compressed-tensors has it: "float-quantized" or "pack-quantized"."""
    is_fp8 = scheme == "fp8"
    format = WeightFormat("float8_e4m3fn") if is_fp8 else WeightFormat("uint4", 1, group_size)
    # Scales are stored in the weight's type, so codes are taken with what is stored.
    scale = format.quantize(weight).scale.to(weight.dtype)
    if is_fp8:
        codes = (weight.float() / scale.float()).clamp(-FP8_MAX, FP8_MAX)
        return {"weight": codes.to(torch.float8_e4m3fn), "weight_scale": scale}
    spread = scale.float().repeat_interleave(group_size, 1)
    codes = ((weight.float() / spread).round().clamp(-8, 7) + 8).to(torch.int32)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    words = (codes.unflatten(1, (-1, 8)) << shifts).sum(2, dtype=torch.int64)
    return {
        "weight_packed": words.to(torch.int32),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }


def _describe(
    folder: ModelFolder, target: Path, scheme: str, group_size: int, left: list[str]
) -> None:
    """config.json with how it was quantised, and everything else that is no weight."""
    assert folder.described is not None
    copy_description(folder, target)
    config = json.loads((folder.described / "config.json").read_text())
    group: dict[str, Any]
    if scheme == "fp8":
        format = "float-quantized"
        group = {
            "weights": {**_FLOAT8, "strategy": "channel", "dynamic": False},
            "input_activations": {**_FLOAT8, "strategy": "token", "dynamic": True},
        }
    else:
        format = "pack-quantized"
        weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
        group = {
            "weights": {**weights, "group_size": group_size, "dynamic": False},
            "input_activations": None,
        }
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "output_activations": None, **group}},
        "ignore": left,
        "kv_cache_scheme": None,
    }
    (target / "config.json").write_text(json.dumps(config, indent=2))
