"""The norms in plain torch against their formulas in float64."""

from __future__ import annotations

import torch

from megatron_hybrid.kernels.norm import reference as norm
from tests.kernels.norm_cases import check_add_rms_norm, check_gated_rms_norm, check_rms_norm


def test_rms_norm() -> None:
    check_rms_norm(norm, (5, 12))
    check_rms_norm(norm, (5, 3, 16))


def test_rms_norm_of_a_wide_residual_for_a_narrow_model() -> None:
    check_rms_norm(norm, (5, 12), torch.float32, torch.bfloat16)


def test_add_rms_norm() -> None:
    check_add_rms_norm(norm, 5, 12)
    check_add_rms_norm(norm, 5, 12, torch.bfloat16, torch.float32)
    check_add_rms_norm(norm, 5, 12, torch.bfloat16, torch.bfloat16)


def test_gated_rms_norm() -> None:
    check_gated_rms_norm(norm, 5, groups=1, size=12)
    check_gated_rms_norm(norm, 5, groups=3, size=16, dtype=torch.bfloat16)
