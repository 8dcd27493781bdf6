"""What is on offer, for how long, and who may read it."""

from __future__ import annotations

from typing import Any

from megatron_hybrid.cache.stored_prefixes import Ending
from megatron_hybrid.disaggregation.desk import KEPT_SECONDS, Answer, Desk, Offer, Wanted
from megatron_hybrid.disaggregation.messages import LEASE_SECONDS, Identity

ENDING = Ending(0, "", True, True, "prompt_end", 0, 0)


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def desk_with(*ends: bytes, pages: int = 3, most: int = 100) -> tuple[Desk, Time]:
    time = Time()
    desk = Desk(most, time)
    for end in ends:
        desk.offer(end, offer(pages))
    return desk, time


def offer(pages: int = 3) -> Offer:
    return Offer(40, list(range(1, pages)), [90], ENDING)


def wanted(*ends: bytes) -> Wanted:
    return Wanted([], [(40 - i, end) for i, end in enumerate(ends)])


def test_the_furthest_place_is_leased_and_goes_when_it_was_read() -> None:
    desk, _ = desk_with(b"a", b"b")
    found = desk.lease([b"none", b"b", b"a"])
    assert found is not None and not desk.take_back()
    desk.give_back(found[0])
    assert desk.take_back() == [(b"b", True)]
    assert desk.lease([b"b"]) is None and desk.lease([b"a"]) is not None
    desk.give_back(found[0])  # twice: nothing
    desk.give_back(12345)


def test_several_may_read_at_once() -> None:
    desk, _ = desk_with(b"a")
    leases = [desk.lease([b"a"]) for _ in range(2)]
    assert all(leases)
    desk.give_back(leases[0][0])  # type: ignore[index]
    assert not desk.take_back()
    desk.give_back(leases[1][0])  # type: ignore[index]
    assert desk.take_back() == [(b"a", True)]


def test_a_reader_that_died_keeps_nothing_for_ever() -> None:
    desk, time = desk_with(b"a")
    assert desk.lease([b"a"])
    time.now += max(KEPT_SECONDS, LEASE_SECONDS) - 1
    assert not desk.take_back()
    time.now += 2
    assert desk.take_back() == [(b"a", False)]
    desk.give_back(1)


def test_the_oldest_go_where_there_is_too_much_but_not_from_under_a_reader() -> None:
    desk, _ = desk_with(b"a", b"b", b"c", b"d", pages=10, most=25)
    assert desk.lease([b"a"])
    assert [end for end, _ in desk.take_back()] == [b"b", b"c"]
    assert not desk.take_back()


def test_what_is_not_there_is_looked_for_once() -> None:
    desk, _ = desk_with()
    number = desk.want(wanted(b"a"))
    assert desk.take_wanted() == [wanted(b"a")._replace(number=number)] and not desk.take_wanted()
    other = desk.want(wanted(b"b"))
    [asked] = desk.take_wanted()
    desk.answer(asked, Answer())
    assert desk.answer_to(number) is None and desk.answer_to(other) == Answer()
    desk.was_answered(other)
    desk.answer(asked, Answer())  # too late: nothing is kept for nobody
    desk.was_answered(number)
    assert desk.lease([b"a"]) is None
    desk.offer(b"a", offer())
    assert desk.lease([b"a"])


def test_what_is_computed_is_looked_for_until_there_is_more() -> None:
    desk, _ = desk_with()
    following = [desk.want(Wanted([b"1"], [], name)) for name in "ab"]
    for _ in range(2):
        wanted = desk.take_wanted()
        assert [one.request for one in wanted] == ["a", "b"]
        for one in wanted:
            desk.answer(one, Answer(comes=True))
    changes = desk.num_changes
    first, _ = desk.take_wanted()
    desk.answer(first, Answer(b"part", comes=True))
    assert desk.num_changes == changes + 1
    desk.was_answered(following[1])
    assert not desk.take_wanted()


def test_only_the_same_model_and_weights_are_of_use() -> None:
    known: dict[str, Any] = {"model": "m", "weights": "w", "sizes": (1, 1), "epoch": 0}
    own = Identity(**known)
    assert not own.why_not(Identity(**known))
    assert "another model" in own.why_not(Identity(**known | {"model": "n"}))
    assert "other weights" in own.why_not(Identity(**known | {"weights": "v"}))
    assert "updated 2 times, and 0" in own.why_not(Identity(**known | {"epoch": 2}))
    # Digests of parts can't be compared: whoever updates weights counts.
    assert not own.why_not(Identity(**known | {"weights": "v", "sizes": (2, 1)}))
