"""Writes tensors as a Hugging Face folder has them: files of safetensors and their index."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


class Shards:
    """Tensors into files of at most so many bytes, and their index."""

    def __init__(self, target: Path, max_bytes: int) -> None:
        self._target, self._max_bytes = target, max_bytes
        self._open: dict[str, Tensor] = {}
        self._bytes = self._total = 0
        self._files: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """The next tensor."""
        if self._open and self._bytes + tensor.nbytes > self._max_bytes:
            self._write()
        self._open[name] = tensor.contiguous()
        self._bytes += tensor.nbytes

    def _write(self) -> None:
        file = self._target / f"part-{len(self._files)}.safetensors"
        save_file(self._open, file, metadata={"format": "pt"})
        self._files.append(list(self._open))
        self._total += self._bytes
        self._open, self._bytes = {}, 0

    def end(self) -> None:
        """Write what is left, and give the files the names that libraries expect."""
        self._write()
        count, weight_map = len(self._files), {}
        for number, names in enumerate(self._files):
            name = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            name = "model.safetensors" if count == 1 else name
            (self._target / f"part-{number}.safetensors").rename(self._target / name)
            weight_map.update(dict.fromkeys(names, name))
        if count > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
            path = self._target / "model.safetensors.index.json"
            path.write_text(json.dumps(index, indent=2))
