"""Activations in plain torch against their formulas in float64."""

from __future__ import annotations

import pytest
import torch

from megatron_hybrid.kernels.activation import reference as activation
from tests.kernels.activation_cases import CAPPED, LIMITED, check_activate, check_gate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", activation.ACTIVATIONS)
def test_activate(name: str, gated: bool, dtype: torch.dtype) -> None:
    check_activate(activation, name, gated, 5, 12, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_and_what_they_are_multiplied_with_may_be_limited(dtype: torch.dtype) -> None:
    check_activate(activation, LIMITED, True, 5, 12, dtype)
    check_activate(activation, CAPPED, True, 5, 12, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", activation.ACTIVATIONS)
def test_gate(name: str, dtype: torch.dtype) -> None:
    check_gate(activation, name, 5, 12, dtype)
