"""The norms in plain torch against their formulas in float64."""

from __future__ import annotations

import pytest
import torch

from megatron_hybrid.kernels.norm import reference as norm
from tests.kernels.norm_cases import (
    EPS,
    check_add_rms_norm,
    check_gated_rms_norm,
    check_l2_clip,
    check_rms_norm,
    check_rms_norm_parts,
    draw,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vectors_are_shortened(dtype: torch.dtype) -> None:
    check_l2_clip(norm, (9, 3, 16), dtype)


def test_rms_norm() -> None:
    check_rms_norm(norm, (5, 12))
    check_rms_norm(norm, (5, 3, 16))
    check_rms_norm(norm, (5, 3, 16), by_head=True)


def test_rms_norm_of_a_wide_residual_for_a_narrow_model() -> None:
    check_rms_norm(norm, (5, 12), torch.float32, torch.bfloat16)


def test_add_rms_norm() -> None:
    check_add_rms_norm(norm, 5, 12)
    check_add_rms_norm(norm, 5, 12, torch.bfloat16, torch.float32)
    check_add_rms_norm(norm, 5, 12, torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16])
def test_float32_weights_of_a_narrow_model(out_dtype: torch.dtype | None) -> None:
    narrow, wide = torch.bfloat16, torch.float32
    check_rms_norm(norm, (5, 12), narrow, wide, out_dtype)
    check_rms_norm(norm, (5, 3, 16), narrow, wide, out_dtype)
    check_add_rms_norm(norm, 5, 12, narrow, narrow, wide, out_dtype)
    check_add_rms_norm(norm, 5, 12, narrow, wide, wide, out_dtype)


def test_an_output_that_is_wider_than_the_weights() -> None:
    check_rms_norm(norm, (5, 12), torch.float32, torch.bfloat16, torch.float32)
    check_add_rms_norm(norm, 5, 12, torch.bfloat16, out_dtype=torch.float32)


def test_only_the_output_is_rounded_where_weights_are_float32() -> None:
    torch.manual_seed(0)
    x, weight = draw(50, 64, dtype=torch.bfloat16), draw(64, dtype=torch.float32)
    y = norm.rms_norm(x, weight, EPS, torch.bfloat16)
    assert torch.equal(y, norm.rms_norm(x, weight, EPS).bfloat16())
    y, total = norm.add_rms_norm(x, x, 0.5, weight, EPS, torch.bfloat16)
    assert torch.equal(y, norm.rms_norm(total, weight, EPS).bfloat16())


@pytest.mark.parametrize("norm_first", [False, True])
def test_gated_rms_norm(norm_first: bool) -> None:
    check_gated_rms_norm(norm, 5, groups=1, size=12, norm_first=norm_first)
    check_gated_rms_norm(norm, 5, 3, 16, torch.bfloat16, norm_first)
    check_gated_rms_norm(norm, 5, 3, 16, norm_first=norm_first, activation="sigmoid")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts(dtype: torch.dtype) -> None:
    check_rms_norm_parts(norm, 5, (12, 5, 7), dtype)
