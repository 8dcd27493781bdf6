"""The Triton norms in Triton's interpreter, on a CPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.kernels.norm_cases import (
    check_add_rms_norm,
    check_gated_rms_norm,
    check_l2_clip,
    check_rms_norm,
    check_rms_norm_parts,
    draw,
)

if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    pytest.skip("for machines with triton and without CUDA", allow_module_level=True)
from megatron_hybrid.kernels.norm import triton as norm  # noqa: E402


@pytest.mark.parametrize("size", [1, 12, 64, 200, 1025])
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_every_size(tokens: int, size: int) -> None:
    check_rms_norm(norm, (tokens, size))
    check_add_rms_norm(norm, tokens, size)
    check_gated_rms_norm(norm, tokens, groups=3, size=size)
    check_gated_rms_norm(norm, tokens, groups=1, size=size)
    check_gated_rms_norm(norm, tokens, groups=2, size=size, norm_first=True)
    check_gated_rms_norm(norm, tokens, 2, size, norm_first=True, activation="sigmoid")


@pytest.mark.parametrize("size", [16, 100, 1025])
def test_vectors_are_shortened(size: int) -> None:
    check_l2_clip(norm, (9, 3, size))
    check_l2_clip(norm, (9, 3, size), torch.bfloat16)
    check_l2_clip(norm, (0, 3, size))


@pytest.mark.parametrize("size", [16, 200, 1025])
def test_heads_with_weights_of_their_own(size: int) -> None:
    check_rms_norm(norm, (5, 3, size), by_head=True)
    check_rms_norm(norm, (5, 3, size), torch.bfloat16, torch.float32, torch.bfloat16, by_head=True)


@pytest.mark.parametrize("groups", [6, 7, 32])
def test_several_groups_of_a_program(groups: int) -> None:
    """Programs with 2, 1 and 8 groups; each group's bits are those that it has in any row."""
    check_gated_rms_norm(norm, 3, groups, size=100, norm_first=True)
    torch.manual_seed(groups)
    x, gate = torch.randn(2, 3, groups * 128)
    weight = torch.randn(groups * 128)
    whole = norm.gated_rms_norm(x, gate, weight, 128, 1e-5)
    assert torch.equal(norm.gated_rms_norm(x[1:2], gate[1:2], weight, 128, 1e-5), whole[1:2])


def test_bfloat16() -> None:
    check_rms_norm(norm, (9, 200), torch.bfloat16)
    check_rms_norm(norm, (9, 200), torch.float32, torch.bfloat16)
    check_add_rms_norm(norm, 9, 200, torch.bfloat16, torch.float32)
    check_gated_rms_norm(norm, 9, groups=3, size=64, dtype=torch.bfloat16)
    check_gated_rms_norm(norm, 9, groups=3, size=64, dtype=torch.bfloat16, norm_first=True)


@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16])
def test_float32_weights_of_a_narrow_model(out_dtype: torch.dtype | None) -> None:
    narrow, wide = torch.bfloat16, torch.float32
    check_rms_norm(norm, (9, 200), narrow, wide, out_dtype)
    check_rms_norm(norm, (9, 3, 16), narrow, wide, out_dtype)
    check_add_rms_norm(norm, 9, 200, narrow, narrow, wide, out_dtype)
    check_add_rms_norm(norm, 9, 200, narrow, wide, wide, out_dtype)


def test_an_output_that_is_wider_than_the_weights() -> None:
    check_rms_norm(norm, (9, 200), torch.float32, torch.bfloat16, torch.float32)
    check_add_rms_norm(norm, 9, 200, torch.bfloat16, out_dtype=torch.float32)


def test_heads_of_a_wider_projection() -> None:
    check_rms_norm(norm, (9, 3, 16))
    torch.manual_seed(0)
    qkv = draw(7, 3 * 64, dtype=torch.float32)
    heads = qkv[:, 64:128].unflatten(1, (4, 16))
    weight = torch.randn(16)
    expected = norm.rms_norm(heads.contiguous(), weight, 1e-5)
    assert torch.equal(norm.rms_norm(heads, weight, 1e-5), expected)


def test_the_residual_takes_the_sum() -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(3, 12), torch.randn(3, 12)
    expected = residual + 0.5 * x
    _, total = norm.add_rms_norm(x, residual, 0.5, torch.ones(12), 1e-5)
    assert total is residual
    torch.testing.assert_close(total, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sections", [(12, 5, 7), (256, 16, 16), (1, 300, 2)])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_parts(tokens: int, sections: tuple[int, int, int], dtype: torch.dtype) -> None:
    check_rms_norm_parts(norm, tokens, sections, dtype)
