"""What CI leaves out for its time: TESTS=all runs everything."""

from __future__ import annotations

import os
from typing import TypeVar

import pytest

T = TypeVar("T")
EVERYTHING = os.environ.get("TESTS") == "all"

thorough = pytest.mark.skipif(not EVERYTHING, reason="others show much the same: TESTS=all")


def usually(few: T, every: T) -> T:
    """`every` one of some cases that differ little, or a `few` of them."""
    return every if EVERYTHING else few
