"""--prefix-caching-disk: a second start goes on from the first one's conversations; what is
refused."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from megatron_hybrid import LLM, SamplingParams
from megatron_hybrid.engine import build_host_memory
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.request import RequestOutput
from tests.engine.test_host_memory_flag import CHATS, PREFIX, SMALL

PARAMS = SamplingParams(max_tokens=6, temperature=0.0)
NEW = " And then?"


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """On which reading pays, even for so small a model."""
    monkeypatch.setitem(build_host_memory._OPERATIONS, "cpu", 1e6)


def start(folder: Path, **options: Any) -> LLM:
    files = {"prefix_caching_disk": str(folder), "prefix_caching_disk_gb": 1.0}
    return LLM(**SMALL | {"prefix_caching_host_gb": 0.25} | files | options)


def ask(llm: LLM, texts: list[str]) -> tuple[list[str], list[RequestOutput]]:
    """What the chats are afterwards, and the outputs."""
    outputs = llm.generate(texts, PARAMS, progress=False)
    return [t + one.text + NEW for t, one in zip(texts, outputs, strict=True)], outputs


def finish(llm: LLM) -> None:
    """All that is on its way is there, as after an idle second and a stop."""
    while llm.engine.use_idle_time():
        pass
    lower = llm.engine.context.transfers.lower  # type: ignore[attr-defined]
    lower.close()
    llm.engine.context.transfers.end_copies()
    llm.engine.check_integrity()


def texts() -> list[str]:
    return [f"The code of gate {i} is {1000 + 37 * i}. " * 7 for i in range(CHATS)]


def test_a_second_start_computes_new_tokens_alone(tmp_path: Path) -> None:
    plain = LLM(**SMALL)
    first_turn, _ = ask(plain, texts())
    _, expected = ask(plain, first_turn)
    folder = tmp_path / "cache"
    first = start(folder)
    assert ask(first, texts())[0] == first_turn
    finish(first)
    written = first.stats()["tier_writes"]["disk"]
    assert written >= CHATS and first.stats()["tier_bytes_used"]["disk"] > 0
    del first
    second = start(folder)
    _, outputs = ask(second, first_turn)
    assert [one.token_ids for one in outputs] == [one.token_ids for one in expected]
    new = len(second.tokenizer.encode(NEW, add_special_tokens=False)) + 1
    computed = [len(one.prompt_token_ids) - one.cached_tokens for one in outputs]
    assert max(computed) <= new, computed
    stats = second.stats()
    assert stats["tier_fetches"]["disk"] == CHATS
    assert stats["tier_tokens_fetched"]["disk"] == sum(one.cached_tokens for one in outputs)
    assert "| disk: " in second.engine.statistics.log_line()
    finish(second)


def test_files_that_were_swapped_cut_or_changed_are_misses(tmp_path: Path) -> None:
    plain = LLM(**SMALL)
    first_turn, _ = ask(plain, texts())
    _, expected = ask(plain, first_turn)
    first = start(tmp_path / "cache")
    ask(first, texts())
    finish(first)
    del first
    files = sorted((tmp_path / "cache").iterdir())
    for number, file in enumerate(files):
        data = bytearray(file.read_bytes())
        if number % 4 == 0:
            file.write_bytes(data[: len(data) // 2])
        elif number % 4 == 1:
            data[-3] ^= 1
            file.write_bytes(data)
        elif number % 4 == 2:
            file.write_bytes(files[number - 1].read_bytes())
    second = start(tmp_path / "cache")
    _, outputs = ask(second, first_turn)
    assert [one.token_ids for one in outputs] == [one.token_ids for one in expected]
    assert second.stats()["tier_fetches"]["disk"] < CHATS
    finish(second)


def test_two_engines_of_one_host_share_files(tmp_path: Path) -> None:
    one, other = start(tmp_path / "cache"), start(tmp_path / "cache")
    first_turn, _ = ask(one, texts()[:6])
    end = time.monotonic() + 20
    while one.stats()["tier_writes"]["disk"] < 6 and time.monotonic() < end:
        one.engine.use_idle_time()
    while one.engine.context.transfers.lower.saves():  # type: ignore[attr-defined]
        one.engine.use_idle_time()  # nothing stays pinned until somebody asks
    _, outputs = ask(other, first_turn)
    assert all(output.cached_tokens > 90 for output in outputs)
    finish(one)
    finish(other)


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"prefix_caching_disk_gb": 0.0}, "prefix-caching-disk-gb is 0: files need both"),
    ({"prefix_caching_disk": None}, "disk is not given, and --prefix-caching-disk-gb is 1"),
    ({"prefix_caching_host_gb": 0.0}, "read into it: --prefix-caching-host-gb is 0"),
    ({PREFIX + "prefix_caching": False}, "prefix caching is off"),
    ({"prefix_caching_store": "mooncake://h:1"}, "one of them can be below memory of the host"),
]


@pytest.mark.parametrize(("options", "words"), REFUSALS)
def test_what_can_have_no_files_is_refused(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        start(tmp_path / "cache", **options)


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigurationError, match="--prefix-caching-disk"):
        start(tmp_path)
