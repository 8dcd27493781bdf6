"""Kernels over several ranks' memory, in Triton's interpreter: one process for each rank."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.parallel.ranks import start_ranks

if importlib.util.find_spec("triton") is None:
    pytest.skip("for machines with triton", allow_module_level=True)

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_sum_and_gather_turn_after_turn(ranks: int, tmp_path: Path) -> None:
    from megatron_hybrid.kernels.norm import reference
    from tests.kernels.over_ranks_worker import COLUMNS, EPS, ROWS, TURNS, WIDTH, part

    start_ranks(ranks, "tests.kernels.over_ranks_worker", tmp_path)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    weight, residual = part(-1, 0, 1, WIDTH)[0], part(-2, 0, ROWS, WIDTH)
    for turn in range(TURNS):
        rows = 1 + turn % ROWS
        x = torch.stack([part(rank, turn, rows, WIDTH) for rank in range(ranks)]).sum(0)
        expected = reference.add_rms_norm(x, residual[:rows].clone(), 0.5, weight, EPS)
        wide = [part(rank, turn, rows, COLUMNS + 5)[:, :COLUMNS] for rank in range(ranks)]
        for of_rank in found:
            normed, total, gathered = of_rank[turn]
            torch.testing.assert_close((normed, total), expected)
            assert torch.equal(gathered, torch.cat(wide, dim=1))
            assert torch.equal(normed, found[0][turn][0])
