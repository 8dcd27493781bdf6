from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_hybrid.kernels.rope import reference


def rotated(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """In float64: dimensions i and i + rotary_dim / 2 are the parts of a complex number."""
    half = len(frequencies)
    x = x.double()
    # angles in float32, as every implementation takes them
    angles = (positions[:, None].float() * frequencies).double()[:, None]
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), dim=-1)


@pytest.mark.parametrize("rotary_dim", [4, 10, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairs_of_dimensions_turn(rotary_dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    positions = torch.tensor([0, 1, 5, 1000, 30000])
    frequencies = 1e4 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
    projection = torch.randn(5, 6, 16, generator=generator).to(dtype)
    x = projection[:, 1:4]
    expected = rotated(x, positions, frequencies)
    plan = reference.plan(positions, frequencies, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(
        reference.rotate(x, plan).double(), expected, atol=tolerance, rtol=tolerance
    )


def test_scores_depend_on_the_distance_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 8, generator=generator)
    frequencies = 1e2 ** -(torch.arange(0, 8, 2) / 8)

    def score(at: int, of: int) -> float:
        plans = [reference.plan(torch.tensor([i]), frequencies, torch.float32) for i in (at, of)]
        return float((reference.rotate(query, plans[0]) * reference.rotate(key, plans[1])).sum())

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
