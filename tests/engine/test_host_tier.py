"""What the device forgets comes back from host memory, and is right."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from megatron_hybrid.cache.host_tier import Copy
from megatron_hybrid.engine import transfers
from megatron_hybrid.engine.transfers import MOST_FETCHES, HostTransfers
from megatron_hybrid.request import SamplingParams
from tests.engine.symbolic import (
    CheckedEngine,
    expected_answer,
    generate,
    make_engine,
    random_tokens,
    run,
)
from tests.thorough import A_THIRD

KINDS = {
    "hybrid": {},
    "packed": {"packed": True},
    "batch-invariant": {"batch_invariant": True},
    "attention": {"recurrent": False},
    "recurrent": {"attention": False},
}
ANSWER = 4


def engine_with(pages: int = 600, **options) -> CheckedEngine:
    small = {"num_blocks": 40, "cached_slots": 3, "max_requests": 2, "exact_ends": True}
    return make_engine(**(small | options), host_pages=pages)


def counts(engine: CheckedEngine) -> dict[str, int]:
    assert isinstance(engine.context.transfers, HostTransfers)
    return engine.context.transfers.tier.counts


def chats(engine: CheckedEngine, number: int, turns: int) -> list[list[int]]:
    """Conversations, one after the other in every turn: tokens skipped, by turn."""
    texts, skipped = [random_tokens(seed, 50) for seed in range(number)], []
    for _ in range(turns):
        skipped.append([])
        for index, text in enumerate(texts):
            (event,) = generate(engine, [text], ANSWER)
            skipped[-1].append(event.cached_tokens)
            texts[index] = text + expected_answer(text, ANSWER) + [5, 6]
    return skipped


class Begun(NamedTuple):
    way: str  # "write" or "fetch"
    copy: Copy
    step: int

    @property
    def sizes(self) -> tuple[str, int, int]:
        """Blocks, and pages of a state."""
        return self.way, len(self.copy.blocks), len(self.copy.state_pages)


def copies_of(engine: CheckedEngine, *ways: str) -> list[Begun]:
    """Those from now on."""
    copier, begun = engine.context.transfers.copier, []
    for way in ways:
        plain = getattr(copier, way)

        def noted(copy, way=way, plain=plain):
            begun.append(Begun(way, copy, engine.context.cache.kv.step))
            return plain(copy)

        setattr(copier, way, noted)
    return begun


def come_back(engine: CheckedEngine, seeds: range) -> None:
    for seed in seeds:
        text = random_tokens(seed, 50)
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        engine.add_request(str(seed), text + expected_answer(text, ANSWER) + [5], params)


@A_THIRD
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("slowest", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_chats_that_the_device_has_no_room_for_go_on_from_host_memory(
    kind: str, slowest: int, drafts: int, asynchronous: bool
) -> None:
    options = {"slowest_copy": slowest, "drafts": drafts, "asynchronous": asynchronous}
    first, *later = chats(engine_with(**KINDS[kind], **options), 8, 3)
    assert not any(first)
    least = 48 if kind == "batch-invariant" else 50
    for turn in later:
        assert sum(skipped >= least for skipped in turn) >= 6, later
    without = chats(engine_with(0, **KINDS[kind], drafts=drafts), 8, 3)
    assert sum(map(sum, without)) < sum(map(sum, [first, *later])) / 2


def test_only_what_is_missing_moves() -> None:
    """Of a conversation that went on, on the device: its new state and KV."""
    engine = engine_with(num_blocks=60, cached_slots=4)
    copies = copies_of(engine, "write", "fetch")
    text = random_tokens(1, 41)
    generate(engine, [text], ANSWER)  # 44 tokens are fed: 11 blocks
    generate(engine, [random_tokens(9, 9)], 1)
    # the prompt's end and the answer's, at once
    assert [one.sizes for one in copies] == 2 * [("write", 11, 3)]
    text += expected_answer(text, ANSWER) + [7] * 11
    generate(engine, [text], ANSWER)  # 59 tokens: 4 blocks more, the last one in part
    generate(engine, [random_tokens(8, 9)], 1)
    assert ("write", 4, 3) in [one.sizes for one in copies]
    assert not any(one.way == "fetch" for one in copies)
    del copies[:]
    engine.context.cache.store.clear(0)  # the device alone
    (event,) = generate(engine, [text + expected_answer(text, ANSWER) + [1]], 1)
    assert event.cached_tokens == 59
    assert copies[0].sizes == ("fetch", 15, 3)


def test_being_fetched_and_read_is_one_use() -> None:
    """After two a state counts as one that others share, and is kept beside those behind it."""
    engine = engine_with()
    chats(engine, 8, 3)
    host, device = engine.context.transfers.tier.host, engine.context.cache.store
    hits = [one.hits for store in (host, device) for one in store.states.cached()]
    assert max(hits) == 1, hits


def test_others_are_admitted_past_one_that_waits() -> None:
    engine = engine_with(slowest_copy=1)
    chats(engine, 6, 1)
    texts = [random_tokens(seed, 50) for seed in range(6)]
    engine.context.transfers.copier.slowest = 40
    back = texts[0] + expected_answer(texts[0], ANSWER) + [5]
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    engine.add_request("back", back, params)
    engine.add_request("new", [3, 4, 5], params)
    events = run(engine)
    assert list(events) == ["new", "back"]
    assert events["back"][-1].cached_tokens == 53


def test_a_burst_behind_one_prefix_fetches_it_once() -> None:
    engine = engine_with(max_requests=4, num_blocks=60, slowest_copy=3)
    chats(engine, 6, 1)
    fetched = counts(engine)["tier_fetches"]
    text = random_tokens(0, 50) + expected_answer(random_tokens(0, 50), ANSWER)
    events = generate(engine, [text + [n] for n in range(4)], 2)
    assert [event.cached_tokens for event in events] == [53] * 4
    assert counts(engine)["tier_fetches"] == fetched + 1


def give_up(engine: CheckedEngine, what: str) -> None:
    """What comes for the request "back" is of no use any more."""
    if what == "abort":
        engine.abort("back")
    elif what == "reset":
        engine.reset()
    else:
        engine.update_weights("a folder")


@pytest.mark.parametrize("what", ["abort", "reset", "update_weights"])
def test_a_fetch_that_is_not_wanted_any_more_leaves_nothing(what: str) -> None:
    engine = engine_with(slowest_copy=1)
    chats(engine, 6, 1)
    engine.context.transfers.copier.slowest = 4
    text = random_tokens(0, 50) + expected_answer(random_tokens(0, 50), ANSWER) + [5]
    engine.add_request("back", text, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    engine.step()
    assert engine.context.transfers.is_fetching
    give_up(engine, what)
    events = run(engine)
    if what != "abort":
        assert events["back"][-1].cached_tokens == 0
    for step in range(5):
        engine.context.transfers.begin_step(100 + step)
    engine.check_integrity()
    use = engine.context.cache.occupancy()
    assert use.kv_used == use.state_used == 0
    assert not list(engine.context.transfers.pins())


def test_what_is_computed_sooner_is_not_fetched() -> None:
    engine = engine_with(bytes_per_token=0.01)
    assert not any(map(sum, chats(engine, 8, 2)))
    assert engine.context.transfers.tier.refused["slower"]  # type: ignore[attr-defined]
    assert not counts(engine)["tier_fetches"]


def test_no_request_is_fetched_for_without_end() -> None:
    """Where there is never room for it in time, it computes."""
    engine = engine_with(slowest_copy=1)
    chats(engine, 6, 1)
    transfers = engine.context.transfers
    text = random_tokens(0, 50) + expected_answer(random_tokens(0, 50), ANSWER) + [5]
    plain, tried = engine.context.admit, 0

    def never_at_first(*args):
        nonlocal tried
        tried += 1
        if tried <= 2 * MOST_FETCHES:
            engine.context.cache.store.clear(0)  # whatever came is lost
            return None
        return plain(*args)

    engine.context.admit = never_at_first  # type: ignore[method-assign]
    (event,) = generate(engine, [text], 2)
    assert event.cached_tokens == 0 and tried > 2 * MOST_FETCHES
    assert not list(transfers.pins())


def test_states_alone_are_fetched_while_others_run() -> None:
    """A model without attention has no blocks that others might need."""
    engine = engine_with(attention=False, max_requests=3)
    chats(engine, 8, 1)
    texts = [random_tokens(seed, 50) for seed in range(3)]
    texts = [text + expected_answer(text, ANSWER) + [5] for text in texts]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    engine.add_request("runs", [3, 4, 5], params)
    engine.step()
    for number, text in enumerate(texts):
        engine.add_request(str(number), text, params)
    events = run(engine)
    assert [events[str(number)][-1].cached_tokens for number in range(3)] == [53, 53, 53]
    assert not engine.stats()["tier_refused"]["device_full"]


def groups_of_chats(engine: CheckedEngine, number: int, at_once: int, turns: int) -> list[int]:
    """Conversations, some at once: tokens of each later turn that were computed."""
    texts, computed = [random_tokens(seed, 50) for seed in range(number)], []
    for turn in range(turns):
        for first in range(0, number, at_once):
            group = range(first, first + at_once)
            events = generate(engine, [texts[index] for index in group], ANSWER)
            for index, event in zip(group, events, strict=True):
                if turn:
                    computed.append(len(texts[index]) - event.cached_tokens)
                texts[index] += expected_answer(texts[index], ANSWER) + [5, 6]
    return computed


@pytest.mark.parametrize(("slots", "slowest"), [(6, 2), (8, 4)])
def test_what_waits_to_be_written_does_not_go_for_what_comes(
    slots: int, slowest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a group end at once, and the next one is fetched while they are written."""
    monkeypatch.setattr(transfers, "MOST_WRITES", 4)
    sizes = {"num_blocks": 240, "cached_slots": slots, "max_requests": 4}
    engine = engine_with(3000, **sizes, slowest_copy=slowest)
    computed = groups_of_chats(engine, 12, 4, 3)
    assert max(computed) <= 3, computed
    assert engine.context.transfers.tier.refused["device_full"] == 0


