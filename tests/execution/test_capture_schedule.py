"""Which CUDA graphs are captured at the start, between steps, and when there is nothing to do."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from torch import Tensor

from megatron_hybrid.execution.capture_schedule import (
    AT_START,
    STEPS_BETWEEN,
    CaptureSchedule,
    capture_order,
)
from megatron_hybrid.execution.cuda_graphs import GraphSize, graph_sizes
from megatron_hybrid.execution.plan import StepDemand
from megatron_hybrid.execution.prompt_room import PromptRoom
from megatron_hybrid.execution.runner import ModelRunner
from megatron_hybrid.parallel import ParallelContext
from tests.execution.steps import Steps, chunk
from tests.models.conftest import TinyModel, random_tokens
from tests.thorough import usually

SIZES = [
    graph_sizes(16, 16, 256, 8192),
    graph_sizes(-1, 16, 256, 8192, 4),
    graph_sizes(6, 0, 100, 8192),
    graph_sizes(1, 1, 1, 16),
    (),
]


def decodes(count: int) -> StepDemand:
    return StepDemand(tokens=count, rows=count, decodes=count)


def prompt(tokens: int) -> StepDemand:
    return StepDemand(tokens=tokens, rows=1, prefill_tokens=tokens, prompts=1)


@pytest.mark.parametrize("sizes", SIZES)
def test_every_graph_has_its_turn_and_the_largest_the_first(sizes: tuple[GraphSize, ...]) -> None:
    order = capture_order(sizes)
    assert sorted(order) == sorted(sizes)
    assert not order or order[0].tokens == max(size.tokens for size in sizes)


def test_a_start_has_graphs_for_all_steps_that_fit_any_and_for_the_smallest() -> None:
    first = capture_order(graph_sizes(16, 16, 256, 8192))[:AT_START]
    assert {size.tokens for size in first if not size.prompts} == {1, 256}
    assert {size.tokens for size in first if size.prompts} == {16, 544}


def test_graphs_of_long_prompts_come_when_all_others_are_there() -> None:
    others = graph_sizes(16, 16, 256, 8192)
    order = capture_order(graph_sizes(16, 16, 256, 8192, 0, PromptRoom(3000, 10**7)))
    assert order[: len(others)] == capture_order(others)
    long = order[len(others) :]
    assert len(long) > 3 and long[0].tokens == 256 + 2560 and long[1].tokens == 640


@pytest.mark.parametrize("sizes", SIZES[:3])
def test_gaps_between_graphs_are_halved_one_after_the_other(sizes: tuple[GraphSize, ...]) -> None:
    order = capture_order(sizes)
    plain = sorted(size for size in sizes if not size.prompts and not size.drafts)
    places = [plain.index(size) for size in order if size in plain]
    for count in range(2, len(places) + 1):
        there = sorted(places[:count])
        widest = max(b - a for a, b in zip(there, there[1:], strict=False))
        halvings = (count - 1).bit_length() - 1  # those of all gaps that are done
        assert widest <= -(-(len(plain) - 1) // 2**halvings)


def test_with_work_at_hand_only_what_steps_want_is_captured_and_seldom() -> None:
    schedule = CaptureSchedule(graph_sizes(16, 16, 256, 8192))
    for _ in range(AT_START):
        schedule.next()
    for _ in range(2 * STEPS_BETWEEN):
        schedule.note(decodes(1))  # which is there
        assert schedule.due() is None
    schedule.note(decodes(5))
    for _ in range(2):
        schedule.note(prompt(300))
    found = [schedule.due()]
    for _ in range(2 * STEPS_BETWEEN):
        schedule.note(decodes(1))
        found.append(schedule.due())
    wanted = [(i, size) for i, size in enumerate(found) if size is not None]
    assert wanted == [(0, GraphSize(0, 384, 16, 32)), (STEPS_BETWEEN, GraphSize(8))]


def test_without_work_what_was_wanted_comes_first_and_then_the_rest() -> None:
    sizes = graph_sizes(16, 16, 256, 8192)
    schedule = CaptureSchedule(sizes)
    schedule.note(decodes(30))
    rest = capture_order(sizes)
    rest.remove(GraphSize(32))
    found = []
    while schedule:
        found.append(schedule.next())
    assert found == [GraphSize(32), *rest]
    assert schedule.next() is None and schedule.due() is None


def test_steps_that_no_graph_fits_want_none() -> None:
    schedule = CaptureSchedule(graph_sizes(16, 16, 256, 8192))
    for _ in range(2 * STEPS_BETWEEN):
        schedule.note(prompt(5000))
    assert schedule.due() is None


# ------------------------------------------------------------------ the runner


class Graphs:
    """Notes what is captured. Steps do without."""

    def __init__(self, fails_from: int = 1000) -> None:
        self.captured: list[GraphSize] = []
        self._fails_from = fails_from

    def capture(self, size: GraphSize, compute: Callable[[], Tensor]) -> None:
        if len(self.captured) == self._fails_from:
            raise RuntimeError("out of memory")
        self.captured.append(size)

    def choose(self, demand: StepDemand) -> None:
        return None

    def replay(self, size: GraphSize) -> Tensor:
        raise AssertionError(size)


SMALL = graph_sizes(4, 2, 8, 64)


class Rank:
    """A runner with such graphs, and one row that decodes."""

    def __init__(self, tiny: TinyModel, parallel: ParallelContext, graphs: Graphs) -> None:
        self.steps = Steps(tiny.ours, parallel)
        self.graphs = graphs
        self.runner: ModelRunner = self.steps.runner
        self.runner._graphs = graphs  # type: ignore[assignment]
        self.runner.capture_graphs(SMALL, AT_START, progress=False)
        self.steps.row(0, [3, 9, 4, 0])
        self.steps.step(prefills=[chunk(0, 0, 5, prompt=random_tokens(5))])

    def decode(self, count: int) -> None:
        for _ in range(count):
            self.steps.step(decodes=[0])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, parallel: ParallelContext) -> TinyModel:
    return TinyModel("llama", tmp_path_factory.mktemp("llama"), parallel, num_hidden_layers=1)


def test_a_runner_captures_between_steps_and_when_it_may(
    llama: TinyModel, parallel: ParallelContext
) -> None:
    rank = Rank(llama, parallel, Graphs())
    captured, order = rank.graphs.captured, capture_order(SMALL)
    assert captured == order[:AT_START]
    rank.steps.row(1, [5, 6, 7, 8])
    rank.steps.step(decodes=[0], prefills=[chunk(1, 0, 3, prompt=random_tokens(3))])
    rank.decode(STEPS_BETWEEN - 3)  # there were two before
    assert len(captured) == AT_START
    rank.decode(1)
    assert captured[AT_START:] == [GraphSize(8, 16, 2, 4)]
    while rank.runner.capture_next():
        pass
    assert sorted(captured) == sorted(SMALL)
    rank.decode(3)
    assert len(captured) == len(SMALL)


@pytest.mark.parametrize("computes", usually([0], [0, 1]))
def test_replicas_in_lockstep_capture_the_same_between_the_same_steps(
    llama: TinyModel, parallel: ParallelContext, computes: int
) -> None:
    """One computes, another one only joins."""
    ranks = [Rank(llama, parallel, Graphs()) for _ in range(2)]
    agreed = decodes(3)
    counts = []
    for _ in range(2 * STEPS_BETWEEN):
        for number, rank in enumerate(ranks):
            if number == computes:
                rank.runner._was_launched(agreed)
            else:
                rank.runner.dummy_forward(agreed)
        counts.append([len(rank.graphs.captured) for rank in ranks])
    assert all(one == other for one, other in counts)
    assert ranks[0].graphs.captured == ranks[1].graphs.captured
    assert ranks[0].graphs.captured[AT_START:] == [GraphSize(4)]


def test_a_graph_that_cannot_be_captured_is_done_without(
    llama: TinyModel, parallel: ParallelContext, caplog: pytest.LogCaptureFixture
) -> None:
    rank = Rank(llama, parallel, Graphs(fails_from=AT_START))
    with caplog.at_level(logging.ERROR):
        assert rank.runner.capture_next()
    assert "No CUDA graph could be captured" in caplog.text
    assert not rank.runner.capture_next()
    rank.decode(3)
    # where others wait in a collective nobody may go on alone
    rank = Rank(llama, parallel, Graphs(fails_from=AT_START))
    rank.runner._is_alone = False
    with pytest.raises(RuntimeError, match="out of memory"):
        rank.runner.capture_next()
