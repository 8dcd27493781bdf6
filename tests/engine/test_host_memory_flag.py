"""--prefix-caching-host-gb: what it changes in an engine, what is refused, what is said."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_hybrid import LLM, SamplingParams
from megatron_hybrid.cache import tier
from megatron_hybrid.engine import build_host_memory
from megatron_hybrid.errors import ConfigurationError

PREFIX = "inference_dynamic_batching_"
SMALL: dict[str, Any] = {
    PREFIX + "buffer_size_gb": 0.03,
    PREFIX + "prefix_caching_mamba_gb": 0.008,
    PREFIX + "max_requests": 8,
    "inference_max_seq_length": 600,
}
FEW_AT_ONCE = {PREFIX + "max_requests": 2, PREFIX + "prefix_caching_mamba_gb": 0.012}
CHATS = 24


def chat(llm: LLM, turns: int = 3) -> list[list[list[int]]]:
    """The reference model's answers, turn by turn, of chats of which the device holds a few."""
    texts = [f"The code of gate {i} is {1000 + 37 * i}. " * 7 for i in range(CHATS)]
    answers = []
    for _ in range(turns):
        outputs = llm.generate(texts, SamplingParams(max_tokens=6, temperature=0.0), progress=False)
        texts = [text + one.text + " And then?" for text, one in zip(texts, outputs, strict=True)]
        answers.append([one.token_ids for one in outputs])
    return answers


def test_chats_that_the_device_has_no_room_for_come_back_from_host_memory() -> None:
    small, llm = LLM(**SMALL), LLM(**SMALL, prefix_caching_host_gb=0.25)
    assert chat(llm) == chat(small)
    without, stats = small.stats(), llm.stats()
    assert stats["skipped_tokens"] > 2 * without["skipped_tokens"]
    figures = {name: stats[name].get("host", 0) for name in (*tier.COUNTERS, *tier.GAUGES)}
    assert figures["tier_fetches"] >= CHATS and figures["tier_writes"] >= CHATS
    assert figures["tier_tokens_fetched"] > stats["skipped_tokens"] / 2
    assert 0 < figures["tier_bytes_used"] <= figures["tier_bytes"] <= 2**28
    assert figures["tier_bytes_fetched"] > 0 < figures["tier_bytes_written"]
    assert set(stats["tier_refused"]) == set(tier.REFUSED)
    assert "| host: " in llm.engine.statistics.log_line()
    assert " host: " not in small.engine.statistics.log_line()
    assert all(without[name] == {} for name in (*tier.COUNTERS, *tier.GAUGES))
    while llm.engine.use_idle_time():  # what is being written keeps its place
        llm.engine.check_integrity()
    llm.engine.reset_prefix_cache()
    assert llm.stats()["tier_bytes_used"] == {"host": 0}


def test_prompts_come_again_as_they_were() -> None:
    """Of which the ends of the answers say more; SGLang's issue 39436, in small."""
    llm = LLM(**SMALL | FEW_AT_ONCE, prefix_caching_host_gb=0.25)
    prompts = [f"The code of gate {i} is {1000 + 37 * i}. " * 7 for i in range(CHATS)]
    params = SamplingParams(max_tokens=6, temperature=0.0)
    first = llm.generate(prompts, params, progress=False)
    again = llm.generate(prompts[:8], params, progress=False)
    assert [one.token_ids for one in again] == [one.token_ids for one in first[:8]]
    assert all(one.cached_tokens == len(one.prompt_token_ids) for one in again)
    assert llm.stats()["tier_fetches"]["host"] >= 8


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({PREFIX + "prefix_caching": False}, "is 0.25, but nothing is kept .* prefix caching is off"),
    ({PREFIX + "prefix_caching_eviction_policy": "ref_zero"}, "eviction-policy is ref_zero"),
    ({"prefix_caching_host_gb": 1e6}, "is 1e[+]06; .* GB of the host's memory are left for each"),
    ({"prefix_caching_host_gb": 1e-4}, "which is 0 pages of 196,608 bytes; .* need 5"),
    ({PREFIX + "prefix_caching_mamba_gb": 0.0}, "no room for a cached state"),
    ({"prefix_caching_host_gb": -1.0}, "--prefix-caching-host-gb is -1"),
]


@pytest.mark.parametrize(("options", "words"), REFUSALS)
def test_what_can_have_no_host_memory_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        LLM(**SMALL | {"prefix_caching_host_gb": 0.25} | options)


def test_processes_of_a_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_host_memory, "available_memory", lambda: 2**30)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(ConfigurationError, match="0.12 GB .* each of the 8 processes"):
        LLM(**SMALL, prefix_caching_host_gb=0.25)
