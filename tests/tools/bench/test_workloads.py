"""The workloads are the same on every machine; the figures mean what they say."""

from __future__ import annotations

import pytest

from bench import (
    WORKLOAD_NAMES,
    Conversations,
    RequestRecord,
    make_workload,
    summarize,
)
from bench.driver import BenchmarkError, run_workload
from bench.measurements import Arrival
from bench.workloads import IF_NAMED
from megatron_hybrid.request import FinishReason
from tests.unit.echo_engine import EchoEngine

# Fixed for ever: figures measured with other tokens can't be compared.
TINY = {
    "unique": "92d6b03659d2a5d7",
    "shared_system": "1ed0f495dbcacbab",
    "multi_turn": "813e52378cbc14b9",
    "fork": "8181f69961ca4a7d",
    "decode_1": "bc9dae616368f34a",
    "decode_32": "bd682b36bae99372",
    "decode_256": "9a536cf286eef3a8",
    "long_resume": "221fb188254d88c6",
}
LONG = {
    "prompts_8k": "9f794b0ee154e0ed",
    "prompts_20k": "8ae6f9b4afd6d997",
    "prompts_40k": "c09156010d372bd2",
    "prompt_65k": "dbe42c91c46c0a83",
    "first_token_600": "bd7540d969370b37",
    "first_token_1k": "4924cd0e888e369c",
    "first_token_2k": "6e46917fee3d5b1e",
    "first_token_4k": "be1d65de5be9e9e4",
}
FULL = {
    "unique": "87b8a96796d0e5db",
    "shared_system": "258aa2902560d255",
    "multi_turn": "6eaf671ca521a4d6",
    "decode_1": "e2ff208154f2ac30",
}
OTHER_SEED_AND_COUNT = {
    "multi_turn": "2e9ac0ae9a8b50ad",
    "fork": "b91e5dc8c688aead",
    "decode_256": "71e2910093c387e2",
    "long_resume": "c5808aa13beeb7c4",
}


def test_the_shared_prefix_can_have_another_length():
    usual = make_workload("shared_system", 512, scale=0.02)
    longer = make_workload("shared_system", 512, scale=0.02, shared_prefix=9000)
    assert [len(r.new_tokens) for r in usual.requests()] == [164 + 5] * 2
    assert [len(r.new_tokens) for r in longer.requests()] == [180 + 5] * 2
    assert make_workload("unique", 512, scale=0.02, shared_prefix=9000).digest() == TINY["unique"]


def test_every_workload_has_a_fixed_digest():
    assert tuple(TINY) == WORKLOAD_NAMES
    assert tuple(LONG) == IF_NAMED


@pytest.mark.parametrize(("name", "digest"), (TINY | LONG).items())
def test_digest_at_a_tiny_scale(name, digest):
    assert make_workload(name, vocab_size=512, scale=0.02).digest() == digest


@pytest.mark.parametrize(("name", "digest"), FULL.items())
def test_digest_at_full_scale(name, digest):
    assert make_workload(name, vocab_size=131072).digest() == digest


@pytest.mark.parametrize(("name", "digest"), OTHER_SEED_AND_COUNT.items())
def test_digest_with_a_seed_and_a_count_scale(name, digest):
    workload = make_workload(name, vocab_size=32000, seed=3, scale=0.05, count_scale=0.125)
    assert workload.digest() == digest


def test_counts_of_a_chat_include_its_earlier_turns():
    counts = make_workload("multi_turn", vocab_size=131072).token_counts()
    assert counts.requests == 192
    assert counts.rounds == 6
    assert counts.prompt_tokens == 897024
    assert counts.new_tokens == 180224
    assert counts.output_tokens == 24576
    assert counts.longest == 6400


@pytest.mark.parametrize(
    ("name", "requests", "length"),
    [
        ("prompts_8k", 128, 8192),
        ("prompts_20k", 128, 20480),
        ("prompts_40k", 128, 40960),
        ("prompt_65k", 1, 65536),
    ],
)
def test_long_prompts_have_answers_of_one_token(name, requests, length):
    # at a tenth of the tokens, which take a while to draw
    counts = make_workload(name, 512, scale=0.1, count_scale=1.0).token_counts()
    assert counts.requests == counts.output_tokens == requests
    assert counts.new_tokens == requests * round(length / 10)


def test_first_tokens_are_asked_for_one_at_a_time():
    workload = make_workload("first_token_1k", 512)
    assert [len(round_) for round_ in workload.rounds] == [1] * 16
    assert all(len(r.new_tokens) == 1024 and r.max_tokens == 1 for r in workload.requests())


def test_long_prompts_share_nothing():
    prompts = [r.new_tokens for r in make_workload("prompts_8k", 512, scale=0.02).requests()]
    assert len(prompts) == len({prompt[:8] for prompt in prompts}) == 3


