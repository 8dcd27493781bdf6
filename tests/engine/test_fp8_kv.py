"""Keys and values in FP8: what users and other programs are told. (The answers:
test_oracle_fp8_kv.py.)"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_hybrid import LLM, ConfigurationError, EngineConfig, SamplingParams
from megatron_hybrid.engine import build, checks
from megatron_hybrid.kv_events.contents import CacheContents
from megatron_hybrid.kv_events.messages import events_of
from tests.tiny_models import make_tiny_model

OPTIONS: dict[str, Any] = {
    "inference_dynamic_batching_block_size": 16,
    "inference_dynamic_batching_buffer_size_gb": 0.02,
    "inference_dynamic_batching_max_requests": 8,
}
PROMPT = list(range(40))
Folder = Callable[[str], str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    def made(family: str) -> str:
        path = tmp_path_factory.mktemp(family)
        make_tiny_model(family, path, chunk_size=16)
        return str(path)

    return made


def test_no_prefix_of_a_cache_in_fp8_is_taken_for_one_of_another_type(folder: Folder) -> None:
    """By a router that knows of both, and has keys for each."""
    path, params = folder("nemotron_h"), SamplingParams(temperature=0.0, max_tokens=2)
    known: list[CacheContents] = []
    for options in ({}, {"kv_cache_dtype": "fp8_e4m3"}, {"dtype": "bfloat16"}):
        engine = LLM(path, **OPTIONS, **options).engine
        changes = engine.cache_changes()
        engine.add_request("a", PROMPT, params)
        while engine.has_work():
            engine.step()
        known.append(CacheContents(keeps_tokens=True))
        known[-1].apply(events_of(changes.take()))
    assert [one.stored_as for one in known] == ["float32", "float8_e4m3fn", "bfloat16"]
    for first, contents in enumerate(known):
        copy = CacheContents()
        for events in contents.snapshot():
            copy.apply(events)
        assert copy.stored_as == contents.stored_as and copy.blocks.keys() == contents.blocks.keys()
        assert contents.blocks and contents.states
        for other in known[first + 1 :]:
            assert not contents.blocks.keys() & other.blocks.keys()
            assert not contents.states.keys() & other.states.keys()


def test_the_start_log_names_the_type_and_where_scales_are_from(folder: Folder, caplog) -> None:
    with caplog.at_level(logging.INFO):
        LLM(folder("nemotron_h"), kv_cache_dtype="fp8_e4m3", **OPTIONS)
    assert "bytes (float8_e4m3fn)" in caplog.text
    assert "the checkpoint has scales for 0 of 1 layers" in caplog.text


def test_what_cannot_be_stored_so_is_refused(folder: Folder) -> None:
    with pytest.raises(ConfigurationError, match="--kv-cache-dtype is 'int8'; .*auto, fp8_e4m3"):
        LLM(folder("nemotron_h"), kv_cache_dtype="int8", **OPTIONS)
    with pytest.raises(ConfigurationError, match=r"--kv-cache-dtype.*model \(mamba2\) has no atte"):
        LLM(folder("mamba2"), kv_cache_dtype="fp8_e4m3", **OPTIONS)
    LLM(folder("mamba2"), **OPTIONS)


def test_gpus_that_do_not_convert_fp8_are_refused(folder: Folder, monkeypatch) -> None:
    config = EngineConfig(load=folder("nemotron_h"), kv_cache_dtype="fp8_e4m3", **OPTIONS)
    model, gpu = build.load_weights(config), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(
        ConfigurationError, match=r"from compute capability 8\.9 on; cuda:0 has 8\.6"
    ):
        checks.check_kv_dtype(config, model, gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    checks.check_kv_dtype(config, model, gpu)
