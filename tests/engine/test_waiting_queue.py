"""What a step does for those who wait is bounded, however many they are and however long."""

from __future__ import annotations

import gc
import random

import pytest

from megatron_hybrid.engine import scheduler, waiting_queue
from megatron_hybrid.engine.context import DynamicInferenceContext
from megatron_hybrid.engine.engine import DynamicInferenceEngine
from megatron_hybrid.engine.garbage import BEFORE_A_FULL_ONE, collect_seldom
from megatron_hybrid.engine.prefix_tree import PrefixTree
from megatron_hybrid.engine.request_keys import RequestKeys
from megatron_hybrid.engine.tracked_request import TrackedRequest
from megatron_hybrid.engine.waiting_queue import WaitingQueue
from megatron_hybrid.request import SamplingParams
from tests.engine import symbolic
from tests.engine.unchecked import make_engine, random_tokens

T = random_tokens(71, 5000)


def greedy(max_tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, n=n)


def some_requests(count: int) -> list[TrackedRequest]:
    """Without tokens."""
    engine = make_engine()
    for i in range(count):
        engine.add_request(f"r{i}", [1], greedy(1))
    return list(engine.scheduler._waiting)


def test_a_tree_finds_who_leaves_a_sequence_where(seed: int = 0):
    """Against looking at everybody, while requests come and go."""
    rng = random.Random(seed)
    requests = some_requests(40)
    tree = PrefixTree()
    keys: dict[TrackedRequest, list[bytes]] = {}
    for _ in range(1500):
        if keys and rng.random() < 0.45:
            request = rng.choice(list(keys))
            tree.remove(request)
            del keys[request]
        elif len(keys) < len(requests):
            request = rng.choice([r for r in requests if r not in keys])
            keys[request] = chained(rng)
            tree.add(request, keys[request])
        assert len(tree) == len(keys)
        mine, first = chained(rng), rng.randrange(1, 4)
        expected: dict[int, set[TrackedRequest]] = {}
        for request, theirs in keys.items():
            shared = sum(a == b for a, b in zip(mine, theirs, strict=False))
            if shared >= first:
                expected.setdefault(shared, set()).add(request)
        found = [(count, list(leavers)) for count, leavers in tree.leavers(mine, first)]
        assert [count for count, _ in found] == sorted({count for count, _ in found})
        assert all(len(set(who)) == len(who) for _, who in found)
        assert {count: set(who) for count, who in found if who} == expected
    for request in list(keys):
        tree.remove(request)
    assert not tree._root.children and not len(tree)


def chained(rng: random.Random) -> list[bytes]:
    """Keys of up to eight blocks; equal ones follow equal ones."""
    length = rng.randrange(9)
    text = bytes(rng.choice(b"ab") for _ in range(length))
    return [text[: i + 1] for i in range(length)]


def test_those_who_wait_stay_in_order_in_chunks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(waiting_queue, "CHUNK", 4)
    rng = random.Random(1)
    queue, waiting = WaitingQueue(), []
    requests = some_requests(200)
    for step in range(600):
        if waiting and (rng.random() < 0.4 or not requests):
            request = waiting.pop(rng.randrange(len(waiting)))
            queue.remove(request)
            if rng.random() < 0.3:
                queue.put_back(request)
                waiting.append(request)
        elif requests:
            request = requests.pop()
            request.priority = rng.choice([-1, 0, 0, 0, 1])
            queue.add(request, step)
            waiting.append(request)
        expected = sorted(waiting, key=lambda request: request.rank)
        assert list(queue) == expected and len(queue) == len(expected)
        assert queue.first(5) == expected[:5]
        assert queue.preempted() == [r for r in expected if r in queue.preempted()]
        assert all(0 < len(chunk) <= 8 for chunk in queue._order._chunks)


