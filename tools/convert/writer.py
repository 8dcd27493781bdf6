"""Writes a Megatron checkpoint (torch_dist) from one process, a stored rectangle at a time.

megatron-core's own writer wants a whole model in memory and process groups around it; the format is
torch.distributed.checkpoint's, whose writer takes tensors as they come.
"""

from __future__ import annotations

import json
import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from tqdm import tqdm

from megatron_hybrid.models.checkpoints.folder import TRACKER

CHECKPOINT_VERSION = 3.0  # what Megatron calls its present order of rows in linear_qkv


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a tensor, read when it is written: it begins at `offsets`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[], Tensor]


@dataclass(slots=True)
class StoredTensor:
    """A tensor of a checkpoint by Megatron's name, in rectangles."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[Piece] = field(default_factory=list)


def write_checkpoint(
    folder: Path, tensors: Sequence[StoredTensor], arguments: dict[str, Any], *, progress: bool
) -> None:
    """Write `folder`/release, and the file that makes it the latest: last, so that a folder that
    is half written is no checkpoint.

    `arguments`: the training job's, for --use-checkpoint-args. Memory: one piece.
    """
    release = folder / "release"
    release.mkdir(parents=True)
    total = sum(len(tensor.pieces) for tensor in tensors)
    with (
        tqdm(total=total, desc="writing weights", unit="part", disable=not progress) as bar,
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(
            {},
            storage_writer=dcp.FileSystemWriter(release),
            planner=_Planner(tensors, bar.update),
            no_dist=True,
        )
    common = {
        "args": Namespace(**arguments),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": 0,
        # Layers are tensors of their own, and so is what experts and gates have in common.
        "content_metadata": {"non_homogeneous_layers": True, "singleton_local_shards": False},
    }
    torch.save(common, release / "common.pt")
    format = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    (release / "metadata.json").write_text(json.dumps(format))
    (folder / TRACKER).write_text("release")


class _Planner(SavePlanner):
    """Hands torch's writer one piece after the other."""

    def __init__(self, tensors: Sequence[StoredTensor], written: Callable[[], Any]) -> None:
        self._written = written
        self._metadata: dict[str, TensorStorageMetadata] = {}
        self._pieces: dict[MetadataIndex, tuple[Piece, torch.dtype]] = {}
        self._items: list[WriteItem] = []
        for tensor in tensors:
            properties = TensorProperties(dtype=tensor.dtype)
            size, chunks = torch.Size(tensor.shape), list[ChunkStorageMetadata]()
            for piece in tensor.pieces:
                chunk = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
                index = MetadataIndex(tensor.name, chunk.offsets, len(chunks))
                data = TensorWriteData(chunk, properties, size)
                self._items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
                self._pieces[index] = piece, tensor.dtype
                chunks.append(chunk)
            self._metadata[tensor.name] = TensorStorageMetadata(properties, size, chunks)

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """There is no state dict."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan(self._items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, Metadata(dict(self._metadata))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        piece, dtype = self._pieces[write_item.index]
        values = piece.read().to(dtype).reshape(piece.sizes).contiguous()
        self._written()
        return values
