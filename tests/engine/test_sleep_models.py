"""Real models that sleep: their memory is gone meanwhile, and their answers are the same after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_hybrid import LLM, EngineConfig, SamplingParams
from megatron_hybrid.engine.build import build_engine, load_weights
from megatron_hybrid.errors import (
    ConfigurationError,
    InvalidRequestError,
    SleepError,
    WeightsError,
)
from megatron_hybrid.memory import moving
from tests.engine.test_update_weights import (
    GREEDY,
    OPTIONS,
    PROMPTS,
    Folders,
    folders,  # noqa: F401
    model_of,
    storage,
    streams,
    tokens,
)
from tests.memory.test_arena import resident
from tests.thorough import A_THIRD, usually
from tests.tiny_models import FAMILIES

MIB = 2**20


@pytest.fixture(autouse=True)
def small_ones_move_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model's weights are all small; what no checkpoint brings is smaller."""
    monkeypatch.setattr(moving, "LEAST_BYTES", 512)


def make(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), enable_sleep_mode=True, **(OPTIONS | options))


def places(llm: LLM) -> dict[str, int]:
    """Of all weights and caches."""
    caches = llm.engine.runner._caches  # type: ignore[attr-defined]
    found = storage(model_of(llm))
    for layer, kv in caches.kv.items():
        found |= {f"key{layer}": kv.key.data_ptr(), f"value{layer}": kv.value.data_ptr()}
    for layer, state in caches.state.items():
        found |= {f"conv{layer}": state.conv.data_ptr(), f"ssm{layer}": state.ssm.data_ptr()}
    return found


@A_THIRD
@pytest.mark.parametrize(
    "family", usually(["nemotron_h_moe", "zamba2", "qwen3_5", "llama"], FAMILIES)
)
def test_answers_are_the_same_after_sleep_and_of_the_new_weights_after_level_2(
    family: str,
    folders: Folders,  # noqa: F811
) -> None:
    a, b = folders(family)
    llm = make(a)
    expected, stays = tokens(llm), places(llm)
    assert expected == tokens(LLM(str(a), **OPTIONS))
    llm.sleep()
    assert llm.stats()["sleeping"] == {"weights": True, "kv_cache": True}
    assert llm.stats()["sleeping_bytes"] > 20 * MIB
    llm.wake_up()
    assert llm.engine.sleeping == [] and llm.stats()["sleeping_bytes"] == 0
    assert tokens(llm) == expected and places(llm) == stays
    again = llm.generate(PROMPTS[:1], GREEDY, progress=False)
    assert again[0].cached_tokens, "what was computed since then is cached"
    llm.sleep(level=2)
    llm.wake_up(["weights"])
    with pytest.raises(SleepError, match="sleeps"):
        tokens(llm)
    llm.update_weights(str(b))
    llm.wake_up(["kv_cache"])
    fresh = LLM(str(b), **OPTIONS)
    assert llm.system_fingerprint == fresh.system_fingerprint
    assert tokens(llm) == tokens(fresh) != expected and places(llm) == stays
    llm.engine.check_integrity()


def test_memory_is_gone_while_the_engine_sleeps(folders: Folders) -> None:  # noqa: F811
    llm = make(folders("nemotron_h_moe")[0])
    before = tokens(llm)
    weights = max(model_of(llm).parameters(), key=lambda value: value.nbytes)
    caches = llm.engine.runner._caches  # type: ignore[attr-defined]
    cache = next(iter(caches.kv.values())).key
    assert resident(weights) and resident(cache)
    for level in (1, 2):
        llm.sleep(level)
        left = resident(weights), resident(cache)
        assert left == (0, 0)  # numbers: to show a tensor would read it
        llm.wake_up()
        assert not cache.any(), "masked places of a cache must hold numbers"
        if level == 1:
            assert tokens(llm) == before


def test_streams_go_on_after_level_1_as_if_nothing_had_been(
    folders: Folders,  # noqa: F811
) -> None:
    llm = make(folders("falcon_h1")[0], inference_dynamic_batching_max_requests=2)
    expected = tokens(llm)
    llm.engine.reset()
    opened = streams(llm, count=3, steps=2)  # of whom one waits, two run
    llm.sleep()
    with pytest.raises(SleepError):
        tokens(llm)
    llm.wake_up()
    assert [list(stream)[-1].token_ids for stream in opened] == expected


def test_a_pause_that_holds_outlives_sleep(folders: Folders) -> None:  # noqa: F811
    llm = make(folders("llama")[0])
    expected = tokens(llm)
    (stream,) = streams(llm, count=1)
    llm.pause("keep")
    llm.sleep()
    llm.wake_up()
    with pytest.raises(RuntimeError, match="is paused"):
        tokens(llm)
    llm.resume()
    assert list(stream)[-1].token_ids == expected[0]


