"""Prompts that one engine computed are answered by another one, which computes none of them; and
all prompts are answered, whatever becomes of the first."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("nixl_cu13", reason="needs NIXL")
from bench.ports import free_address  # noqa: E402
from megatron_hybrid import LLM, SamplingParams  # noqa: E402
from megatron_hybrid.cache.block_hash import SequenceKeys  # noqa: E402
from megatron_hybrid.cache.lower_tier import LowerTier  # noqa: E402
from megatron_hybrid.disaggregation import desk, peer_prefixes, peers  # noqa: E402
from megatron_hybrid.engine import build_host_memory  # noqa: E402
from megatron_hybrid.engine.transfers import HostTransfers  # noqa: E402
from megatron_hybrid.errors import ConfigurationError, InvalidRequestError  # noqa: E402
from tests.disaggregation.engines import (  # noqa: E402
    ANSWER,
    PREFIX,
    PrefillProcess,
    answers,
    options,
)
from tests.thorough import A_THIRD, usually  # noqa: E402
from tests.tiny_models import FAMILIES, make_tiny_model  # noqa: E402

FIRST = SamplingParams(max_tokens=1, temperature=0.0)


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """On which a copy pays, even for so small a model; with little patience."""
    monkeypatch.setitem(build_host_memory._OPERATIONS, "cpu", 1e6)
    monkeypatch.setattr(peer_prefixes, "FIND_SECONDS", 5.0)
    monkeypatch.setattr(peer_prefixes.PeerPrefixes, "patience", 4.0)
    monkeypatch.setattr(peers, "PAUSE_SECONDS", 0.3)


class Pair:
    """Both in this process, the one that computes prompts in a thread of its own."""

    def __init__(self, folder: str = "", **given: Any) -> None:
        self.address = free_address()
        self.prefill = LLM(
            **options(folder, role="prefill", disaggregation_listen=self.address, **given)
        )
        self.decode = LLM(
            **options(folder, role="decode", disaggregation_peers=self.address, **given)
        )
        self.both = LLM(**options(folder, **given))
        self.ends = threading.Event()
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        while not self.ends.is_set():
            with self.lock:
                is_busy = self.prefill.engine.use_idle_time()
            if not is_busy:
                time.sleep(0.002)

    def compute(self, prompts: list[list[int]]) -> None:
        with self.lock:
            answers(self.prefill, prompts, params=FIRST)

    def go_on(self, *, computing: bool) -> None:
        """A step of the one that computes, if it is to compute, and all that is read behind it."""
        if computing:
            with self.lock:
                self.prefill.engine.step()
        for _ in range(20):
            self.decode.engine.use_idle_time()
            self.decode.engine.check_integrity()
            time.sleep(0.005)

    def there(self, llm: LLM, prompt: list[int]) -> int:
        """Its blocks that are in memory of the host."""
        tokens, cache = np.array(prompt, dtype=np.int32), llm.engine.context.cache
        keys = SequenceKeys(cache.root(), 16, lambda start, end: tokens[start:end])
        keys.extend_to(len(prompt))
        with self.lock:
            return LowerTier(transfers_of(llm).tier).num_there(keys)

    def offers(self) -> int:
        with self.lock:
            self.prefill.engine.check_integrity()
            return int(self.prefill.stats()["tier_states"]["peers"])

    def parts(self) -> int:
        """On offer, of prompts that are computed."""
        with self.lock:
            self.prefill.engine.check_integrity()
            return sum(save.ending is None for save in transfers_of(self.prefill).lower.saves())

    def close(self) -> None:
        self.ends.set()
        self.thread.join()
        for llm in (self.prefill, self.decode):
            transfers_of(llm).lower.close()


def transfers_of(llm: LLM) -> HostTransfers:
    transfers = llm.engine.context.transfers
    assert isinstance(transfers, HostTransfers)
    return transfers


def wait_until(condition: Any) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def prompts_of(llm: LLM, number: int, length: int = 90) -> list[list[int]]:
    rng = random.Random(length)
    vocabulary = llm.engine.vocab_size
    return [[rng.randrange(vocabulary) for _ in range(length + i)] for i in range(number)]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(build_host_memory._OPERATIONS, "cpu", 1e6)
        found = Pair(**{PREFIX + "block_size": 16})
    yield found
    found.close()


def test_prompts_are_answered_without_computing_any_of_them(pair: Pair) -> None:
    prompts = prompts_of(pair.both, 8)
    expected, _ = answers(pair.both, prompts)
    pair.compute(prompts)
    found, skipped = answers(pair.decode, prompts, pair.address)
    assert found == expected and skipped == [len(prompt) for prompt in prompts]
    stats = pair.decode.stats()
    assert stats["tier_fetches"]["peers"] >= 8 and stats["tier_tokens_fetched"]["peers"] >= 700
    assert not any(stats["tier_refused"].values())
    wait_until(lambda: not pair.offers())
    assert pair.prefill.stats()["tier_writes"]["peers"] >= 8


def test_only_what_is_missing_is_read(pair: Pair) -> None:
    """Of a conversation that went on: its new KV and its state."""
    (text,) = prompts_of(pair.both, 1, 200)
    pair.compute([text])
    (answer,), _ = answers(pair.decode, [text], pair.address)
    longer = text + answer + [5, 6, 7] * 9
    before = pair.decode.stats()["tier_bytes_fetched"]["peers"]
    pair.compute([longer])
    (_,), (skipped,) = answers(pair.decode, [longer], pair.address)
    assert skipped == len(longer), (
        pair.decode.stats()["tier_refused"],
        pair.decode.stats()["tier_fetches"],
    )
    host = transfers_of(pair.decode).tier.host
    read = (pair.decode.stats()["tier_bytes_fetched"]["peers"] - before) / host.page_bytes
    state = host.geometry.bytes_per_cached_slot / host.page_bytes
    assert read - state <= 1 + len(longer) // 16 - len(text) // 16


def read(llm: LLM) -> int:
    return int(llm.stats()["tier_bytes_fetched"]["peers"])


@pytest.fixture(scope="module")
def slow_pair() -> Iterator[Pair]:
    """The one computes 64 tokens a step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(build_host_memory._OPERATIONS, "cpu", 1e6)
        found = Pair(**{PREFIX + "block_size": 16, PREFIX + "max_tokens": 64})
    yield found
    found.close()


