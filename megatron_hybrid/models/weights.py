"""Loading a Hugging Face folder of safetensors: only this rank's slices, straight into place."""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from megatron_hybrid.errors import ConfigurationError, WeightsError
from megatron_hybrid.layers.parts import WeightPart
from megatron_hybrid.models.config import HybridModelConfig, resolve_dtype
from megatron_hybrid.models.families import family_of
from megatron_hybrid.models.family import Family, Location
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import ParallelContext


def load_model(
    folder: str | Path,
    *,
    device: torch.device,
    dtype: torch.dtype | str | None,
    parallel: ParallelContext,
    conv_states_dtype: torch.dtype | None = None,
    ssm_states_dtype: torch.dtype = torch.float32,
    load_format: str = "auto",
    seed: int = 1234,
    progress: bool = True,
) -> HybridModel:
    """The model of a Hugging Face folder, with this rank's weights on `device`.

    `dtype` None or "auto": the checkpoint's. `conv_states_dtype` None: the model's. `load_format`
    "dummy" draws random weights from `seed`, the same for any number of ranks, and needs only
    config.json. Raises ConfigurationError for what is not supported, before any weight is read,
    and WeightsError, naming the weight, for a checkpoint that does not fit its configuration.
    """
    if load_format not in ("auto", "dummy"):
        raise ConfigurationError(f"--load-format is {load_format!r}; it can be auto or dummy.")
    folder = Path(folder)
    config = HybridModelConfig.from_folder(folder)
    dtype = resolve_dtype(dtype, config.dtype)
    with torch.device(device):
        model = HybridModel(config, parallel, dtype, conv_states_dtype or dtype, ssm_states_dtype)
    model.eval()
    if load_format == "dummy":
        _fill_randomly(model, seed)
    else:
        checkpoint = _Checkpoint.open(folder, family_of(config.model_type))
        _read(model, checkpoint, progress and parallel.is_first)
    model.after_loading()
    return model


@dataclass(frozen=True)
class _Checkpoint:
    """Where each tensor is: canonical name -> (name in its file, file)."""

    folder: Path
    family: Family
    tensors: dict[str, tuple[str, str]]

    @classmethod
    def open(cls, folder: Path, family: Family) -> _Checkpoint:
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        files: dict[str, str]
        if index.is_file():
            files = json.loads(index.read_text())["weight_map"]
            for file in sorted(set(files.values())):
                if not (folder / file).is_file():
                    raise WeightsError(f"{index.name} names {file}, which is not in {folder}.")
        elif single.is_file():
            with safe_open(single, framework="pt") as opened:
                files = dict.fromkeys(opened.keys(), single.name)
        else:
            raise WeightsError(
                f"{folder} has neither model.safetensors nor model.safetensors.index.json."
            )
        return cls(
            folder, family, {family.canonical(name): (name, file) for name, file in files.items()}
        )

    def locate(self, config: HybridModelConfig, block: int | None, role: str) -> Location:
        """Raises WeightsError when the weight is in none of its places."""
        if block is None:
            places = [Location(str(getattr(self.family, role)))]
        else:
            places = self.family.locate(config, block, role)
        for place in places:
            if place.name in self.tensors:
                return place
        raise WeightsError(f"Weight {places[0].name!r} is missing in {self.folder}.")


def _read(model: HybridModel, checkpoint: _Checkpoint, progress: bool) -> None:
    by_file: dict[str, list[tuple[WeightPart, Location]]] = defaultdict(list)
    used = set()
    for block, part in model.weight_parts():
        place = checkpoint.locate(model.config, block, part.role)
        used.add(place.name)
        by_file[checkpoint.tensors[place.name][1]].append((part, place))
    for name in sorted(checkpoint.tensors.keys() - used):
        if not checkpoint.family.ignores(model.config, name):
            raise WeightsError(
                f"Weight {checkpoint.tensors[name][0]!r} in {checkpoint.folder} has no place in a "
                f"{model.config.model_type} model of this configuration."
            )
    total = sum(len(parts) for parts in by_file.values())
    with tqdm(total=total, desc="loading weights", unit="part", disable=not progress) as bar:
        for file in sorted(by_file):
            with safe_open(checkpoint.folder / file, framework="pt") as opened:
                for part, place in by_file[file]:
                    stored = opened.get_slice(checkpoint.tensors[place.name][0])
                    _check_shape(tuple(stored.get_shape()), part, place)
                    part.target.copy_(stored[_slices(part, place)])
                    bar.update()


def _slices(part: WeightPart, place: Location) -> tuple[slice | int, ...]:
    offset = place.part * part.shape[0]
    first = slice(part.source[0].start + offset, part.source[0].stop + offset)
    rest = (first, *part.source[1:])
    return rest if place.index is None else (place.index, *rest)


def _check_shape(stored: tuple[int, ...], part: WeightPart, place: Location) -> None:
    expected = (part.shape[0] * place.parts, *part.shape[1:])
    if place.index is not None:
        expected = (place.stacked, *expected)
    if stored != expected:
        raise WeightsError(
            f"Weight {place.name!r} has shape {list(stored)}; the configuration makes it "
            f"{list(expected)}."
        )


def _fill_randomly(model: HybridModel, seed: int) -> None:
    """Every rank draws whole weights and keeps its slice."""
    whole: tuple[str, Tensor] | None = None  # parts of one weight follow one another
    for block, part in model.weight_parts():
        name = f"{block}.{part.role}"
        if whole is None or whole[0] != name:
            whole = name, _random(part, seed ^ zlib.crc32(name.encode()))
        part.target.copy_(whole[1][part.source])


def _random(part: WeightPart, seed: int) -> Tensor:
    device = part.target.device
    generator = torch.Generator(device).manual_seed(seed)
    name = part.role.rsplit(".", 1)[-1]
    if name in ("A_log", "dt_bias"):
        # A in [1, 16], step sizes around 0.01: what Mamba2 is initialised with.
        uniform = torch.rand(part.shape, generator=generator, device=device)
        return (1 + 15 * uniform).log() if name == "A_log" else uniform * 2 - 5.5
    if len(part.shape) == 1:
        return torch.zeros(part.shape, device=device).add_(0.0 if name == "bias" else 1.0)
    normal = torch.randn(part.shape, generator=generator, device=device)
    return normal.mul_(0.5 / part.shape[-1] ** 0.5)
