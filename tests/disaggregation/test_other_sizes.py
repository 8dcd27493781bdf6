"""Servers that are split over ranks in other ways hand prompts over to one another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("nixl_cu13", reason="needs NIXL")
from bench.ports import free_address  # noqa: E402
from megatron_hybrid import LLM  # noqa: E402
from tests.disaggregation.engines import PREFIX, answers, options  # noqa: E402
from tests.disaggregation.ranks_worker import long_prompt, prompts  # noqa: E402
from tests.parallel.ranks import run_on_ranks, start_ranks  # noqa: E402
from tests.thorough import usually  # noqa: E402
from tests.tiny_models import make_tiny_model  # noqa: E402

WORKER = "tests.disaggregation.ranks_worker"
Sizes = tuple[int, int]  # tensor- and pipeline-parallel
ONE, TENSOR, STAGES, FOUR = (1, 1), (2, 1), (1, 2), (2, 2)
PAIRS: list[tuple[Sizes, Sizes]] = usually(
    [(TENSOR, ONE), (ONE, TENSOR)],
    [(TENSOR, ONE), (ONE, TENSOR), (TENSOR, TENSOR), (STAGES, TENSOR), (FOUR, ONE), (ONE, STAGES)],
)
FAMILIES = usually(["nemotron_h"], ["nemotron_h", "qwen3_next", "mamba", "llama", "lfm2"])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_either_side_may_be_split(
    prefill: Sizes, decode: Sizes, family: str, tmp_path: Path
) -> None:
    folders = {name: tmp_path / name for name in ("model", "prefill", "decode", "shared")}
    for folder in folders.values():
        folder.mkdir()
    make_tiny_model(family, folders["model"])
    address, shared = free_address(), str(folders["shared"])

    def arguments(role: str, sizes: Sizes) -> list[str]:
        return [role, *map(str, sizes), address, str(folders["model"]), shared]

    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(
            start_ranks, prefill[0] * prefill[1], WORKER, folders["prefill"],
            *arguments("prefill", prefill),
        )  # fmt: skip
        try:
            found = run_on_ranks(
                decode[0] * decode[1], WORKER, folders["decode"], *arguments("decode", decode)
            )
        finally:
            (folders["shared"] / "answered").touch()
        first.result()
    llm = LLM(**options(str(folders["model"]), **{PREFIX + "block_size": 16}))
    every = [*prompts(), long_prompt()]
    expected, _ = answers(llm, every)
    assert found["found"] == [expected, [len(prompt) for prompt in every]]
    assert found["ahead"] or not llm.engine.context.geometry.has_attention