def follow(pair: Pair, prompt: list[int], request: str) -> None:
    tokens = np.array(prompt, dtype=np.int32)
    transfers_of(pair.decode).read_ahead(request, tokens, "", pair.address, request)


def test_a_prompt_is_read_while_it_is_computed(slow_pair: Pair) -> None:
    pair = slow_pair
    (prompt,) = prompts_of(pair.both, 1, 400)
    (expected,), _ = answers(pair.both, [prompt])
    transfers, before = transfers_of(pair.decode), read(pair.decode)
    with pair.lock:
        pair.prefill.engine.add_request("p", prompt, FIRST)
    follow(pair, prompt, "p")
    steps = []
    while pair.prefill.engine.has_work():
        assert not transfers.is_read_ahead("p")
        pair.go_on(computing=True)
        if pair.prefill.engine.has_work():  # else there may be no time for all of it
            wait_until(
                lambda: (
                    pair.there(pair.decode, prompt) == pair.there(pair.prefill, prompt)
                    or pair.go_on(computing=False)
                )
            )
        steps.append(read(pair.decode) - before)
    assert len({*steps}) >= 4, steps  # it grew with what was computed
    wait_until(lambda: pair.go_on(computing=False) or transfers.is_read_ahead("p"))
    ahead = read(pair.decode) - before
    assert answers(pair.decode, [prompt], pair.address) == ([expected], [len(prompt)])
    host = transfers.tier.host
    kv = host.geometry.blocks_for(len(prompt)) * host.geometry.bytes_per_block
    assert ahead >= kv / 2
    assert read(pair.decode) - before == kv + host.geometry.bytes_per_cached_slot  # nothing twice
    assert pair.decode.stats()["tier_fetches"]["peers"] == 1
    assert not any(pair.decode.stats()["tier_refused"].values())
    wait_until(lambda: not pair.offers())
    assert not pair.prefill.stats()["tier_refused"]["unread"]


