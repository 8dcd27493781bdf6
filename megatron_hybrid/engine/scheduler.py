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

Decisions are pure functions of the stream of submissions and steps: no randomness, and no clocks
but for the number of drafts (draft_policy.py), whose times all ranks agree on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from megatron_hybrid.cache import checkpoint_placement as placement
from megatron_hybrid.cache.prefix_store import PrefixMatch
from megatron_hybrid.engine.context import DynamicInferenceContext
from megatron_hybrid.engine.decodes import Decodes
from megatron_hybrid.engine.open_requests import OpenRequests
from megatron_hybrid.engine.outbox import Outbox
from megatron_hybrid.engine.prefills import Prefills
from megatron_hybrid.engine.speculation import Speculation
from megatron_hybrid.engine.statistics import Statistics
from megatron_hybrid.engine.thoughts import Thoughts
from megatron_hybrid.engine.tracked_request import Running, TrackedRequest
from megatron_hybrid.engine.twins import Twins
from megatron_hybrid.engine.waiting_queue import WaitingQueue
from megatron_hybrid.execution.plan import StepPlan, StepResult
from megatron_hybrid.pause_mode import PauseMode
from megatron_hybrid.request import FinishReason, RequestEvent, RequestStatus
from megatron_hybrid.text.grammar import FIELD as GRAMMAR_FIELD

Received = list[tuple[TrackedRequest, RequestEvent]]  # new tokens, not handed out yet

