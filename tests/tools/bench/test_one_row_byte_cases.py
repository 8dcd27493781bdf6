"""Products of one row in 8 bits in tools/benchmark_kernels.py: that all calls of a case compute the
same."""

from __future__ import annotations

import pytest
import torch

from bench.one_row_byte_cases import one_row_byte_cases, other_tiles
from tests.tools.bench.benches import bench_of, check_calls


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

    for columns in [2048, 1536, 4096, 21504]:
        tiles = other_tiles(columns)
        assert choose_tile(columns) not in tiles
        assert len(set(tiles)) == len(tiles)
        assert {tile.depth for tile in tiles} == {512, 1024, 2048}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.inference_mode()
def test_all_calls_of_a_case_compute_the_same() -> None:
    bench = bench_of("granite-4.0-h-tiny", "cuda:0")
    # Rounding to FP8 costs some percent.
    tiles = check_calls(one_row_byte_cases(bench), "tensor cores", {"16 bits": 0.1})
    assert len(tiles) > 10
