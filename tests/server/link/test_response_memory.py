"""Stored responses: whose they are, how long they are kept, and what they go on from."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hybrid.server.link.response_memory import (
    ENTRY_BYTES,
    ResponseMemory,
    ResponseMemoryClient,
    ResponseMemoryServer,
    Stored,
    StoreUnavailable,
)

ME, YOU = b"me", b"you"


def stored(text: str = "", previous: str = "", owner: bytes = ME) -> Stored:
    return Stored(owner, previous, b"[]", text.encode())


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def room_for(count: int) -> int:
    return count * (ENTRY_BYTES + len(b"[]") + len(b"a"))


def names(memory: ResponseMemory) -> list[str]:
    return [name for name in "abcdef" if memory.find(name, ME) is not None]


def test_the_least_recently_used_go_first() -> None:
    memory = ResponseMemory(room_for(3), 10.0)
    for name in "abc":
        memory.keep(name, stored("a"))
    memory.find("a", ME)
    memory.keep("d", stored("a"))
    assert names(memory) == ["a", "c", "d"]
    assert memory.bytes == room_for(3)


def test_what_does_not_fit_is_not_held_and_costs_nobody_a_place() -> None:
    memory = ResponseMemory(room_for(2), 10.0)
    memory.keep("a", stored("a"))
    memory.keep("b", stored("x" * 10_000))
    assert names(memory) == ["a"]


def test_what_nobody_asks_for_goes_in_time() -> None:
    clock = Clock()
    memory = ResponseMemory(room_for(9), 10.0, clock)
    memory.keep("a", stored("a"))
    memory.keep("b", stored("a"))
    clock.now = 8.0
    memory.find("a", ME)
    clock.now = 17.0
    assert names(memory) == ["a"]
    clock.now = 28.0
    memory.keep("c", stored("a"))
    assert (len(memory), memory.bytes) == (1, room_for(1))


def test_a_chain_is_what_was_said_before_the_oldest_first() -> None:
    memory = ResponseMemory(room_for(9), 10.0)
    memory.keep("a", stored("a"))
    memory.keep("b", stored("b", "a"))
    memory.keep("c", stored("c", "b"))
    memory.keep("d", stored("d", "a"))  # a fork
    assert [one.body for one in memory.chain("c", ME) or []] == [b"a", b"b", b"c"]
    assert [one.body for one in memory.chain("d", ME) or []] == [b"a", b"d"]
    assert memory.chain("e", ME) is None


def test_a_turn_uses_all_turns_before_it() -> None:
    clock = Clock()
    memory = ResponseMemory(room_for(4), 10.0, clock)
    memory.keep("a", stored("a"))
    for turn, name in enumerate("bcd"):
        clock.now = 8.0 * turn
        memory.keep(name, stored("a", "abc"[turn]))
    clock.now = 25.0
    assert len(memory.chain("d", ME) or []) == 4
    # The newest of a chain goes first: what others may share stays.
    memory.keep("e", stored("a"))
    assert names(memory) == ["a", "b", "c", "e"]


def test_nobody_else_finds_a_response_or_drops_it() -> None:
    memory = ResponseMemory(room_for(9), 10.0)
    memory.keep("a", stored("a"))
    memory.keep("b", stored("a", "a", YOU))
    assert memory.find("a", YOU) is None and memory.chain("a", YOU) is None
    assert memory.chain("b", YOU) is None  # which was never checked when it was stored
    assert not memory.forget("a", YOU)
    assert memory.forget("a", ME) and not memory.forget("a", ME)
    assert names(memory) == []


def test_a_response_that_was_dropped_breaks_the_chain() -> None:
    memory = ResponseMemory(room_for(9), 10.0)
    memory.keep("a", stored("a"))
    memory.keep("b", stored("a", "a"))
    memory.forget("a", ME)
    assert memory.chain("b", ME) is None
    assert memory.find("b", ME) is not None


def test_a_front_end_finds_what_another_one_has_stored(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    endpoint = f"ipc://{tmp_path_factory.mktemp('m')}/responses"
    server = ResponseMemoryServer(endpoint, 10**6, 10.0)
    one, other = ResponseMemoryClient(endpoint), ResponseMemoryClient(endpoint)
    one.keep("a", stored("a"))
    assert other.find(["b", "a"], ME) == [None, stored("a")]
    one.keep("b", stored("b", "a"))
    assert other.find_chain("b", ME) == [stored("a"), stored("b", "a")]
    assert other.find_chain("b", YOU) is None
    assert other.forget("a", ME) and not one.forget("a", ME)
    for each in (one, other, server):
        each.close()


def test_a_memory_that_does_not_answer_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ResponseMemoryClient(f"ipc://{tmp_path}/nobody")
    monkeypatch.setattr(client, "_seconds", 0.01)
    with pytest.raises(StoreUnavailable, match="does not answer"):
        client.find(["a"], ME)
    client.close()