# Tokens of waiting prompts that a step hashes, unless it may compute more: 2 ms in blocks of 16
# tokens, less in larger ones. A longer prompt takes several steps.
HASHED_AT_ONCE = 65_536
# As many times that it hashes besides while it has room for prompts that are not longer than that:
# where nearly all of them is cached, many fit into a step.
HASHED_FOR_ROOM = 4
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
        self._statistics = statistics
        self._totals = statistics.totals
        self._chunked_prefill = chunked_prefill
        self._waiting = WaitingQueue()
        self._running: dict[tuple[str, int], Running] = {}
        if twins is None:
            twins = Twins(context.cache, break_at_checkpoints=break_at_checkpoints)
        self.twins = twins
        self.decodes = Decodes(context, statistics, speculation)
        context.transfers.attach(self.decodes)
        self._prefills = Prefills(context, statistics, self._waiting, twins)
        self._thoughts = Thoughts(context)
        self._events = Outbox()
        self._dropped: list[tuple[list[TrackedRequest], BaseException]] = []  # not ended yet
        self.pause_mode: PauseMode | None = None  # of the pause that holds
        self.is_held = False  # nothing can be computed now, whatever the pause (see Sleeper)
        self._open = OpenRequests()
        self._sampled: Sequence[TrackedRequest] = ()  # those with tokens in flight
        self._step = 0
        self._epoch = context.cache.epoch  # of the keys by which those who wait are indexed

    # --------------------------------------------------------------- requests

    def submit(self, requests: Sequence[TrackedRequest]) -> None:
        """Queue requests with one request_id and one prompt."""
        self._open.add(requests)
        for request in requests:
            if request.index:
                request.first = requests[0]
            self._waiting.add(request, self._step)

    def abort(
        self,
        request_id: str,
        index: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
    ) -> None:
        """End all requests with this id, or one of them, wherever they are. Ignored are unknown
        ids, and those whose last token is in flight."""
        for request in self._open.named(request_id):
            computes = request.status is RequestStatus.WAITING or request.running is not None
            if computes and index in (None, request.index):
                self._abort(request, reason)

    def _abort(self, request: TrackedRequest, reason: FinishReason) -> None:
        """A token in flight is dropped, but where the answer may be gone on with from what it has:
        its state holds what that token is behind, and could not be found without it."""
        if reason is FinishReason.ABORT and request.running and request in self._sampled:
            self._leave(request.running)
            self._open.abort(request)
        else:
            self._finish(request, reason)

    def knows(self, request_id: str) -> bool:
        """Whether a request with this id has neither ended nor been aborted."""
        return bool(self._open.named(request_id))

    def started(self) -> list[TrackedRequest]:
        """Those that run, and those whose last token is in flight."""
        return [request for request in self._open if request.status is RequestStatus.RUNNING]

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for one."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything or return any event, besides those of a step in
        flight."""
        if self.is_held or self.pause_mode is PauseMode.KEEP:
            return bool(self._events)
        waiting = len(self._waiting) if self.pause_mode is None else len(self._waiting.preempted())
        return bool(waiting or self._running or self._events)

    # ------------------------------------------------------------------ pause

    def pause(self, mode: PauseMode) -> None:
        """Admit nobody who has not begun; `mode` is for the others. Paused already: the new mode
        counts from now on."""
        self.pause_mode = mode
        if mode is PauseMode.ABORT:
            running = [running.request for running in self._running.values()]
            for request in [*running, *self._waiting.preempted()]:
                self._abort(request, FinishReason.ABORT)

    def resume(self) -> None:
        """Admit everybody again."""
        self.pause_mode = None

    def advance_to(self, step: int) -> None:
        """Let time pass: the coming step has this number. Ages are counted in steps."""
        self._step = step

    def take_events(self) -> list[RequestEvent]:
        """Events that came up since they were last taken, in their order."""
        return self._events.take()

    # ------------------------------------------------------------------- plan

    @property
    def needs_tokens(self) -> bool:
        """Whether the coming step may preempt a request: its tokens in flight have to be known
        before, or what it has computed with them could not be found again. Or whether a grammar,
        or a budget of thoughts, has to see them to say what may follow."""
        context = self._context
        return bool(context.rows.grammars) or context.lacks_blocks or self._thoughts.need_tokens

    def schedule(self) -> StepPlan:
        """Plan a step of at most `max_tokens` computed tokens; skipped tokens cost nothing. During
        a pause that keeps everybody where they are it is empty."""
        if self.is_held or self.pause_mode is PauseMode.KEEP:
            return StepPlan(step=self._step, decode_rows=np.zeros(0, dtype=np.int64))
        statistics, context = self._statistics, self._context
        context.cache.begin_step(self._step)
        context.transfers.begin_step(self._step)
        self._extend_block_tables()
        context.cache.packing.begin_step()
        decode_rows = context.rows.decoding.nonzero()[0]
        self.decodes.reserve_checkpoints(decode_rows)
        owners = [context.requests[row] for row in decode_rows.tolist()]
        plan = StepPlan(step=self._step, decode_rows=decode_rows, decode_owners=owners)
        self._step += 1
        budget = context.max_tokens - len(decode_rows)
        self._look_ahead()
        self.twins.begin_step(budget)
        budget = self._prefills.plan_started(plan, budget)
        if len(self._waiting) and budget > 0:
            self._admit_waiting(plan, budget)
            if plan.is_empty and len(self._waiting) and self._release_pins():
                self._admit_waiting(plan, budget)
        self._thoughts.plan()
        self.decodes.plan(plan)
        statistics.step, plan.adapters = plan.step, bool(context.rows.adapter.any())
        statistics.running, statistics.waiting = len(self._running), len(self._waiting)
        return plan

    def _extend_block_tables(self) -> None:
        """A block for every decoding request whose next token starts one. Where there is none
        left, the least important request has to make room."""
        for running in self._context.rows_that_need_a_block():
            while running.request.running is running:  # it has not made room itself
                if self._context.extend_block_table(running):
                    break
                if not self._release_pins():
                    self._preempt(max(self._running.values(), key=lambda r: r.importance))

    def _release_pins(self) -> bool:
        """Keep nothing for those who wait; whether anything was kept."""
        return self.twins.release_pins() | self._context.transfers.release_pins()

    def _preempt(self, running: Running) -> None:
        """Take everything back from a running request; it goes on later from what is cached."""
        request = running.request
        self._statistics.count_preemption(running)
        self.decodes.bring_up_to_date(running)
        self._context.keep_end(running, placement.PREEMPTED)
        self._stop(running)
        request.status = RequestStatus.WAITING
        request.prompt_logprobs = None  # not handed out yet: they are computed again
        self._waiting.put_back(request)

    def preempt_all(self) -> None:
        """Take everything back from all who run, and keep nothing for those who wait."""
        self._release_pins()
        for running in list(self._running.values()):
            self._preempt(running)
        self.decodes.take_catch_ups()  # of states that nobody has any more
        self._context.cache.packing.take()

    def _look_ahead(self) -> None:
        """Hash prompts of those who wait: so that they can be admitted, and running prefills see
        who waits for what they compute."""
        context, waiting = self._context, self._waiting
        if not context.cache.enabled or not len(waiting):
            return
        if self._epoch != context.cache.epoch:
            self._epoch = context.cache.epoch
            waiting.forget_keys()
        budget = max(HASHED_AT_ONCE, context.max_tokens)
        for request in waiting.to_index(self._first(context.rows.num_free)):
            budget -= context.keys.hash(request, budget)
            if context.keys.has(request):
                waiting.index(request)
            if budget <= 0:
                break

    def _admit_waiting(self, plan: StepPlan, budget: int) -> None:
        """Admit who can be: in the queue's order, past those that wait for a twin or whose prompts
        are being hashed, step by step."""
        context, twins, transfers = self._context, self.twins, self._context.transfers
        unmatched, unhashed = MATCHED_AT_ONCE, HASHED_FOR_ROOM * HASHED_AT_ONCE
        # no more than there are rows: one that waits for a twin keeps its row against later ones
        for request in transfers.to_be_tried(self._first(context.rows.num_free)):
            if budget == 0 or unmatched <= 0:
                break
            if not context.keys.has(request):
                if request.num_tokens > min(HASHED_AT_ONCE, unhashed):
                    continue
                unhashed -= context.keys.hash(request, request.num_tokens)
                self._waiting.index(request)
            unmatched -= request.num_tokens // context.geometry.block_size
            match = context.match(request)
            if twins.must_wait(request, match.skip, budget):
                self._totals["twin_deferrals"] += 1
                continue
            if transfers.must_wait(request, match, len(self._running)):
                continue
            running = self._admit(request, match, budget)
            twins.was_tried(request)
            transfers.was_tried(request)
            if running is None:
                break
            budget -= self._prefills.plan_admitted(plan, running, budget)

    def _first(self, count: int) -> list[TrackedRequest]:
        """Who is tried, in order: during a pause only those who go on."""
        waiting = self._waiting
        return waiting.first(count) if self.pause_mode is None else waiting.preempted()[:count]

    def _admit(self, request: TrackedRequest, match: PrefixMatch, budget: int) -> Running | None:
        if not self._chunked_prefill and request.num_tokens - match.skip > budget:
            return None
        headroom = len(self._running)  # so that admitting and preempting don't chase each other
        running = self._context.admit(request, match, headroom)
        if running is None and not self._running:
            # alone, and yet what it matched leaves no room for the rest: then nothing matches
            match = PrefixMatch([], 0, 0, most=request.most_skipped)
            running = self._context.admit(request, match, 0)
        if running is not None:
            self._waiting.remove(request)
            self._running[request.key] = running
            self._statistics.count_admission(running, match)
        return running

    # ----------------------------------------------------------------- commit

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """All that becomes of a step, where no other one is in flight."""
        self.publish(plan)
        self.settle(self.receive(plan, result))

    def publish(self, plan: StepPlan) -> None:
        """Count a launched step as computed and make what it leaves visible. Every token that it
        feeds is known; requests whose last token it samples leave."""
        context, rows = self._context, self._context.rows
        context.transfers.write_back()
        self.decodes.publish(plan)
        for running in self._prefills.publish(plan):
            self.decodes.begin(running)
        self.decodes.publish_states(plan)
        context.windows.move()
        self._totals["steps"] += 1
        sampled, self._sampled = plan.sampled_rows, plan.sampled_owners
        rows.generated[sampled] += 1
        for row in sampled[rows.generated[sampled] >= rows.max_tokens[sampled]].tolist():
            self._leave(context.running_in(row))
        if context.transfers.handover_address and not self.decodes.owes_states:
            context.transfers.write_back()  # others wait for what this step leaves

    def receive(self, plan: StepPlan, result: StepResult) -> Received:
        """Note a step's tokens, but end nobody yet. Those of requests that have ended since the
        launch are dropped."""
        written, self._sampled = result.tokens_by_row(), ()
        # where a row has changed hands: before its new owner's first one
        self._context.rows.last_token[plan.sampled_rows] = [tokens[-1] for tokens in written]
        self._prefills.receive(plan, result)
        received: Received = []
        rows, logprobs, count = plan.sampled_rows.tolist(), result.logprobs, 0
        version = self._context.weight_version
        for row, request, tokens in zip(rows, plan.sampled_owners, written, strict=True):
            if not request.is_open:
                continue
            if not request.max_tokens:  # what its prompt's end was sampled for is dropped
                tokens = []
            count += len(tokens)
            request.output += tokens
            if tokens and request.grammar is not None:
                request.grammar.advance(tokens[-1])  # the only one: it has no drafts
            event = request.event(version, tokens)
            if logprobs and row in logprobs:
                event.logprobs = logprobs[row]
            if request.prompt_logprobs is not None:
                event.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
            received.append((request, event))
        self._totals["generated_tokens"] += count
        if spared := self.decodes.receive(plan, result, written):
            # Ages are those of a run without drafts, which would have taken so many steps more.
            self._step += spared
            self._context.cache.begin_step(self._step - 1)
        return received

    def settle(self, received: Received) -> None:
        """Hand out the tokens of `receive`, and end the requests that end with them, and those of
        a step that was dropped. A step that was launched meanwhile is published: the states of
        these requests include what it fed."""
        for request, event in received:
            if not request.max_tokens:
                self._finish(request, FinishReason.LENGTH, event)
                continue
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
            elif self._open.is_aborted(request):
                self._finish(request, FinishReason.ABORT, event)
            else:
                self._events.append(event)
        while self._dropped:
            self.fail(*self._dropped.pop())

    def drop(self, plan: StepPlan, error: BaseException) -> None:
        """A step could not be launched, which may have spoiled the states of its requests: they
        give back what they hold. Their tokens in flight are still theirs, so `settle` ends them."""
        for request in plan.owners:
            self._leave(request.running, keeps_end=False)
        self._dropped.append((plan.owners, error))

    def fail(self, requests: Iterable[TrackedRequest], error: BaseException) -> None:
        """End those of the requests that have not ended; nothing more of theirs is published."""
        for request in requests:
            if request.is_open:
                event = request.event(self._context.weight_version)
                event.error = f"The step failed: {type(error).__name__}: {error}"
                self._finish(request, FinishReason.ERROR, event)

    def _finish(
        self, request: TrackedRequest, reason: FinishReason, event: RequestEvent | None = None
    ) -> None:
        """End a request, wherever it is, with this last event or one of its own."""
        if request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
            self.twins.was_tried(request)
            self._context.transfers.was_tried(request)
        elif request.running is not None:
            # a step that failed may have spoiled the state
            self._leave(request.running, keeps_end=reason is not FinishReason.ERROR)
        request.status = RequestStatus.FINISHED
        request.keys = None  # refers back to the request: without it, no cycle is left
        self._open.remove(request)
        self._statistics.count_end(request, reason)
        event = event or request.event(self._context.weight_version)
        event.finish_reason = reason
        event.counters = dict(request.counters)
        event.queue_seconds = request.queue_seconds
        self._events.append_last(request, event)

    def _leave(self, running: Running, *, keeps_end: bool = True) -> None:
        """A running request computes nothing more: take back its row and lease."""
        if keeps_end and running not in self._prefills.started:  # a part of a prompt is of no use
            self.decodes.bring_up_to_date(running)
            self._context.keep_end(running, placement.ANSWER_END)
        self._stop(running)

    def _stop(self, running: Running) -> None:
        self._prefills.leave(running)
        self.decodes.leave(running)
        del self._running[running.request.key]
        self._context.release(running)
