"""What host memory forgets, and what an earlier process knew, comes back from a store."""

from __future__ import annotations

import pytest

from megatron_hybrid.engine.lower_transfers import LowerTransfers
from megatron_hybrid.engine.transfers import HostTransfers
from megatron_hybrid.request import SamplingParams
from tests.engine.symbolic import CheckedEngine, expected_answer, generate, random_tokens, run
from tests.engine.symbolic_store import SymbolicStore
from tests.engine.test_host_tier import ANSWER, KINDS, chats, counts, engine_with, give_up
from tests.engine.test_read_ahead import ByHand
from tests.thorough import A_THIRD, usually


def settle(engine: CheckedEngine) -> None:
    """All that it has for the store is there."""
    for _ in range(200):
        engine.use_idle_time()
        engine.context.transfers.end_copies()
    engine.check_integrity()


def stored(engine: CheckedEngine) -> dict[str, int]:
    assert isinstance(engine.context.transfers, HostTransfers)
    lower = engine.context.transfers.lower
    assert isinstance(lower, LowerTransfers)
    return lower.lower.counts


def refused(engine: CheckedEngine) -> dict[str, int]:
    assert isinstance(engine.context.transfers, HostTransfers)
    return engine.context.transfers.tier.refused


@A_THIRD
@pytest.mark.parametrize(
    ("asynchronous", "slowest"),
    usually([(False, 3), (True, 1)], [(False, 1), (False, 3), (True, 1), (True, 3)]),
)
@pytest.mark.parametrize("kind", KINDS)
def test_chats_go_on_after_a_restart(kind: str, slowest: int, asynchronous: bool) -> None:
    store = SymbolicStore()
    options = {**KINDS[kind], "slowest_copy": slowest, "asynchronous": asynchronous}
    first = engine_with(store=store, **options)
    chats(first, 8, 1)
    settle(first)
    second = engine_with(store=store, **options)
    skipped = []
    for seed in range(8):
        text = random_tokens(seed, 50)
        whole = text + expected_answer(text, ANSWER) + [5, 6]
        (event,) = generate(second, [whole], ANSWER)
        skipped.append(event.cached_tokens)
    # All but the last token, which was never fed; or up to the grid. With slow copies some are gone
    # before they are written.
    least = 52 if kind == "batch-invariant" else 53
    assert sum(n >= least for n in skipped) >= (7 if slowest == 1 else 5), skipped
    assert stored(second)["tier_fetches"] >= 6
    settle(second)


def test_what_host_memory_has_no_room_for_comes_from_the_store() -> None:
    pages = 60  # of three conversations
    first, *later = chats(engine := engine_with(pages, store=SymbolicStore()), 12, 3)
    assert not any(first)
    for turn in later:
        assert sum(skipped >= 50 for skipped in turn) >= 10, later
    assert stored(engine)["tier_fetches"] > 10
    without = chats(engine_with(pages), 12, 3)
    assert sum(map(sum, without)) < sum(map(sum, [first, *later])) / 2


def test_only_what_is_missing_is_written_and_read() -> None:
    store = SymbolicStore()
    engine = engine_with(num_blocks=60, cached_slots=4, store=store)
    text = random_tokens(1, 41)
    generate(engine, [text], ANSWER)
    settle(engine)
    del store.calls[:]
    text += expected_answer(text, ANSWER) + [7] * 11
    generate(engine, [text], ANSWER)  # 59 tokens: the first 11 blocks of 4 are there
    settle(engine)
    # Of the prompt's end and of the answer's: KV behind what is there, a state and a list each.
    assert store.calls.count("put") <= 2 * (4 + 2)
    del store.calls[:]
    engine.context.cache.store.clear(0)  # the device alone
    (event,) = generate(engine, [text + expected_answer(text, ANSWER) + [1]], 1)
    assert event.cached_tokens == 59 and "get" not in store.calls


def test_other_weights_have_other_objects() -> None:
    store = SymbolicStore()
    engine = engine_with(store=store)
    chats(engine, 4, 1)
    settle(engine)
    engine.update_weights("a folder")
    text = random_tokens(0, 50)
    (event,) = generate(engine, [text + expected_answer(text, ANSWER) + [5]], 2)
    assert event.cached_tokens == 0 and not stored(engine)["tier_fetches"]


