"""Functions of single numbers: torch's values, and the same bits wherever a number stands."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.kernels import elementwise
from tests.thorough import usually

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid, "silu": F.silu, "gelu": F.gelu, "softplus": F.softplus,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "soft_capped": torch.tanh,
}  # fmt: skip
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = pytest.mark.parametrize("dtype", TYPES, ids=str)
NAMES = pytest.mark.parametrize("name", FUNCTIONS)


def function_of(name: str) -> Callable[[Tensor], Tensor]:
    function: Callable[..., Tensor] = getattr(elementwise, name)
    return partial(function, cap=1.0) if name == "soft_capped" else function


def numbers(dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (4 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


@DTYPES
@NAMES
def test_values_are_torch_s(name: str, dtype: torch.dtype) -> None:
    ends = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 88.0, -88.0, 700.0, -700.0]).to(dtype)
    x = torch.cat((numbers(dtype, 1000), ends))
    before, found = x.clone(), function_of(name)(x)
    assert torch.equal(x, before) and found.dtype == dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    truth = FUNCTIONS[name](x.double())
    # a rounding of the result, and of what is computed on the way
    error = (found.double() - truth).abs()
    allowed = 4 * torch.finfo(wide).eps * (1 + truth.abs())
    if dtype != wide:
        allowed += torch.finfo(dtype).eps * truth.abs() + torch.finfo(dtype).smallest_normal
        if name == "softplus":  # which is only given wide ones
            allowed += 2 * torch.finfo(dtype).eps * (1 + truth.abs())
    assert (error <= allowed).all(), (x[error > allowed], found[error > allowed])


@DTYPES
@NAMES
def test_infinities_and_nan(name: str, dtype: torch.dtype) -> None:
    function, large = function_of(name), float("inf")
    found = function(torch.tensor([large, float("nan")]).to(dtype)).tolist()
    ends = {"sigmoid": 1.0, "soft_capped": 1.0}
    assert found[0] == ends.get(name, large) and found[1] != found[1]
    if name in ("sigmoid", "softplus"):
        assert function(torch.tensor([-large]).to(dtype)).tolist() == [0.0]


@DTYPES
@NAMES
def test_a_number_s_bits_do_not_depend_on_its_place(name: str, dtype: torch.dtype) -> None:
    function, x = function_of(name), numbers(dtype, 150)
    whole = function(x)
    for begin in range(0, usually(18, 70)):
        for count in range(1, usually(36, 80)):
            end = begin + count
            assert torch.equal(function(x[begin:end]), whole[begin:end]), (begin, end)
    table = numbers(dtype, 40, 33)
    every = function(table)
    assert torch.equal(function(table.t()).t(), every)
    assert torch.equal(function(table[:, ::2]), every[:, ::2])
    assert all(torch.equal(function(row), own) for row, own in zip(table, every, strict=True))
