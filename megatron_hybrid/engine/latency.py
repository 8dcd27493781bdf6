"""What time requests take: histograms of one engine, and when its steps ran.

Nothing here decides anything: the scheduler knows no clock. Who asks for n answers counts n times.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_hybrid.engine.tracked_request import Running, TrackedRequest
from megatron_hybrid.execution.plan import StepPlan, StepResult
from megatron_hybrid.request import RequestEvent

Clock = Callable[[], float]  # seconds, with the zero of `time.monotonic`: front ends read it too

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 7.5, 10.0,
    15.0, 20.0, 30.0, 45.0, 60.0, 120.0, 300.0, 600.0, 1800.0,
)  # fmt: skip
TOKEN_SECONDS = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1,
    0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
STEP_TOKENS = tuple(float(2**power) for power in range(17))

AGES = ((10.0, "<10 s"), (60.0, "<1 min"), (600.0, "<10 min"), (3600.0, "<1 h"))  # upper bounds
OLDER = "older"
_NEVER = 2**62  # no step comes this far


class Histogram:
    """Observations, counted by the first of the ascending `bounds` that is not below them."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(float(bound) for bound in bounds)
        self.sum = 0.0
        self._bounds = np.asarray(self.bounds)
        self._counts = np.zeros(len(bounds) + 1, dtype=np.int64)  # the last: beyond all bounds

    def observe(self, value: float) -> None:
        """One observation."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: npt.NDArray[np.float64]) -> None:
        """[n]: n observations at once."""
        if len(values) == 1:
            self.observe(float(values[0]))
            return
        places = self._bounds.searchsorted(values)
        self._counts += np.bincount(places, minlength=len(self._counts))
        self.sum += float(values.sum())

    def add_counts(self, counts: npt.NDArray[np.int64], total: float) -> None:
        """[bounds + 1]: observations by bucket, the last ones beyond all bounds; their sum."""
        self._counts += counts
        self.sum += total

    def quantile(self, share: float) -> float | None:
        """About the value that this share of observations does not exceed, as if each bucket held
        its own at even distances; the largest bound for what is beyond it, None for nothing."""
        below = np.concatenate([[0], self._counts.cumsum()])
        if not below[-1]:
            return None
        wanted = share * below[-1]
        bucket = int(below[1:].searchsorted(wanted))
        if bucket >= len(self.bounds):
            return self.bounds[-1]
        low = self.bounds[bucket - 1] if bucket else 0.0
        inside = (wanted - below[bucket]) / max(1, self._counts[bucket])
        return float(low + inside * (self.bounds[bucket] - low))

    def as_dict(self) -> dict[str, Any]:
        """`buckets`: (upper bound, how many do not exceed it); `count` has those beyond, too."""
        cumulative = self._counts.cumsum().tolist()
        return {
            "count": cumulative[-1],
            "sum": self.sum,
            "p50": self.quantile(0.5),
            "p95": self.quantile(0.95),
            "buckets": [list(pair) for pair in zip(self.bounds, cumulative, strict=False)],
        }


class Latencies:
    """Told by the engine what happens to its requests; looks at the clock once for each of these,
    and once a step."""

    def __init__(self, max_requests: int, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self.histograms = {
            "time_to_first_token_seconds": Histogram(SECONDS),
            "inter_token_latency_seconds": Histogram(TOKEN_SECONDS),
            "e2e_request_latency_seconds": Histogram(SECONDS),
            "request_queue_time_seconds": Histogram(SECONDS),
            "request_prefill_time_seconds": Histogram(SECONDS),
        }
        self.iteration_tokens = Histogram(STEP_TOKENS)  # computed in a step
        self._last_token = np.zeros(max_requests)  # by row: when its owner's last token came

    def was_admitted(self, request: TrackedRequest) -> None:
        """A waiting request got its row: for the first time, or after a preemption."""
        if request.admitted is None:
            request.admitted = self.clock()
            self._observe("request_queue_time_seconds", request.admitted - request.arrived)

    def will_be_preempted(self, running: Running) -> None:
        """A running request is about to lose its row; all its tokens have been received."""
        if running.request.output:
            running.request.last_token = float(self._last_token[running.row])

    def was_launched(self, plan: StepPlan) -> None:
        """A step was given to the device."""
        decoded = len(plan.decode_rows) + plan.num_drafts
        self.iteration_tokens.observe(decoded + plan.num_prefill_tokens)

    def was_received(
        self,
        plan: StepPlan,
        received: Sequence[tuple[TrackedRequest, RequestEvent]],
        result: StepResult,
    ) -> None:
        """A step's tokens are here, and nobody has ended with them yet.

        received: the requests that got some, with what they are told, which for a first token is
        also when it came; fewer than were sampled if some ended before.
        """
        now, decoded, ended = self.clock(), len(received), plan.ended
        events = dict(received) if ended else {}
        for end in ended:
            if end.owner.is_open:
                decoded -= 1
                self._observe_prompt(end.row, end.owner, events[end.owner], now)
        rows, accepted = plan.decode_rows, result.accepted
        if decoded < len(rows):
            is_open = [owner.is_open for owner in plan.decode_owners]
            rows = rows[is_open]
            accepted = None if accepted is None else accepted[is_open]
        if len(rows):
            self._observe_decodes(rows, accepted, now)

    def has_finished(self, request: TrackedRequest) -> None:
        """For whatever reason, running or still waiting."""
        self._observe("e2e_request_latency_seconds", self.clock() - request.arrived)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Every latency's figures, in seconds."""
        return {name: histogram.as_dict() for name, histogram in self.histograms.items()}

    def _observe_decodes(
        self, rows: npt.NDArray[np.int64], accepted: npt.NDArray[np.int64] | None, now: float
    ) -> None:
        """Tokens of a row that come together share the time evenly. accepted: drafts before each
        one's token; None: there were none."""
        seconds = now - self._last_token[rows]
        if accepted is not None:
            seconds = np.repeat(seconds / (accepted + 1), accepted + 1)
        self.histograms["inter_token_latency_seconds"].observe_all(seconds)
        self._last_token[rows] = now

    def _observe_prompt(
        self, row: int, request: TrackedRequest, event: RequestEvent, now: float
    ) -> None:
        """The token behind a computed prompt: a request's first, or its next after a preemption."""
        self._last_token[row] = now
        if request.last_token is not None:
            self._observe("inter_token_latency_seconds", now - request.last_token)
            return
        assert request.admitted is not None
        event.queue_seconds = request.admitted - request.arrived
        event.prefill_seconds = now - request.admitted
        if event.token_ids:  # else there will be none
            self._observe("time_to_first_token_seconds", now - request.arrived)
        self._observe("request_prefill_time_seconds", event.prefill_seconds)

    def _observe(self, name: str, seconds: float) -> None:
        self.histograms[name].observe(max(0.0, seconds))


