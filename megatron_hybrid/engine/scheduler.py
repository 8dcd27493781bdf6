"""Who runs in a step, and with which tokens; and what becomes of the results.

    schedule   plan the step: decodes, then started prefills, then admissions
    commit     after the step: publish blocks and states, hand out tokens, finish requests
    fail       the step raised: its requests end, nothing is published

Decisions are pure functions of the stream of submissions and steps: no clocks, no randomness.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from megatron_hybrid.cache.hybrid_cache import StepCheckpoint
from megatron_hybrid.engine.context import DynamicInferenceContext
from megatron_hybrid.engine.statistics import Statistics, StepStatistics
from megatron_hybrid.engine.tracked_request import TrackedRequest
from megatron_hybrid.execution.plan import PrefillChunk, StepPlan, StepResult
from megatron_hybrid.request import FinishReason, RequestEvent, RequestStatus


class Scheduler:
    """The waiting queue and the running requests of one engine."""

    def __init__(
        self,
        context: DynamicInferenceContext,
        statistics: Statistics,
        *,
        chunked_prefill: bool = True,
        break_at_checkpoints: bool = False,
    ) -> None:
        self._context = context
        self._statistics = statistics
        self._chunked_prefill = chunked_prefill
        self._break_at_checkpoints = break_at_checkpoints
        self._waiting: OrderedDict[str, TrackedRequest] = OrderedDict()
        self._running: dict[str, TrackedRequest] = {}
        self._prefilling: list[TrackedRequest] = []  # in order of admission
        self._checkpoints: dict[int, list[StepCheckpoint]] = {}  # of the planned step, by row
        self._events: list[RequestEvent] = []  # not handed out yet
        self._step = 0

    # --------------------------------------------------------------- requests

    def submit(self, request: TrackedRequest) -> None:
        """Put a request at the end of the queue."""
        self._waiting[request.request_id] = request

    def abort(self, request_id: str) -> None:
        """End a request, wherever it is. Unknown ids are ignored: it may just have finished."""
        request = self._waiting.pop(request_id, None) or self._running.get(request_id)
        if request is not None:
            self._events.append(self._finish(request, FinishReason.ABORT))

    def knows(self, request_id: str) -> bool:
        return request_id in self._waiting or request_id in self._running

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything or return any event."""
        return bool(self._waiting or self._running or self._events)

    def take_events(self) -> list[RequestEvent]:
        """Events that came up since they were last taken, in their order."""
        events, self._events = self._events, []
        return events

    # ------------------------------------------------------------------- plan

    def schedule(self) -> StepPlan:
        """Plan a step of at most `max_tokens` computed tokens. Skipped tokens cost nothing."""
        context = self._context
        decode_rows = np.flatnonzero(context.rows.decoding)
        context.extend_block_tables(decode_rows)
        plan = StepPlan(step=self._step, decode_rows=decode_rows)
        self._step += 1
        self._statistics.last_step = StepStatistics(step=plan.step, decode_tokens=len(decode_rows))
        budget = context.max_tokens - len(decode_rows)
        for request in self._prefilling:
            if budget == 0:
                break
            budget -= self._plan_chunk(plan, request, budget)
        while self._waiting and budget > 0:
            request = next(iter(self._waiting.values()))
            if not self._admit(request, budget):
                break
            budget -= self._plan_chunk(plan, request, budget)
        last = self._statistics.last_step
        last.prefill_tokens = plan.num_prefill_tokens
        last.running, last.waiting = len(self._running), len(self._waiting)
        return plan

    def _admit(self, request: TrackedRequest, budget: int) -> bool:
        match = self._context.match(request)
        if not self._chunked_prefill and request.prompt_tokens - match.skip > budget:
            return False
        if not self._context.admit(request, match):
            return False
        del self._waiting[request.request_id]
        self._running[request.request_id] = request
        self._prefilling.append(request)
        assert request.lease is not None
        statistics = self._statistics
        statistics.requests_admitted += 1
        statistics.prompt_tokens += request.prompt_tokens
        statistics.skipped_tokens += match.skip
        statistics.matched_tokens += match.matched_tokens
        statistics.lost_tokens.update(request.lease.lost_tokens)
        statistics.last_step.admitted += 1
        statistics.last_step.skipped_tokens += match.skip
        return True

    def _plan_chunk(self, plan: StepPlan, request: TrackedRequest, budget: int) -> int:
        """Add the request's next chunk of at most `budget` tokens; returns its length."""
        lease = request.lease
        assert lease is not None
        start, end = request.position, self._chunk_end(request, budget)
        checkpoints = self._context.cache.reserve_checkpoints(lease, end)
        self._checkpoints[request.row] = checkpoints
        targets = None
        if request.params.prompt_logprobs is not None:
            targets = request.prompt[start + 1 : end + 1]
        plan.prefills.append(
            PrefillChunk(
                row=request.row,
                owner=request,
                tokens=request.prompt[start:end],
                start=start,
                end=end,
                write_from=lease.num_shared * self._context.geometry.block_size,
                read_slot=lease.read_slot,
                write_slot=lease.live_slot,
                # one at the chunk's end needs no capturing: the write slot holds it
                checkpoints=tuple((c.position, c.slot) for c in checkpoints if c.position < end),
                samples=end == request.prompt_tokens,
                logprob_targets=targets,
                num_top_logprobs=request.params.prompt_logprobs or 0,
            )
        )
        return end - start

    def _chunk_end(self, request: TrackedRequest, budget: int) -> int:
        start, length = request.position, request.prompt_tokens
        end = min(length, start + budget)
        if self._break_at_checkpoints:
            assert request.lease is not None
            checkpoint = self._context.cache.next_checkpoint(request.lease)
            if checkpoint is not None:
                end = min(end, checkpoint)
        if end < length:
            # the next chunk should start on the grid, unless that would mean no progress
            aligned = self._context.geometry.floor_grid(end)
            end = aligned if aligned > start else end
        return end

    # ----------------------------------------------------------------- commit

    def commit(self, plan: StepPlan, result: StepResult) -> list[RequestEvent]:
        """Make a computed step's results visible; returns its events, one a sampled row."""
        context, rows = self._context, self._context.rows
        context.states_were_read(plan.decode_rows)
        rows.position[plan.decode_rows] += 1
        context.publish_decoded_blocks(plan.decode_rows)
        for chunk in plan.prefills:
            self._commit_chunk(chunk, result)
        self._statistics.steps += 1
        self._statistics.computed_tokens += plan.num_prefill_tokens
        return self._hand_out(plan.sampled_rows, result)

    def _commit_chunk(self, chunk: PrefillChunk, result: StepResult) -> None:
        request: TrackedRequest = chunk.owner
        context, cache, lease = self._context, self._context.cache, request.lease
        assert lease is not None
        request.position = chunk.end
        cache.state_was_read(lease)
        context.publish_blocks(request, chunk.end)
        for checkpoint in self._checkpoints.pop(chunk.row):
            cache.publish_state(lease, checkpoint, at_end=checkpoint.position == chunk.end)
        if chunk.logprob_targets is not None:
            if request.prompt_logprobs is None:
                request.prompt_logprobs = [None]
            request.prompt_logprobs += result.prompt_logprobs[chunk.row]
        if chunk.samples:
            self._prefilling.remove(request)
            context.start_decoding(request)

    def _hand_out(self, sampled: np.ndarray, result: StepResult) -> list[RequestEvent]:
        rows, requests = self._context.rows, self._context.requests
        tokens = result.tokens
        rows.last_token[sampled] = tokens
        rows.generated[sampled] += 1
        stopped = (tokens[:, None] == rows.stop_ids[sampled]).any(axis=1)
        ended = stopped | (rows.generated[sampled] >= rows.max_tokens[sampled])
        self._statistics.generated_tokens += len(tokens)
        events = []
        for row, token in zip(sampled.tolist(), tokens.tolist(), strict=True):
            request = requests[row]
            assert request is not None
            request.output.append(token)
            event = self._event(request)
            event.token_ids.append(token)
            if request.prompt_logprobs is not None:
                event.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
            events.append(event)
        for row, logprob in result.logprobs.items():
            at = int(np.flatnonzero(sampled == row)[0])
            events[at].logprobs = [logprob]
        for at in np.flatnonzero(ended).tolist():
            request = requests[sampled[at]]
            assert request is not None
            reason = FinishReason.STOP if stopped[at] else FinishReason.LENGTH
            self._finish(request, reason, events[at])
            if stopped[at]:
                events[at].stop_token_id = int(tokens[at])
        return events

    def fail(self, plan: StepPlan, error: BaseException) -> list[RequestEvent]:
        """End the requests of a step that raised. Nothing of it is published."""
        message = f"The step failed: {type(error).__name__}: {error}"
        rows = plan.decode_rows.tolist() + [chunk.row for chunk in plan.prefills]
        events = []
        for row in rows:
            request = self._context.requests[row]
            assert request is not None
            event = self._finish(request, FinishReason.ERROR)
            event.error = message
            events.append(event)
        return events

    def _finish(
        self, request: TrackedRequest, reason: FinishReason, event: RequestEvent | None = None
    ) -> RequestEvent:
        """End a waiting or running request and give back what it holds."""
        if request.status is RequestStatus.RUNNING:
            for checkpoint in self._checkpoints.pop(request.row, ()):
                self._context.cache.discard_checkpoint(checkpoint)
            if request in self._prefilling:
                self._prefilling.remove(request)
            del self._running[request.request_id]
            self._context.release(request)
        request.status = RequestStatus.FINISHED
        self._statistics.requests_finished[reason.value] += 1
        event = self._event(request) if event is None else event
        event.finish_reason = reason
        return event

    @staticmethod
    def _event(request: TrackedRequest) -> RequestEvent:
        return RequestEvent(
            request.request_id,
            prompt_tokens=request.prompt_tokens,
            cached_tokens=request.cached_tokens,
        )
