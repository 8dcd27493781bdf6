"""Which experts the tokens of a request were sent to. Routing replay: a trainer sends them to the
same ones (Ma et al., 2025, arXiv:2510.11370)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

FLAG = "--enable-return-routed-experts"


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Ids of experts, [positions, layers, top_k] in C order, from position `start` of prompt and
    answer on; the last token of an answer was never computed and has none. Layers are counted as
    in the model's config.json (num_hidden_layers): those without experts have zeros."""

    data: bytes
    shape: tuple[int, int, int]
    dtype: str  # "uint8", or of more than 256 experts "uint16"
    start: int = 0

    @classmethod
    def of(cls, ids: npt.NDArray[Any], start: int) -> RoutedExperts:
        """ids [positions, layers, top_k]: in one of the types."""
        positions, layers, top_k = ids.shape
        return cls(ids.tobytes(), (positions, layers, top_k), ids.dtype.name, start)

    def until(self, tokens: int) -> RoutedExperts:
        """Of the first so many tokens of prompt and answer, of which the last one has none."""
        positions = min(max(tokens - 1 - self.start, 0), self.shape[0])
        row = self.shape[1] * self.shape[2] * np.dtype(self.dtype).itemsize
        shape = (positions, *self.shape[1:])
        return replace(self, data=self.data[: positions * row], shape=shape)

    def array(self) -> npt.NDArray[Any]:
        """[positions, layers, top_k], not to be written to."""
        return np.frombuffer(self.data, dtype=self.dtype).reshape(self.shape)
