"""How the memory of a GPU or of a machine is divided, and what the largest step is; nothing here
needs a GPU."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
import torch

from megatron_hybrid import EngineConfig, SamplingParams
from megatron_hybrid.cache.geometry import GIB, STAGED_SLOTS
from megatron_hybrid.engine import host_memory, profiling
from megatron_hybrid.engine.build import build_engine, load_weights
from megatron_hybrid.engine.profiling import largest_step, smaller_steps
from megatron_hybrid.engine.sizing import (
    GPU_SHARE,
    cpu_cache_bytes,
    derive_geometry,
    gpu_cache_bytes,
)
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.execution.runner import ModelRunner
from megatron_hybrid.layers.inputs import KVSpec, StateSpec, allocate_caches
from megatron_hybrid.parallel import initialize
from tests.thorough import usually

GPU = torch.device("cuda", 0)
BUFFER = "inference_dynamic_batching_buffer_size_gb"
STATES = "inference_dynamic_batching_prefix_caching_mamba_gb"
CACHING = "inference_dynamic_batching_prefix_caching"
REQUESTS = "inference_dynamic_batching_max_requests"
CACHED_TYPE = "mamba_inference_cached_states_dtype"
KV = KVSpec(num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
STATE = StateSpec((10240, 3), torch.bfloat16, (128, 64, 128), torch.float32, kernel_chunk=128)
VOCABULARY = 131072


def geometry(gigabytes: float, **options):
    """Of Nemotron-H-8B's layers, with so much left on the GPU."""
    return derive_geometry(
        EngineConfig(**options), [KV] * 4, [STATE] * 24, VOCABULARY, int(gigabytes * GIB)
    )


def test_blocks_hold_whole_groups_of_an_index():
    indexed = replace(KV, index_dim=256, index_dtype=torch.bfloat16, index_group=48)

    def divided(size: int):
        config = EngineConfig(inference_dynamic_batching_block_size=size)
        return derive_geometry(config, [KV, indexed], [STATE], VOCABULARY, 90 * GIB)

    assert divided(96).bytes_per_block == 96 * (2 * KV.bytes_per_token() + 512)
    with pytest.raises(ConfigurationError, match="block-size is 64, but must be a multiple of 48"):
        divided(64)


def used(found):
    kv = (found.num_blocks + 1) * found.bytes_per_block
    return (kv + (found.max_requests + found.num_cached_slots) * found.bytes_per_slot) / GIB


@pytest.mark.parametrize(
    "options", [{}, {BUFFER: 60.0}, {STATES: 20.0}, {BUFFER: 50.0, STATES: 20}]
)
def test_caches_take_what_is_left_and_no_more(options):
    found = geometry(100.0, **options)
    states = options.get(STATES, 100 - options.get(BUFFER, 50.0))
    buffer = options.get(BUFFER, 100 - states)
    assert buffer + states - 0.2 < used(found) <= buffer + states
    assert found.max_requests == 256
    assert found.num_cached_slots == int(states * GIB) // found.bytes_per_slot


def test_keys_and_values_in_fp8_make_twice_the_blocks():
    whole = geometry(100.0, **{BUFFER: 50.0})
    half = derive_geometry(
        EngineConfig(**{BUFFER: 50.0}),
        [replace(KV, dtype=torch.float8_e4m3fn)] * 4,
        [STATE] * 24,
        VOCABULARY,
        int(100.0 * GIB),
    )
    assert whole.bytes_per_block == 2 * half.bytes_per_block
    assert half.num_blocks in range(2 * whole.num_blocks, 2 * whole.num_blocks + 3)
    assert (whole.stored_as, half.stored_as) == ("bfloat16", "float8_e4m3fn")
    assert derive_geometry(EngineConfig(), [], [STATE], VOCABULARY, GIB).stored_as == ""


@pytest.mark.parametrize(("dtype", "times"), [("int8", 3.5), ("bfloat16", 1.95), ("float16", 1.95)])
def test_the_same_budget_holds_more_states_of_a_smaller_type(dtype: str, times: float):
    """Windows and logits stay as they are: 97.9 MiB become 27.4 in int8."""
    exact = geometry(100.0, **{BUFFER: 60.0, STATES: 40.0})
    packed = geometry(100.0, **{BUFFER: 60.0, STATES: 40.0, CACHED_TYPE: dtype})
    assert packed.num_cached_slots > times * exact.num_cached_slots
    layer = 128 * 64 * 128 * (1 if dtype == "int8" else 2) + 10240 * 3 * 2
    scales = 128 * 128 * 4 if dtype == "int8" else 0
    assert packed.bytes_per_cached_slot == 24 * (layer + scales) + 4 * VOCABULARY
    assert exact.bytes_per_cached_slot == exact.bytes_per_slot == packed.bytes_per_slot
    if dtype == "int8":
        assert round(packed.bytes_per_cached_slot / 2**20, 1) == 27.4
    # a step's checkpoints are stored in full before they are packed: out of the other budget
    assert packed.num_slots == 256 + packed.num_cached_slots
    assert packed.num_full_slots == 256 + STAGED_SLOTS
    kv = (packed.num_blocks + 1) * packed.bytes_per_block
    assert 59.98 * GIB < kv + (256 + STAGED_SLOTS) * packed.bytes_per_slot <= 60 * GIB


