"""Memory of a GPU that is given back and taken again under tensors and CUDA graphs."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from megatron_hybrid import LLM, EngineConfig, SamplingParams
from megatron_hybrid.cache.geometry import GIB
from megatron_hybrid.engine.build import build_engine
from megatron_hybrid.engine.sleep import arena_on
from megatron_hybrid.errors import SleepError
from megatron_hybrid.memory import moving
from tests.gpu.test_engine_gpu import GRAPHS, OPTIONS, PARAMS, prompts
from tests.tiny_models import make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MIB = 2**20
CONFIG = Path(__file__).parents[2] / "configs" / "nemotron-h-8b.yaml"


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def free() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def test_memory_goes_and_comes_back_under_tensors_and_a_graph() -> None:
    before = free()
    arena = arena_on(device())
    tensors = [arena.empty((100 * MIB,), dtype) for dtype in (torch.uint8, torch.bfloat16)]
    tensors.append(arena.empty((1000, 1000), torch.float8_e4m3fn))
    assert all(tensor.data_ptr() % 256 == 0 for tensor in tensors)
    assert 301 * MIB <= arena.nbytes <= 370 * MIB
    assert before - free() >= 0.99 * arena.nbytes
    for number, tensor in enumerate(tensors, 1):
        tensor.view(torch.uint8).fill_(number)
    total = torch.zeros((), device=device())
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        total.copy_(tensors[0].float().sum())
    addresses = [tensor.data_ptr() for tensor in tensors]
    arena.release(keep=True)
    asleep = free()
    arena.restore()
    assert asleep - free() >= 0.99 * arena.nbytes
    assert addresses == [tensor.data_ptr() for tensor in tensors]
    for number, tensor in enumerate(tensors, 1):
        assert bool((tensor.view(torch.uint8) == number).all())
    graph.replay()
    assert int(total) == 100 * MIB
    arena.release(keep=False)
    arena.restore()
    assert not tensors[0].any()
    tensors[0].fill_(2)
    graph.replay()
    assert int(total) == 200 * MIB
    del arena, tensors, tensor, graph, total
    gc.collect()
    assert before - free() < 40 * MIB, "it goes with the last tensor"


def test_memory_that_another_has_taken_can_be_waited_for() -> None:
    arena = arena_on(device())
    tensor = arena.empty((GIB,), torch.uint8)
    tensor.fill_(3)
    arena.release(keep=True)
    hog = torch.empty(free() - 300 * MIB, dtype=torch.uint8, device=device())
    with pytest.raises(MemoryError, match="cuMemCreate failed: out of memory"):
        arena.restore()
    assert arena.is_released and torch.cuda.mem_get_info()[0] >= 200 * MIB
    del hog
    torch.cuda.empty_cache()
    arena.restore()
    assert bool((tensor == 3).all())


@pytest.mark.parametrize("family", ["nemotron_h_moe", "qwen3_next", "jamba", "llama"])
def test_graphs_replay_rightly_after_every_kind_of_sleep(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "LEAST_BYTES", 512)
    a, b = tmp_path / "a", tmp_path / "b"
    for seed, folder in enumerate((a, b), 1):
        make_tiny_model(family, folder, seed=seed)
    options = {"device": "cuda", GRAPHS: 6} | OPTIONS

    def answers(llm: LLM) -> list[list[int]]:
        return [output.token_ids for output in llm.generate(prompts(), PARAMS, progress=False)]

    first, second = (answers(LLM(str(folder), **options)) for folder in (a, b))  # type: ignore[arg-type]
    llm = LLM(str(a), enable_sleep_mode=True, **options)  # type: ignore[arg-type]
    assert answers(llm) == first
    replayed = llm.engine.runner.replayed  # type: ignore[attr-defined]
    for tags in (("weights",), ("kv_cache",), ("weights", "kv_cache")):
        steps = replayed["decode"]
        llm.engine.sleep(tags)
        with pytest.raises(SleepError):
            llm.engine.step()
        llm.wake_up()
        assert answers(llm) == first, tags
        assert replayed["decode"] > steps
    streams = [llm.stream(prompt, PARAMS) for prompt in prompts()[:3]]
    for stream in streams:
        next(stream)
    llm.sleep()
    llm.wake_up()
    assert [list(stream)[-1].token_ids for stream in streams] == first[:3]
    llm.sleep(level=2)
    llm.wake_up(["weights"])
    llm.update_weights(str(b))
    llm.wake_up(["kv_cache"])
    assert answers(llm) == second != first
    llm.engine.check_integrity()


def test_nearly_all_of_an_engines_memory_is_given_back() -> None:
    before = free()
    config = EngineConfig.from_yaml(
        CONFIG,
        enable_sleep_mode=True,
        inference_dynamic_batching_buffer_size_gb=24.0,
        inference_dynamic_batching_prefix_caching_mamba_gb=16.0,
        inference_dynamic_batching_num_cuda_graphs=4,
    )
    engine = build_engine(config)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    engine.add_request("a", list(range(3, 400)), params)
    while engine.has_work():
        engine.step()
    arenas = sum(arena.nbytes for arena in engine.sleeper._arenas.values())
    held = arenas + torch.cuda.memory_reserved()
    awake = free()
    assert before - awake < 1.1 * held, "weights are there once"
    for level in (1, 2):
        engine.sleep(keep_weights=level == 1)
        given = free() - awake
        print(f"level {level}: {given / GIB:.2f} of {held / GIB:.2f} GiB given back")
        assert given >= 0.95 * held
        assert engine.stats()["sleeping_bytes"] == arenas
        engine.wake_up()
        assert abs(awake - free()) < 200 * MIB


def test_weights_are_never_on_the_device_twice() -> None:
    before = free()
    config = EngineConfig.from_yaml(CONFIG, enable_sleep_mode=True)
    torch.cuda.reset_peak_memory_stats()
    least = [before]
    place = moving._return_what_is_free

    def looked(where: torch.device) -> None:
        least.append(torch.cuda.mem_get_info()[0])
        place(where)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moving, "_return_what_is_free", looked)
        from megatron_hybrid.engine.build import load_weights

        model = load_weights(config)
    weights = sum(weight.nbytes for weight in model.parameters())
    assert len(least) > 5
    assert before - min(least) < weights + 4 * GIB
