"""Engines with sliding windows: what a request holds, how memory is divided, what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megatron_hybrid import LLM, ConfigurationError, EngineConfig, SamplingParams
from megatron_hybrid.cache.geometry import GIB
from megatron_hybrid.engine.sizing import TILE, derive_geometry, describe
from megatron_hybrid.kernels.paged_attention import by_key_tiles
from megatron_hybrid.layers.inputs import KVSpec, StateSpec
from tests.engine.symbolic import expected_answer, make_engine, random_tokens
from tests.thorough import A_THIRD
from tests.tiny_models import make_tiny_model

WHOLE = KVSpec(4, 128, torch.bfloat16)
WINDOW = KVSpec(4, 128, torch.bfloat16, window=256)
STATE = StateSpec((8, 3), torch.bfloat16, (4, 8), torch.float32, 16)
BLOCK = 64 * WHOLE.bytes_per_token()


@A_THIRD
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(("attention", "recurrent"), [(True, True), (False, False)])
def test_window_blocks_in_use_are_bounded_while_a_request_of_thousands_of_tokens_runs(
    attention: bool, recurrent: bool, drafts: int, asynchronous: bool
) -> None:
    engine = make_engine(
        window=24, attention=attention, recurrent=recurrent, drafts=drafts, max_tokens=32,
        max_seq_length=4000, num_blocks=1000, cached_slots=6, asynchronous=asynchronous,
        spare_window_blocks=40, exact_ends=True, interval=256, max_requests=2,
    )  # fmt: skip
    geometry, prompt = engine.context.geometry, random_tokens(1, 2000)
    size = geometry.block_size
    engine.add_request("long", prompt, SamplingParams(temperature=0.0, max_tokens=300))
    tokens: list[int] = []
    used: list[int] = []
    while engine.has_work():
        for event in engine.step():
            tokens += event.token_ids
        used.append(engine.context.cache.occupancy().window_used)
        engine.check_integrity()
        (in_prompt,) = [not engine.context.rows.decoding.any()]
        assert used[-1] <= geometry.window_quota + (32 // size + 1 if in_prompt else 0)
    assert tokens == expected_answer(prompt, 300)
    assert max(used) * size < 100  # of 2,300 tokens
    assert used[-1] == 0
    whole = engine.context.cache.occupancy().kv_cached * size
    assert whole > 2200 if attention else whole == 0


def geometry(kv: list[KVSpec], states: list[StateSpec], **options: object):  # type: ignore[no-untyped-def]
    every = {
        "inference_dynamic_batching_block_size": 64,
        "inference_dynamic_batching_max_requests": 8,
        "inference_dynamic_batching_max_tokens": 1000,
        "inference_dynamic_batching_buffer_size_gb": 0.25,
        "inference_dynamic_batching_prefix_caching_mamba_gb": 0.125,
    }
    config = EngineConfig.from_mapping({"load": "x", **every, **options}, "test")
    return config, derive_geometry(config, kv, states, 1000, GIB, on_gpu=False)


@pytest.mark.parametrize("states", [[STATE] * 3, []])
def test_windows_are_paid_for_by_who_holds_them(states: list[StateSpec]) -> None:
    _, sizes = geometry([WHOLE] * 2 + [WINDOW] * 3, states)
    quota, window_block = 256 // 64 + 1, 3 * BLOCK
    assert sizes.window == 256 and sizes.window_quota == sizes.window_of_state == quota
    assert sizes.bytes_per_window_block == window_block and sizes.bytes_per_block == 2 * BLOCK
    state = sum(spec.bytes_per_slot() for spec in states) + 4 * 1000  # with logits
    assert sizes.num_cached_slots == int(0.125 * GIB) // (state + quota * window_block)
    of_prompts = 1000 // 64 + 1
    assert sizes.num_window_blocks == (8 + sizes.num_cached_slots) * quota + of_prompts
    live = 8 * (state + quota * window_block) + (of_prompts + 1) * window_block
    left = int(0.25 * GIB) - live
    assert sizes.num_blocks == left // (2 * BLOCK) - 1
    assert sizes.needs_state and sizes.has_recurrent == bool(states)


def test_a_model_of_windows_alone_has_no_other_blocks_and_no_longest_sequence() -> None:
    _, sizes = geometry([WINDOW] * 2, [])
    assert sizes.num_blocks == 0 and not sizes.has_attention and sizes.longest_sequence is None
    assert sizes.num_window_blocks > 8 * sizes.window_quota
    with pytest.raises(
        ConfigurationError,
        match="buffer-size-gb is 0.0098, .* beside the sliding windows and live states of "
        ".*at least 0.0",
    ):
        geometry([WINDOW] * 2, [], inference_dynamic_batching_buffer_size_gb=0.0098)


def test_models_without_windows_are_divided_as_ever() -> None:
    _, sizes = geometry([WHOLE] * 2, [STATE])
    assert (sizes.window, sizes.num_window_blocks, sizes.bytes_per_window_block) == (0, 0, 0)
    assert not sizes.has_window and sizes.most_ahead == 1


def test_windows_of_two_sizes_are_refused() -> None:
    other = KVSpec(4, 128, torch.bfloat16, window=128)
    with pytest.raises(ConfigurationError, match="windows of 128 and 256 tokens"):
        geometry([WINDOW, other], [])


def test_batch_invariant_windows_begin_where_tiles_of_keys_do() -> None:
    triton_by_split = pytest.importorskip("megatron_hybrid.kernels.paged_attention.triton_by_split")
    assert TILE % by_key_tiles.KEYS == 0 and TILE % triton_by_split.KEYS == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lfm3")
    make_tiny_model("lfm3", folder)
    return folder


def test_the_log_says_how_windows_are_kept(folder: Path) -> None:
    llm = LLM(str(folder), inference_dynamic_batching_max_requests=3)
    context = llm.engine.context
    text = describe(context.geometry, context)
    found = re.search(r"(\d+) window blocks of (\d+) bytes for layers that see 21 tokens", text)
    assert found is not None and int(found[1]) == context.geometry.num_window_blocks
    llm.generate([[1, 2, 3] * 30], SamplingParams(max_tokens=3), progress=False)
    use = llm.stats()
    assert use["window_used"] == 0 < use["window_evictable"]
    assert use["window_free"] + use["window_evictable"] == use["window_blocks"]
    assert f"windows 0/{use['window_blocks']} blocks" in llm.engine.statistics.log_line()


def test_what_windows_do_not_go_together_with_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--prefix-caching-host-gb is 0.1, but the model"):
        LLM(str(folder), prefix_caching_host_gb=0.1)
