"""Where weights come from, by a checkpoint's names: a Hugging Face folder, or tensors in memory
(Megatron's checkpoints: megatron_source.py); and what they have to be: shaped as the configuration
says, all of use, and the same where the model has one weight for several of them."""

from __future__ import annotations

import contextlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_hybrid.errors import WeightsError
from megatron_hybrid.layers.rope import inverse_frequencies
from megatron_hybrid.models.checkpoints.folder import INDEX, SINGLE, ModelFolder
from megatron_hybrid.models.checkpoints.kv_scales import is_kv_scale
from megatron_hybrid.models.checkpoints.quantization import Quantization
from megatron_hybrid.models.checkpoints.sent_tensors import SentTensors
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.families.family import ROTARY_TABLE, Location
from megatron_hybrid.models.families.registry import family_of

Index = tuple[slice | int, ...]
# safetensors' names of types that quantised weights may have
_TYPES = {
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I8": torch.int8,
    "U8": torch.uint8, "I32": torch.int32, "BF16": torch.bfloat16, "F16": torch.float16,
}  # fmt: skip


class WeightSource(ABC):
    """Tensors by their canonical names (see Family.canonical), as those of a model, by default with
    the names of its family; nothing is read before `read`."""

    where: str  # for messages
    names: Mapping[str, str]  # canonical name -> the source's own
    quantization: Quantization | None = None  # of what is stored
    reads_side_by_side = False  # `read` may be called by several threads

    def __init__(self, config: HybridModelConfig) -> None:
        self.config = config

    def places(self, block: int | None, role: str) -> list[Location]:
        """See Family.places."""
        return family_of(self.config.model_type).places(self.config, block, role)

    def ignores(self, name: str) -> bool:
        """See Family.ignores."""
        return family_of(self.config.model_type).ignores(self.config, name)

    def constants(self) -> Mapping[str, Tensor]:
        """See Family.constants."""
        return family_of(self.config.model_type).constants(self.config)

    def file_of(self, name: str) -> str:
        """What to sort reads by."""
        return ""

    def tensors_of(self, name: str) -> Collection[str]:
        """The source's own names of all that has to be there to read it."""
        return (self.names[name],)

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Of a whole tensor."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor."""

    @abstractmethod
    def read(self, name: str, index: Index) -> Tensor:
        """A rectangle of a tensor, or of one of those that are stacked in it: for each dimension a
        range, or a number to drop it."""

    # ------------------------------------------------------------------ checks

    def check_shape(self, place: Location, shape: tuple[int, ...]) -> None:
        """`shape`: the role's. Raises WeightsError for another one."""
        expected = (place.all_rows(shape[0]), *shape[1:])
        if place.transposed:
            expected = expected[::-1]
        if place.index is not None:
            expected = (place.stacked, *expected)
        stored = self.shape(place.name)
        if stored not in (expected, (place.padded, *expected[1:])):
            raise WeightsError(
                f"Weight {place.name!r} has shape {list(stored)}; the configuration makes it "
                f"{list(expected)}."
            )

    def check_all_used(self, used: Collection[str]) -> None:
        """Raise WeightsError for a tensor that no part of the model is from."""
        for name in sorted(self.names.keys() - set(used)):
            if not self.ignores(name) and not is_kv_scale(name):
                raise WeightsError(
                    f"Weight {self.names[name]!r} in {self.where} has no place in a "
                    f"{self.config.model_type} model of this configuration."
                )

    def check_same(
        self, place: Location, copy: Location, read: Callable[[Location], Tensor]
    ) -> None:
        """Raise WeightsError unless a role has the same values in two places. `read`: of one."""
        first, second = read(place), read(copy)
        if torch.equal(first, second.to(first.device, first.dtype)):
            return
        advice = ""
        if copy in self.places(None, "lm_head"):
            advice = ' A head of its own needs "tie_word_embeddings": false in config.json.'
        raise WeightsError(
            f"Weights {self.names[place.name]!r} and {self.names[copy.name]!r} in {self.where} "
            f"have different values, but a {self.config.model_type} model of this configuration "
            f"has one weight for both.{advice}"
        )

    def check_rotary_tables(self) -> None:
        """Old checkpoints hold the frequencies of the rotary embedding, which are made anew from
        the configuration. Raises WeightsError where that would give others. (Scaled ones can't be
        compared: some versions stored them before scaling.)"""
        rope = self.config.rope
        if rope is None or rope.kind != "default":
            return
        expected = inverse_frequencies(rope)
        for name, own in self.names.items():
            if not re.search(ROTARY_TABLE, name):
                continue
            (size,) = expected.shape
            if self.shape(name) == (size,):
                table = self.read(name, (slice(0, size),)).cpu()
                # Rounded to what is stored, where the smallest ones are close to nothing.
                ours = expected.cpu().to(table.dtype)
                if torch.allclose(table.float(), ours.float(), rtol=1e-2, atol=1e-7):
                    continue
            raise WeightsError(
                f"Weight {own!r} in {self.where} holds other frequencies than rope_theta "
                f"{rope.theta:g} and {rope.rotary_dim} rotated dimensions give, which config.json "
                "says."
            )

    def check_constants(self) -> None:
        """Raise WeightsError for one of `constants` that is not what the configuration makes."""
        for name, expected in self.constants().items():
            if name not in self.names:
                continue
            whole = tuple(slice(0, size) for size in expected.shape)
            if self.shape(name) != tuple(expected.shape) or not torch.equal(
                self.read(name, whole).cpu(), expected
            ):
                raise WeightsError(
                    f"Weight {self.names[name]!r} in {self.where} holds other numbers than the "
                    f"configuration of this {self.config.model_type} model makes."
                )


