"""The prompts of a step: which of their tokens it computes, which states it leaves on the way, and
what becomes of that."""

from __future__ import annotations

from megatron_hybrid.cache.lease import StateMove, StepCheckpoint
from megatron_hybrid.engine.context import DynamicInferenceContext
from megatron_hybrid.engine.statistics import Statistics
from megatron_hybrid.engine.tracked_request import Running, TrackedRequest
from megatron_hybrid.engine.twins import Twins
from megatron_hybrid.engine.waiting_queue import WaitingQueue
from megatron_hybrid.execution.plan import PrefillChunk, ResumedRow, StepPlan, StepResult


class Prefills:
    """Of one scheduler, which says when and how many tokens."""

    def __init__(
        self,
        context: DynamicInferenceContext,
        statistics: Statistics,
        waiting: WaitingQueue,
        twins: Twins,
    ) -> None:
        self.started: list[Running] = []  # in order of admission
        self._context = context
        self._cache = context.cache
        self._statistics = statistics
        self._waiting = waiting
        self._twins = twins
        self._checkpoints: dict[int, list[StepCheckpoint]] = {}  # of the planned step, by row

    # ------------------------------------------------------------------- plan

    def plan_started(self, plan: StepPlan, budget: int) -> int:
        """Add the next chunks of those who were admitted before, of at most `budget` tokens in
        all; returns what is left of it."""
        for running in self.started:
            if budget == 0:
                break
            budget -= self._plan_chunk(plan, running, budget)
        return budget

    def plan_admitted(self, plan: StepPlan, running: Running, budget: int) -> int:
        """Add the first chunk of a request that was just admitted, of at most `budget` tokens, or
        its row if all of its prompt was found; returns the chunk's length."""
        lease = running.lease
        if lease.copy is not None:
            plan.copies.append(lease.copy)
        if lease.window is not None and lease.window.copy is not None:
            plan.window_copies.append(lease.window.copy)
        if self._context.geometry.is_packed(lease.read_slot):
            plan.unpacks.append(StateMove(lease.read_slot, lease.write_slot))
        if lease.skip == running.prefill_tokens:
            plan.resumed.append(ResumedRow(running.row, running.request, lease.read_slot))
            return 0
        self.started.append(running)
        return self._plan_chunk(plan, running, budget)

    def _plan_chunk(self, plan: StepPlan, running: Running, budget: int) -> int:
        request, lease, row = running.request, running.lease, running.row
        start = self._context.computed_tokens(running)
        if self._cache.publishes(lease):
            self._place_forks(running, start)
        end = self._chunk_end(running, start, budget)
        checkpoints = self._cache.reserve_checkpoints(lease, start, end)
        self._context.windows.extend(running, end)
        self._checkpoints[row] = checkpoints
        last = checkpoints[-1] if checkpoints and checkpoints[-1].position == end else None
        first_logits = request.first_logits
        begin = end if first_logits is None else max(start, first_logits)
        geometry, read_slot, write_slot = self._context.geometry, lease.read_slot, lease.write_slot
        if geometry.is_packed(read_slot):
            read_slot = write_slot  # it is unpacked there before
        if last is not None and last.slot and geometry.needs_state and not geometry.packs_states:
            write_slot = last.slot
        chunk = PrefillChunk(
            row=row,
            owner=request,
            tokens=request.tokens(start, end),
            start=start,
            end=end,
            write_from=lease.num_shared * geometry.block_size,
            read_slot=read_slot,
            write_slot=write_slot,
            # one at the chunk's end needs no capturing: the write slot is its own
            checkpoints=tuple(
                (c.position, c.written) for c in checkpoints if c.position < end and c.slot
            ),
            samples=end == running.prefill_tokens,
            logprob_targets=request.prompt[begin + 1 : end + 1] if begin < end else None,
            logprobs_from=begin - start if begin < end else 0,
            num_top_logprobs=request.params.prompt_logprobs or 0,
            logits_slot=last.slot if last is not None and last.state.has_logits else 0,
        )
        plan.prefills.append(chunk)
        if len(self._waiting):
            self._twins.promise(lease, end, checkpoints)
        return end - start

    def _place_forks(self, running: Running, start: int) -> None:
        """Have states left where those who wait leave this prompt: only where another one than the
        last could be of use, and each of them once."""
        geometry, lease = self._context.geometry, running.lease
        reached = lease.deepest.position if lease.deepest and lease.deepest.alive else 0
        above = start
        if geometry.needs_state:
            above = max(above, geometry.floor_grid(reached) + geometry.grid)
        shared = self._waiting.shared_with(
            running, geometry.block_size, max(1, above // geometry.block_size)
        )
        forks = self._cache.placement.for_waiters(shared, reached, start, running.prefill_tokens)
        promises = self._twins.promises
        lease.forks = [c for c in forks if not promises.has(lease.keys, c.position)]

    def _chunk_end(self, running: Running, start: int, budget: int) -> int:
        lease, cache, length = running.lease, self._cache, running.prefill_tokens
        end = min(length, start + budget)
        if cache.geometry.has_window:
            end = min(end, cache.windows.reach(lease))
        if cache.publishes(lease):
            for position, _ in lease.planned(start):
                if position > end:
                    break
                forced = self._twins.break_at_checkpoints or cache.placement.needs_break(position)
                if forced and not cache.is_cached(lease, position):
                    return position
        if end < length:
            # the next chunk should start on the grid, unless that would mean no progress
            geometry = self._context.geometry
            floors = geometry.floor_grid(end), geometry.floor_granule(end), end
            end = next(floor for floor in floors if floor > start)
        return end

    # ----------------------------------------------------------------- commit

    def publish(self, plan: StepPlan) -> list[Running]:
        """The step was launched: make visible what it leaves. Returns whose prompts it ends, which
        decode from now on."""
        ended = []
        for chunk in plan.prefills:
            running = self._context.running_in(chunk.row)
            self._publish_chunk(running, chunk)
            if chunk.samples:
                self.started.remove(running)
                ended.append(running)
        for resumed in plan.resumed:
            running = self._context.running_in(resumed.row)
            self._cache.tail_was_copied(running.lease)
            geometry = self._context.geometry
            if not geometry.needs_state or geometry.packs_states:
                self._cache.state_was_read(running.lease)  # else its first decode reads it
            ended.append(running)
        return ended

    def _publish_chunk(self, running: Running, chunk: PrefillChunk) -> None:
        context, cache, lease = self._context, self._cache, running.lease
        self._statistics.count_computed(running.request, chunk.start, chunk.end)
        context.rows.position[chunk.row] = chunk.end
        cache.tail_was_copied(lease)
        cache.state_was_read(lease)
        context.publish_blocks(running, chunk.end)
        for checkpoint in self._checkpoints.pop(chunk.row):
            position = checkpoint.position
            if cache.publish_state(lease, checkpoint, at_end=position == chunk.end):
                self._twins.was_published(lease, position)
        if not chunk.samples:
            context.transfers.write_ahead(lease)

    @staticmethod
    def receive(plan: StepPlan, result: StepResult) -> None:
        """Note the log-probabilities of prompts, for those who want them."""
        for chunk in plan.prefills:
            owner: TrackedRequest = chunk.owner
            if chunk.logprob_targets is not None and owner.is_open:
                if owner.prompt_logprobs is None:
                    owner.prompt_logprobs = [] if owner.params.prompt_logprobs_start else [None]
                owner.prompt_logprobs += result.prompt_logprobs.get(chunk.row, [])

    def leave(self, running: Running) -> None:
        """A request stops, in its prompt or behind it: what was reserved for it is not needed."""
        for checkpoint in self._checkpoints.pop(running.row, ()):
            self._cache.discard_checkpoint(checkpoint)
        if running in self.started:
            self.started.remove(running)