def test_several_prompts_are_read_while_they_are_computed(slow_pair: Pair) -> None:
    pair, transfers = slow_pair, transfers_of(slow_pair.decode)
    prompts = prompts_of(pair.both, 5, 250)
    prompts[1:3] = [prompts[0][:120] + prompt[120:] for prompt in prompts[1:3]]
    expected, _ = answers(pair.both, prompts)
    with pair.lock:
        for number, prompt in enumerate(prompts):
            pair.prefill.engine.add_request(f"s{number}", prompt, FIRST)
    for number, prompt in enumerate(prompts):
        follow(pair, prompt, f"s{number}")
    before = read(pair.decode)
    while pair.prefill.engine.has_work():
        pair.go_on(computing=True)
    assert read(pair.decode) - before > 8 * transfers.tier.host.geometry.bytes_per_block
    wait_until(lambda: not transfers.lower.is_underway or pair.go_on(computing=False))
    lengths = [len(prompt) for prompt in prompts]
    assert answers(pair.decode, prompts, pair.address) == (expected, lengths)
    assert not any(pair.decode.stats()["tier_refused"].values())
    wait_until(lambda: not pair.parts())


def test_what_is_read_ahead_ends_with_the_request(slow_pair: Pair) -> None:
    """Whether it never was, is aborted, or nobody waits any more."""
    pair, transfers = slow_pair, transfers_of(slow_pair.decode)
    one, two, three = prompts_of(pair.both, 3, 300)
    follow(pair, one, "unknown")
    wait_until(lambda: pair.go_on(computing=False) or transfers.is_read_ahead("unknown"))
    for prompt, name in ((two, "aborted"), (three, "left")):
        with pair.lock:
            pair.prefill.engine.add_request(name, prompt, FIRST)
        follow(pair, prompt, name)
        for _ in range(3):
            pair.go_on(computing=True)
        assert not transfers.is_read_ahead(name)
        if name == "left":
            transfers.stop_reading_ahead(name)
        else:
            with pair.lock:
                pair.prefill.engine.abort(name)
        wait_until(lambda name=name: pair.go_on(computing=True) or transfers.is_read_ahead(name))
        while pair.prefill.engine.has_work():
            pair.go_on(computing=True)
    expected, _ = answers(pair.both, [one, two, three])
    assert answers(pair.decode, [one, two, three], pair.address)[0] == expected
    wait_until(lambda: pair.go_on(computing=False) or not transfers.lower.is_underway)
    wait_until(lambda: not pair.parts())


def test_a_prompt_that_was_computed_before_is_handed_over_again(pair: Pair) -> None:
    prompts = prompts_of(pair.both, 2, 120)
    for _ in range(2):
        pair.compute(prompts)
        pair.decode.engine.reset_prefix_cache()
        _, skipped = answers(pair.decode, prompts, pair.address)
        assert skipped == [120, 121]


def test_what_nobody_computed_is_computed_here(pair: Pair) -> None:
    prompts = prompts_of(pair.both, 2, 70)
    expected, _ = answers(pair.both, prompts)
    assert answers(pair.decode, prompts, pair.address) == (expected, [0, 0])
    assert not pair.decode.stats()["tier_refused"]["late"]  # it was said at once


def test_without_the_name_of_a_server_nobody_is_asked(pair: Pair) -> None:
    prompts = prompts_of(pair.both, 1, 75)
    pair.compute(prompts)
    assert answers(pair.decode, prompts)[1] == [0]


def test_a_server_that_the_flag_does_not_name_is_refused(pair: Pair) -> None:
    for llm in (pair.decode, pair.both):
        with pytest.raises(InvalidRequestError, match="'10.0.0.1:80', which is none of --disagg"):
            llm.engine.add_request("x", [1, 2], ANSWER, prefilled_by="10.0.0.1:80")
        assert not llm.engine.has_work()


def test_log_probabilities_of_a_prompt_are_computed_here(pair: Pair) -> None:
    (prompt,) = prompts_of(pair.both, 1, 80)
    pair.compute([prompt])
    params = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=1)
    expected = answers(pair.both, [prompt], params=params)[0]
    assert answers(pair.decode, [prompt], pair.address, params) == (expected, [0])


