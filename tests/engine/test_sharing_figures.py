"""Bursts, samples and chats: what several requests compute together, counted exactly."""

from __future__ import annotations

import random

import pytest

from megatron_hybrid.request import RequestEvent, SamplingParams
from tests.engine.symbolic import answer, expected_answer, generate, make_engine, random_tokens, run
from tests.thorough import A_THIRD, usually

T = random_tokens(21, 4000)
OWN = random_tokens(22, 60_000)
pytestmark = pytest.mark.usefixtures("asynchronous")

MODES = pytest.mark.parametrize("mode", ["extract", "break"])
SIZES = pytest.mark.parametrize(
    ("block", "chunk"),
    usually([(64, 128), (16, 16)], [(64, 64), (64, 128), (256, 256), (16, 16)]),
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


def large_engine(**options):  # type: ignore[no-untyped-def]
    block = options.get("block_size", 64)
    defaults = {
        "block_size": 64, "kernel_chunk": 128, "num_blocks": 60_000 // block, "max_requests": 40,
        "cached_slots": 200, "max_tokens": 8192, "max_seq_length": 8192, "exact_ends": True,
        "interval": 1024,
    }  # fmt: skip
    return make_engine(**(defaults | options))


def is_thorough(test: str, mode: str = "", asynchronous: bool = False, **others: object) -> bool:
    """Whether CI leaves this case out: half of them."""
    return mode != "" and (mode == "break") == asynchronous


def own(i: int, count: int) -> list[int]:
    return OWN[i * count : (i + 1) * count]


@A_THIRD
@MODES
@SIZES
@pytest.mark.parametrize("exact_ends", [True, False])
def test_a_burst_behind_one_beginning_computes_it_once(mode, block, chunk, exact_ends):
    engine = large_engine(mode=mode, block_size=block, kernel_chunk=chunk, exact_ends=exact_ends)
    generate(engine, [T[:2048] + own(i, 1024) for i in range(32)], max_tokens=2)
    assert engine.stats()["computed_tokens"] == 2048 + 32 * 1024


@A_THIRD
@MODES
@SIZES
def test_a_trickle_behind_one_beginning_computes_it_once(mode, block, chunk):
    engine = large_engine(mode=mode, block_size=block, kernel_chunk=chunk, max_tokens=512)
    prompts = [T[:1990] + own(i, 700) for i in range(12)]
    events: dict[str, list[RequestEvent]] = {f"r{i}": [] for i in range(12)}
    for i, prompt in enumerate(prompts):
        engine.add_request(f"r{i}", prompt, GREEDY)
        for event in engine.step():
            events[event.request_id].append(event)
        engine.check_integrity()
    for name, more in run(engine).items():
        events[name] += more
    for i, prompt in enumerate(prompts):
        assert answer(events[f"r{i}"]) == expected_answer(prompt, 3)
    grid = engine.context.geometry.grid
    assert 1990 + 12 * 700 <= engine.stats()["computed_tokens"] <= 1990 + 12 * 700 + grid


def test_a_fork_behind_the_last_grid_position_that_is_computed_is_not_missed():
    engine = large_engine(max_tokens=64, kernel_chunk=64, interval=0)
    engine.add_request("first", T[:300] + own(0, 50), GREEDY)
    for _ in range(4):
        engine.step()  # 256 tokens, and no state before there
    engine.add_request("second", T[:300] + own(1, 50), GREEDY)
    assert run(engine)["second"][-1].cached_tokens == 300


@MODES
def test_sixteen_samples_of_one_prompt_prefill_once(mode):
    engine = large_engine(mode=mode)
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, n=16)
    engine.add_request("r", T[:2000], params)
    events = run(engine)["r"]
    assert engine.stats()["computed_tokens"] == 2000
    for index in range(16):
        own_events = [event for event in events if event.index == index]
        assert answer(own_events) == expected_answer(T[:2000], 5)
        assert own_events[-1].cached_tokens == (0 if index == 0 else 2000)
    assert engine.stats()["twins_waited"] == 15
    assert engine.stats()["twin_tokens_saved"] == 15 * 2000


@A_THIRD
@MODES
@pytest.mark.parametrize("rows", [40, 10])  # with ten of them most samples wait
@pytest.mark.parametrize("budget", [8192, 512, 64])  # of a step, and so in how many a prompt comes
@pytest.mark.parametrize("at_once", [True, False])
def test_samples_that_come_one_by_one_and_mixed_compute_each_prompt_once(
    mode, rows, budget, at_once
):
    engine = large_engine(mode=mode, max_requests=rows, max_tokens=budget)
    prompts = [own(i, 2000) for i in range(4)]
    requests = [(prompt, sample) for prompt in range(4) for sample in range(8)]
    random.Random(3).shuffle(requests)
    events: dict[str, list[RequestEvent]] = {}
    for prompt, sample in requests:
        engine.add_request(f"{prompt}-{sample}", prompts[prompt], GREEDY)
        for event in [] if at_once else engine.step():
            events.setdefault(event.request_id, []).append(event)
    for name, more in run(engine).items():
        events.setdefault(name, []).extend(more)
    assert engine.stats()["computed_tokens"] == 4 * 2000
    assert engine.stats()["skipped_tokens"] == 28 * 2000
    for prompt, sample in requests:
        found = answer(events[f"{prompt}-{sample}"])
        assert found == expected_answer(prompts[prompt], 3)


