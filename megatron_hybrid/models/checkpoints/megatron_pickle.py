"""Unpickling what Megatron leaves beside its tensors, without running anything that it names.

A pickle may call any function of any module. Those of a checkpoint also name classes of
megatron.training, Transformer Engine or whatever else the training job had, which need not be
installed here. Only a few harmless classes are looked up; an `Unknown` stands in for all others.
"""

from __future__ import annotations

import pickle
from enum import Enum
from pathlib import Path
from typing import IO, Any

import torch

from megatron_hybrid.errors import WeightsError

_CLASSES = {
    "argparse": {"Namespace"},
    "builtins": {"set", "frozenset", "slice", "complex", "range", "bytearray"},
    "collections": {"OrderedDict", "deque"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "PurePath"},
    "types": {"SimpleNamespace"},
    "torch": {"Size", "device"},
    "torch._utils": {"_rebuild_tensor_v2", "_rebuild_parameter"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}


class Unknown:
    """Stands in for an object of a class that is not looked up; `arguments` is what it was made of
    (of a member of an Enum: its value or its name)."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        """As of a list: forgotten."""

    def extend(self, items: Any) -> None:
        """As of a list: forgotten."""


def _member(owner: Any, name: str) -> Any:
    """What Python 3.11.0 to 3.11.3 write for a member of an Enum: its class's attribute."""
    is_enum = isinstance(owner, type) and issubclass(owner, Enum)
    return owner[name] if is_enum else Unknown(name)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module in ("torch", "torch.storage"):
            found = getattr(torch, name, None)
            if isinstance(found, torch.dtype) or name.endswith("Storage"):
                return super().find_class(module, name)
        return Unknown


class _Module:
    """What torch.load needs of a pickle module."""

    Unpickler = _Unpickler


def read_pickle(path: Path) -> Any:
    """The object in a file that pickle wrote. Raises WeightsError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return _Unpickler(file).load()
    except Exception as error:  # a broken pickle raises almost anything
        raise WeightsError(f"{path} cannot be read: {type(error).__name__}: {error}.") from error


def read_torch(source: Path | IO[bytes], where: str) -> Any:
    """The object that torch.save wrote, on the CPU. Raises WeightsError, which names `where`."""
    try:
        return torch.load(source, map_location="cpu", pickle_module=_Module, weights_only=False)
    except Exception as error:
        raise WeightsError(f"{where} cannot be read: {type(error).__name__}: {error}.") from error
