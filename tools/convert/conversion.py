"""Hugging Face folders to Megatron checkpoints and back, a tensor at a time, bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from convert.arguments import arguments_of
from convert.config_json import with_model_type
from convert.shards import Shards
from convert.writer import Piece, StoredTensor, write_checkpoint
from megatron_hybrid.errors import ConfigurationError, WeightsError
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.models.checkpoints.megatron_checkpoint import MegatronCheckpoint
from megatron_hybrid.models.checkpoints.megatron_limits import check_expressible
from megatron_hybrid.models.checkpoints.megatron_names import HEAD, MegatronNames, Role, Rows
from megatron_hybrid.models.checkpoints.megatron_source import MegatronSource
from megatron_hybrid.models.checkpoints.weight_source import (
    FolderSource,
    Index,
    WeightSource,
    open_folder,
)
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.families.family import Location
from megatron_hybrid.models.families.registry import family_of

# Beside a checkpoint that was converted: the names and types that its tensors had.
NAMES_FILE = "hugging_face_weights.json"
_TOKENIZER = (
    "*tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "chat_template*", "generation_config.json",
)  # fmt: skip
# Weight - 1 is exact in a type that is twice as wide.
_WIDER = {torch.float32: torch.float64}
# As safetensors calls them.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


# ------------------------------------------------------------------ to Megatron


def to_megatron(source: Path, target: Path, *, progress: bool = True) -> None:
    """Write `target`, a Megatron checkpoint with config.json and tokenizer beside it.

    Raises ConfigurationError for a model that Megatron cannot express or a `target` that exists,
    WeightsError for a folder whose weights are not its configuration's.
    """
    folder = ModelFolder.open(source)
    config = folder.config
    check_expressible(config)
    arguments = arguments_of(config) | {"tokenizer_model": str(target.resolve())}
    make_folder(target)
    with open_folder(folder, config) as weights:
        reader = _HuggingFaceRoles(weights)
        reader.check()
        write_checkpoint(target, _stored_tensors(reader, config), arguments, progress=progress)
        used = {reader.place(role).name for role in MegatronNames(config).roles()}
        names = {
            own: str(_dtype_of(weights, name))
            for name, own in weights.names.items()
            if name in used
        }
    (target / NAMES_FILE).write_text(json.dumps(names, indent=1))
    copy_description(folder, target)


def _dtype_of(source: FolderSource, name: str) -> torch.dtype:
    """Raises WeightsError for one that is no type of weights."""
    stored = source.stored(name).get_dtype()
    if stored not in _DTYPES:
        raise WeightsError(
            f"Weight {name!r} in {source.where} is of type {stored}, which is not supported, "
            f"only {', '.join(_DTYPES)} are."
        )
    return _DTYPES[stored]


class _HuggingFaceRoles:
    """A Hugging Face folder's weights by our roles."""

    def __init__(self, source: FolderSource) -> None:
        self._source = source

    def check(self) -> None:
        """Raise WeightsError for a weight that is of no use, or that is stored twice with different
        values."""
        source, used = self._source, set[str]()
        for role in MegatronNames(source.config).roles():
            first, *copies = self._places(role)
            used.update(place.name for place in (first, *copies))
            for copy in copies:
                source.check_same(first, copy, self._whole)
        source.check_all_used(used)
        source.check_rotary_tables()

    def place(self, role: Role) -> Location:
        return self._places(role)[0]

    def _places(self, role: Role) -> list[Location]:
        places = self._source.places(role.block, role.role)
        found = [place for place in places if place.name in self._source.names]
        if not found:
            raise WeightsError(f"Weight {places[0].name!r} is missing in {self._source.where}.")
        return found

    def shape(self, role: Role) -> tuple[int, ...]:
        return self._shape(self.place(role))

    def _shape(self, place: Location) -> tuple[int, ...]:
        shape = self._source.shape(place.name)[0 if place.index is None else 1 :]
        return (shape[0] // place.parts, *shape[1:])

    def dtype(self, role: Role) -> torch.dtype:
        return _dtype_of(self._source, self.place(role).name)

    def read(self, role: Role, start: int, stop: int) -> Tensor:
        """Rows of a role."""
        return self._read(self.place(role), start, stop)

    def _whole(self, place: Location) -> Tensor:
        return self._read(place, 0, self._shape(place)[0])

    def _read(self, place: Location, start: int, stop: int) -> Tensor:
        rows, *rest = self._shape(place)
        offset = place.part * rows
        index: Index = (slice(offset + start, offset + stop), *(slice(0, n) for n in rest))
        if place.index is not None:
            index = (place.index, *index)
        return self._source.read(place.name, index)


@dataclass(slots=True)
class _Assembly:
    """A stored rectangle: which rows of which roles are where in it."""

    parts: list[tuple[Role, int, int, Rows]] = field(default_factory=list)  # role's rows [a, b)

    def rows(self) -> int:
        return max(rows.start + stop - start for _, start, stop, rows in self.parts)


def _stored_tensors(reader: _HuggingFaceRoles, config: HybridModelConfig) -> list[StoredTensor]:
    assemblies: dict[tuple[str, tuple[tuple[int, int], ...]], _Assembly] = {}
    for role in MegatronNames(config).roles():
        begin, total = 0, reader.shape(role)[0]
        for rows in role.rows:
            count = total - begin if rows.count is None else rows.count
            assembly = assemblies.setdefault((rows.name, rows.lead), _Assembly())
            assembly.parts.append((role, begin, begin + count, rows))
            begin += count
        if begin != total:
            name = reader.place(role).name
            raise WeightsError(
                f"Weight {name!r} has {total} rows for {role.role}; the configuration makes it "
                f"{begin}."
            )
    tensors: dict[str, StoredTensor] = {}
    for (name, lead), assembly in assemblies.items():
        first = assembly.parts[0][0]
        inner = (assembly.rows(), *reader.shape(first)[1:])
        dtype = _stored_dtype(reader, assembly)
        tensor = tensors.get(name)
        if tensor is None:
            shape = (*(size for _, size in lead), *inner)
            tensor = tensors[name] = StoredTensor(name, shape, dtype)
        tensor.pieces.append(
            Piece(
                offsets=(*(index for index, _ in lead), *(0 for _ in inner)),
                sizes=(*(1 for _ in lead), *inner),
                read=partial(_assembled, reader, assembly, inner, dtype),
            )
        )
    return list(tensors.values())


def _stored_dtype(reader: _HuggingFaceRoles, assembly: _Assembly) -> torch.dtype:
    found: torch.dtype | None = None
    for role, _, _, rows in assembly.parts:
        dtype = reader.dtype(role)
        if rows.offset:
            dtype = _WIDER.get(dtype, torch.float32)
        found = dtype if found is None else torch.promote_types(found, dtype)
    assert found is not None
    return found


def _assembled(
    reader: _HuggingFaceRoles, assembly: _Assembly, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    out = torch.empty(shape, dtype=dtype)
    for role, start, stop, rows in assembly.parts:
        values = reader.read(role, start, stop).to(dtype)
        out[rows.start : rows.start + stop - start] = (
            values - rows.offset if rows.offset else values
        )
    return out


# ------------------------------------------------------------------ to Hugging Face


def to_hugging_face(
    source: Path, target: Path, *, max_shard_bytes: int = 5 << 30, progress: bool = True
) -> None:
    """Write `target`, a Hugging Face folder, from a Megatron checkpoint.

    Memory: a file of `max_shard_bytes`, or the largest tensor. Raises ConfigurationError where
    neither a config.json beside the checkpoint nor its arguments say which family it is,
    WeightsError for a checkpoint whose weights are not its configuration's.
    """
    folder = ModelFolder.open(source)
    config = folder.config
    values: dict[str, Any] | None = None
    if folder.described is None:
        config, values = with_model_type(config)
        if values is None:
            raise ConfigurationError(
                f"No Hugging Face family has the model in {source} (layers {config.pattern!r}); "
                "it can be served as it is, but not converted."
            )
    checkpoint = MegatronCheckpoint(folder.checkpoint)
    weights = MegatronSource(checkpoint, config)
    weights.check_all_used(())
    if config.tie_word_embeddings and HEAD in weights.names:
        first, copy = weights.places(None, "embedding")
        weights.check_same(first, copy, partial(whole_tensor, weights))
    make_folder(target)
    tensors = _HuggingFaceTensors(weights, checkpoint.dtypes, _recorded_names(folder))
    _write_safetensors(target, tensors, max_shard_bytes, progress)
    copy_description(folder, target)
    if values is not None:
        (target / "config.json").write_text(json.dumps(values, indent=2))


def whole_tensor(source: WeightSource, place: Location) -> Tensor:
    """All that is stored under a place's name."""
    return source.read(place.name, tuple(slice(0, n) for n in source.shape(place.name)))


def _recorded_names(folder: ModelFolder) -> dict[str, torch.dtype]:
    """Names and types that the tensors of a converted checkpoint had; empty for Megatron's own."""
    path = (folder.described or folder.path) / NAMES_FILE
    if not path.is_file():
        return {}
    return {
        name: getattr(torch, dtype.removeprefix("torch."))
        for name, dtype in json.loads(path.read_text()).items()
    }


@dataclass(slots=True)
class _Whole:
    """A Hugging Face tensor to be written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[tuple[str, tuple[int, ...], Location]]  # (name, shape) in the source, place in it


class _HuggingFaceTensors:
    """A Megatron checkpoint's weights by Hugging Face's names."""

    def __init__(
        self,
        source: MegatronSource,
        stored: Mapping[str, torch.dtype],
        recorded: dict[str, torch.dtype],
    ) -> None:
        """`stored`: the types of Megatron's tensors; `recorded`: of Hugging Face's, if known."""
        self._source, config = source, source.config
        family = family_of(config.model_type)
        self.tensors: dict[str, _Whole] = {}
        own = {family.canonical(name): name for name in recorded}
        for name, role in source.roles.items():
            if config.tie_word_embeddings and role.role == "lm_head":
                continue
            places = family.places(config, role.block, role.role)
            place = next((place for place in places if place.name in own), places[0])
            shape = source.shape(name)
            written = own.get(place.name, place.name)
            whole = self.tensors.get(written)
            if whole is None:
                sizes: tuple[int, ...] = (shape[0] * place.parts, *shape[1:])
                if place.index is not None:
                    sizes = (place.stacked, *sizes)
                dtype = recorded.get(written, stored[role.rows[0].name])
                whole = self.tensors[written] = _Whole(sizes, dtype, [])
            whole.parts.append((name, shape, place))

    def read(self, name: str) -> Tensor:
        whole = self.tensors[name]
        out = torch.empty(whole.shape, dtype=whole.dtype)
        for stored, shape, place in whole.parts:
            target = out if place.index is None else out[place.index]
            rows = target[place.part * shape[0] : (place.part + 1) * shape[0]]
            rows.copy_(whole_tensor(self._source, Location(stored)))
        return out


def _write_safetensors(
    target: Path, tensors: _HuggingFaceTensors, max_shard_bytes: int, progress: bool
) -> None:
    shards = Shards(target, max_shard_bytes)
    for name in tqdm(tensors.tensors, desc="writing weights", unit="tensor", disable=not progress):
        shards.add(name, tensors.read(name))
    shards.end()


# ------------------------------------------------------------------ both


def make_folder(target: Path) -> None:
    """Raises ConfigurationError for one that holds something."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigurationError(f"{target} exists already and is not an empty folder.")
    target.mkdir(parents=True, exist_ok=True)


def copy_description(source: ModelFolder, target: Path) -> None:
    """Copy what describes a model, and its tokenizer, from one folder to another."""
    _copy(source.described or source.path, target, ("config.json", *_TOKENIZER, "*.py", "LICENSE*"))


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy a tokenizer, and the end tokens. Raises ConfigurationError where there is none."""
    if not _copy(source, target, _TOKENIZER):
        raise ConfigurationError(f"{source} has no tokenizer.")


def _copy(source: Path, target: Path, patterns: tuple[str, ...]) -> int:
    """How many files were copied."""
    paths = {path for pattern in patterns for path in source.glob(pattern) if path.is_file()}
    for path in paths:
        shutil.copyfile(path, target / path.name)
    return len(paths)
