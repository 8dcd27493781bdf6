"""The engine on a GPU against the same engine on plain torch kernels and a CPU: the same greedy
tokens, in every way that a prompt can be computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_hybrid import LLM, SamplingParams
from megatron_hybrid.cache.geometry import GIB
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.models.config import IN_PLAIN_TORCH
from tests.tiny_models import FAMILIES, make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OPTIONS = {
    "inference_dynamic_batching_block_size": 16,
    "inference_dynamic_batching_buffer_size_gb": 0.05,
    "inference_dynamic_batching_max_requests": 24,
    "inference_dynamic_batching_prefix_caching_mamba_gb": 0.05,
    "dtype": "float32",
}
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
GRAPHS = "inference_dynamic_batching_num_cuda_graphs"
PROMPTS = "inference_dynamic_batching_cuda_graph_mixed_prefill_count"
WAYS = {
    "graphs": {GRAPHS: 6},
    "graphs of two prompts": {GRAPHS: 6, PROMPTS: 2},
    "graphs of decodes": {GRAPHS: 6, PROMPTS: 0},
    "no graphs": {GRAPHS: 0},
    "chunked": {"inference_dynamic_batching_max_tokens": 48},
    "break": {"prefill_checkpoint_mode": "break"},
    "reference kernels": {"kernels": "reference"},
}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, 160, (150,), generator=generator).tolist()
    own = [torch.randint(0, 160, (n,), generator=generator).tolist() for n in (1, 15, 16, 33, 70)]
    # every length modulo the grid, much in common, and twins
    return own + [text[: 60 + n] for n in range(17)] + [text, text, text[:64] + own[4]]


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    make_tiny_model(request.param, folder)
    return folder


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[list[int]]:
    outputs = LLM(str(tiny), device="cpu", **OPTIONS).generate(prompts(), PARAMS)
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_the_reference(tiny: Path, expected: list[list[int]], way: str) -> None:
    llm = LLM(str(tiny), device="cuda", **(OPTIONS | WAYS[way]))  # type: ignore[arg-type]
    together = [output.token_ids for output in llm.generate(prompts(), PARAMS)]
    warm = llm.generate(prompts(), PARAMS)
    alone = [llm.generate([prompt], PARAMS)[0].token_ids for prompt in prompts()[::4]]
    assert together == expected
    assert [output.token_ids for output in warm] == expected
    assert alone == expected[::4]
    assert sum(output.cached_tokens for output in warm) > 0
    llm.engine.check_integrity()
    replayed = llm.engine.runner.replayed  # type: ignore[attr-defined]
    captures = may_capture(tiny)
    assert (replayed["decode"] > 0) == (captures and way not in ("no graphs", "reference kernels"))
    if way == "graphs" and captures:
        assert replayed["mixed"] > 0
    if way in ("graphs of decodes", "no graphs", "reference kernels") or not captures:
        assert replayed["mixed"] == 0


def test_preempted_requests_give_the_tokens_of_the_reference(tiny: Path) -> None:
    """Answers that grow past the KV blocks that there are."""
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    plain = LLM(str(tiny), device="cpu", **OPTIONS)  # type: ignore[arg-type]
    geometry = plain.engine.context.geometry
    if not geometry.has_attention:
        pytest.skip("A model without attention never runs out of KV blocks.")
    stages = plain.engine.runner._model.stages  # type: ignore[attr-defined]
    ring_place = sum(spec.bytes_per_ring_place() for spec in stages.state_specs.values())
    interval = {"mamba_inference_state_write_interval": 4}
    size = 8 * (geometry.bytes_per_slot + 4 * ring_place) + 21 * geometry.bytes_per_block
    few: dict[str, object] = {"inference_dynamic_batching_max_requests": 8}
    if geometry.has_window:  # whose blocks a step's prompts need beside those of each request
        few["inference_dynamic_batching_max_tokens"] = 64
        of_windows = 8 * geometry.window_quota + 64 // geometry.block_size + 2
        size += of_windows * geometry.bytes_per_window_block
    few["inference_dynamic_batching_buffer_size_gb"] = size / GIB
    llm = LLM(str(tiny), device="cuda", **(OPTIONS | few | interval))  # type: ignore[arg-type]
    found = [output.token_ids for output in llm.generate(prompts(), params)]
    assert found == [output.token_ids for output in plain.generate(prompts(), params)]
    assert llm.stats()["preemptions"] > 0
    llm.engine.check_integrity()


def may_capture(folder: Path) -> bool:
    """Not with recurrences in plain torch alone."""
    return not set(ModelFolder.open(folder).config.pattern) & IN_PLAIN_TORCH


def serve(llm: LLM, waves: dict[int, list[list[int]]], params: SamplingParams) -> list[list[int]]:
    """The tokens of requests that are added before steps of these numbers."""
    engine, tokens, step = llm.engine, {}, 0
    while engine.has_work() or step <= max(waves):
        for prompt in waves.get(step, []):
            name = str(len(tokens))
            tokens[name] = []
            engine.add_request(name, prompt, params)
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
        step += 1
    return list(tokens.values())


def test_prompts_arrive_among_decodes(tiny: Path) -> None:
    """One long prompt, many short ones, more than a graph has room for, and known ones."""
    generator = torch.Generator().manual_seed(4)

    def random(*lengths: int) -> list[list[int]]:
        return [torch.randint(0, 160, (n,), generator=generator).tolist() for n in lengths]

    first, long, most = random(40, 7, 1), random(700), random(*range(200, 520, 60))
    waves = {
        0: first,
        3: long,
        6: random(*range(1, 7)),
        9: [*random(33), first[0]],  # the end of a prompt is stored, another one resumed
        12: [first[0], first[1]],
        14: random(*[5] * 12),
        20: most,
    }
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    found, counts = {}, {}
    for prompts_in_a_graph in (0, 4, 16):
        options = OPTIONS | {PROMPTS: prompts_in_a_graph}
        llm = LLM(str(tiny), device="cuda", **options)  # type: ignore[arg-type]
        found[prompts_in_a_graph] = serve(llm, waves, params)
        counts[prompts_in_a_graph] = dict(llm.engine.runner.replayed)  # type: ignore[attr-defined]
        llm.engine.check_integrity()
    plain = LLM(str(tiny), device="cpu", **OPTIONS)  # type: ignore[arg-type]
    assert found[0] == serve(plain, waves, params)
    assert found[4] == found[0] and found[16] == found[0]
    if may_capture(tiny):
        assert counts[0]["mixed"] == 0 < counts[4]["mixed"] < counts[16]["mixed"]


def test_mixed_graphs_on_the_fast_attention_kernels(tmp_path: Path) -> None:
    """In bfloat16, with heads that flashinfer has kernels for: the same distributions."""
    make_tiny_model("nemotron_h", tmp_path, head_dim=64)
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=5, ignore_eos=True)
    asked = [prompt for prompt in prompts() for _ in range(2)][::3]
    found = []
    for prompts_in_a_graph in (0, 16):
        options = OPTIONS | {PROMPTS: prompts_in_a_graph, "dtype": "bfloat16"}
        llm = LLM(str(tmp_path), device="cuda", **options)  # type: ignore[arg-type]
        outputs = [output for prompt in asked for output in llm.generate([prompt], params)]
        found.append([output.logprobs[0] for output in outputs if output.logprobs])
        replayed = llm.engine.runner.replayed["mixed"]  # type: ignore[attr-defined]
        assert (replayed > 0) == (prompts_in_a_graph > 0)
    assert len(found[0]) == len(found[1]) == len(asked)
    for one, other in zip(*found, strict=True):
        assert one.top[0][1] == pytest.approx(other.top[0][1], abs=0.1)


@pytest.mark.parametrize("family", ["nemotron_h", "granite_moe_hybrid", "qwen3_5_moe", "lfm2"])
def test_mixed_graphs_of_long_prompts(tmp_path: Path, family: str) -> None:
    """The same distributions as without, of prompts with a past and without, beside decodes and
    each other; and states on the way are stored."""
    make_tiny_model(family, tmp_path, head_dim=64, max_position_embeddings=8192)
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=5, ignore_eos=True)
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(0, 160, (6000,), generator=generator).tolist()
    # a grid's end and past it; behind what the one before has left in the cache
    asked = [text[:n] for n in (700, 1024, 1025, 2600, 6000, 5000)]
    asked += [text[1:900], text[2:3000]]
    big = {"inference_dynamic_batching_buffer_size_gb": 0.3, "dtype": "bfloat16"}
    found = []
    for prompts_in_a_graph in (0, 16):
        llm = LLM(str(tmp_path), device="cuda", **(OPTIONS | big | {PROMPTS: prompts_in_a_graph}))
        outputs = [output for prompt in asked for output in llm.generate([prompt], params)]
        outputs += llm.generate([prompt[3:] for prompt in asked], params)  # together
        outputs += llm.generate(asked, params)  # what was stored
        found.append([output.logprobs[0] for output in outputs if output.logprobs])
        runner = llm.engine.runner
        long = [size for size in runner._graphs._graphs if size.is_long]
        assert bool(long) == (prompts_in_a_graph > 0)
        assert (runner.replayed["mixed"] > 6) == (prompts_in_a_graph > 0)
        llm.engine.check_integrity()
    assert len(found[0]) == len(found[1]) == 3 * len(asked)
    for one, other in zip(*found, strict=True):
        assert one.top[0][1] == pytest.approx(other.top[0][1], abs=0.1)


def test_idle_steps_change_nothing(tiny: Path, expected: list[list[int]]) -> None:
    llm = LLM(str(tiny), device="cuda", **OPTIONS)  # type: ignore[arg-type]
    llm.generate(prompts(), PARAMS)
    for _ in range(20):
        llm.engine.dummy_forward()
    warm = llm.generate(prompts(), PARAMS)
    assert [output.token_ids for output in warm] == expected


def test_seeds_give_the_same_tokens_in_any_batch(tiny: Path) -> None:
    llm = LLM(str(tiny), device="cuda", **OPTIONS)  # type: ignore[arg-type]
    drawn = [
        SamplingParams(temperature=0.9, top_p=0.9, top_k=k, max_tokens=8, seed=k, ignore_eos=True)
        for k in (0, 5, 20)
    ]
    prompt = prompts()[4]
    alone = [llm.generate([prompt], params)[0].token_ids for params in drawn]
    mixed = llm.generate([prompt] * 6, [PARAMS, *drawn, PARAMS, drawn[0]])
    assert [output.token_ids for output in mixed[1:4]] == alone
    assert mixed[5].token_ids == alone[0]