def test_what_needs_memory_that_is_given_back_is_refused(
    folders: Folders,  # noqa: F811
) -> None:
    a, b = folders("nemotron_h_moe")
    llm = make(a)
    expected = tokens(llm)
    llm.sleep()
    with pytest.raises(WeightsError, match="wake the weights up first"):
        llm.update_weights(str(b))
    with pytest.raises(InvalidRequestError, match="level is 3; it can be 1 or 2"):
        llm.sleep(level=3)
    llm.wake_up()
    assert tokens(llm) == expected and llm.engine.epoch == 0
    with pytest.raises(SleepError, match="start it with --enable-sleep-mode"):
        LLM(str(a), **OPTIONS).sleep()


def test_weights_may_go_alone_and_cached_prefixes_stay(folders: Folders) -> None:  # noqa: F811
    llm = make(folders("qwen3_next")[0])
    tokens(llm)
    expected = [output.cached_tokens for output in llm.generate(PROMPTS, GREEDY, progress=False)]
    (stream,) = streams(llm, count=1)
    llm.engine.sleep(["weights"])
    llm.wake_up()
    rest = list(stream)[-1].token_ids
    again = llm.generate(PROMPTS, GREEDY, progress=False)
    assert rest == again[0].token_ids
    assert [output.cached_tokens for output in again] == expected and all(expected)


def test_prefixes_in_memory_of_the_host_are_found_after_level_1(
    folders: Folders,  # noqa: F811
) -> None:
    llm = make(folders("nemotron_h_moe")[0], prefix_caching_host_gb=0.02)
    long = [list(range(3, 120))]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    llm.engine.context.transfers.tier._bytes_per_token = 1e12  # type: ignore[attr-defined]
    expected = llm.generate(long, params)[0].token_ids
    while llm.engine.use_idle_time():
        pass
    llm.sleep()
    llm.wake_up()
    (output,) = llm.generate(long, params)
    assert output.cached_tokens >= 100 and output.token_ids == expected
    assert llm.stats()["tier_fetches"]["host"] == 1


@A_THIRD
@pytest.mark.parametrize(
    "options",
    [
        {"mamba_inference_cached_states_dtype": "int8"},
        {"num_speculative_tokens": 2, "drafter": "prompt_lookup"},
        {"batch_invariant": True},
        {"quantization": "fp8"},
        {"quantization": "fp8_block"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_other_kinds_of_caches_and_weights_sleep_too(
    options: dict[str, Any],
    folders: Folders,  # noqa: F811
) -> None:
    llm = make(folders("nemotron_h_moe")[0], **options)
    expected = tokens(llm)
    assert tokens(llm) == expected or "int8" in options.values()
    opened = streams(llm, count=2)
    llm.sleep()
    llm.wake_up()
    assert [list(stream)[-1].token_ids for stream in opened] == expected[:2]
    llm.engine.reset()
    assert tokens(llm) == expected
    llm.engine.check_integrity()


def test_engines_on_the_same_weights_share_where_these_lie(
    folders: Folders,  # noqa: F811
) -> None:
    folder = str(folders("llama")[0])
    config = EngineConfig(load=folder, enable_sleep_mode=True, **OPTIONS)  # type: ignore[arg-type]
    model = load_weights(config)
    assert model.arena is not None
    engine = build_engine(config, model=model)
    engine.sleep()
    assert model.arena.is_released
    engine.wake_up()
    plain = load_weights(config.replace(enable_sleep_mode=False))
    with pytest.raises(ConfigurationError, match="loaded without --enable-sleep-mode"):
        build_engine(config, model=plain)


def test_the_flag_and_its_other_name() -> None:
    assert not EngineConfig().enable_sleep_mode
    given = EngineConfig.from_mapping({"enable-memory-saver": True}, "LLM")
    assert given.enable_sleep_mode
    with pytest.raises(ConfigurationError, match="--enable-sleep-mode does not go together with"):
        EngineConfig(
            enable_sleep_mode=True, role="prefill", disaggregation_listen="a:1",
            prefix_caching_host_gb=1,
        )  # fmt: skip


def test_without_the_flag_nothing_lies_in_an_arena(folders: Folders) -> None:  # noqa: F811
    llm = LLM(str(folders("llama")[0]), **OPTIONS)
    assert model_of(llm).arena is None and not any(llm.stats()["sleeping"].values())
    assert torch.is_tensor(next(model_of(llm).parameters()))
