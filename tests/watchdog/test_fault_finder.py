"""Which rank is named, and which is not, by what the ranks have said."""

from __future__ import annotations

import ast
import sys
import threading
from pathlib import Path

import pytest

from megatron_hybrid.parallel.ranks import RankGroup
from megatron_hybrid.rank_layout import ParallelSizes, RankLayout
from megatron_hybrid.watchdog.fault_finder import LOADING_SILENCE, FaultFinder
from megatron_hybrid.watchdog.rank_beat import (
    COLLECTIVES,
    PACKAGE,
    WORDS,
    RankBeat,
    Stage,
    describe,
    own_beat,
)

LIMIT = 10.0


def beat(rank: int, **changes: object) -> RankBeat:
    layout = RankLayout(ParallelSizes(tensor=2, pipeline=2), rank, 4)
    found = own_beat(layout)
    found.stage, found.turn = Stage.SERVING, 1
    for name, value in changes.items():
        setattr(found, name, value)
    return found


class Group:
    """Four ranks that serve, looked at once a second."""

    def __init__(self) -> None:
        self.finder = FaultFinder(4, LIMIT)
        self.beats = [beat(rank) for rank in range(4)]
        self.now = 1000.0

    def run(self, seconds: int, *, silent: tuple[int, ...] = (), turns: bool = True) -> None:
        for _ in range(seconds):
            self.now += 1.0
            for rank, one in enumerate(self.beats):
                if rank not in silent:
                    one.count += 1
                    one.turn += turns
            self.look()

    def look(self) -> None:
        copies = [RankBeat(**{name: getattr(b, name) for name in b.__struct_fields__})
                  for b in self.beats]  # fmt: skip
        self.finder.look(copies, self.now)


@pytest.fixture
def group() -> Group:
    return Group()


def test_ranks_that_serve_are_left_alone(group: Group) -> None:
    group.run(100)
    assert group.finder.fault() is None


def test_a_silent_rank_is_named_with_all_that_finds_it(group: Group) -> None:
    group.run(5)
    group.beats[3].doing = "planning a step"
    group.run(1)
    group.run(10, silent=(3,), turns=False)
    assert group.finder.fault() is None
    group.run(1, silent=(3,), turns=False)
    found = group.finder.fault()
    assert found is not None
    message, ranks = found
    assert ranks == [3]
    for words in ("rank 3", "host", "process", "replica 0", "pipeline stage 1", "planning a step"):
        assert words in message


def test_the_rank_that_the_others_wait_for_is_named(group: Group) -> None:
    group.run(5)
    for one in group.beats:
        one.waits = one.rank != 2
        one.doing = "waiting for other ranks" if one.waits else "planning a step"
    group.run(12, turns=False)
    found = group.finder.fault()
    assert found is not None
    message, ranks = found
    assert ranks == [2]
    assert "planning a step" in message
    assert "rank 1" not in message


def test_the_rank_that_is_a_turn_behind_is_named(group: Group) -> None:
    group.run(5)
    for one in group.beats:
        one.waits = True
    group.beats[1].turn -= 1
    group.run(12, turns=False)
    found = group.finder.fault()
    assert found is not None
    assert found[1] == [1]


def test_ranks_that_all_wait_are_all_named(group: Group) -> None:
    group.run(5)
    for one in group.beats:
        one.waits = True
    group.run(12, turns=False)
    found = group.finder.fault()
    assert found is not None
    assert found[1] == [0, 1, 2, 3]
    assert "one of these" in found[0]


def test_a_rank_that_loads_holds_up_the_others_by_right(group: Group) -> None:
    group.run(5)
    group.beats[2].stage = Stage.LOADING  # new weights
    group.run(int(LOADING_SILENCE), turns=False)
    assert group.finder.fault() is None
    group.beats[2].stage = Stage.SERVING
    group.run(5, turns=False)
    assert group.finder.fault() is None  # the time counts from now


def test_a_rank_that_says_nothing_while_it_loads_gets_longer(group: Group) -> None:
    group.run(5)
    for one in group.beats:
        one.stage = Stage.LOADING
    group.run(int(LOADING_SILENCE), silent=(1,), turns=False)
    assert group.finder.fault() is None
    group.run(2, silent=(1,), turns=False)
    found = group.finder.fault()
    assert found is not None
    assert found[1] == [1]


def test_a_rank_that_ended_in_order_is_not_missed(group: Group) -> None:
    group.run(5)
    group.beats[1].stage = Stage.LEFT
    group.run(1)
    group.run(20, silent=(1,))
    assert group.finder.fault() is None
    assert group.finder.death(1) is None
    assert "rank 2" in str(group.finder.death(2))


def test_a_machine_that_stood_still_is_forgiven(group: Group) -> None:
    group.run(5)
    group.now += 1000.0  # nothing ran, nobody said anything
    group.look()
    assert group.finder.fault() is None
    group.run(5, turns=False)
    assert group.finder.fault() is None
    group.run(10, turns=False)
    assert group.finder.fault() is not None


def test_a_store_that_does_not_answer_makes_nobody_look_dead(group: Group) -> None:
    group.run(5)
    assert group.finder.fault() is None  # however late it is: there was no look
    group.now += 4.0
    group.look()
    assert group.finder.fault() is None


def test_a_thread_in_a_collective_is_said_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bool, bool]] = []

    def all_gather(*arguments: object, **options: object) -> None:
        seen.append(describe(sys._getframe()))

    monkeypatch.setattr("torch.distributed.all_gather_object", all_gather)
    group = RankGroup.__new__(RankGroup)
    group.size, group.group = 2, None  # type: ignore[assignment]
    group.gather_objects(1)
    ((doing, waits, loads),) = seen
    assert "waiting for other ranks in gather_objects" in doing
    assert "parallel/ranks.py" in doing
    assert waits
    assert not loads


def test_a_thread_outside_of_the_package_waits_for_nobody() -> None:
    doing, waits, loads = describe(sys._current_frames().get(threading.get_ident()))
    assert not waits
    assert not loads
    assert describe(None)[0] == "running (outside of the package)"


def test_functions_that_have_words_exist() -> None:
    from pathlib import Path

    from megatron_hybrid.watchdog.rank_beat import PACKAGE, WORDS

    for file, function in WORDS:
        assert f"def {function}(" in Path(PACKAGE, file).read_text(), (file, function)


def test_where_a_connection_broke_a_silent_rank_is_named_though_it_was_last_heard_loading(
    group: Group,
) -> None:
    group.beats[1].stage = Stage.LOADING
    group.run(4, silent=(1,))
    assert group.finder.silence(2.0) is None
    found = group.finder.silence(2.0, even_loading=True)
    assert found is not None and found[1] == [1]


def test_what_a_stack_is_put_in_words_by_is_there() -> None:
    """Names in text, since the watchdog looks at a stack and imports none of these."""
    for file, name in WORDS:
        tree = ast.parse(Path(PACKAGE, file).read_text())
        assert name in {
            node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
        }, (file, name)
    assert Path(COLLECTIVES).is_file()
