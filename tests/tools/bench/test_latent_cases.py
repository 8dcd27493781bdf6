"""Cases of latent attention: what runs, and what it is said to move."""

from __future__ import annotations

import pytest

from bench.latent_cases import latent_cases
from tests.tools.bench.benches import bench_of


@pytest.mark.parametrize("model", ["kimi-linear-48b-a3b", "ling-3.0-flash"])
def test_every_case_runs(model: str) -> None:
    cases = list(latent_cases(bench_of(model)))
    assert {case.name for case in cases} == {"latent decode", "latent prefill", "latent prepare"}
    for case in cases:
        for call in case.make().values():
            call()
    by_shape = {case.shape: case for case in cases}
    one, drafted = by_shape["B=3 kv 70"], by_shape["B=3 kv 70 x 5"]
    weights = 4 * (16 + 16) * 32 * 4
    assert one.num_bytes == drafted.num_bytes == 3 * 70 * (32 + 8) * 4 + weights
    assert drafted.flops == 5 * one.flops == 5 * 2 * 3 * 70 * 4 * (40 + 32)


def test_a_model_without_latent_attention_has_none() -> None:
    assert not list(latent_cases(bench_of("llama-3.1-8b")))
