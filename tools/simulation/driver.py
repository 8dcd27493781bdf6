"""Drives the real scheduler and cache through a trace, with a runner that computes nothing.

A decoding row changes nothing that others see until it crosses a block's boundary or ends. With
`fast_forward` such a row is parked: it leaves the step plan, still counts against the step's
budget, and comes back for the step that matters with its tokens filled in. Steps in which nothing
can happen are jumped over. Decisions are the same ones, at a cost per event instead of per token.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from megatron_hybrid.cache.checkpoint_placement import CheckpointHints
from megatron_hybrid.cache.hybrid_cache import HybridCache
from megatron_hybrid.cache.lease import Lease, StepCheckpoint
from megatron_hybrid.engine.context import DynamicInferenceContext
from megatron_hybrid.engine.latency import Latencies
from megatron_hybrid.engine.scheduler import Scheduler
from megatron_hybrid.engine.statistics import Statistics
from megatron_hybrid.engine.tracked_request import TrackedRequest
from megatron_hybrid.engine.transfers import Transfers
from megatron_hybrid.engine.twins import Twins
from megatron_hybrid.execution.plan import StepPlan, StepResult
from megatron_hybrid.request import SamplingParams
from simulation.parameters import MAX_CONTEXT
from simulation.pools import MAX_TOKENS
from simulation.sessions import Trace, TraceRequest

_PARAMS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


@dataclass(slots=True)
class SimulationResult:
    """What one policy did with one trace."""

    requests: int = 0
    sequences: int = 0  # samples counted one by one
    prompt_tokens: int = 0  # of requests: what samples share counts once
    computed_tokens: int = 0  # prompt tokens
    generated_tokens: int = 0
    steps: int = 0  # simulated
    executed_steps: int = 0
    preemptions: int = 0
    kv_evictions: int = 0
    state_evictions: int = 0
    checkpoints_skipped: int = 0  # for lack of a slot
    held_bytes: int = 0  # in cached blocks and states at the end
    scheduler_seconds: float = 0.0
    seconds: float = 0.0  # the whole simulation

    @property
    def skipped_share(self) -> float:
        """Of the prompt tokens. Computing what samples share more than once lowers it."""
        return 1 - self.computed_tokens / max(1, self.prompt_tokens)


class _Sequence:
    """One sample under way."""

    __slots__ = ("answer", "parked", "request", "tracked")

    def __init__(self, request: _Request, tracked: TrackedRequest, answer: list[int]) -> None:
        self.request = request
        self.tracked = tracked
        self.answer = answer
        self.parked = 0  # steps that it is to be away


class _Request:
    """A request of the trace and how many of its samples have not ended."""

    __slots__ = ("pending", "traced")

    def __init__(self, traced: TraceRequest) -> None:
        self.traced = traced
        self.pending = traced.n


class _NoTwins(Twins):
    """Nobody waits for anybody."""

    def promise(self, lease: Lease, end: int, reserved: Sequence[StepCheckpoint]) -> None:
        pass


class Simulation:
    """One trace on one cache."""

    def __init__(
        self,
        trace: Trace,
        cache: HybridCache,
        *,
        twins: bool = True,
        fast_forward: bool = True,
        transfers: Transfers | None = None,
        on_finish: Callable[[TraceRequest, TrackedRequest], None] | None = None,
    ) -> None:
        self.context = DynamicInferenceContext(
            cache.geometry, max_tokens=MAX_TOKENS, max_seq_length=MAX_CONTEXT, cache=cache
        )
        if transfers is not None:
            self.context.transfers = transfers
        self.statistics = Statistics(cache, Latencies(cache.geometry.max_requests))
        self.scheduler = Scheduler(
            self.context, self.statistics, twins=None if twins else _NoTwins(cache)
        )
        self.result = SimulationResult()
        self._trace = trace
        self._fast_forward = fast_forward
        self._on_finish = on_finish
        self._sequences: dict[tuple[str, int], _Sequence] = {}
        self._parked: list[tuple[int, int]] = []  # a heap: (step to come back in, row)
        self._stalled = False  # whoever waits goes on waiting until something ends or arrives
        self._now = 0

    def run(self, on_request: Callable[[TraceRequest], None] | None = None) -> SimulationResult:
        """Play the whole trace. `on_request` is called with every request when it arrives."""
        trace, started = self._trace, perf_counter()
        while (step := self._next_step()) is not None:
            self._now = step
            # The engine counts the steps that it runs; here time passes while it is idle, too.
            self.scheduler.advance_to(step)
            for traced in trace.take(step):
                if on_request is not None:
                    on_request(traced)
                self._submit(traced)
            self._step()
        self.result.seconds = perf_counter() - started
        return self._finish()

    # ------------------------------------------------------------------- time

    def _next_step(self) -> int | None:
        """The next step in which something happens; None when all is done."""
        scheduler = self.scheduler
        is_busy = scheduler.has_work
        if is_busy and self._fast_forward:
            unparked = scheduler.num_running > len(self._parked)
            is_busy = unparked or (scheduler.num_waiting > 0 and not self._stalled)
        if is_busy:
            return self._now + 1
        events = [self._parked[0][0]] if self._parked else []
        arrival = self._trace.next_arrival()
        if arrival is not None:
            events.append(max(arrival, self._now + 1))
        return min(events, default=None)

    def _step(self) -> None:
        self._unpark(self._now)
        scheduler, kv = self.scheduler, self.context.cache.kv
        quiet = False
        if self._parked and kv.num_available < scheduler.num_running - len(self._parked):
            # Somebody may be preempted: anyone, and as it is now.
            self._unpark(max(self._parked)[0])
        elif self._parked and len(self._parked) == scheduler.num_running:
            # The scheduler must not take the engine for idle, so a row joins without need.
            self._unpark(self._parked[0][0])
            quiet = True
        self.context.max_tokens = MAX_TOKENS - len(self._parked)
        started = perf_counter()
        plan = scheduler.schedule()
        self._stalled = plan.is_empty or (quiet and not plan.prefills and not plan.resumed)
        self._stalled &= not self.context.transfers.is_fetching
        if not plan.is_empty:
            scheduler.commit(plan, self._execute(plan))
        self.result.scheduler_seconds += perf_counter() - started
        self.result.executed_steps += 1
        for event in scheduler.take_events():
            if event.finish_reason is not None:
                self._ended((event.request_id, event.index))
        if self._fast_forward:
            self._park(plan)

    # --------------------------------------------------------------- requests

    def _submit(self, traced: TraceRequest) -> None:
        request, prompt = _Request(traced), traced.prompt()
        answers = [
            TrackedRequest(
                request_id=str(traced.number),
                prompt=prompt,
                params=_PARAMS,
                seed=0,
                max_tokens=len(answer),
                stop_ids=(),
                index=index,
                cache_salt=traced.cache_salt,
                hints=CheckpointHints(message_ends=traced.message_ends),
            )
            for index, answer in enumerate(traced.answers)
        ]
        for tracked, answer in zip(answers, traced.answers, strict=True):
            self._sequences[tracked.key] = _Sequence(request, tracked, answer.tolist())
        self.scheduler.submit(answers)
        self.result.requests += 1
        self.result.sequences += traced.n
        self.result.prompt_tokens += len(prompt)

    def _ended(self, key: tuple[str, int]) -> None:
        sequence = self._sequences.pop(key)
        request = sequence.request
        if self._on_finish is not None:
            self._on_finish(request.traced, sequence.tracked)
        request.pending -= 1
        if request.pending == 0:
            self._trace.finished(request.traced, self._now)

    def _execute(self, plan: StepPlan) -> StepResult:
        """The scripted tokens of the plan's rows."""
        generated = self.context.rows.generated
        tokens = [self._at(row).answer[generated[row]] for row in plan.sampled_rows.tolist()]
        return StepResult(np.asarray(tokens, dtype=np.int64), {}, {})

    def _at(self, row: int) -> _Sequence:
        return self._sequences[self.context.running_in(row).request.key]

    # ---------------------------------------------------------------- parking

    def _park(self, plan: StepPlan) -> None:
        """Take rows out of the plans to come until the step in which they matter again."""
        rows, size = self.context.rows, self.context.geometry.block_size
        for row in plan.sampled_rows.tolist():
            if not rows.decoding[row]:
                continue  # it has ended
            # A step matters when it begins a block, ends one, ends the answer or reads a state
            # that somebody else wrote.
            inside = int(rows.position[row]) % size
            if inside == 0 or rows.read_slot[row] != rows.write_slot[row]:
                continue
            left = int(rows.max_tokens[row]) - int(rows.generated[row])
            steps = min(size - inside, left) - 1
            if steps > 1:  # parking for one step costs more than it saves
                rows.decoding[row] = False
                self._at(row).parked = steps
                heapq.heappush(self._parked, (self._now + 1 + steps, row))

    def _unpark(self, until: int) -> None:
        """Bring back the rows that were to come back in step `until` or before, as they are now."""
        rows = self.context.rows
        while self._parked and self._parked[0][0] <= until:
            due, row = heapq.heappop(self._parked)
            sequence = self._at(row)
            tracked, steps = sequence.tracked, sequence.parked - max(0, due - self._now)
            generated = len(tracked.output)
            tracked.output += sequence.answer[generated : generated + steps]
            rows.position[row] += steps
            rows.generated[row] += steps
            rows.last_token[row] = tracked.output[-1]
            rows.decoding[row] = True
            self.statistics.totals["generated_tokens"] += steps

    # ----------------------------------------------------------------- result

    def _finish(self) -> SimulationResult:
        result, cache, geometry = self.result, self.context.cache, self.context.geometry
        totals = self.statistics.totals
        result.computed_tokens = totals["computed_tokens"] + totals["recomputed_tokens"]
        result.generated_tokens = totals["generated_tokens"]
        result.preemptions = totals["preemptions"]
        result.steps = self._now
        result.kv_evictions = cache.kv.evictions
        result.state_evictions = cache.states.evictions
        result.checkpoints_skipped = cache.checkpoints_skipped
        occupancy = cache.occupancy()
        windows = geometry.window_of_state * geometry.bytes_per_window_block
        result.held_bytes = (
            occupancy.kv_cached * geometry.bytes_per_block
            + occupancy.state_cached * (geometry.bytes_per_cached_slot - windows)
            + occupancy.window_evictable * geometry.bytes_per_window_block
        )
        return result