def test_a_long_prompt_is_hashed_in_pieces_while_others_decode(monkeypatch: pytest.MonkeyPatch):
    """It is found in the cache in full all the same."""
    hashed = count_hashed(monkeypatch, at_once=32)
    engine = symbolic.make_engine(num_blocks=400, max_tokens=16, cached_slots=20, exact_ends=True)
    text = [t % 90 for t in T[:203]]
    symbolic.generate(engine, [text])
    engine.add_request("decodes", text[:9], greedy(40))
    engine.step()
    hashed.clear()
    engine.add_request("long", [*text, 5, 6], greedy(3))
    for _ in range(6):  # 32 tokens each, of 205
        assert [event.request_id for event in engine.step()] == ["decodes"]
    events = symbolic.run(engine)
    assert events["long"][-1].cached_tokens == 203
    assert symbolic.answer(events["long"]) == symbolic.expected_answer([*text, 5, 6], 3)
    assert max(hashed) <= 32 and sum(hashed) == 204


def count_hashed(monkeypatch: pytest.MonkeyPatch, at_once: int) -> list[int]:
    """Tokens hashed in each step, from now on."""
    hashed: list[int] = []

    def schedule(self: scheduler.Scheduler) -> scheduler.StepPlan:
        hashed.append(0)
        return really_schedule(self)

    def hash_keys(self: RequestKeys, request: TrackedRequest, most: int) -> int:
        count = really_hash(self, request, most)
        hashed[-1] += count
        return count

    really_schedule = scheduler.Scheduler.schedule
    really_hash = RequestKeys.hash
    monkeypatch.setattr(scheduler.Scheduler, "schedule", schedule)
    monkeypatch.setattr(RequestKeys, "hash", hash_keys)
    monkeypatch.setattr(scheduler, "HASHED_AT_ONCE", at_once)
    return hashed


def test_a_step_hashes_only_so_many_tokens_of_many_prompts(monkeypatch: pytest.MonkeyPatch):
    hashed = count_hashed(monkeypatch, at_once=1000)
    engine = make_engine(max_tokens=512)
    for i in range(60):
        engine.add_request(f"r{i}", [i, *T[:320]], greedy(1))
    while engine.has_work():
        engine.step()
    assert max(hashed) <= 1000 + 16 and sum(hashed) == 60 * 320


def test_a_step_with_room_hashes_more_of_prompts_that_are_mostly_cached(
    monkeypatch: pytest.MonkeyPatch,
):
    hashed = count_hashed(monkeypatch, at_once=200)
    monkeypatch.setattr(scheduler, "HASHED_FOR_ROOM", 3)
    engine = symbolic.make_engine(num_blocks=400, max_requests=16, max_tokens=200, exact_ends=True)
    text = [t % 90 for t in T[:160]]
    symbolic.generate(engine, [text])
    hashed.clear()
    prompts = {f"r{i}": [*text, 80 + i % 10, i, 3] for i in range(12)}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, greedy(3))
    first = engine.step()
    assert engine.scheduler.num_running == 4 and hashed[0] <= 4 * 200
    events = symbolic.run(engine)
    for event in first:
        events[event.request_id].insert(0, event)
    for name, prompt in prompts.items():
        assert events[name][-1].cached_tokens == 160
        assert symbolic.answer(events[name]) == symbolic.expected_answer(prompt, 3)
    # one longer than that goes on a part at a time
    engine.add_request("long", [80, *text, *text[:70]], greedy(1))
    hashed.clear()
    symbolic.run(engine)
    assert max(hashed) <= 200 + 16 and len(hashed) > 2


def test_samples_of_one_prompt_hash_it_once(monkeypatch: pytest.MonkeyPatch):
    hashed = count_hashed(monkeypatch, at_once=64)
    engine = symbolic.make_engine(num_blocks=400, max_requests=8, exact_ends=True)
    text = [t % 90 for t in T[:150]]
    engine.add_request("samples", text, greedy(6, n=8))
    events = symbolic.run(engine)["samples"]
    assert sum(event.finish_reason is not None for event in events) == 8
    assert sum(hashed) == 148
    assert engine.stats()["computed_tokens"] == 150


