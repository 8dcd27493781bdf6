"""TailIndex: against a list that is searched from end to end."""

from __future__ import annotations

import random

from megatron_hybrid.cache.tail_index import Tail, TailIndex


def test_any_order_of_calls_agrees_with_a_plain_list():
    rng = random.Random(0)
    index, truth = TailIndex(), dict[bytes, Tail]()
    for turn in range(4000):
        action = rng.random()
        if action < 0.5:
            key = turn.to_bytes(4, "little")
            tail = Tail(bytes([rng.randrange(4)]), rng.randrange(1, 5), rng.randrange(9))
            index.add(key, tail)
            truth[key] = tail
        elif action < 0.9 and truth:
            key = rng.choice(list(truth))
            assert index.remove(key) == truth.pop(key)
        elif action < 0.95 and truth:
            key = rng.choice(list(truth))
            index[key] = truth[key] = truth[key]._replace(block=rng.randrange(9))
        elif action < 0.951:
            index.clear()
            truth.clear()
        assert index.remove(b"unknown") is None and index.get(b"unknown") is None
        assert len(index) == len(truth) and dict(index.items()) == truth
        for parent in map(lambda p: bytes([p]), range(5)):
            fills = {tail.fill for tail in truth.values() if tail.parent == parent}
            ends = index.fills.ends(parent, [], 9, lambda fill: bytes([fill]), length=9)
            assert list(ends) == [(fill, bytes([fill])) for fill in sorted(fills, reverse=True)]
    assert all(key in index and index.get(key) == tail for key, tail in truth.items())
    for key in list(truth):
        index.remove(key)
    assert not index.fills, "parents without tails are kept"
