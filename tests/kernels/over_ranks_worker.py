"""One of several ranks that run kernels in Triton's interpreter, over memory in files that all map.

python -m tests.kernels.over_ranks_worker FOLDER   writes FOLDER/<its rank>.pt
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import tests.interpreter  # noqa: F401
from megatron_hybrid.kernels.norm import triton as norm
from megatron_hybrid.kernels.over_ranks import PIECE, gather_columns

TURNS = 5
ROWS, WIDTH = 3, 72
COLUMNS = PIECE + 40  # two pieces, the second one cut short
EPS = 1e-5


@dataclass(frozen=True)
class Shared:
    rank: int
    size: int
    rows: int
    data: Tensor
    flags: Tensor
    turns: Tensor
    mapped: list[Tensor]

    @classmethod
    def open(cls, folder: Path, rank: int, ranks: int, rows: int, width: int) -> Shared:
        def of(other: int, name: str, count: int, dtype: torch.dtype) -> Tensor:
            path = folder / f"{name}-{width}-{other}"
            return torch.from_file(str(path), shared=True, size=count, dtype=dtype)

        data = [of(other, "data", 2 * rows * width, torch.float32) for other in range(ranks)]
        flags = [of(other, "flags", rows * ranks, torch.int32) for other in range(ranks)]

        def addresses(tensors: list[Tensor]) -> Tensor:
            return torch.tensor([one.data_ptr() for one in tensors])

        turns = torch.zeros(rows, dtype=torch.int32)
        return cls(rank, ranks, rows, addresses(data), addresses(flags), turns, data + flags)


def part(rank: int, turn: int, rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * turn + rank)
    return torch.randn(rows, columns, generator=generator)


def main() -> None:
    folder = Path(sys.argv[1])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for_norms = Shared.open(folder, rank, ranks, ROWS, WIDTH)
    for_pieces = Shared.open(folder, rank, ranks, 2 * ROWS, PIECE)
    weight, residual = part(-1, 0, 1, WIDTH)[0], part(-2, 0, ROWS, WIDTH)
    found = []
    for turn in range(TURNS):
        rows = 1 + turn % ROWS  # so that rows differ in how many turns they took
        x = part(rank, turn, rows, WIDTH)
        normed, total = norm.add_rms_norm_over_ranks(
            x, residual[:rows].clone(), 0.5, weight, EPS, None, for_norms
        )
        wide = part(rank, turn, rows, COLUMNS + 5)[:, :COLUMNS]  # strided
        found.append((normed, total, gather_columns(wide, for_pieces)))
    torch.save(found, folder / f"{rank}.pt")


if __name__ == "__main__":
    main()
