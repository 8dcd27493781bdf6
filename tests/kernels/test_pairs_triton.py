"""Grouping pairs of a token and an expert, in Triton's interpreter."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs these kernels compiled", allow_module_level=True)
if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from megatron_hybrid.kernels.experts import pairs  # noqa: E402
from tests.kernels.groups_by_hand import check_groups  # noqa: E402
from tests.thorough import A_THIRD

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("number", [4096, 4097])
def test_the_last_group_of_few_pairs_and_the_first_of_many(number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    # Two of seven experts have nothing.
    check_groups(torch.randint(1, 6, (number, 1), generator=generator), 7, 16)


@pytest.mark.parametrize("rows", [1, 16])
def test_groups_of_few_pairs_some_of_which_are_elsewhere(rows: int) -> None:
    ids = torch.randint(0, 50, (70, 4), generator=torch.Generator().manual_seed(0))
    check_groups(ids, 20, rows)
    check_groups(torch.full_like(ids, 5), 5, rows)
    check_groups(torch.full_like(ids, 4), 5, rows)


@A_THIRD
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("pieces", [3, 128])
def test_groups_of_many_pairs(
    monkeypatch: pytest.MonkeyPatch, pieces: int, dtype: torch.dtype
) -> None:
    """In pieces of several chunks, and of one."""
    monkeypatch.setattr(pairs, "_MOST_PIECES", pieces)
    generator = torch.Generator().manual_seed(pieces)
    ids = torch.randint(0, 50, (1300, 4), generator=generator).to(dtype)
    check_groups(ids, 50, 16)
    check_groups(ids, 20, 16)
    check_groups(torch.full_like(ids, 3), 5, 16)
    check_groups(torch.full_like(ids, 5), 5, 16)
