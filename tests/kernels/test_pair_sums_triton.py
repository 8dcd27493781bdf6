"""Sums of experts' pairs in Triton's interpreter, on a CPU."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs these kernels compiled", allow_module_level=True)
if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from tests.kernels.pair_sum_cases import (  # noqa: E402
    check_rounded_sums,
    check_sums,
    of_kinds_and_types,
    of_readers,
)
from tests.thorough import A_THIRD

pytestmark = pytest.mark.usefixtures("poisoned")


@A_THIRD
@of_kinds_and_types
@pytest.mark.parametrize(("tokens", "width"), [(0, 40), (5, 40), (3, 1100)])
def test_sums_and_their_norms(tokens: int, width: int, kind: Any, types: Any) -> None:
    check_sums(tokens, width, kind, types, "cpu")


@of_readers
@pytest.mark.parametrize("plain", [True, False])
def test_norms_that_are_rounded_for_who_reads_them(reader: str, plain: bool) -> None:
    check_rounded_sums(reader, plain, "cpu")