@pytest.mark.parametrize(("loses", "fails"), [(0.3, 0.0), (0.0, 0.1), (0.2, 1.0)])
def test_a_store_that_loses_or_fails_costs_tokens_alone(loses: float, fails: float) -> None:
    """Answers are checked; the rest is counted."""
    store = SymbolicStore(loses=loses, fails=fails)
    engine = engine_with(60, store=store, slowest_copy=2)
    engine.context.transfers.lower._clock = iter(range(0, 10**9, 5)).__next__  # type: ignore
    chats(engine, 12, 3)
    settle(engine)
    assert bool(refused(engine)["failed"]) == bool(fails)
    if fails < 1:
        assert stored(engine)["tier_writes"]
    assert counts(engine)["tier_writes"]


def test_nobody_waits_for_a_store_that_does_not_answer() -> None:
    store = SymbolicStore()
    first = engine_with(store=store)
    chats(first, 4, 1)
    settle(first)
    engine, time = engine_with(store=store, slowest_copy=1), [0.0]
    lower = engine.context.transfers.lower  # type: ignore[attr-defined]
    lower._clock = lambda: time[0]
    lower._asker.submit = lambda *args: Never()
    text = random_tokens(0, 50)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    engine.add_request("back", text + expected_answer(text, ANSWER) + [5], params)
    engine.add_request("new", [3, 4, 5], params)
    for _ in range(20):
        engine.step()
    assert not engine.scheduler.knows("new") and engine.scheduler.knows("back")
    time[0] = 5.0
    events = run(engine)
    assert events["back"][-1].cached_tokens == 0 and refused(engine)["late"] == 1


def test_the_last_of_many_questions_may_be_answered_first() -> None:
    """Others go on while a store lets some wait."""
    store, many = SymbolicStore(), 20
    first = engine_with(store=store, pages=1000)
    chats(first, many, 1)
    settle(first)
    engine = engine_with(store=store, pages=1000, max_requests=many)
    asker = engine.context.transfers.lower._asker = ByHand()  # type: ignore[attr-defined]
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    for seed in range(many):
        text = random_tokens(seed, 50)
        engine.add_request(f"chat {seed}", text + expected_answer(text, ANSWER) + [5], params)
    for _ in range(many):
        engine.step()
    assert len(asker.waiting) == many
    asker.waiting.insert(0, asker.waiting.pop())
    asker.run()
    for _ in range(20):
        engine.step()
    waiting = [seed for seed in range(many) if engine.scheduler.knows(f"chat {seed}")]
    assert waiting == list(range(many - 1))
    while asker.waiting:
        asker.run()
    run(engine)
    settle(engine)


@pytest.mark.parametrize("what", ["abort", "reset", "update_weights"])
def test_a_read_that_is_not_wanted_any_more_leaves_nothing(what: str) -> None:
    store = SymbolicStore()
    first = engine_with(store=store)
    chats(first, 4, 1)
    settle(first)
    engine = engine_with(store=store, slowest_copy=1)
    engine.context.transfers.lower._reader.slowest = 9  # type: ignore[attr-defined]
    text = random_tokens(0, 50)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    engine.add_request("back", text + expected_answer(text, ANSWER) + [5], params)
    for _ in range(3):
        engine.step()
        engine.check_integrity()
    give_up(engine, what)
    events = run(engine)
    if what == "update_weights":
        assert events["back"][-1].cached_tokens == 0
    settle(engine)
    host = engine.context.transfers.tier.host  # type: ignore[attr-defined]
    use = host.occupancy()
    assert use.kv_used == len(host._paged.pages) * host.pages_per_state
    assert not list(engine.context.transfers.pins())


def test_a_store_that_was_slow_is_tried_again() -> None:
    store = SymbolicStore()
    first = engine_with(store=store)
    chats(first, 4, 1)
    settle(first)
    engine = engine_with(store=store)
    lower = engine.context.transfers.lower  # type: ignore[attr-defined]
    lower._was_read(1, 1e13)  # as if
    skipped = []
    for _ in range(2000):
        text = random_tokens(0, 50)
        engine.reset()
        (event,) = generate(engine, [text + expected_answer(text, ANSWER) + [5]], 1)
        skipped.append(event.cached_tokens)
        if event.cached_tokens:
            break
    assert not any(skipped[:3]) and skipped[-1] == 53
    assert refused(engine)["slower"] == len(skipped) - 1


class Never:
    """A future that is never done."""

    def done(self) -> bool:
        return False
