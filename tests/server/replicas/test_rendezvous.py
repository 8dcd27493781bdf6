"""Rendezvous hashing with bounded loads, against the definition looked through by brute force."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction

import pytest

from megatron_hybrid.server.replicas.rendezvous import bounded_place, key_of, ranked


def key(number: int) -> bytes:
    return number.to_bytes(8, "little")


@pytest.mark.parametrize("bound", [1.25, 1.5, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_first_one_in_the_keys_order_that_has_room(seed: int, bound: float) -> None:
    generator = random.Random(seed)
    passed_over = 0
    for _ in range(300):
        loads = {
            one: generator.choice((0, 1, 2, 9))
            for one in generator.sample(range(9), generator.randrange(1, 7))
        }
        mean = Fraction(sum(loads.values()) + 1, len(loads))
        room = [one for one in loads if loads[one] < Fraction(bound) * mean]
        drawn = key(generator.randrange(10))
        order = ranked(drawn, loads)
        expected = min(room, key=order.index)
        assert bounded_place(drawn, loads, bound) == expected
        passed_over += expected != order[0]
    assert 20 < passed_over < 200


@pytest.mark.parametrize("bound", [1.25, 1.5, 2.0])
def test_nobody_gets_much_more_than_its_share(bound: float) -> None:
    """All requests begin alike, and end in any order."""
    generator = random.Random(1)
    loads = dict.fromkeys(range(5), 0)
    running: list[int] = []
    for _ in range(2_000):
        if running and generator.random() < 0.48:
            loads[running.pop(generator.randrange(len(running)))] -= 1
            continue
        chosen = bounded_place(key(7), loads, bound)
        loads[chosen] += 1
        running.append(chosen)
        assert loads[chosen] < bound * len(running) / len(loads) + 1
    assert len(running) > 20


def test_a_replica_that_goes_or_comes_changes_nothing_between_the_others() -> None:
    orders = [ranked(key(number), range(4)) for number in range(400)]
    assert min(Counter(order[0] for order in orders).values()) > 70
    for number, order in enumerate(orders):
        assert ranked(key(number), [3, 1, 0]) == [one for one in order if one != 2]


def test_a_key_is_that_of_the_first_blocks() -> None:
    assert key_of([]) == b""
    assert key_of([5, 6, 7]) == key(5)
    assert key_of([5, 6, 7], 2) == key(6)
    assert key_of([5], 2) == key(5)