def test_what_nobody_came_for_is_given_up(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_until(lambda: not pair.offers() or monkeypatch.setattr(desk, "KEPT_SECONDS", 0.0))
    before = pair.prefill.stats()["tier_refused"]["unread"]
    monkeypatch.setattr(desk, "KEPT_SECONDS", 0.2)
    pair.compute(prompts_of(pair.both, 2, 60))
    wait_until(lambda: pair.prefill.stats()["tier_refused"]["unread"] >= before + 2)
    assert not pair.offers()


def test_other_weights_are_none_of_ours(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    prompts = prompts_of(pair.both, 1, 65)
    pair.compute(prompts)
    pair.decode.engine.context.cache.epoch += 1  # as if they had been updated here alone
    try:
        assert answers(pair.decode, prompts, pair.address)[1] == [0]
        assert pair.decode.stats()["tier_refused"]["failed"] == 1
    finally:
        pair.decode.engine.context.cache.epoch -= 1
    assert "its weights were updated" in caplog.text


KINDS = usually(["nemotron_h", "qwen3_next", "lfm2", "mamba", "llama"], [name for name in FAMILIES])


@A_THIRD
@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("given", [{}, {"batch_invariant": True}], ids=["fast", "invariant"])
def test_families(family: str, given: dict[str, Any], tmp_path: Path) -> None:
    make_tiny_model(family, tmp_path)
    pair = Pair(str(tmp_path), **{PREFIX + "block_size": 16, **given})
    try:
        prompts = prompts_of(pair.both, 3, 150)
        expected, _ = answers(pair.both, prompts)
        pair.compute(prompts)
        found, skipped = answers(pair.decode, prompts, pair.address)
        granule = pair.both.engine.context.geometry.granule
        assert found == expected
        assert skipped == [len(prompt) // granule * granule for prompt in prompts]
    finally:
        pair.close()


def test_a_server_that_dies_costs_time_alone() -> None:
    address = free_address()
    llm = LLM(**options(role="decode", disaggregation_peers=address))
    both = LLM(**options())
    prompts = prompts_of(both, 4)
    expected, _ = answers(both, prompts)
    # Before it is there, killed before it is asked, and while it is.
    assert answers(llm, prompts[:1], address) == (expected[:1], [0])
    first = PrefillProcess(address)
    first.wait_for("ready")
    time.sleep(0.4)  # the pause after it did not answer
    first.compute(prompts[1])
    assert answers(llm, prompts[1:2], address) == (expected[1:2], [len(prompts[1])])
    os.kill(first.process.pid, signal.SIGSTOP)
    threading.Timer(0.7, first.kill).start()
    assert answers(llm, prompts[2:3], address) == (expected[2:3], [0])
    second = PrefillProcess(address)
    second.wait_for("ready")
    time.sleep(0.4)
    second.compute(prompts[3])
    assert answers(llm, prompts[3:], address) == (expected[3:], [len(prompts[3])])
    assert llm.stats()["tier_refused"]["failed"] == 2
    second.kill()
    transfers_of(llm).lower.close()


FLAGS: list[tuple[dict[str, Any], str]] = [
    ({"role": "prefill"}, "--role is prefill, and --disaggregation-listen is not given"),
    ({"role": "decode"}, "--role is decode, and --disaggregation-peers is not given"),
    ({"disaggregation_peers": "a:1"}, "--role is both, and --disaggregation-peers is a:1"),
    ({"role": "decode", "disaggregation_peers": "a:1,b"}, "'b' is not HOST:PORT"),
    ({"role": "prefill", "disaggregation_listen": "a:99999"}, "'a:99999' is not HOST:PORT"),
    (
        {"role": "decode", "disaggregation_peers": "a:1", "prefix_caching_host_gb": 0.0},
        "--prefix-caching-host-gb is 0",
    ),
    (
        {"role": "decode", "disaggregation_peers": "a:1", "prefix_caching_store": "mooncake://a:1"},
        "not both",
    ),
    ({"role": "prefill", "disaggregation_listen": "203.0.113.1:7000"}, "nothing can listen"),
]


@pytest.mark.parametrize(("given", "words"), FLAGS)
def test_flags_that_do_not_go_together_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        LLM(**options(**given))
