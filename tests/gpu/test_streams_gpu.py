"""Residual streams on a GPU: kernels against float64, at the sizes of Qwen3.8-Flash-Next,
GLM-5.3-Flash and Inkling 2 Small; and tables of n-grams that the GPU reads from the host's memory.

    python -m pytest -m gpu -s tests/gpu/test_streams_gpu.py
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from megatron_hybrid import LLM, SamplingParams
from megatron_hybrid.layers.mixer import LayerContext
from megatron_hybrid.layers.ngram_table import NGramTable
from megatron_hybrid.parallel import ExpertRanks, RankGroup, initialize
from tests.kernels.streams_cases import (
    SHAPES,
    TYPES,
    check_all,
    check_alone,
    check_attended,
    check_balanced,
)
from tests.tiny_models import make_tiny_model

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from megatron_hybrid.kernels.streams import triton as streams  # noqa: E402

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
PROMPTS = [[(7 * i * i + 3 * i + n) % 160 for i in range(n)] for n in (1, 5, 33, 80)]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (1, 4, 2560), (333, 4, 2560), (129, 4, 4096)])
def test_every_sum(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check_all(streams, shape, dtype, "cuda")


@pytest.mark.parametrize("dtype", TYPES)
def test_averages_of_inkling_2(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    every = torch.randn(333, 9, 4608, device="cuda").to(dtype)
    check_attended(streams, every[:, :5].contiguous(), every)


@pytest.mark.parametrize(("count", "times"), [(2, 1), (4, 20), (5, 3)])
def test_matrices_are_balanced(count: int, times: int) -> None:
    check_balanced(streams, 777, count, times, "cuda")


@pytest.mark.parametrize("dtype", TYPES)
def test_bits_do_not_depend_on_who_is_beside(dtype: torch.dtype) -> None:
    check_alone(streams, dtype, "cuda")


def test_a_table_is_read_where_it_lies() -> None:
    """Also in a CUDA graph; rows past 2^31 bytes; and how fast."""
    parallel = initialize(device=torch.device("cuda", 0))
    ranks: RankGroup = parallel.tensor
    experts: ExpertRanks = parallel.experts
    kinds = (torch.bfloat16, torch.float32, torch.bfloat16)
    context = LayerContext(
        2560, 1e-6, 0, torch.bfloat16, ranks, experts, *kinds, tables_on_host=True
    )
    rows, numbers = 9_000_000, 160  # 2.9 GB
    before = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        table = NGramTable(rows, numbers, 16, 128, context)
    assert torch.cuda.memory_allocated() - before < 2**20 and not list(table.parameters())
    assert table.held is not None
    number = torch.arange(rows, dtype=torch.int32)
    table.held.host[:, 0] = (number % 251).bfloat16()
    table.held.host[:, -1] = (number // 251 % 251).bfloat16()
    places = torch.randint(0, rows, (512, 16), device="cuda")
    places[0, 0] = rows - 1

    def check(found: torch.Tensor) -> None:
        own = found.view(512, 16, numbers)
        assert torch.equal(own[:, :, 0].long(), places % 251)
        assert torch.equal(own[:, :, -1].long(), places // 251 % 251)

    check(table(places))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = table(places)
    places.copy_(torch.randint(0, rows, (512, 16)))
    graph.replay()
    check(out)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    print(f"512 tokens of 16 rows: {(time.perf_counter() - start) / 20 * 1e6:.0f} us")


def test_answers_are_the_same_with_tables_on_the_host(tmp_path: Path) -> None:
    make_tiny_model("qwen4_exp", tmp_path)
    sizes = {
        "inference_dynamic_batching_block_size": 16,
        "inference_dynamic_batching_buffer_size_gb": 0.02,
        "inference_dynamic_batching_max_requests": 16,
        "inference_dynamic_batching_prefix_caching_mamba_gb": 0.02,
    }
    known = []
    for on_host in (False, True):
        llm = LLM(str(tmp_path), ngram_embeddings_on_host=on_host, **sizes)
        kinds = llm.stats()["weight_bytes"]
        assert any("tables of n-grams on the host" in kind for kind in kinds) == on_host
        outputs = llm.generate(PROMPTS, GREEDY, progress=False)
        known.append([output.token_ids for output in outputs])
        again = llm.generate(PROMPTS, GREEDY, progress=False)
        assert [output.token_ids for output in again] == known[-1]
    assert known[0] == known[1]
