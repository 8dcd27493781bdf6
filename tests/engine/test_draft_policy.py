"""Drafts never cost: with what steps take and drafts that hold by chance, on a simulated device."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_hybrid.engine.draft_policy import FIRST_CREDIT, DraftPolicy
from megatron_hybrid.engine.step_costs import (
    AGREED_STEPS,
    AssumedCosts,
    MeasuredCosts,
    StepTimer,
    TimedStep,
)
from megatron_hybrid.execution.cuda_graphs import GraphSize, graph_sizes
from megatron_hybrid.execution.plan import StepDemand
from tests.engine.simulated_device import CostModel, Device
from tests.thorough import A_THIRD, usually

WIDTHS = (1, 2, 4)
# Decodes and tokens of a step -> what it takes.
COSTS: dict[str, CostModel] = {
    "free": lambda decodes, tokens: 1.0,
    "proportional": lambda decodes, tokens: tokens / decodes,
    "memory, then products": lambda decodes, tokens: max(1 + tokens / 600, tokens / 200),
    "a head": lambda decodes, tokens: (
        1 + 0.1 * (tokens > decodes) + 0.05 * (tokens - decodes) / decodes
    ),
}
# Every cost with some batches and shares; TESTS=all: with all.
CASES = usually(
    [
        ("free", 8, 0.0, True),
        ("free", 32, 0.5, True),
        ("free", 8, 1.0, False),
        ("proportional", 8, 0.0, True),
        ("proportional", 128, 0.75, True),
        ("proportional", 32, 1.0, False),
        ("memory, then products", 1, 0.0, True),
        ("memory, then products", 128, 0.0, True),
        ("memory, then products", 256, 0.25, True),
        ("memory, then products", 128, 0.5, True),
        ("memory, then products", 32, 0.75, False),
        ("memory, then products", 128, 1.0, False),
        ("a head", 8, 0.0, True),
        ("a head", 32, 0.25, True),
        ("a head", 1, 1.0, True),
    ],
    [
        (cost, batch, share, by_head)
        for cost in COSTS
        for batch in (1, 8, 32, 128, 256)
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
        for by_head in (True, False)
    ],
)


def rate(batch: int, cost: CostModel, share: float, by_head: bool, width: int) -> float:
    """Tokens a second with so many drafts in every step."""
    device = Device(batch, cost, share, by_head, fixed=width)
    device.run(20)
    return device.run(max(100, 2000 // batch))


@A_THIRD
@pytest.mark.parametrize(("name", "batch", "share", "by_head"), CASES)
def test_drafts_never_cost_and_bring_what_the_best_width_does(
    name: str, batch: int, share: float, by_head: bool
) -> None:
    cost = COSTS[name]
    plain = rate(batch, cost, share, by_head, 0)
    best = max(rate(batch, cost, share, by_head, width) for width in WIDTHS)
    device = Device(batch, cost, share, by_head)
    device.run(200)
    found = device.run(max(300, 2000 // batch))
    assert found > 0.98 * plain
    if best > 1.2 * plain:  # where luck does not decide
        assert found > 0.95 * best


@pytest.mark.parametrize("batch", [1, 32, 128])
def test_changes_are_followed(batch: int) -> None:
    """Within some hundred steps, and at no price."""
    cost = COSTS["memory, then products"]
    device = Device(batch, cost, 1.0)
    plain = rate(batch, cost, 0.0, True, 0)
    device.run(100)
    assert (right := device.run(100)) > 1.5 * plain
    device.share = 0.0
    assert device.run(400) > 0.98 * plain
    device.share = 1.0
    device.run(300)
    assert device.run(100) > 0.95 * right


def test_steps_that_hang_decide_nothing() -> None:
    cost = COSTS["memory, then products"]
    for share in (0.0, 1.0):
        device = Device(32, cost, share, hiccups=0.03)
        device.run(200)
        found = device.run(600)
        fixed = max(
            Device(32, cost, share, fixed=width, hiccups=0.03).run(800) for width in (0, *WIDTHS)
        )
        assert found > 0.94 * fixed


def test_a_row_whose_drafts_hold_has_them_beside_others() -> None:
    """With a drafter on the host, what there is room for goes to those whose drafts hold."""
    device = Device(8, COSTS["a head"], by_head=False)
    device.share = np.array([1.0, 1, 1, 1, 0, 0, 0, 0])[:, None]  # type: ignore[assignment]
    device.run(100)
    begin = device.rows.position[:8].copy()
    device.run(100)
    written = device.rows.position[:8] - begin
    assert (written[:4] > 2 * written[4:]).all()


def test_new_requests_with_other_texts_have_drafts_soon() -> None:
    """Although those before them had none that held."""
    device = Device(1, COSTS["a head"], 0.0)
    device.run(300)
    device.share = 1.0
    device.begin()
    assert device.run(30) > 2 * rate(1, COSTS["a head"], 0.0, True, 0)


# ------------------------------------------------------------------ what steps take


def costs() -> MeasuredCosts:
    return MeasuredCosts(graph_sizes(-1, 0, 64, 8192, 4), 4, True)


def steps_that_may_lose_half(policy: DraftPolicy, decodes: int) -> int:
    """How many of so many decodes with drafts, in the time of one and a half each, drafts go on
    for, whose figures stay as good as they can be."""
    chance, nothing = np.full(decodes, 0.99), np.zeros(decodes, dtype=np.int64)
    demand = StepDemand(decodes=decodes, drafts=4 * decodes, runs=decodes, widest=4)
    for steps in range(100):
        if policy.choose(chance, nothing, nothing + 4) is None:
            return steps
        policy.note(TimedStep(demand, decodes, 1.5))
    raise AssertionError("they go on for ever")


@pytest.mark.parametrize("first", [8, 256])
def test_what_drafts_have_gained_is_not_lost_by_batches_of_another_size(first: int) -> None:
    def gained() -> DraftPolicy:
        policy = DraftPolicy(AssumedCosts(4), row_by_row=True)
        demand = StepDemand(decodes=first, drafts=4 * first, runs=first, widest=4)
        for _ in range(20):
            policy.note(TimedStep(demand, 2 * first, 1.0))
        return policy

    assert steps_that_may_lose_half(gained(), first) > 4 * FIRST_CREDIT
    assert steps_that_may_lose_half(gained(), 2 * first) > 4 * FIRST_CREDIT
    assert steps_that_may_lose_half(gained(), 48) <= 2 * FIRST_CREDIT + 1


def test_a_wider_step_is_tried_when_the_narrower_one_is_known() -> None:
    found = costs()
    assert found.plain(60) is None
    for _ in range(2):
        found.note(StepDemand(decodes=60), 1.0)
    assert found.plain(60) == found.plain(64) == 1.0
    assert found.options(60) == [(1, 1.0, False)]
    found.note(StepDemand(decodes=60, drafts=60, runs=1, widest=1), 1.2)
    assert found.options(60) == [(1, 1.2, True), (2, 1.2, False)]
    found.note(StepDemand(decodes=60, drafts=120, runs=1, widest=2), 1.1)  # by chance
    assert found.options(60) == [(1, 1.2, True), (2, 1.2, True), (4, 1.2, False)]
    assert found.plain(32) is None  # another graph


def test_what_takes_up_drafts_alone_is_no_step_without() -> None:
    found = costs()
    for _ in range(9):
        found.note(StepDemand(decodes=1, runs=1), 5.0)
    assert found.plain(1) is None and found.options(1) == [(4, 0.0, False)]


def test_steps_without_a_graph_are_known_by_powers_of_two() -> None:
    found = MeasuredCosts((), 4, False)
    for decodes in (5, 8):
        found.note(StepDemand(decodes=decodes), 1.0)
    assert found.plain(6) == 1.0 and found.plain(9) is None
    found.note(StepDemand(decodes=6, drafts=11, runs=1), 1.5)  # two each, or nearly
    assert found.options(7)[0] == (1, 1.0, False)


def test_a_step_takes_from_result_to_result() -> None:
    now = [0.0]
    timer = StepTimer(clock=lambda: now[0])
    timed = StepDemand(decodes=1), 1
    seconds = []
    timer.begin(1)
    for step, moment in ((1, 3.0), (2, 5.0)):
        timer.begin(step + 1)  # while it is in flight
        now[0] = moment
        seconds += [found.seconds for found in timer.end(step, timed)]
    now[0] = 6.0
    assert timer.end(3, None) == []  # of prompts
    now[0] = 10.0  # idle
    timer.begin(4)
    now[0] = 12.0
    seconds += [found.seconds for found in timer.end(4, timed)]
    assert seconds == [3.0, 2.0, 2.0]


def test_ranks_decide_by_the_same_times() -> None:
    """Which all of them learn in the same step."""
    now = [0.0]

    def agree(mine: list[int]) -> list[int]:
        assert len(mine) == AGREED_STEPS
        return [int(5e9)] * len(mine)

    timer = StepTimer(clock=lambda: now[0], agree=agree)  # type: ignore[arg-type]
    found = []
    for step in range(2 * AGREED_STEPS):
        timer.begin(step)
        now[0] += 1.0
        known = timer.end(step, (StepDemand(decodes=1), 1))
        assert bool(known) == (step % AGREED_STEPS == AGREED_STEPS - 1)
        found += [one.seconds for one in known]
    assert found == [5.0] * 2 * AGREED_STEPS


def test_sizes_of_prompts_are_none_of_decodes() -> None:
    found = MeasuredCosts((GraphSize(1, 16, 1), GraphSize(2)), 2, False)
    for _ in range(2):
        found.note(StepDemand(decodes=2), 1.0)
    assert found.plain(1) == 1.0
