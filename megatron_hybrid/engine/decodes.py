"""The decodes of a step: which drafts they have, whose states are written and where, and what
becomes of that. See docs/speculative_decoding.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from megatron_hybrid.cache.lease import StepCheckpoint
from megatron_hybrid.engine.context import DynamicInferenceContext
from megatron_hybrid.engine.speculation import Speculation
from megatron_hybrid.engine.statistics import Statistics
from megatron_hybrid.engine.tracked_request import Running
from megatron_hybrid.engine.transfers import without_slot
from megatron_hybrid.execution.plan import CatchUp, DraftPlan, StepPlan, StepResult

Ints = npt.NDArray[np.int64]


class Decodes:
    """Of one scheduler, which says when; rows that decode are in the row table."""

    def __init__(
        self,
        context: DynamicInferenceContext,
        statistics: Statistics,
        speculation: Speculation | None,
    ) -> None:
        self._context = context
        self._rows = context.rows
        self._cache = context.cache
        self._statistics = statistics
        self.speculation = speculation
        # By row: for a position that its state may come to with accepted drafts.
        self._checkpoints: dict[int, StepCheckpoint] = {}
        self._catch_ups: list[CatchUp] = []  # for the coming step

    @property
    def reserved_slots(self) -> Iterable[int]:
        """Of checkpoints that answers may come to when it is known which drafts are accepted."""
        return [checkpoint.slot for checkpoint in self._checkpoints.values() if checkpoint.slot]

    def begin(self, running: Running) -> None:
        """A request's prompt is computed: from now on its row table entry drives it."""
        self._context.set_slots(running)
        self._rows.decoding[running.row] = True
        self._on_grid(np.asarray([running.row]))
        if self.speculation is not None:
            request = running.request
            text = request.tokens(0, request.num_tokens)
            self.speculation.begin(running.row, text, request.stop_ids, request.cache_salt)

    # ------------------------------------------------------------------- plan

    def reserve_checkpoints(self, decode_rows: Ints, *, feeds: int = 1) -> None:
        """For the positions of the grid that the states of these rows may come to with accepted
        drafts and so many tokens more."""
        geometry, rows, cache = self._context.geometry, self._rows, self._cache
        if not cache.enabled or not geometry.needs_state:
            return
        next_on_grid = (rows.position[decode_rows] // geometry.grid + 1) * geometry.grid
        reached = next_on_grid <= rows.next_position(decode_rows) + feeds
        positions = next_on_grid[reached].tolist()
        for row, position in zip(decode_rows[reached].tolist(), positions, strict=True):
            if row in self._checkpoints:
                continue  # since a step that might have passed the position and did not
            lease = self._context.running_in(row).lease
            passes = self.speculation is not None
            checkpoint = cache.reserve_decode_checkpoint(lease, position, passes=passes)
            if checkpoint is not None:
                self._checkpoints[row] = checkpoint

    def plan(self, plan: StepPlan) -> None:
        """Choose drafts for the decodes of a step whose prompts are known, and where states and
        checkpoints are written; and hand it what is to catch up, if it computes anything."""
        rows, decodes = self._rows, plan.decode_rows
        drafts = None if plan.prefills else self._draft(decodes)
        if drafts is not None or self._has_drafts_to_take_up(decodes):
            plan.drafts = drafts or DraftPlan.nothing(len(decodes))
            self._reserve_room(decodes, plan.drafts)
        else:
            kept = [r for r, c in self._checkpoints.items() if c.position == rows.position[r] + 1]
            if not self._context.geometry.packs_states:  # else the requests' own are copied
                for row in kept:
                    rows.write_slot[row] = self._checkpoints[row].slot
            plan.writes = self._choose_writes(decodes, kept)
        if not plan.is_empty:
            plan.catch_ups = self.take_catch_ups()
            plan.packs = self._cache.packing.take()
            if self.speculation is not None:
                self.speculation.was_planned(plan)

    def _choose_writes(self, decodes: Ints, kept: list[int]) -> npt.NDArray[np.bool_] | None:
        """Which of these decodes write their states, [decodes]; None: all. Those of the rows `kept`
        are cached. A state that is read from where others may read it, too, is written to a place
        of its own at once, so that the first one need not be held; a request's last token is behind
        everything else of it."""
        rows, interval = self._rows, self._context.write_interval
        if interval == 1 or self._context.geometry.granule > 1:
            return None
        # not all in the same step: one takes as long as the other then
        is_due = (rows.position[decodes] + decodes) % interval == 0
        moves = rows.read_slot[decodes] != rows.write_slot[decodes]
        ends = rows.generated[decodes] + 1 >= rows.max_tokens[decodes]
        return np.asarray(is_due | moves | ends | np.isin(decodes, kept))

    def _has_drafts_to_take_up(self, decodes: Ints) -> bool:
        rows = self._rows
        if self.speculation is None:
            return False
        return bool((rows.accepted[decodes] | rows.unknown[decodes]).any())

    def _draft(self, decodes: Ints) -> DraftPlan | None:
        if self.speculation is None or not len(decodes):
            return None
        # An answer's last token is never that behind a draft: when it is launched, everything else
        # of the answer is in the state.
        rows = self._rows
        written = rows.most_written(decodes)
        most = (rows.max_tokens[decodes] - written - 2).clip(min=0)
        if rows.limited:  # nor does one pass by the place where thoughts may have to end
            most = np.minimum(most, (rows.look_at[decodes] - written - 1).clip(min=0))
        if (budget := self._context.max_tokens - len(decodes)) < most.sum():
            most = np.minimum(most, budget // len(decodes))
        return self.speculation.choose(decodes, most)

    def _reserve_room(self, decodes: Ints, drafts: DraftPlan) -> None:
        """Blocks for as many drafts as there is room for, and the checkpoints' slots."""
        drafts.num_drafts = self._room_for_drafts(decodes, drafts.num_drafts)
        for row, checkpoint in self._checkpoints.items():
            index = np.searchsorted(decodes, row)
            drafts.checkpoint_position[index] = checkpoint.position
            drafts.checkpoint_slot[index] = checkpoint.written

    def _room_for_drafts(self, decodes: Ints, wanted: Ints) -> Ints:
        """[decodes]: so many of the drafts that each row wants have a place for their KV, and so
        has the token behind them. For drafts nothing is evicted, which would go on without."""
        context, kv = self._context, self._cache.kv
        if not context.geometry.has_blocks:
            return wanted
        kept = not context.geometry.has_attention  # window blocks are promised to whoever runs
        behind = self._rows.next_position(decodes) + 2
        lacking = behind + wanted - context.tokens_with_room(decodes)
        blocks = np.where(wanted > 0, -(-lacking // context.geometry.block_size), 0)
        for row in np.repeat(decodes, blocks.clip(min=0)).tolist():
            if not (kept or kv.num_free) or not context.extend_block_table(context.running_in(row)):
                break
        room = context.tokens_with_room(decodes) - behind
        return np.minimum(wanted, room.clip(min=0))

    # ----------------------------------------------------------------- commit

    def publish(self, plan: StepPlan) -> None:
        """The step was launched: states include what it feeds."""
        rows, decodes, writes = self._rows, plan.decode_rows, plan.writes
        # from now on each reads its own slot
        moved = decodes[rows.read_slot[decodes] != rows.write_slot[decodes]]
        for row in moved.tolist():
            lease = self._context.running_in(row).lease
            self._cache.state_was_read(lease)
            rows.read_slot[row] = lease.read_slot
        rows.unfolded[decodes] = 0 if writes is None else (rows.unfolded[decodes] + 1) * ~writes
        self._advance(decodes)
        self._on_grid(decodes)
        if plan.drafts is not None:
            rows.unknown[decodes] = plan.drafts.num_drafts

    def _on_grid(self, decodes: Ints) -> None:
        """The states of these rows are those after the last multiple of the granule; above 1."""
        rows, granule = self._rows, self._context.geometry.granule
        if granule > 1:
            rows.unfolded[decodes] = rows.position[decodes] % granule

    def _advance(self, decodes: Ints, *, feeds: int = 1) -> None:
        """The states of these rows have come to include their accepted drafts, and so many tokens
        more. Makes the blocks that were completed visible."""
        context, rows, size = self._context, self._rows, self._context.geometry.block_size
        before, accepted = rows.position[decodes], rows.accepted[decodes]
        after = before + accepted + feeds
        rows.position[decodes] = after
        rows.generated[decodes] += accepted
        rows.accepted[decodes] = rows.unknown[decodes] = 0
        if self._cache.enabled and context.geometry.has_attention:
            for row in decodes[after // size > before // size].tolist():
                context.publish_blocks(context.running_in(row), int(rows.position[row]))
        self._statistics.totals["decode_tokens"] += int((after - before).sum())

    def publish_states(self, plan: StepPlan) -> None:
        """Make the checkpoints that the step has come to visible."""
        for row in list(self._checkpoints):
            # without drafts they were written instead of the requests' own states
            self._publish_state(row, at_end=plan.drafts is None)

    def _publish_state(self, row: int, *, at_end: bool) -> None:
        checkpoint = self._checkpoints.get(row)
        if checkpoint is not None and checkpoint.position <= self._rows.position[row]:
            del self._checkpoints[row]
            running = self._context.running_in(row)
            self._cache.publish_state(running.lease, checkpoint, at_end=at_end)
            self._context.set_slots(running)

    def receive(self, plan: StepPlan, result: StepResult, written: Sequence[list[int]]) -> int:
        """Note which of a step's drafts were accepted, and the texts as they are now; written: the
        tokens of each sampled row. The most accepted of a row: so many steps were spared."""
        if self.speculation is None:
            return 0
        self.speculation.was_received(plan, result)
        owners = plan.sampled_owners
        stay = np.asarray([request.running is not None for request in owners], dtype=bool)
        spared = 0
        if result.accepted is not None:
            assert plan.drafts is not None
            decodes = plan.decode_rows
            num_drafts, accepted = plan.drafts.num_drafts, result.accepted
            self._statistics.count_drafts(num_drafts, accepted)
            here = stay[: len(decodes)]
            decodes, num_drafts, accepted = decodes[here], num_drafts[here], accepted[here]
            self._rows.accepted[decodes], self._rows.unknown[decodes] = accepted, 0
            self.speculation.note(decodes, num_drafts, accepted)
            spared = int(accepted.max(initial=0))
        if stay.any():
            texts = [tokens for tokens, stays in zip(written, stay, strict=True) if stays]
            self.speculation.extend(plan.sampled_rows[stay], texts)
        return spared

    # -------------------------------------------------------------------- end

    def bring_up_to_date(self, running: Running) -> None:
        """Have the state of a request that computes nothing more come to where it is without
        drafts, and written in every step: its unfolded tokens, and the accepted drafts of its
        last step, are folded at the beginning of the coming one."""
        context, lease, row = self._context, running.lease, running.row
        geometry = context.geometry
        unfolded = int(self._rows.accepted[row] + self._rows.unfolded[row])
        if unfolded < geometry.granule and not self._rows.accepted[row]:
            return  # the state is there, or the last one that can be
        who = np.asarray([row])
        self.reserve_checkpoints(who, feeds=0)
        self._advance(who, feeds=0)
        position = context.computed_tokens(running)
        passed, checkpoint = (0, 0), self._checkpoints.get(row)
        if checkpoint is not None and checkpoint.position <= position:
            passed = checkpoint.position, checkpoint.written
        end = geometry.floor_granule(position)
        is_kept = passed[1] or self._cache.placement.keeps_end(end)
        if end == position - unfolded:
            is_kept = False  # no token more
        if geometry.has_recurrent and is_kept and self._cache.publishes(lease):
            self._catch_ups.append(CatchUp(row, position, unfolded, lease.write_slot, *passed))
        self._publish_state(row, at_end=False)

    def leave(self, running: Running) -> None:
        """A request decodes no more; what was reserved for it is not needed."""
        checkpoint = self._checkpoints.pop(running.row, None)
        if checkpoint is not None:
            self._cache.discard_checkpoint(checkpoint)

    def forget_slot(self, slot: int) -> None:
        """Something else comes into a slot whose state is gone: nothing is put off for it."""
        self._cache.packing.forget(slot)
        self._catch_ups = without_slot(self._catch_ups, slot, self._cache)

    @property
    def owes_states(self) -> bool:
        """Whether a cached state is to be written, or packed, in the coming step."""
        return bool(self._catch_ups) or self._cache.packing.is_pending

    def take_catch_ups(self) -> list[CatchUp]:
        """What was put off, which is done now."""
        taken, self._catch_ups = self._catch_ups, []
        self._cache.states.touch(slot for one in taken for slot in (one.slot, one.checkpoint_slot))
        return taken

    def write_states(self) -> list[CatchUp]:
        """Where states of running requests are not written yet, they are to be: by these."""
        rows = self._rows
        if self._context.geometry.granule > 1:
            return []  # they can't be
        behind = np.flatnonzero(rows.decoding & (rows.unfolded > 0))
        figures = np.stack([rows.position, rows.unfolded, rows.read_slot])[:, behind].T.tolist()
        rows.unfolded[behind] = 0
        return [
            CatchUp(row, position, unfolded, slot, 0, 0)
            for row, (position, unfolded, slot) in zip(behind.tolist(), figures, strict=True)
        ]
