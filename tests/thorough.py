"""What CI leaves out for its time: TESTS=all runs everything."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import product
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
EVERYTHING = os.environ.get("TESTS") == "all"

# Others show much the same. What is left out is not even reported: a skipped case costs 3 ms of
# processor time, and CI leaves out more than it runs.
thorough = pytest.mark.thorough
# Of a test whose cases differ little CI runs a third: of any two values of a parameter both, most
# likely, and the same ones in each run (see conftest.py).
A_THIRD = pytest.mark.a_third


def usually(few: T, every: T) -> T:
    """`every` one of some cases that differ little, or a `few` of them."""
    return every if EVERYTHING else few


def combined(step: int, *values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Every combination, or each `step`-th one: a number that divides none of theirs takes turns
    with the values."""
    every = list(product(*values))
    return usually(every[::step], every)
