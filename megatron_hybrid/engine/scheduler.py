"""Who runs in a step, and with which tokens; and what becomes of the results.

    schedule   plan the step: decodes, then started prefills, then admissions
    publish    it was launched, and all its inputs are known: what it computes becomes visible
    receive    its tokens are here
    settle     hand them out; whoever they end gives back what it holds
    drop       its launch raised: its requests end with the next `settle`, nothing is published

While a step is in flight, the next one may be scheduled, but not published:

    schedule 2, launch 2 | receive 1, publish 2, settle 1 | schedule 3, launch 3 | receive 2, ...

A request that comes to its max_tokens has computed everything when its last step is launched, so
it leaves with `publish`; only its last token is still to come. Another token that ends a request
is known one step late: the request is in the next step already, whose token is dropped. What a
step wrote may be read, and what it read be given away, as soon as it is published: later steps
take effect later.

Decisions are pure functions of the stream of submissions and steps: no clocks, no randomness.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from megatron_hybrid.cache import checkpoint_placement as placement
from megatron_hybrid.cache.lease import Pin, StepCheckpoint
from megatron_hybrid.cache.prefix_store import PrefixMatch
from megatron_hybrid.engine.context import DynamicInferenceContext
from megatron_hybrid.engine.decodes import Decodes
from megatron_hybrid.engine.pause import PauseMode
from megatron_hybrid.engine.speculation import Speculation
from megatron_hybrid.engine.statistics import Statistics
from megatron_hybrid.engine.tracked_request import TrackedRequest
from megatron_hybrid.engine.twins import Twins
from megatron_hybrid.engine.waiting_queue import WaitingQueue
from megatron_hybrid.execution.plan import (
    BlockCopy,
    PrefillChunk,
    ResumedRow,
    StepPlan,
    StepResult,
)
from megatron_hybrid.request import FinishReason, RequestEvent, RequestStatus
from megatron_hybrid.text.grammar import FIELD as GRAMMAR_FIELD

Received = list[tuple[TrackedRequest, RequestEvent]]  # new tokens, not handed out yet

# Tokens of waiting prompts that a step hashes, unless it may compute more: 2 ms in blocks of 16
# tokens, less in larger ones. A longer prompt takes several steps.
HASHED_AT_ONCE = 65_536
# Blocks of waiting prompts that a step looks up in the cache, of one prompt at least: 2 ms, and 10
# where no state is left behind the KV of any.
MATCHED_AT_ONCE = 32_768


class Scheduler:
    """The waiting queue and the running requests of one engine."""

    def __init__(
        self,
        context: DynamicInferenceContext,
        statistics: Statistics,
        *,
        chunked_prefill: bool = True,
        break_at_checkpoints: bool = False,
        twins: Twins | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """`speculation`: None for decodes of one token each."""
        self._context = context
        self._cache = context.cache
        self._statistics = statistics
        self._totals = statistics.totals
        self._chunked_prefill = chunked_prefill
        self._break_at_checkpoints = break_at_checkpoints
        self._waiting = WaitingQueue()
        self._running: dict[tuple[str, int], TrackedRequest] = {}
        self._prefilling: list[TrackedRequest] = []  # in order of admission
        if twins is None:
            twins = Twins(context.cache, break_at_checkpoints=break_at_checkpoints)
        self._twins = twins
        self.decodes = Decodes(context, statistics, speculation)
        # of the planned step's prompts, by row
        self._checkpoints: dict[int, list[StepCheckpoint]] = {}
        self._events: list[RequestEvent] = []  # not handed out yet
        self._dropped: list[tuple[list[TrackedRequest], BaseException]] = []  # not ended yet
        self._pause: PauseMode | None = None
        # answers that have not ended, by request and index
        self._open: dict[str, dict[int, TrackedRequest]] = {}
        self._step = 0
        self._epoch = context.cache.epoch  # of the keys by which those who wait are indexed

    # --------------------------------------------------------------- requests

    def submit(self, answers: Sequence[TrackedRequest]) -> None:
        """Queue a request: as many answers as it asks for, to one prompt."""
        self._open[answers[0].request_id] = {request.index: request for request in answers}
        for request in answers:
            if request.index:
                request.first_answer = answers[0]
            self._waiting.add(request, self._step)

    def abort(
        self,
        request_id: str,
        index: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
    ) -> None:
        """End a request, or one of its answers, wherever it is; a token in flight is dropped.
        Ignored are unknown ids, and answers whose last token is in flight."""
        for request in list(self._open.get(request_id, {}).values()):
            computes = request.status is RequestStatus.WAITING or request.lease is not None
            if computes and index in (None, request.index):
                self._finish(request, reason)

    def knows(self, request_id: str) -> bool:
        return request_id in self._open

    def started(self) -> list[TrackedRequest]:
        """Those that run, and those whose last token is in flight."""
        known = [request for answers in self._open.values() for request in answers.values()]
        return [request for request in known if request.status is RequestStatus.RUNNING]

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything or return any event, besides those of a step in
        flight."""
        if self._pause is PauseMode.KEEP:
            return bool(self._events)
        waiting = len(self._waiting) if self._pause is None else len(self._waiting.preempted())
        return bool(waiting or self._running or self._events)

    # ------------------------------------------------------------------ pause

    @property
    def pause_mode(self) -> PauseMode | None:
        """Of the pause that holds; None without one."""
        return self._pause

    def pause(self, mode: PauseMode) -> None:
        """Admit nobody who has not begun; `mode` is for the others. Paused already: the new mode
        counts from now on."""
        self._pause = mode
        if mode is PauseMode.ABORT:
            for request in [*self._running.values(), *self._waiting.preempted()]:
                self._finish(request, FinishReason.ABORT)

    def resume(self) -> None:
        self._pause = None

    @property
    def pins(self) -> Iterable[Pin]:
        """What is kept in the cache for requests that wait."""
        return self._twins.pins

    def advance_to(self, step: int) -> None:
        """Let time pass: the coming step has this number. Ages are counted in steps."""
        self._step = step

    def take_events(self) -> list[RequestEvent]:
        """Events that came up since they were last taken, in their order."""
        events, self._events = self._events, []
        return events

    # ------------------------------------------------------------------- plan

    @property
    def needs_tokens(self) -> bool:
        """Whether the coming step may preempt a request: its tokens in flight have to be known
        before, or what it has computed with them could not be found again. Or whether a grammar
        has to see them to say what may follow."""
        if self._context.rows.grammars:
            return True
        return len(self._context.rows_that_need_a_block()) > self._cache.kv.num_available

    def schedule(self) -> StepPlan:
        """Plan a step of at most `max_tokens` computed tokens; skipped tokens cost nothing. During
        a pause that keeps everybody where they are it is empty."""
        if self._pause is PauseMode.KEEP:
            return StepPlan(step=self._step, decode_rows=np.zeros(0, dtype=np.int64))
        statistics, context = self._statistics, self._context
        self._cache.begin_step(self._step)
        self._extend_block_tables()
        decode_rows = context.rows.decoding.nonzero()[0]
        self.decodes.reserve_checkpoints(decode_rows)
        owners = [context.requests[row] for row in decode_rows.tolist()]
        plan = StepPlan(step=self._step, decode_rows=decode_rows, decode_owners=owners)
        self._step += 1
        budget = context.max_tokens - len(decode_rows)
        self._look_ahead()
        self._twins.begin_step(budget)
        for request in self._prefilling:
            if budget == 0:
                break
            budget -= self._plan_chunk(plan, request, budget)
        if len(self._waiting) and budget > 0:
            self._admit_waiting(plan, budget)
            if plan.is_empty and len(self._waiting) and self._twins.release_pins():
                self._admit_waiting(plan, budget)
        self.decodes.plan(plan)
        statistics.step = plan.step
        statistics.running, statistics.waiting = len(self._running), len(self._waiting)
        return plan

    def _extend_block_tables(self) -> None:
        """A block for every decoding request whose next token starts one. Where there is none
        left, the least important request has to make room."""
        for request in self._context.rows_that_need_a_block():
            while request.status is RequestStatus.RUNNING:
                if self._context.extend_block_table(request):
                    break
                if not self._twins.release_pins():
                    self._preempt(max(self._running.values(), key=_importance))

    def _preempt(self, request: TrackedRequest) -> None:
        """Take everything back from a running request; it goes on later from what is cached."""
        self._statistics.count_preemption(request)
        self.decodes.bring_up_to_date(request)
        self._context.keep_end(request, placement.PREEMPTED)
        self._stop_running(request)
        request.status = RequestStatus.WAITING
        request.prompt_logprobs = None  # not handed out yet: they are computed again
        self._waiting.put_back(request)

    def _look_ahead(self) -> None:
        """Hash prompts of those who wait: so that they can be admitted, and running prefills see
        who waits for what they compute."""
        if not self._cache.enabled or not len(self._waiting):
            return
        context, waiting = self._context, self._waiting
        if self._epoch != self._cache.epoch:
            self._epoch = self._cache.epoch
            waiting.forget_keys()
        budget = max(HASHED_AT_ONCE, context.max_tokens)
        for request in waiting.to_index(self._first(context.rows.num_free)):
            budget -= context.hash_keys(request, budget)
            if context.has_keys(request):
                waiting.index(request)
            if budget <= 0:
                break

    def _admit_waiting(self, plan: StepPlan, budget: int) -> None:
        """Admit who can be: in the queue's order, past those that wait for a twin or whose prompts
        are being hashed."""
        context, twins = self._context, self._twins
        unmatched = MATCHED_AT_ONCE
        # no more than there are rows: one that waits for a twin keeps its row against later ones
        for request in self._first(context.rows.num_free):
            if budget == 0 or unmatched <= 0:
                break
            if not context.has_keys(request):
                continue
            unmatched -= request.num_tokens // context.geometry.block_size
            match = context.match(request)
            if twins.must_wait(request, match.skip, budget):
                self._totals["twin_deferrals"] += 1
                continue
            admitted = self._admit(request, match, budget)
            twins.was_tried(request)
            if not admitted:
                break
            budget -= self._plan_admitted(plan, request, budget)

    def _first(self, count: int) -> list[TrackedRequest]:
        """Who is tried, in order: during a pause only those who go on."""
        waiting = self._waiting
        return waiting.first(count) if self._pause is None else waiting.preempted()[:count]

    def _admit(self, request: TrackedRequest, match: PrefixMatch, budget: int) -> bool:
        if not self._chunked_prefill and request.num_tokens - match.skip > budget:
            return False
        headroom = len(self._running)  # so that admitting and preempting don't chase each other
        if not self._context.admit(request, match, headroom):
            if self._running:
                return False
            # alone, and yet what it matched leaves no room for the rest: then nothing matches
            match = PrefixMatch([], 0, 0, may_skip=request.may_skip)
            if not self._context.admit(request, match, 0):
                return False
        self._waiting.remove(request)
        self._running[request.key] = request
        self._statistics.count_admission(request, match)
        return True

    def _plan_admitted(self, plan: StepPlan, request: TrackedRequest, budget: int) -> int:
        lease = request.lease
        assert lease is not None
        if lease.copy is not None:
            plan.copies.append(BlockCopy(*lease.copy))
        if request.position == request.prefill_tokens:
            plan.resumed.append(ResumedRow(request.row, request, lease.read_slot))
            return 0
        self._prefilling.append(request)
        return self._plan_chunk(plan, request, budget)

    def _plan_chunk(self, plan: StepPlan, request: TrackedRequest, budget: int) -> int:
        """Add the request's next chunk of at most `budget` tokens; returns its length."""
        lease, cache = request.lease, self._cache
        assert lease is not None
        if cache.publishes(lease):
            deepest = lease.deepest
            reached = deepest.position if deepest is not None and deepest.alive else 0
            forks = cache.placement.for_waiters(
                self._shared_with(request, reached),
                reached,
                request.position,
                request.prefill_tokens,
            )
            # once is enough
            lease.forks = [c for c in forks if not self._twins.expects(lease.keys, c.position)]
        start, end = request.position, self._chunk_end(request, budget)
        checkpoints = cache.reserve_checkpoints(lease, start, end)
        self._checkpoints[request.row] = checkpoints
        last = checkpoints[-1] if checkpoints and checkpoints[-1].position == end else None
        write_slot = lease.write_slot
        if last is not None and last.slot and self._context.geometry.has_recurrent:
            write_slot = last.slot
        targets = None
        if request.wants_prompt_logprobs:
            targets = request.prompt[start + 1 : end + 1]
        chunk = PrefillChunk(
            row=request.row,
            owner=request,
            tokens=request.tokens(start, end),
            start=start,
            end=end,
            write_from=lease.num_shared * self._context.geometry.block_size,
            read_slot=lease.read_slot,
            write_slot=write_slot,
            # one at the chunk's end needs no capturing: the write slot is its own
            checkpoints=tuple(
                (c.position, c.slot) for c in checkpoints if c.position < end and c.slot
            ),
            samples=end == request.prefill_tokens,
            logprob_targets=targets,
            num_top_logprobs=request.params.prompt_logprobs or 0,
            logits_slot=last.slot if last is not None and last.state.has_logits else 0,
        )
        plan.prefills.append(chunk)
        if len(self._waiting):
            self._twins.promise(chunk, checkpoints)
        return end - start

    def _shared_with(self, request: TrackedRequest, reached: int) -> list[tuple[int, int]]:
        """Where those who wait leave a prompt that has a state at `reached`: only where another one
        could be of use."""
        geometry = self._context.geometry
        above = request.position
        if geometry.has_recurrent:
            above = max(above, geometry.floor_grid(reached) + geometry.grid)
        return self._waiting.shared_with(
            request, geometry.block_size, max(1, above // geometry.block_size)
        )

    def _chunk_end(self, request: TrackedRequest, budget: int) -> int:
        lease, cache = request.lease, self._cache
        assert lease is not None
        start, length = request.position, request.prefill_tokens
        end = min(length, start + budget)
        if cache.publishes(lease):
            for position, _ in lease.planned(start):
                if position > end:
                    break
                forced = self._break_at_checkpoints or cache.placement.needs_break(position)
                if forced and not cache.is_cached(lease, position):
                    return position
        if end < length:
            # the next chunk should start on the grid, unless that would mean no progress
            aligned = self._context.geometry.floor_grid(end)
            end = aligned if aligned > start else end
        return end

    # ----------------------------------------------------------------- commit

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """All that becomes of a step, where no other one is in flight."""
        self.publish(plan)
        self.settle(self.receive(plan, result))

    def publish(self, plan: StepPlan) -> None:
        """Count a launched step as computed and make what it leaves visible. Every token that it
        feeds is known; requests whose last token it samples leave."""
        context, rows = self._context, self._context.rows
        self.decodes.publish(plan)
        for chunk in plan.prefills:
            self._publish_chunk(chunk)
        for resumed in plan.resumed:
            self._publish_resumed(resumed)
        self.decodes.publish_states(plan)
        self._totals["steps"] += 1
        sampled = plan.sampled_rows
        rows.generated[sampled] += 1
        for row in sampled[rows.generated[sampled] >= rows.max_tokens[sampled]].tolist():
            self._leave(context.request_in(row))

    def _publish_chunk(self, chunk: PrefillChunk) -> None:
        request: TrackedRequest = chunk.owner
        context, cache, lease = self._context, self._cache, request.lease
        assert lease is not None
        self._statistics.count_computed(request, chunk.start, chunk.end)
        request.position = chunk.end
        cache.tail_was_copied(lease)
        cache.state_was_read(lease)
        context.publish_blocks(request, chunk.end)
        for checkpoint in self._checkpoints.pop(chunk.row):
            position = checkpoint.position
            if cache.publish_state(lease, checkpoint, at_end=position == chunk.end):
                self._twins.was_published(lease, position)
        if chunk.samples:
            self._prefilling.remove(request)
            self._start_decoding(request)

    def _publish_resumed(self, resumed: ResumedRow) -> None:
        request: TrackedRequest = resumed.owner
        assert request.lease is not None
        self._cache.tail_was_copied(request.lease)
        if not self._context.geometry.has_recurrent:  # else its first decode reads the state
            self._cache.state_was_read(request.lease)
        self._start_decoding(request)

    def _start_decoding(self, request: TrackedRequest) -> None:
        self._context.start_decoding(request)
        self.decodes.begin(request)

    def receive(self, plan: StepPlan, result: StepResult) -> Received:
        """Note a step's tokens, but end nobody yet. Those of requests that have ended since the
        launch are dropped."""
        written = result.tokens_by_row()
        # where a row has changed hands: before its new owner's first one
        self._context.rows.last_token[plan.sampled_rows] = [tokens[-1] for tokens in written]
        for chunk in plan.prefills:
            if chunk.logprob_targets is not None and chunk.owner.is_open:
                known = chunk.owner.prompt_logprobs or [None]
                chunk.owner.prompt_logprobs = known + result.prompt_logprobs[chunk.row]
        received: Received = []
        rows, logprobs, count = plan.sampled_rows.tolist(), result.logprobs, 0
        for row, request, tokens in zip(rows, plan.sampled_owners, written, strict=True):
            if not request.is_open:
                continue
            count += len(tokens)
            request.output += tokens
            if request.grammar is not None:
                request.grammar.advance(tokens[-1])  # the only one: it has no drafts
            event = self._event(request, tokens)
            if logprobs and row in logprobs:
                event.logprobs = logprobs[row]
            if request.prompt_logprobs is not None:
                event.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
            received.append((request, event))
        self._totals["generated_tokens"] += count
        if spared := self.decodes.receive(plan, result, written):
            # Ages are those of a run without drafts, which would have taken so many steps more.
            self._step += spared
            self._cache.begin_step(self._step - 1)
        return received

    def settle(self, received: Received) -> None:
        """Hand out the tokens of `receive`, and end the requests that end with them, and those of
        a step that was dropped. A step that was launched meanwhile is published: the states of
        these requests include what it fed."""
        for request, event in received:
            token = event.token_ids[-1]  # an end is never drafted: it comes last
            grammar = request.grammar
            is_complete = grammar is not None and grammar.is_complete
            if grammar is not None and grammar.error is not None:  # whatever its last token is
                event.error = grammar.error
                event.error_field = GRAMMAR_FIELD if grammar.is_to_blame else None
                self._finish(request, FinishReason.ERROR, event)
            elif token in request.stop_ids:
                event.stop_token_id = token
                self._finish(request, FinishReason.STOP, event)
            elif is_complete:
                self._finish(request, FinishReason.STOP, event)
            elif len(request.output) == request.max_tokens:
                self._finish(request, FinishReason.LENGTH, event)
            else:
                self._events.append(event)
        while self._dropped:
            self.fail(*self._dropped.pop())

    def drop(self, plan: StepPlan, error: BaseException) -> None:
        """A step could not be launched, which may have spoiled the states of its requests: they
        give back what they hold. Their tokens in flight are still theirs, so `settle` ends them."""
        for request in plan.owners:
            self._leave(request, keeps_end=False)
        self._dropped.append((plan.owners, error))

    def fail(self, requests: Iterable[TrackedRequest], error: BaseException) -> None:
        """End those of the requests that have not ended; nothing more of theirs is published."""
        for request in requests:
            if request.is_open:
                event = self._event(request)
                event.error = f"The step failed: {type(error).__name__}: {error}"
                self._finish(request, FinishReason.ERROR, event)

    def _finish(
        self, request: TrackedRequest, reason: FinishReason, event: RequestEvent | None = None
    ) -> None:
        """End a request, wherever it is, with this last event or one of its own."""
        if request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
            self._twins.was_tried(request)
        elif request.lease is not None:
            # a step that failed may have spoiled the state
            self._leave(request, keeps_end=reason is not FinishReason.ERROR)
        request.status = RequestStatus.FINISHED
        request.keys = None  # refers back to the request: without it, no cycle is left
        del self._open[request.request_id][request.index]
        if not self._open[request.request_id]:
            del self._open[request.request_id]
        self._statistics.count_end(request, reason)
        event = self._event(request) if event is None else event
        event.finish_reason = reason
        event.counters = dict(request.counters)
        if request.admitted is not None:
            event.queue_seconds = request.admitted - request.arrived
        self._events.append(event)

    def _leave(self, request: TrackedRequest, *, keeps_end: bool = True) -> None:
        """A running request computes nothing more: take back its row and lease."""
        # a prompt cut short is of no use
        if keeps_end and request not in self._prefilling:
            self.decodes.bring_up_to_date(request)
            self._context.keep_end(request, placement.ANSWER_END)
        self._stop_running(request)

    def _stop_running(self, request: TrackedRequest) -> None:
        for checkpoint in self._checkpoints.pop(request.row, ()):
            self._cache.discard_checkpoint(checkpoint)
        self.decodes.leave(request)
        if request in self._prefilling:
            self._prefilling.remove(request)
        del self._running[request.key]
        self._context.release(request)

    @staticmethod
    def _event(request: TrackedRequest, token_ids: list[int] | None = None) -> RequestEvent:
        # by position: this runs once for every token
        return RequestEvent(
            request.request_id,
            request.index,
            [] if token_ids is None else token_ids,
            None,
            None,
            len(request.prompt),
            request.cached_tokens,
        )


def _importance(request: TrackedRequest) -> tuple[int, int]:
    """The largest is preempted first: the lowest priority, then the last one admitted."""
    return request.priority, request.admission