class FolderSource(WeightSource):
    """The safetensors of a Hugging Face folder, whose files are open with their headers checked."""

    reads_side_by_side = True

    def __init__(
        self,
        config: HybridModelConfig,
        folder: Path,
        file_names: Mapping[str, str],
        files: Mapping[str, Any],
        quantization: Quantization | None = None,
    ) -> None:
        """`file_names`: by the names in the files. Raises WeightsError for two names of one
        weight."""
        super().__init__(config)
        self.where = str(folder)
        self.names = _canonical(config, file_names, self.where)
        self._file_names, self._files = file_names, files
        self.quantization = quantization

    def file_of(self, name: str) -> str:
        return self._file_names[self.names[name]]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.stored(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        return _TYPES.get(self.stored(name).get_dtype(), torch.float32)

    def read(self, name: str, index: Index) -> Tensor:
        if not index:  # a scalar, which has no slices
            return self._files[self.file_of(name)].get_tensor(self.names[name])
        values: Tensor = self.stored(name)[index]
        return values

    def stored(self, name: str) -> Any:
        """safetensors' slice of a tensor. Raises WeightsError for one that cannot be read."""
        own, file = self.names[name], self.file_of(name)
        try:
            return self._files[file].get_slice(own)
        except SafetensorError as error:
            raise WeightsError(
                f"Weight {own!r} cannot be read from {file} in {self.where}: {error}."
            ) from error


class TensorSource(WeightSource):
    """Tensors by Hugging Face's names that were sent, or are to be; read from those that are
    there."""

    def __init__(self, config: HybridModelConfig, sent: SentTensors) -> None:
        super().__init__(config)
        self.where = sent.where
        self._sent = sent
        self.names = _canonical(config, sent.infos, self.where)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._sent.infos[self.names[name]].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._sent.infos[self.names[name]].dtype

    def read(self, name: str, index: Index) -> Tensor:
        return self._sent.held[self.names[name]][index]


@contextmanager
def open_folder(model: ModelFolder, config: HybridModelConfig) -> Iterator[FolderSource]:
    """The safetensors of a Hugging Face folder, as those of a model, open within the block. Raises
    WeightsError for one without weights, or with files that are no safetensors."""
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
        yield FolderSource(config, folder, own, files, model.quantization)


def _unreadable(folder: Path, file: str, error: Exception) -> str:
    with contextlib.suppress(OSError), (folder / file).open("rb") as opened:
        if opened.read(20) == b"version https://git-":
            return (
                f"{file} in {folder} is Git LFS's pointer to the weights: `git lfs pull` there "
                "fetches them."
            )
    return f"{file} in {folder} cannot be read: {error}."


def _canonical(config: HybridModelConfig, names: Iterable[str], where: str) -> dict[str, str]:
    """The names of weights by the canonical ones. Raises WeightsError for two of one weight."""
    family, found = family_of(config.model_type), dict[str, str]()
    for name in names:
        first = found.setdefault(family.canonical(name), name)
        if first != name:
            raise WeightsError(f"{first!r} and {name!r} in {where} are names of the same weight.")
    return found


def _weight_map(index: Path) -> dict[str, str]:
    try:
        files = json.loads(index.read_text())["weight_map"]
        return {str(name): str(file) for name, file in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise WeightsError(f"{index} is no index of safetensors: {error!r}.") from error
