"""A checkpoint of megatron-core's dist_checkpointing in its torch_dist format, read by tensors.

Such a folder holds `.metadata` (torch.distributed.checkpoint's: which rectangle of which tensor is
where), `*.distcp` files and `metadata.json` (the format's name). Everything that is not split,
among it the training job's arguments, is in `common.pt` (megatron-core 0.16) or one more object in
the `*.distcp` files (0.19). It does not matter how many ranks wrote it. The folder that Megatron's
--save names has one of them for each iteration.
"""

from __future__ import annotations

import io
import json
from collections import OrderedDict
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megatron_hybrid.errors import WeightsError
from megatron_hybrid.models.checkpoints.megatron_pickle import read_pickle, read_torch

Index = tuple[slice | int, ...]

# Stored rectangles that are kept in memory: what shares one is read one after the other.
_KEPT_BYTES = 1 << 30


class MegatronCheckpoint:
    """`shapes` and `dtypes` say what is stored, by Megatron's names."""

    def __init__(self, folder: Path) -> None:
        """`folder`: of one iteration. Raises WeightsError for one that is no such checkpoint."""
        self.folder = folder
        self.where = str(folder)
        _check_format(self.folder)
        metadata = read_pickle(self.folder / ".metadata")
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise WeightsError(
                f"{self.folder / '.metadata'} does not describe a checkpoint of "
                "torch.distributed.checkpoint."
            )
        self._stored: dict[str, TensorStorageMetadata] = {
            name: stored
            for name, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(stored.size) for name, stored in self._stored.items()
        }
        self.dtypes: Mapping[str, torch.dtype] = {
            name: stored.properties.dtype for name, stored in self._stored.items()
        }
        self._records = metadata.storage_data
        self._bounds: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._kept: OrderedDict[MetadataIndex, Tensor] = OrderedDict()

    @cached_property
    def common(self) -> Mapping[str, Any]:
        """What is not split: iteration, checkpoint_version, args, ..."""
        path = self.folder / "common.pt"
        index = next((one for one in self._records if one.fqn.startswith("common_state/")), None)
        found: Any = {}
        if path.is_file():
            found = read_torch(path, str(path))
        elif index is not None:
            (found,) = read_torch(self._record(index), f"{index.fqn} in {self.folder}")
        return found if isinstance(found, Mapping) else {}

    @property
    def arguments(self) -> Mapping[str, Any] | None:
        """The training job's arguments; None where it kept none."""
        arguments = self.common.get("args")
        return dict(vars(arguments)) if hasattr(arguments, "__dict__") else None

    def read(self, name: str, index: Index) -> Tensor:
        """A rectangle of the tensor `name`: for each dimension a range, or a number to drop it."""
        stored = self._stored[name]
        ranges = [
            (i, i + 1) if isinstance(i, int) else i.indices(size)[:2]
            for i, size in zip(index, stored.size, strict=True)
        ]
        starts, ends = (np.array(bounds, dtype=np.int64) for bounds in zip(*ranges, strict=True))
        out = torch.empty((ends - starts).tolist(), dtype=stored.properties.dtype)
        first, last = self._chunk_bounds(name)
        filled = 0
        for number in np.flatnonzero(((first < ends) & (last > starts)).all(axis=1)):
            low = np.maximum(first[number], starts)
            high = np.minimum(last[number], ends)
            source = _ranges(low - first[number], high - first[number])
            chunk = self._chunk(name, stored.chunks[number])
            out[_ranges(low - starts, high - starts)] = chunk[source]
            filled += int((high - low).prod())
        if filled != out.numel():
            raise WeightsError(
                f"Weight {name!r} in {self.folder} is stored only in part: "
                f"{filled} of {out.numel()} values that are needed are there."
            )
        return out[tuple(0 if isinstance(i, int) else slice(None) for i in index)]

    def _chunk_bounds(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Where the tensor's stored rectangles begin and end, [rectangles, dimensions] each."""
        if name not in self._bounds:
            chunks = self._stored[name].chunks
            first = np.array([chunk.offsets for chunk in chunks], dtype=np.int64)
            sizes = np.array([chunk.sizes for chunk in chunks], dtype=np.int64)
            self._bounds[name] = first, first + sizes
        return self._bounds[name]

    def _chunk(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        """A stored rectangle, whole: its file holds it as one record."""
        index = MetadataIndex(name, chunk.offsets)
        values = self._kept.get(index)
        if values is None:
            try:
                values = torch.load(self._record(index), map_location="cpu", weights_only=True)
                values = values.view(chunk.sizes)
            except Exception as error:  # torch raises many kinds for a file that is cut off
                raise WeightsError(
                    f"Weight {name!r} cannot be read from {self.folder}: "
                    f"{type(error).__name__}: {error}."
                ) from error
            self._kept[index] = values
            while len(self._kept) > 1 and sum(v.nbytes for v in self._kept.values()) > _KEPT_BYTES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(index)
        return values

    def _record(self, index: MetadataIndex) -> io.BytesIO:
        """What torch.save wrote of one object, among others' in a file."""
        stored = self._records[index]
        if getattr(stored, "transform_descriptors", None):
            raise WeightsError(
                f"{index.fqn!r} in {self.folder} is stored by way of "
                f"{', '.join(stored.transform_descriptors)}, which is not supported."
            )
        with (self.folder / stored.relative_path).open("rb") as file:
            file.seek(stored.offset)
            return io.BytesIO(file.read(stored.length))


def _ranges(starts: np.ndarray, ends: np.ndarray) -> tuple[slice, ...]:
    return tuple(slice(int(start), int(end)) for start, end in zip(starts, ends, strict=True))


def _check_format(folder: Path) -> None:
    path = folder / "metadata.json"
    try:
        backend = json.loads(path.read_text())["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(
            f"{folder} is no distributed checkpoint of Megatron: {path.name} is missing there or "
            "names no sharded_backend."
        ) from error
    if backend != "torch_dist":
        raise WeightsError(
            f"The checkpoint in {folder} is of format {backend!r}; only torch_dist is supported "
            "(Megatron's --ckpt-format torch_dist, its --ckpt-convert-format converts others)."
        )