@pytest.mark.parametrize("dtype", ["float32", None])
def test_cached_states_of_the_live_type_are_live_slots(dtype: str | None):
    assert geometry(100.0, **{CACHED_TYPE: dtype}) == geometry(100.0)


def test_a_few_requests_need_few_staged_slots():
    found = geometry(100.0, **{CACHED_TYPE: "int8", REQUESTS: 3})
    assert found.num_full_slots == 3 + 3
    assert not geometry(100.0, **{CACHED_TYPE: "int8", CACHING: False}).packs_states


@pytest.mark.parametrize("room", range(8, 60, 4))
def test_staged_slots_leave_room_for_kv(room: int):
    """In a small buffer, live states take what half of it holds, with those of staged slots."""
    slot = geometry(100.0).bytes_per_slot
    found = geometry(100.0, **{BUFFER: room * slot / GIB, STATES: 1.0, CACHED_TYPE: "int8"})
    assert found.max_requests >= room // 4
    assert found.num_full_slots <= room // 2 + 1 and found.num_blocks > 0


def test_without_prefix_caching_everything_is_for_kv_and_live_states():
    found = geometry(60.0, **{CACHING: False, STATES: 100.0})  # a budget that nothing uses
    assert found.num_cached_slots == 0 and found.bytes_per_logits == 0
    assert 59.9 < used(found) <= 60.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({BUFFER: 90.0, STATES: 20.0}, "buffer-size-gb is 90.00 and --.*-mamba-gb is 20.00; .*"),
        ({STATES: 101.0}, "caching-mamba-gb is 101.00; beside the weights"),
        ({BUFFER: 100.5}, "buffer-size-gb is 100.50; .* 100.00 GB of the GPU are left"),
        (
            {BUFFER: 20.0, REQUESTS: 256},
            "buffer-size-gb is 20.0000, which leaves no KV block beside the live states of 256",
        ),
        ({STATES: 99.9}, "buffer-size-gb is 0.1000; the state of one request alone"),
    ],
)
def test_what_does_not_fit_is_refused_with_flag_value_and_limit(options, words):
    with pytest.raises(ConfigurationError, match=words):
        geometry(100.0, **options)


def test_nothing_left_is_refused():
    with pytest.raises(ConfigurationError, match="no memory for caches; .* 8192 and CUDA graphs"):
        geometry(0.0)


def test_the_least_of_all_ranks_decides():
    config = EngineConfig()
    found = derive_geometry(
        config, [KV], [STATE], 1000, 60 * GIB, minimum=lambda value: min(value, 30 * GIB)
    )
    assert used(found) <= 30


def test_weights_activations_graphs_and_workspaces_are_taken_off(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * GIB, 140 * GIB))
    left = gpu_cache_bytes(GPU, weights=10 * GIB, activations=4 * GIB)
    assert left == int(85 * GIB * GPU_SHARE)  # 1 GB for workspaces
    fewer = gpu_cache_bytes(GPU, graph_sizes=(1, 256), vocab_size=VOCABULARY)
    assert fewer < int(99 * GIB * GPU_SHARE) - 257 * 4 * VOCABULARY * GPU_SHARE
    assert gpu_cache_bytes(GPU, activations=200 * GIB) == 0
    with pytest.raises(ConfigurationError, match="take 101.00 GB; of the 140.00 GB of cuda:0, 100"):
        gpu_cache_bytes(GPU, weights=101 * GIB)


def test_a_share_of_the_gpu_bounds_all_that_is_taken(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * GIB, 140 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20 * GIB)
    left = gpu_cache_bytes(GPU, share=0.5, activations=4 * GIB)
    assert left == int(45 * GIB * GPU_SHARE)  # of 70 GB, 20 are held already, 1 is for workspaces
    assert gpu_cache_bytes(GPU, share=0.5, held=15 * GIB) == int(34 * GIB * GPU_SHARE)
    assert gpu_cache_bytes(GPU, held=15 * GIB) == gpu_cache_bytes(GPU)  # it is not free already
    assert gpu_cache_bytes(GPU, share=1.0) == gpu_cache_bytes(GPU)  # others hold the rest
    assert gpu_cache_bytes(GPU, share=0.1) == 0
    words = r"50.00 GB may be taken \(--gpu-memory-utilization 0.5\)"
    with pytest.raises(ConfigurationError, match=words):
        gpu_cache_bytes(GPU, share=0.5, weights=51 * GIB)


