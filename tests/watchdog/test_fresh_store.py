"""Ranks that start again find nothing that their predecessors wrote."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.parallel.fresh_store import agree_on_prefix


def start(store: dist.Store, ranks: list[int], size: int, found: dict[int, str]) -> None:
    def run(rank: int) -> None:
        try:
            found[rank] = agree_on_prefix(store, rank, size, timedelta(seconds=20))
        except ConfigurationError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_each_start_has_a_prefix_of_its_own() -> None:
    store, names = dist.HashStore(), set()
    for ranks in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        found: dict[int, str] = {}
        start(store, ranks, 3, found)
        assert len(set(found.values())) == 1
        assert len(found) == 3
        names.update(found.values())
    assert len(names) == 3


@pytest.mark.parametrize("early", [0, 1])
def test_a_rank_that_is_early_waits_for_living_ones(early: int) -> None:
    store = dist.HashStore()
    before: dict[int, str] = {}
    start(store, [0, 1], 2, before)
    found: dict[int, str] = {}
    first = threading.Thread(target=start, args=(store, [early], 2, found))
    first.start()
    first.join(0.5)
    assert first.is_alive(), "it took a dead rank for a living one"
    start(store, [1 - early], 2, found)
    first.join()
    assert found[0] == found[1]
    assert found[0] != before[0]


def test_a_rank_that_does_not_come_is_named() -> None:
    store = dist.HashStore()
    with pytest.raises(ConfigurationError, match=r"Rank\(s\) 1 "):
        agree_on_prefix(store, 0, 2, timedelta(seconds=0.2))


def test_one_rank_waits_for_nobody() -> None:
    assert agree_on_prefix(dist.HashStore(), 0, 1, timedelta(seconds=1))