def test_a_lone_sample_hashes_the_prompt_itself_when_the_first_one_has_gone(
    monkeypatch: pytest.MonkeyPatch,
):
    hashed = count_hashed(monkeypatch, at_once=64)
    engine = symbolic.make_engine(num_blocks=400, max_requests=8, exact_ends=True)
    text = [t % 90 for t in T[:150]]
    engine.add_request("samples", text, greedy(6, n=2))
    engine.step()
    engine.abort("samples", 0)
    events = [event for event in symbolic.run(engine)["samples"] if event.index == 1]
    assert symbolic.answer(events) == symbolic.expected_answer(text, 6)
    assert sum(hashed) == 64 + 148


def test_a_step_looks_up_only_so_many_blocks_but_of_one_prompt_at_least(
    monkeypatch: pytest.MonkeyPatch,
):
    looked_up: list[int] = []

    def match(self: DynamicInferenceContext, request: TrackedRequest) -> object:
        looked_up[-1] += 1
        return really_match(self, request)

    really_match = DynamicInferenceContext.match
    monkeypatch.setattr(DynamicInferenceContext, "match", match)
    monkeypatch.setattr(scheduler, "MATCHED_AT_ONCE", 50)
    engine = make_engine()
    for i in range(10):
        engine.add_request(f"r{i}", [i, *T[:320]], greedy(1))  # 20 blocks
    engine.add_request("long", T[:3200], greedy(1))
    while engine.has_work():
        looked_up.append(0)
        engine.step()
    assert looked_up == [3, 3, 3, 2]


def test_thousands_that_share_a_beginning_are_not_all_compared(monkeypatch: pytest.MonkeyPatch):
    compared = 0

    def common_tokens(*arguments: object) -> int:
        nonlocal compared
        compared += 1
        return really_compare(*arguments)  # type: ignore[arg-type]

    really_compare = waiting_queue._common_tokens
    monkeypatch.setattr(waiting_queue, "_common_tokens", common_tokens)
    engine = make_engine(max_requests=64, max_tokens=2048)
    for i in range(3000):
        engine.add_request(f"r{i}", [*T[:40], i % 30, i // 30, *T[:10]], greedy(20))
    for _ in range(25):
        compared = 0
        engine.step()
        assert compared <= waiting_queue.COMPARED_IN_A_STEP + waiting_queue.COMPARED_AT_ONCE


def test_only_so_many_tokens_of_those_who_wait_are_known_ahead(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(waiting_queue, "LOOKS_AHEAD", 2000)
    engine = make_engine(max_requests=2, max_tokens=64)
    for i in range(100):
        engine.add_request(f"r{i}", [i, *T[:100]], greedy(2))
    while engine.has_work():
        engine.step()
        assert engine.scheduler._waiting._indexed_tokens <= 2000 + 101
    assert not engine.scheduler._waiting._indexed_tokens


def test_objects_are_all_looked_at_seldom_once_an_engine_is_built():
    before = gc.get_threshold()
    try:
        collect_seldom()
        assert gc.get_freeze_count() > 1000
        assert gc.get_threshold() == (*before[:2], BEFORE_A_FULL_ONE)
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


def preempted_engine() -> DynamicInferenceEngine:
    engine = symbolic.make_engine(max_requests=2)
    for i in range(4):
        engine.add_request(f"r{i}", [i, *range(8)], greedy(9))
    engine.step()
    engine.step()
    for request in list(engine.context.running()):
        engine.preempt(request)
    return engine


def test_during_a_pause_only_those_who_have_begun_are_looked_at():
    engine = preempted_engine()
    engine.pause("finish")
    assert [r.request_id for r in engine.scheduler._first(2)] == ["r0", "r1"]
    while engine.has_work():
        engine.step()
    assert engine.num_waiting == 2
    engine.resume()
    symbolic.run(engine)