@pytest.mark.parametrize("share", [0, -0.5, 1.5, float("nan")])
def test_no_share_is_refused(share):
    with pytest.raises(ConfigurationError, match="--gpu-memory-utilization is"):
        EngineConfig(gpu_memory_utilization=share)


def on_a_cpu(gigabytes: float, **options):
    return derive_geometry(
        EngineConfig(**options), [KV], [STATE], 1000, int(gigabytes * GIB), on_gpu=False
    )


def test_on_a_cpu_little_is_taken_and_less_where_there_is_little():
    for memory, wanted in ((100.0, 1.25), (2.0, 1.25), (1.0, 0.625)):
        assert wanted - 0.02 < used(on_a_cpu(memory)) <= wanted
    found = on_a_cpu(1.0, **{BUFFER: 0.9})
    assert 0.9 < used(found) <= 0.925


@pytest.mark.parametrize(
    ("memory", "options", "words"),
    [
        (4.0, {STATES: 1e6}, "caching-mamba-gb is 1000000.00; .* weights, 4.00 GB of memory"),
        (4.0, {BUFFER: 4.1}, "buffer-size-gb is 4.10; .* 4.00 GB of memory are available"),
        (4.0, {BUFFER: 3.0, STATES: 2.0}, "buffer-size-gb is 3.00 and --.*-mamba-gb is 2.00; "),
        (0.0, {}, "There is no memory for caches; .* 0.00 GB"),
    ],
)
def test_a_budget_is_compared_with_the_machines_memory(memory, options, words):
    with pytest.raises(ConfigurationError, match=words):
        on_a_cpu(memory, **options)


def test_a_budget_that_nothing_uses_is_not_compared():
    assert on_a_cpu(4.0, **{CACHING: False, STATES: 100.0}).num_cached_slots == 0