def test_reserved_ids_are_never_drawn():
    for request in make_workload("decode_32", vocab_size=128, scale=0.5).requests():
        assert min(request.new_tokens) >= 16
        assert max(request.new_tokens) < 128


def test_what_is_many_stays_more_than_one_and_what_is_alone_stays_alone():
    assert make_workload("unique", 512, scale=0.001).token_counts().requests == 2
    assert make_workload("decode_1", 512, scale=0.001).token_counts().requests == 1


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="shared_system"):
        make_workload("shared_sytem", vocab_size=512)


@pytest.mark.parametrize("sizes", [{"scale": 0.0}, {"scale": 1.0, "count_scale": -1.0}])
def test_a_scale_that_is_not_positive_is_refused(sizes):
    with pytest.raises(ValueError, match="more than 0"):
        make_workload("unique", vocab_size=512, **sizes)


def test_a_prompt_is_everything_said_so_far_and_the_new_tokens():
    first, second = (r[0] for r in make_workload("long_resume", 512, scale=0.001).rounds)
    conversations = Conversations()
    assert conversations.prompt(first) == list(first.new_tokens)
    conversations.append(first, [7, 8])
    assert conversations.prompt(second) == [*first.new_tokens, 7, 8, *second.new_tokens]


def _record(round_, submitted, arrivals, *, cached=0):
    return RequestRecord(
        request_id=f"r{round_}.{submitted}",
        round=round_,
        prompt_tokens=10,
        submitted=submitted,
        cached_tokens=cached,
        arrivals=[Arrival(*arrival) for arrival in arrivals],
    )


def test_figures_of_a_small_run():
    figures = summarize(
        [
            _record(0, 0.0, [(1.0, 1), (2.0, 1), (4.0, 2)], cached=4),
            _record(0, 0.0, [(3.0, 1), (3.5, 1)]),
            _record(1, 10.0, [(12.0, 1)], cached=8),
        ],
        [4.0, 2.0],
    )
    assert figures["wall_s"] == 6.0
    assert figures["requests"] == 3
    assert figures["prompt_tokens"] == 30
    assert figures["cached_tokens"] == 12
    assert figures["computed_tokens"] == 18
    assert figures["output_tokens"] == 7
    assert figures["output_tok_s"] == pytest.approx(7 / 6)
    assert figures["ttft_s"]["mean"] == pytest.approx(2.0)
    assert figures["ttft_s"]["p50"] == pytest.approx(2.0)
    # 1 s; two tokens that took 2 s together; half a second.
    assert figures["itl_ms"]["mean"] == pytest.approx((1000 + 1000 + 1000 + 500) / 4)
    assert [r["cached_tokens"] for r in figures["rounds"]] == [4, 8]


def test_steady_gaps_begin_after_the_rounds_last_first_token():
    figures = summarize(
        [
            _record(0, 0.0, [(1.0, 1), (3.0, 1), (3.1, 1)]),
            _record(0, 0.0, [(2.0, 1), (2.5, 1)]),
        ],
        [4.0],
    )
    # The gap from 1.0 to 3.0 began before the second request's first token.
    assert figures["steady_itl_ms"]["mean"] == pytest.approx((100 + 500) / 2)


def test_a_request_without_a_token_is_named():
    with pytest.raises(ValueError, match="r0.0.0"):
        summarize([_record(0, 0.0, [])], [1.0])


def test_the_driver_feeds_answers_into_the_next_turn():
    engine = EchoEngine()
    workload = make_workload("multi_turn", 512, scale=0.02)
    finished = []
    run = run_workload(engine, workload, on_finish=lambda: finished.append(1))
    counts = workload.token_counts()
    assert len(finished) == counts.requests
    assert sum(map(len, engine.prompts)) == counts.prompt_tokens
    first, second = engine.prompts[0], engine.prompts[2]
    answer = [len(first)] * workload.rounds[0][0].max_tokens
    assert second[: len(first) + len(answer)] == first + answer
    figures = summarize(run.records, run.round_walls)
    assert figures["output_tokens"] == counts.output_tokens
    assert figures["cached_tokens"] == counts.requests
    assert len(figures["rounds"]) == counts.rounds


def test_a_run_with_a_failed_request_has_no_figures():
    with pytest.raises(BenchmarkError, match="'error'"):
        run_workload(EchoEngine(FinishReason.ERROR), make_workload("decode_1", 512, scale=0.02))


def test_a_run_with_too_few_tokens_has_no_figures():
    with pytest.raises(BenchmarkError, match="4 tokens instead of 5"):
        run_workload(EchoEngine(missing=1), make_workload("decode_1", 512, scale=0.02))
