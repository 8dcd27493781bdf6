"""Decodes on a device whose steps take what a function says, with drafts that hold by chance: what
there is between a scheduler, `Speculation` and a runner with a step in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from megatron_hybrid.engine.draft_policy import DraftPolicy
from megatron_hybrid.engine.speculation import Speculation
from megatron_hybrid.engine.step_costs import MeasuredCosts, StepTimer
from megatron_hybrid.execution.cuda_graphs import graph_sizes
from megatron_hybrid.execution.plan import DraftPlan, StepPlan, StepResult
from megatron_hybrid.execution.rows import RowTable

Ints = np.ndarray
# Decodes and tokens of a step -> how much longer it takes than one of a token.
CostModel = Callable[[int, int], float]


class Oracle:
    """Guesses what is to come: token p of every text is p % 1000."""

    def __init__(self, rows: int) -> None:
        self.lengths = np.zeros(rows, dtype=np.int64)

    def begin(self, row: int, text: Ints, cache_salt: str) -> None:
        self.lengths[row] = len(text)

    def extend(self, rows: Ints, tokens: Ints, counts: Ints) -> None:
        self.lengths[rows] += counts

    def guess(self, rows: Ints, width: int) -> Ints:
        return (self.lengths[rows, None] + np.arange(width)) % 1000


class FixedPolicy(DraftPolicy):
    """As many for everybody in every step."""

    def __init__(self, width: int, plain_every: int = 0) -> None:
        super().__init__(MeasuredCosts((), 8, True), True)
        self._width = width

    def choose(self, chance: Ints, between: Ints, most: Ints) -> Ints | None:
        drafts = np.minimum(most, self._width)
        return drafts if drafts.any() else None


@dataclass
class Device:
    """batch rows, of whose drafts share(row, token) hold, if those before them do."""

    batch: int
    cost: CostModel
    share: float = 0.5
    by_head: bool = True
    num_tokens: int = 4
    fixed: int | None = None
    hiccups: float = 0.0  # share of steps that take four times as long
    seed: int = 0
    now: float = field(default=0.0, init=False)
    written: int = field(default=0, init=False)
    widths: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        sizes = graph_sizes(-1, 0, 256, 8192, self.num_tokens)
        self._sizes = [size for size in sizes if size.decodes >= self.batch]
        self.rows = RowTable(256, 1)
        costs = MeasuredCosts(sizes, self.num_tokens, self.by_head)
        policy = DraftPolicy(costs, self.by_head)
        if self.fixed is not None:
            policy = FixedPolicy(self.fixed)
        drafter = None if self.by_head else Oracle(256)
        timer = StepTimer(clock=lambda: self.now)
        self.speculation = Speculation(self.rows, drafter, self.num_tokens, policy, timer)
        self._random = np.random.default_rng(self.seed)
        self._in_flight: deque[tuple[StepPlan, StepResult, float]] = deque()
        self._free_at = 0.0
        self._step = 0
        self._last = [np.ones((self.batch, 1), dtype=bool)] * 2  # which places were guessed rightly
        self._decodes = np.arange(self.batch)
        self.begin()

    def begin(self) -> None:
        """A new request in every row."""
        for row in self._decodes.tolist():
            self.speculation.begin(row, np.arange(20, dtype=np.int32), [], "")
            self.rows.position[row] = 19
            self.rows.accepted[row] = self.rows.unknown[row] = 0

    def run(self, steps: int) -> float:
        """Tokens a second over so many steps."""
        now, written = self.now, self.written
        for _ in range(steps):
            self._one()
        return (self.written - written) / (self.now - now)

    def _one(self) -> None:
        rows, decodes = self.rows, self._decodes
        drafts = self.speculation.choose(decodes, np.full(self.batch, 99))
        self.widths.append(0 if drafts is None else int(drafts.num_drafts.max()))
        if drafts is None and (rows.unknown | rows.accepted)[decodes].any():
            drafts = DraftPlan.nothing(self.batch)
        self._step += 1
        plan = StepPlan(self._step, decodes, [None] * self.batch, drafts=drafts)
        self.speculation.was_planned(plan)
        done = max(self.now, self._free_at) + self._takes(plan)
        self._free_at = done
        ahead, lag = self._in_flight, rows.unknown[decodes]
        if ahead:
            self._receive(*ahead.popleft())
        accepted = self._verify(plan, lag)
        rows.position[decodes] += 1 + rows.accepted[decodes]
        rows.accepted[decodes] = 0
        rows.unknown[decodes] = 0 if drafts is None else drafts.num_drafts
        count = self.batch + int(accepted.sum())
        tokens = np.zeros(count, dtype=np.int64)
        result = StepResult(tokens, {}, {}, None if drafts is None else accepted)
        ahead.append((plan, result, done))

    def _takes(self, plan: StepPlan) -> float:
        drafts, widest = plan.num_drafts, 0 if plan.drafts is None else plan.drafts.widest
        fits = [
            size
            for size in self._sizes
            if size.drafts >= drafts
            and widest * size.decodes <= size.drafts
            and bool(size.drafts) == (plan.drafts is not None)
        ]
        size = min(fits, key=lambda size: (size.tokens, size))
        takes = 0.01 * self.cost(size.decodes, size.tokens)
        takes *= 1 + 0.02 * self._random.standard_normal()
        return takes * (4 if self._random.random() < self.hiccups else 1)

    def _verify(self, plan: StepPlan, unknown: Ints) -> Ints:
        """What is accepted; guesses for what was in flight had to be right as well."""
        if plan.drafts is None:
            return np.zeros(self.batch, dtype=np.int64)
        drafted = plan.drafts.num_drafts
        holds = self._random.random((self.batch, 32)) < self.share
        before = np.zeros_like(unknown) if self.by_head else 1 + unknown
        run = holds.cumprod(1).sum(1)
        return np.where(drafted > 0, (run - before).clip(0, drafted), 0)

    def _receive(self, plan: StepPlan, result: StepResult, done: float) -> None:
        self.now = max(self.now, done)
        self.speculation.was_received(plan, result)
        self.written += len(result.tokens)
        counts = np.ones(self.batch, dtype=np.int64)
        if result.accepted is not None:
            assert plan.drafts is not None
            counts += result.accepted
            self.rows.accepted[self._decodes] = result.accepted
            self.rows.unknown[self._decodes] = 0
            self.speculation.note(self._decodes, plan.drafts.num_drafts, result.accepted)
        self.speculation.extend(self._decodes, [[0] * n for n in counts.tolist()])