def test_weights_that_do_not_fit_into_memory_are_refused_before_they_load(monkeypatch):
    monkeypatch.setattr(host_memory, "_machine_available", lambda: 8 * GIB)
    monkeypatch.setattr(host_memory, "_left_in_groups", lambda root: [2 * GIB, 3 * GIB])
    assert cpu_cache_bytes(weights=GIB) == GIB
    with pytest.raises(ConfigurationError, match="weights take 3.00 GB; 2.00 GB of memory are av"):
        cpu_cache_bytes(weights=3 * GIB)
    with pytest.raises(ConfigurationError, match="1.00 GB .* available to each of 2 processes"):
        cpu_cache_bytes(weights=3 * GIB // 2, processes=2)
    monkeypatch.setattr(host_memory, "_left_in_groups", lambda root: [GIB // 1000])
    for load in (load_weights, build_engine):
        with pytest.raises(ConfigurationError, match="The model's weights take 0.0. GB; 0.00 GB"):
            load(CONFIG)


@pytest.mark.parametrize(
    ("requests", "tokens", "longest", "prompts"),
    [(256, 8192, 70000, 1), (4, 8192, 70000, 1), (4, 100, 40, 3), (2, 2, 1, 2), (1, 64, 8, 1)],
)
def test_the_largest_step_is_as_large_as_can_be(requests, tokens, longest, prompts):
    rows, plan = largest_step(
        block_size=16, max_requests=requests, max_tokens=tokens, max_seq_length=longest
    )
    assert len(plan.prefills) == prompts
    lengths = [chunk.length for chunk in plan.prefills]
    assert all(0 < length <= longest for length in lengths)
    total = len(plan.decode_rows) + sum(lengths)
    assert total == min(tokens, requests - prompts + prompts * longest)
    assert len(plan.sampled_rows) == len(rows.decoding) <= requests
    blocks = [
        block
        for chunk in plan.prefills
        for block in rows.block_table[chunk.row, : -(-chunk.length // 16)].tolist()
    ]
    assert sorted(blocks) == list(range(1, len(blocks) + 1))


CONFIG = EngineConfig(
    device="cpu",
    **{BUFFER: 0.05, STATES: 0.02, REQUESTS: 4, "inference_dynamic_batching_max_tokens": 64},
)


@pytest.fixture(scope="module")
def model():
    return load_weights(CONFIG)


class Memory:
    """A GPU's, in units, of which tensors on a CPU take none: what is allocated, and the peak."""

    def __init__(self, monkeypatch):
        self.allocated = self.peak = 1000  # weights
        for name, answer in {
            "memory_allocated": lambda device: self.allocated,
            "max_memory_allocated": lambda device: self.peak,
            "reset_peak_memory_stats": lambda device: setattr(self, "peak", self.allocated),
            "empty_cache": lambda: None,
            "synchronize": lambda device: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, answer)

    def take(self, units):
        self.allocated += units
        self.peak = max(self.peak, self.allocated)

    def take_for(self, owner, units):
        """Until the owner is gone."""
        self.take(units)
        weakref.finalize(owner, self.take, -units)


def test_what_kernels_keep_from_the_largest_step_on_is_not_set_aside_again(model, monkeypatch):
    """It is no longer free when the caches' memory is divided."""
    memory = Memory(monkeypatch)
    workspaces = []
    step = ModelRunner.execute

    class Runner(ModelRunner):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            memory.take_for(self, 5)

        def execute(self, plan):
            if not workspaces:
                workspaces.append("kept by the kernels")
                memory.take(400)
            memory.take(30)
            result = step(self, plan)
            memory.take(-30)
            return result

    def allocate(*arguments, **options):
        caches = allocate_caches(*arguments, **options)
        memory.take_for(caches.end_logits, 200)
        return caches

    monkeypatch.setattr(profiling, "ModelRunner", Runner)
    monkeypatch.setattr(profiling, "allocate_caches", allocate)
    monkeypatch.setattr(profiling, "_compile_kernels", lambda *arguments: None)
    sizes = {"block_size": 16, "max_requests": 4, "max_tokens": 64, "max_seq_length": 50}
    gc.collect()
    gc.disable()
    try:
        found = [
            profiling.measure_activations(model, initialize(), torch.device("cpu"), **sizes)
            for _ in range(2)
        ]
    finally:
        gc.enable()
    assert memory.allocated == 1400  # runners and their caches went at once
    assert found == [35, 35]


def runner_of_the_largest_step(model, max_tokens, **sizes):
    rows, plan = largest_step(block_size=16, max_tokens=max_tokens, **sizes)
    device, blocks, slots = torch.device("cpu"), int(rows.block_table.max()) + 1, len(plan.prefills)
    caches = allocate_caches(model.kv_specs, model.state_specs, blocks, 16, slots + 1, device)
    runner = ModelRunner(model, caches, rows, 16, device, initialize(), max_tokens=max_tokens)
    return runner, plan


def test_the_largest_step_can_be_computed(model):
    runner, plan = runner_of_the_largest_step(model, 64, max_requests=4, max_seq_length=50)
    tokens = runner.execute(plan).tokens
    assert len(tokens) == 4
    assert np.all((tokens >= 0) & (tokens < model.config.vocab_size))


@pytest.mark.parametrize(
    ("max_requests", "max_seq_length"),
    usually([(1, 600), (4, 50), (40, 600)], list(product((1, 4, 40), (50, 600)))),
)
def test_steps_that_kernels_are_compiled_for_can_be_computed(model, max_requests, max_seq_length):
    sizes = {"max_requests": max_requests, "max_seq_length": max_seq_length}
    runner, plan = runner_of_the_largest_step(model, 512, **sizes)
    most, found = len(plan.decode_rows) + plan.num_prefill_tokens, []
    for step in smaller_steps(plan):
        tokens = len(step.decode_rows) + step.num_prefill_tokens
        assert tokens <= most
        assert len(step.decode_rows) + len(step.prefills) <= max_requests
        assert len(runner.execute(step).tokens) == len(step.decode_rows) + len(step.prefills)
        found.append((tokens, len(step.prefills)))
    if len(plan.decode_rows) >= 3:
        assert found.pop(0) == (2, 0)
    assert found[0] == (1, 1)
    assert found[1][1] == min(16, max_requests)
    for more, fewer in pairwise(found[2:]):
        assert more[0] >= fewer[0] >= more[0] // 2 - len(plan.prefills)
    assert found[-1][0] < 32


def test_engines_share_weights_and_nothing_else(model):
    engines = [
        build_engine(CONFIG.replace(**{CACHING: caching}), model=model) for caching in (True, False)
    ]
    prompt = list(range(20, 60))
    answers = []
    for engine in engines:
        engine.add_request("a", prompt, SamplingParams(temperature=0.0, max_tokens=4))
        tokens: list[int] = []
        while engine.has_work():
            for event in engine.step():
                tokens += event.token_ids
        answers.append(tokens)
    assert len(answers[0]) == 4 and answers[0] == answers[1]
    assert engines[0].context.cache.enabled and not engines[1].context.cache.enabled
