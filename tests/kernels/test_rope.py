from __future__ import annotations

import pytest
import torch

from megatron_hybrid.kernels.paged_attention import reference as attention
from megatron_hybrid.kernels.rope import reference
from tests.kernels.attention_cases import attention_shape
from tests.kernels.rope_cases import check_prepare, check_turn, rotated


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


@pytest.mark.parametrize("rotary_dim", [0, 4, 8])
@pytest.mark.parametrize("norm_dtype", [None, torch.float32])
def test_what_a_layer_without_a_cache_takes(
    norm_dtype: torch.dtype | None, rotary_dim: int
) -> None:
    check_turn(reference, 3, 8, rotary_dim, norm_dtype)


@pytest.mark.parametrize("rotary_dim", [0, 4, 8])
@pytest.mark.parametrize("norm_dtype", [None, torch.float32])
@pytest.mark.parametrize("queries", [True, False])
def test_what_attention_takes(
    queries: bool, norm_dtype: torch.dtype | None, rotary_dim: int
) -> None:
    for kv_dtype in (torch.float32, torch.float8_e4m3fn):
        shape = attention_shape(kv_dtype=kv_dtype)
        check_prepare(reference, attention, shape, rotary_dim, norm_dtype, queries=queries)