def test_fetches_take_a_part_of_the_device_at_a_time() -> None:
    engine = engine_with(2000, num_blocks=120, cached_slots=40, max_requests=8, slowest_copy=40)
    groups_of_chats(engine, 16, 8, 1)
    engine.context.cache.store.clear(0)  # the device alone
    fetches, most = engine.context.transfers._fetches, 0
    come_back(engine, range(16))
    while engine.has_work():
        engine.step()
        most = max(most, sum(len(one.fetch.copy.blocks) for one in fetches.values()))
    assert 30 < most <= 30 + 14


@pytest.mark.parametrize("kind", ["hybrid", "packed", "attention", "recurrent"])
def test_kv_of_a_prompt_that_others_wait_for_is_written_while_the_rest_is_computed(
    kind: str,
) -> None:
    engine = engine_with(num_blocks=80, max_tokens=16, **KINDS[kind])
    engine.context.transfers.handover_address = "here"
    begun = copies_of(engine, "write")
    text = random_tokens(1, 61)
    generate(engine, [text], 1)
    generate(engine, [random_tokens(9, 9)], 1)
    written = [(len(one.copy.blocks), bool(one.copy.slot)) for one in begun]
    ahead = [blocks for blocks, has_state in written if not has_state]
    if kind != "recurrent":
        assert len(ahead) >= 2 and sum(ahead) >= 8
        assert sum(blocks for blocks, _ in written) <= 16 + 3 + 4  # few of them twice
    engine.context.cache.store.clear(0)
    (event,) = generate(engine, [text + [7]], ANSWER)
    assert event.cached_tokens == 61
    engine.check_integrity()