class StepTimes:
    """When steps ran, to a second: the cache counts ages in steps, people in seconds."""

    RESOLUTION = 1.0  # seconds
    KEPT = 4096  # more than the largest bound of AGES needs

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=self.KEPT)
        self._steps: deque[int] = deque(maxlen=self.KEPT)

    def note(self, step: int, now: float) -> None:
        """This step begins; called for each step in turn."""
        if not self._times or now - self._times[-1] >= self.RESOLUTION:
            self._times.append(now)
            self._steps.append(step)

    def count_by_age(self, last_uses: npt.NDArray[np.int64], now: float) -> list[list[Any]]:
        """[label, number] for each age: how many of these steps ran so long ago."""
        times, steps = list(self._times), list(self._steps)
        # A step that was not noted ran less than a second after the noted one before it. So all
        # those ran before a time that come before the first one noted after it.
        firsts = []  # ascending: the oldest age first
        for bound, _ in reversed(AGES):
            after = bisect_right(times, now - bound)
            firsts.append(steps[after] if after < len(steps) else _NEVER)
        places = np.asarray(firsts).searchsorted(last_uses, side="right")
        counts = np.bincount(places, minlength=len(AGES) + 1)[::-1].tolist()
        labels = [label for _, label in AGES] + [OLDER]
        return [list(pair) for pair in zip(labels, counts, strict=True)]
