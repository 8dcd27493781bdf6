"""What a step of decodes takes, with drafts and without: as it was measured, or is assumed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from megatron_hybrid.engine.latency import Clock
from megatron_hybrid.execution.cuda_graphs import GraphSize, smallest_fit
from megatron_hybrid.execution.plan import StepDemand

# Of one size, of which the middle one counts: a result that the host comes late to makes one step
# look long and the next one short.
SAMPLES = 8
# Steps of so many decodes after which what was measured is measured again: contexts grow.
REFRESHED_AFTER = 512
FORGOTTEN_AFTER = 4 * REFRESHED_AFTER
DOUBTED_AFTER = 512  # where it was measured once only
AGREED_STEPS = 8  # at once, where several ranks have to
ASSUMED_COST = 0.05  # of a draft of each row, in steps without drafts


class Option(NamedTuple):
    """A step in which each row has room for so many drafts."""

    width: int
    seconds: float
    is_known: bool  # it was measured, or is assumed


class StepCosts(Protocol):
    """What the choice of drafts is based on."""

    def plain(self, decodes: int) -> float | None:
        """Seconds of a step of so many decodes without drafts; None: it has to be measured, so the
        coming steps are to have none."""

    def options(self, decodes: int) -> list[Option]:
        """Steps with drafts that may be chosen, the narrowest first."""

    def note(self, step: StepDemand, seconds: float) -> None:
        """A step of decodes alone took so long."""


class AssumedCosts(StepCosts):
    """Each draft of a row costs a part of a step. For devices on which nothing is in flight: what
    is decided there depends on no clock."""

    def __init__(self, num_tokens: int) -> None:
        """num_tokens: the most drafts of a row in a step."""
        self._options = [Option(w, 1 + w * ASSUMED_COST, True) for w in range(1, num_tokens + 1)]

    def plain(self, decodes: int) -> float:
        return 1.0

    def options(self, decodes: int) -> list[Option]:
        return self._options

    def note(self, step: StepDemand, seconds: float) -> None:
        pass


class MeasuredCosts(StepCosts):
    """By what computes a step: its CUDA graph, or decodes and drafts up to a power of two.

    A width that was not measured yet counts as if it took no longer than the next narrower one, so
    that it is tried where it would pay then; wider ones are not thought of before.
    """

    def __init__(self, sizes: Sequence[GraphSize], num_tokens: int, row_by_row: bool) -> None:
        """sizes: of the CUDA graphs. num_tokens: the most drafts of a row in a step. row_by_row:
        drafts are made so, as many for each row as for the one that has most."""
        self._sizes = tuple(size for size in sizes if not size.prompts and not size.adapters)
        self._num_tokens = num_tokens
        self._row_by_row = row_by_row
        self._samples: dict[GraphSize, _Samples] = {}
        self._steps: dict[int, int] = {}  # that were noted, by the decodes there is room for
        self._widths: dict[int, list[tuple[int, GraphSize]]] = {}  # by decodes

    def plain(self, decodes: int) -> float | None:
        samples = self._samples.get(size := self._size(StepDemand(decodes=decodes)))
        if samples is None or samples.count < 2 or self._age(size) >= REFRESHED_AFTER:
            return None
        return samples.median

    def options(self, decodes: int) -> list[Option]:
        if decodes not in self._widths:
            self._widths[decodes] = self._find_widths(decodes)
        options = []
        longest = self.plain(decodes) or 0.0
        for width, size in self._widths[decodes]:
            seconds = self._drafting(size)
            longest = max(longest, seconds or 0.0)
            options.append(Option(width, longest, seconds is not None))
            if seconds is None:
                break
        return options

    def note(self, step: StepDemand, seconds: float) -> None:
        if step.runs and not step.drafts:
            return  # it takes up what an earlier step has left, which nobody chooses
        size = self._size(step)
        now = self._steps[size.decodes] = self._steps.get(size.decodes, 0) + 1
        self._samples.setdefault(size, _Samples()).add(seconds, now)

    def _find_widths(self, decodes: int) -> list[tuple[int, GraphSize]]:
        """Of those that the same graph computes the widest."""
        widest = {}
        for width in range(1, self._num_tokens + 1):
            drafts, by_row = decodes * width, width if self._row_by_row else 0
            step = StepDemand(decodes=decodes, drafts=drafts, runs=1, widest=by_row)
            widest[self._size(step)] = width
        return [(width, size) for size, width in widest.items()]

    def _size(self, step: StepDemand) -> GraphSize:
        size = smallest_fit(self._sizes, step._replace(adapters=0))  # which make both slower
        if size is not None:
            return size
        decodes = 1 << (step.decodes - 1).bit_length()
        return GraphSize(decodes, drafts=decodes * -(-step.drafts // step.decodes))

    def _drafting(self, size: GraphSize) -> float | None:
        """Seconds of a step with drafts; None: not known, or not any more."""
        samples = self._samples.get(size)
        if samples is None:
            return None
        limit = FORGOTTEN_AFTER if samples.count > 1 else DOUBTED_AFTER
        return samples.median if self._age(size) < limit else None

    def _age(self, size: GraphSize) -> int:
        """Steps since one of this size was measured."""
        return self._steps[size.decodes] - self._samples[size].last


class _Samples:
    """The last ones of one size."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=SAMPLES)
        self.last = 0  # step
        self.median = 0.0

    @property
    def count(self) -> int:
        return len(self._seconds)

    def add(self, seconds: float, step: int) -> None:
        if step - self.last >= REFRESHED_AFTER:
            self._seconds.clear()
        self._seconds.append(seconds)
        self.last = step
        self.median = sorted(self._seconds)[(len(self._seconds) - 1) // 2]


class TimedStep(NamedTuple):
    """A step of decodes alone whose result is here."""

    demand: StepDemand
    tokens: int  # that it added to texts
    seconds: float


class StepTimer:
    """Measures steps without waiting for the device.

        plan 2, launch 2 | result 1 | plan 3, launch 3 | result 2
                         |<------------- step 2 ------------>|

    A step takes from the result before to its own, or from its plan on where nothing was in flight.
    """

    def __init__(
        self,
        clock: Clock = time.monotonic,
        agree: Callable[[Sequence[int]], list[int]] | None = None,
    ) -> None:
        """agree: of several ranks that decide alike, each of which takes its own time: the largest
        of their first values, of their second ones and so on. None: this one is alone."""
        self._clock = clock
        self._agree = agree
        self._planned: deque[tuple[int, float]] = deque()  # step, when
        self._last = 0.0  # when the last result was here
        self._steps: list[TimedStep] = []  # that were not agreed on yet

    def begin(self, step: int) -> None:
        """It was planned."""
        self._planned.append((step, self._clock()))

    def end(self, step: int, timed: tuple[StepDemand, int] | None) -> list[TimedStep]:
        """Its result is here. timed: demand and tokens, where it is of decodes alone. The steps
        whose times are known on every rank now."""
        now, begun = self._clock(), self._last
        while self._planned and self._planned[0][0] <= step:  # those before were never launched
            begun = max(self._last, self._planned.popleft()[1])
        self._last = now
        if timed is not None:
            self._steps.append(TimedStep(*timed, now - begun))
        if len(self._steps) < (1 if self._agree is None else AGREED_STEPS):
            return []
        steps, self._steps = self._steps, []
        if self._agree is not None:
            agreed = self._agree([int(step.seconds * 1e9) for step in steps])
            steps = [s._replace(seconds=n / 1e9) for s, n in zip(steps, agreed, strict=True)]
        return steps
