"""Products of few rows in tools/benchmark_kernels.py: of which weights, and that all calls of a
case compute the same."""

from __future__ import annotations

import pytest
import torch

from bench.few_row_cases import few_row_cases, linear_shapes, other_tiles
from tests.tools.bench.benches import bench_of, check_calls, config


def test_all_linear_layers_but_the_experts_are_timed() -> None:
    mamba, shared = [(6448, 1536), (1536, 3072)], [(2048, 1536), (1536, 1024)]
    attention = [(1536, 1536), (2560, 1536)]
    assert linear_shapes(config("granite-4.0-h-tiny")) == [*mamba, *shared, *attention]


def test_other_tiles_are_others() -> None:
    pytest.importorskip("triton")
    from megatron_hybrid.kernels.linear.few_rows import choose_tile

    for shape in [(6448, 1536), (1536, 3072), (131072, 2688)]:
        chosen = choose_tile(*shape)
        tiles = other_tiles(chosen)
        assert chosen not in tiles
        assert len(set(tiles)) == len(tiles)
        assert {tile.rows for tile in tiles} == {64, 128}
        assert {tile.programs for tile in tiles} == {1, 2, 3}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.inference_mode()
def test_all_calls_of_a_case_compute_the_same() -> None:
    bench = bench_of("granite-4.0-h-tiny", "cuda:0")
    tiles = check_calls(few_row_cases(bench), "cuBLAS")
    assert len(tiles) > 10