def test_a_prompts_own_end_is_not_written_while_something_is_fetched() -> None:
    """Its slot may be wanted for that, and hardly anybody wants it."""
    engine = engine_with(num_blocks=80, cached_slots=8, max_requests=2, slowest_copy=6)
    transfers = engine.context.transfers
    first = random_tokens(1, 61)
    generate(engine, [first], 1)
    while engine.use_idle_time():
        pass
    engine.context.cache.store.clear(0)
    real, asked = transfers.tier.begin_write, []

    def noted(*, covered):
        asked.append((covered, bool(transfers._fetches)))
        return real(covered=covered)

    transfers.tier.begin_write = noted
    generate(engine, [first + [7], random_tokens(2, 41)], ANSWER)
    assert {(True, False), (False, True)} == set(asked)
    while engine.use_idle_time():
        pass
    engine.context.cache.store.clear(0)
    (event,) = generate(engine, [random_tokens(2, 41)], 1)
    assert event.cached_tokens == 41


def test_what_was_not_kept_is_kept_once_it_is_used_again() -> None:
    """The end of a prompt, for which there was no room beside the answer's that covers it."""
    engine = engine_with(pages=44, num_blocks=80, cached_slots=8)
    host = engine.context.transfers.tier.host
    for seed in range(4):  # host memory is full
        generate(engine, [random_tokens(seed, 50)], ANSWER)
    text = random_tokens(9, 41)

    def is_kept() -> bool:
        while engine.use_idle_time():
            pass
        return any(one.position == 41 for one in host.states.cached())

    generate(engine, [text], ANSWER)
    assert not is_kept()
    generate(engine, [text + [7]], 1)
    generate(engine, [text + [8]], 1)
    assert is_kept()