@pytest.mark.parametrize("recurrent", [True, False])
def test_samples_of_other_models_prefill_once_too(recurrent):
    engine = large_engine(recurrent=recurrent, attention=not recurrent)
    generate(engine, [T[:1000]] * 8, max_tokens=3)
    assert engine.stats()["computed_tokens"] == 1000


@MODES
@pytest.mark.parametrize(
    ("block", "budget"),
    usually([(64, 8192), (16, 64)], [(block, n) for n in (8192, 300, 64) for block in (16, 64)]),
)
def test_a_chat_of_eight_turns_computes_only_what_is_new(mode, budget, block):
    engine = large_engine(
        mode=mode, block_size=block, kernel_chunk=64, max_tokens=budget, cached_slots=60,
        interval=0,
    )  # fmt: skip
    history: list[int] = []
    for turn in range(8):
        new = own(turn, 37 + 11 * turn)
        prompt = history + new
        (event,) = generate(engine, [prompt], max_tokens=20 + turn)
        sampled_last = 1 if history else 0  # no step has fed it
        assert len(prompt) - event.cached_tokens == len(new) + sampled_last
        history = prompt + expected_answer(prompt, 20 + turn)


def test_an_answer_that_was_cut_short_is_continued_from_where_it_was():
    engine = large_engine()
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    engine.add_request("a", T[:100], params)
    for _ in range(11):
        engine.step()
    engine.abort("a")
    run(engine)
    (event,) = generate(engine, [T[:100] + expected_answer(T[:100], 11) + [3, 4]])
    assert event.cached_tokens == 110


def test_the_same_prompt_again_computes_nothing_at_every_length():
    engine = large_engine(
        block_size=16, kernel_chunk=32, interval=0, cached_slots=400, num_blocks=1000
    )
    for length in (*range(1, 70), 500):
        prompt = own(length % 100, 600)[:length]
        generate(engine, [prompt])
        before = engine.stats()["computed_tokens"]
        (event,) = generate(engine, [prompt])
        assert event.cached_tokens == length
        assert engine.stats()["computed_tokens"] == before


def test_a_named_checkpoint_lets_another_prompt_branch_off_exactly_there():
    engine = large_engine(interval=0)
    engine.add_request("a", T[:900], GREEDY, cache_checkpoints=(333,))
    run(engine)
    assert engine.stats()["checkpoints_published"]["hint"] == 1
    assert generate(engine, [T[:333] + own(1, 200)])[0].cached_tokens == 333


def test_the_end_of_a_system_message_is_shared_from_the_second_chat_on():
    engine = large_engine(interval=0)
    for i in range(3):
        name, prompt = f"chat {i}", T[:777] + own(i, 300)
        engine.add_request(name, prompt, GREEDY, message_ends=(777, 1072))
        (event,) = [e for e in run(engine)[name] if e.finish_reason]
        assert event.cached_tokens == (0 if i == 0 else 777)


def test_hints_out_of_order_or_out_of_range_do_no_harm():
    engine = large_engine(interval=0)
    engine.add_request("a", T[:300], GREEDY, message_ends=(900, 0, -3, 200, 200))
    assert answer(run(engine)["a"]) == expected_answer(T[:300], 3)


def test_states_at_intervals_serve_a_prompt_that_nobody_could_foresee():
    engine = large_engine(interval=256)
    generate(engine, [T[:1500]])
    assert generate(engine, [T[:1100] + own(1, 100)])[0].cached_tokens == 1024


@pytest.mark.parametrize("exact_ends", [True, False])
def test_the_newest_state_of_an_answer_in_progress_can_be_used(exact_ends):
    engine = large_engine(block_size=16, kernel_chunk=16, interval=0, exact_ends=exact_ends)
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    engine.add_request("a", T[:40], params)
    for _ in range(30):
        engine.step()
    engine.check_integrity()
    history = T[:40] + expected_answer(T[:40], 30)
    engine.add_request("b", history + [7], GREEDY)
    events = run(engine)
    assert events["b"][-1].cached_tokens == 64
    stats = engine.stats()
    # the request keeps one at a time, and did not drop the one that was read
    assert stats["checkpoints_published"]["decode"] == 6
    assert stats["checkpoints_read"]["decode"] == 1
