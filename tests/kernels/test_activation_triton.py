"""The Triton activations in Triton's interpreter, on a CPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from megatron_hybrid.kernels.activation.reference import ACTIVATIONS
from tests.kernels.activation_cases import CAPPED, LIMITED, check_activate, check_gate
from tests.thorough import A_THIRD, usually

if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    pytest.skip("for machines with triton and without CUDA", allow_module_level=True)
from megatron_hybrid.kernels.activation import triton as activation  # noqa: E402

TYPES = (torch.float32, torch.bfloat16)
SIZES = [(columns, dtype) for columns in (1, 12, 700) for dtype in TYPES]


@A_THIRD
@pytest.mark.parametrize(("columns", "dtype"), usually(SIZES[::3] + SIZES[4:], SIZES))
@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_size(name: str, gated: bool, tokens: int, columns: int, dtype: torch.dtype) -> None:
    check_activate(activation, name, gated, tokens, columns, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_and_what_they_are_multiplied_with_may_be_limited(dtype: torch.dtype) -> None:
    check_activate(activation, LIMITED, True, 5, 12, dtype)
    check_activate(activation, CAPPED, True, 5, 700, dtype)


@A_THIRD
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "columns"), [(0, 12), (1, 1), (9, 12), (2, 700)])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gate(name: str, tokens: int, columns: int, dtype: torch.dtype) -> None:
    check_gate(activation, name, tokens, columns, dtype)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # exp(200)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_extreme_inputs(name: str) -> None:
    x = torch.tensor([[-200.0, -90.0, 0.0, 90.0, float("nan")]])
    expected = ACTIVATIONS[name](x)
    torch.testing.assert_close(activation.activate(x, name, False), expected, equal_nan=True)


def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(
        ValueError, match="'tanh', must be one of silu, relu2, gelu, gelu_tanh, sigmoid, none"
    ):
        activation.activate(torch.zeros(1, 4), "tanh", False)
