"""Where weights come from, by a checkpoint's names: a Hugging Face folder, or tensors in memory.
(Megatron's checkpoints: megatron_source.py.)"""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_hybrid.errors import WeightsError
from megatron_hybrid.models.checkpoints.folder import INDEX, SINGLE, ModelFolder
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.families.family import Family, Location

Index = tuple[slice | int, ...]
# As safetensors calls them.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
Tensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


class WeightSource(ABC):
    """Tensors by their canonical names (see Family.canonical); nothing is read before `read`."""

    where: str  # for messages
    names: Mapping[str, str]  # canonical name -> the source's own

    def file_of(self, name: str) -> str:
        """What to sort reads by."""
        return ""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Of a whole tensor."""

    @abstractmethod
    def read(self, name: str, index: Index) -> Tensor:
        """A rectangle of a tensor, or of one of those that are stacked in it: for each dimension a
        range, or a number to drop it."""


class WeightNames(Protocol):
    """What says where in a source a model's weights are: a Family, or a Megatron checkpoint."""

    def places(self, config: HybridModelConfig, block: int | None, role: str) -> list[Location]:
        """See Family.places."""

    def ignores(self, config: HybridModelConfig, name: str) -> bool:
        """See Family.ignores."""


class FolderSource(WeightSource):
    """The safetensors of a Hugging Face folder, whose files are open with their headers checked."""

    def __init__(self, folder: Path, names: dict[str, tuple[str, str]], files: dict[str, Any]):
        """`names`: canonical name -> (name in its file, file)."""
        self.where = str(folder)
        self.names = {canonical: name for canonical, (name, _) in names.items()}
        self._names, self._files = names, files

    def file_of(self, name: str) -> str:
        return self._names[name][1]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Raises WeightsError for one that is no type of weights."""
        stored = self._slice(name).get_dtype()
        if stored not in _DTYPES:
            raise WeightsError(
                f"Weight {name!r} in {self.where} is of type {stored}, which is not supported, "
                f"only {', '.join(_DTYPES)} are."
            )
        return _DTYPES[stored]

    def read(self, name: str, index: Index) -> Tensor:
        values: Tensor = self._slice(name)[index]
        return values

    def _slice(self, name: str) -> Any:
        own, file = self._names[name]
        try:
            return self._files[file].get_slice(own)
        except SafetensorError as error:
            raise WeightsError(
                f"Weight {own!r} cannot be read from {file} in {self.where}: {error}."
            ) from error


class TensorSource(WeightSource):
    """Tensors in memory, on any device and in any dtype."""

    where = "the tensors given"

    def __init__(self, tensors: Tensors, family: Family) -> None:
        self._tensors: dict[str, Tensor] = {}
        names: dict[str, str] = {}
        for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise WeightsError(
                    "Weights in memory are pairs of a name and a torch tensor, not of "
                    f"{type(name).__name__} and {type(tensor).__name__}."
                )
            canonical = family.canonical(name)
            _refuse_twice(names.get(canonical, name), name, self.where)
            self._tensors[canonical], names[canonical] = tensor.detach(), name
        self.names = names

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str, index: Index) -> Tensor:
        return self._tensors[name][index]


@contextmanager
def open_folder(model: ModelFolder, family: Family) -> Iterator[FolderSource]:
    """The safetensors of a Hugging Face folder, open within the block. Raises WeightsError for one
    without weights, or with files that are no safetensors."""
    model.check_weights()
    folder = model.path
    index, single = folder / INDEX, folder / SINGLE
    with ExitStack() as stack:
        files: dict[str, Any] = {}

        def opened(file: str) -> Any:
            if file not in files:
                try:
                    files[file] = stack.enter_context(safe_open(folder / file, framework="pt"))
                except (SafetensorError, OSError) as error:
                    raise WeightsError(_unreadable(folder, file, error)) from error
            return files[file]

        if index.is_file():
            own = _weight_map(index)
            if single.is_file() and single.name not in own.values():
                raise WeightsError(
                    f"{folder} has both {single.name} and {index.name}, which names other files: "
                    "remove the one that is not the model."
                )
            for file in sorted(set(own.values())):
                if not (folder / file).is_file():
                    raise WeightsError(f"{index.name} names {file}, which is not in {folder}.")
                opened(file)
        else:
            own = dict.fromkeys(opened(single.name).keys(), single.name)
        names: dict[str, tuple[str, str]] = {}
        for name, file in own.items():
            canonical = family.canonical(name)
            _refuse_twice(names.get(canonical, (name, ""))[0], name, str(folder))
            names[canonical] = name, file
        yield FolderSource(folder, names, files)


def _unreadable(folder: Path, file: str, error: Exception) -> str:
    with contextlib.suppress(OSError), (folder / file).open("rb") as opened:
        if opened.read(20) == b"version https://git-":
            return (
                f"{file} in {folder} is Git LFS's pointer to the weights: `git lfs pull` there "
                "fetches them."
            )
    return f"{file} in {folder} cannot be read: {error}."


def _refuse_twice(first: str, second: str, where: str) -> None:
    """Raise WeightsError for two spellings of one weight's name."""
    if first != second:
        raise WeightsError(f"{first!r} and {second!r} in {where} are names of the same weight.")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        files = json.loads(index.read_text())["weight_map"]
        return {str(name): str(file) for name, file in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise WeightsError(f"{index} is no index of safetensors: {error!r}.") from error
