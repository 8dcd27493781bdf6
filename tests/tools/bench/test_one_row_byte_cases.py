"""Products of one row in 8 bits in tools/benchmark_kernels.py: that all calls of a case compute the
same."""

from __future__ import annotations

import pytest
import torch

from bench.one_row_byte_cases import one_row_byte_cases, other_tiles
from tests.tools.bench.benches import bench_of


def test_every_format_of_8_bits_is_timed() -> None:
    cases = list(one_row_byte_cases(bench_of("granite-4.0-h-tiny")))
    assert {case.shape.split(",")[0] for case in cases} == {"FP8", "FP8 blocks", "INT8"}
    for case in cases:
        y = case.make()["ours"]()
        assert isinstance(y, torch.Tensor)
        assert case.shape.endswith(f" to {y.shape[1]}")


def test_other_tiles_are_others() -> None:
    pytest.importorskip("triton")
    from megatron_hybrid.kernels.linear.one_row_bytes import choose_tile

    for shape in [(12288, 2048), (2048, 1536), (18560, 4096), (4096, 21504)]:
        tiles = other_tiles(*shape)
        assert choose_tile(shape[1]) not in tiles
        assert len(set(tiles)) == len(tiles)
        assert {tile.depth for tile in tiles} == {512, 1024, 2048}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.inference_mode()
def test_all_calls_of_a_case_compute_the_same() -> None:
    bench = bench_of("granite-4.0-h-tiny", "cuda:0")
    expected: dict[str, torch.Tensor] = {}
    tiles = set()
    for case in one_row_byte_cases(bench):
        size, _, tile = case.shape.partition(": ")
        torch.manual_seed(0)  # cases of a size have the same inputs
        calls = case.make()
        if not tile:
            expected[size] = calls["tensor cores"]()
        for label, call in calls.items():
            # Rounding to FP8 costs some percent.
            limit = 0.1 if label == "16 bits" else 0.01
            error = (call() - expected[size]).norm()
            assert error <= limit * expected[size].norm(), (case.shape, label)
        tiles.add(tile)
    assert len(tiles) > 10
