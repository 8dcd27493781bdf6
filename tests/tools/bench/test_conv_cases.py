"""Tiles of the convolution's decodes in tools/benchmark_kernels.py: all compute the same."""

from __future__ import annotations

import pytest
import torch

from bench.cases import Case
from bench.conv_cases import TILES, conv_cases
from bench.recurrent_kinds import recurrent_kinds
from tests.tools.bench.benches import bench_of, results, triton_bench


def tile_cases(bench) -> list[Case]:
    (kind,) = recurrent_kinds(bench.model, bench.kernels, bench.device, bench.dtype)
    return [case for case in conv_cases(bench, kind) if case.name == "conv tiles"]


@pytest.mark.parametrize("model", ["nemotron-h-8b", "qwen3.5-35b-a3b", "lfm2-1.2b"])
@torch.inference_mode()
def test_a_decode_is_the_same_in_all_tiles(model: str) -> None:
    bench = triton_bench(model)
    cases = tile_cases(bench)
    assert [case.shape.split(",")[0] for case in cases] == [f"B={n}" for n in bench.batches()]
    for case in cases:
        chosen = case.shape.split(" ours ")[1]
        found = results(case)
        assert list(found) == ["ours", *(tile for tile in TILES if tile != chosen)]
        for tile, y in found.items():
            assert torch.equal(y, found["ours"]), tile


def test_what_is_not_ours_has_no_tiles() -> None:
    assert tile_cases(bench_of("lfm2-1.2b")) == []
