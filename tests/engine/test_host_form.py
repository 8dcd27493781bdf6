"""Memory of the host in 8 bits, below a device that is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_hybrid import LLM
from megatron_hybrid.engine import build_host_memory
from megatron_hybrid.errors import ConfigurationError
from tests.engine.test_disk_flag import ask, finish, start, texts
from tests.engine.test_host_memory_flag import CHATS, SMALL, chat
from tests.thorough import usually

HOST = {"prefix_caching_host_gb": 0.25}
KV, STATES = "prefix_caching_host_kv_dtype", "prefix_caching_host_states_dtype"
BOTH = {KV: "fp8_e4m3", STATES: "int8"}


@pytest.mark.parametrize("form", usually([BOTH], [{KV: "fp8_e4m3"}, {STATES: "int8"}, BOTH]))
def test_more_of_it_fits_and_answers_are_hardly_others(form: dict[str, str]) -> None:
    exact, llm = LLM(**SMALL | HOST), LLM(**SMALL | HOST | form)
    wanted, found = chat(exact), chat(llm)
    pairs = zip(sum(wanted, []), sum(found, []), strict=True)
    assert sum(one == other for one, other in pairs) >= 0.9 * 3 * CHATS
    stats, before = llm.stats(), exact.stats()
    for name in ("tier_tokens_fetched", "tier_fetches"):
        assert stats[name]["host"] == before[name]["host"] > 0
    size, exact_size = (figures["tier_bytes_fetched"]["host"] for figures in (stats, before))
    assert size < (0.4 if form == BOTH else 0.95) * exact_size
    llm.engine.check_integrity()


def test_files_of_another_form_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(build_host_memory._OPERATIONS, "cpu", 1e6)  # reading pays
    one, same, other = (start(tmp_path / "cache", **form) for form in (BOTH, BOTH, {}))
    fingerprints = [llm.engine.weights.fingerprint.short for llm in (one, same, other)]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    prompts, _ = ask(one, texts())
    finish(one)
    for llm, is_there in ((same, True), (other, False)):
        _, outputs = ask(llm, prompts)
        assert any(output.cached_tokens > 0 for output in outputs[:2]) == is_there
        finish(llm)


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({STATES: "int8", "prefix_caching_host_gb": 0.0}, "states-dtype is int8, but there is nothing"),
    ({KV: "fp8_e4m3", "kv_cache_dtype": "fp8_e4m3"}, "have 8 bits on the device, too"),
    (
        {STATES: "int8", "mamba_inference_cached_states_dtype": "int8"},
        "cached states are rounded on the device",
    ),
    (
        {KV: "fp8_e4m3", "role": "prefill", "disaggregation_listen": "127.0.0.1:1"},
        "but --role is prefill",
    ),
    ({STATES: "int8", "batch_invariant": True}, "does not go together .* which rounds what"),
    ({KV: "int3"}, "--prefix-caching-host-kv-dtype"),
]


@pytest.mark.parametrize(("options", "words"), REFUSALS)
def test_what_can_not_be_rounded_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        LLM(**SMALL | HOST | options)