def test_nobody_waits_for_writes_who_does_not_need_their_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer's last tokens come when they are there, whatever is on its way to the host."""
    engine = engine_with(num_blocks=80, slowest_copy=30, asynchronous=True)
    sleeps = []
    monkeypatch.setattr(transfers.time, "sleep", sleeps.append)
    for seed in range(4):
        generate(engine, [random_tokens(seed, 41)], 3)
        assert engine.context.transfers._writes or not seed
    assert not sleeps
    while engine.use_idle_time():
        pass
    engine.context.cache.store.clear(0)
    del sleeps[:]
    text = random_tokens(0, 41)
    (event,) = generate(engine, [text + expected_answer(text, 3) + [5]], 1)
    assert event.cached_tokens > 40 and sleeps


def with_chats_in_host_memory_alone(**sizes) -> CheckedEngine:
    """16 of them; copies are slow from now on."""
    engine = engine_with(2000, **sizes, max_requests=16)
    groups_of_chats(engine, 16, 8, 1)
    while engine.use_idle_time():
        pass
    engine.context.cache.store.clear(0)
    engine.context.transfers.copier.slowest = 40
    return engine


def test_copies_wait_for_no_step_that_has_nothing_to_do_with_them() -> None:
    engine = engine_with(2000, num_blocks=120, cached_slots=12, asynchronous=True)
    written = copies_of(engine, "write")
    chats(engine, 12, 1)
    assert all(one.copy.touched < one.step for one in written if one.copy.slot), written
    engine.context.cache.store.clear(0)
    fetched = copies_of(engine, "fetch")
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    engine.add_request("runs", [3, 4, 5], params)
    for _ in range(5):
        engine.step()
    come_back(engine, range(1))
    engine.step()
    (one,) = fetched
    assert one.copy.touched < one.step - 1  # the step before is in flight
    run(engine)


@pytest.mark.parametrize("others_run", [False, True])
def test_few_fetches_are_begun_at_once_while_nobody_runs(others_run: bool) -> None:
    engine = with_chats_in_host_memory_alone(num_blocks=800, cached_slots=80)
    if others_run:
        params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        engine.add_request("runs", [3, 4, 5], params)
        engine.step()
    fetched = copies_of(engine, "fetch")
    come_back(engine, range(12))
    engine.step()
    assert len(fetched) == (12 if others_run else transfers.FETCHES_AT_ONCE)
    assert all(
        events[-1].cached_tokens == 53 for name, events in run(engine).items() if name != "runs"
    )


def test_who_waits_for_room_is_not_looked_up_in_every_step() -> None:
    engine = with_chats_in_host_memory_alone(num_blocks=200, cached_slots=40)
    come_back(engine, range(12))
    engine.step()
    plain, looked_up = engine.context.match, []

    def noted(request):
        looked_up.append(request)
        return plain(request)

    engine.context.match = noted  # type: ignore[method-assign]
    engine.step()
    assert len(engine.context.transfers._fetches) < 12 == engine.num_waiting
    for _ in range(3):
        del looked_up[:]
        engine.step()
        assert len(looked_up) == 1
    assert all(events[-1].cached_tokens == 53 for events in run(engine).values())
