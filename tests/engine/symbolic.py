"""A runner that computes prefix hashes instead of activations, and checks everything it reads.

A KV entry holds the hash of the tokens up to its position, a state slot the hash of the tokens it
has seen. So a wrong block, a wrong slot or a stale value is an assertion at the step that reads
it, and the "answer" of a prompt is known without any engine (`expected_answer`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from megatron_hybrid.cache.checkpoint_placement import CheckpointPlacement
from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.cache.host_tier import HostTier
from megatron_hybrid.cache.hybrid_cache import HybridCache
from megatron_hybrid.cache.lower_tier import LowerTier
from megatron_hybrid.cache.replay_cost import queue_of
from megatron_hybrid.cache.stored_prefixes import StoredPrefixes
from megatron_hybrid.engine.adapters import Adapters
from megatron_hybrid.engine.agreement import Agreement, Ranks
from megatron_hybrid.engine.context import DynamicInferenceContext
from megatron_hybrid.engine.engine import DynamicInferenceEngine
from megatron_hybrid.engine.lower_transfers import LowerTransfers
from megatron_hybrid.engine.speculation import Speculation
from megatron_hybrid.engine.tracked_request import Running
from megatron_hybrid.engine.transfers import HostTransfers
from megatron_hybrid.errors import WeightsError
from megatron_hybrid.execution.plan import NO_DRAFT, CatchUp, StepDemand, StepPlan, StepResult
from megatron_hybrid.request import FinishReason, RequestEvent, SamplingParams, TokenLogprob
from tests.engine.symbolic_copies import SymbolicCopier, SymbolicMemory
from tests.engine.symbolic_store import PageView, SlowExecutor, SymbolicStore

VOCAB = 97
ADAPTERS = ("a", "b", "tuned")
default_asynchronous = False
EMPTY = 0


_known: deque[tuple[list[int], list[int]]] = deque(maxlen=64)  # texts, and their hashes


def prefix_hashes(tokens: Sequence[int]) -> list[int]:
    """[i]: the hash of tokens[:i]. Most texts are one that was asked for, and a few tokens more."""
    text, hashes = list(map(int, tokens)), [EMPTY]
    for place in range(len(_known) - 1, -1, -1):
        before, found = _known[place]
        if len(before) <= len(text) and before == text[: len(before)]:
            hashes = found.copy()
            break
    for token in text[len(hashes) - 1 :]:
        hashes.append(hash((hashes[-1], token)) & (2**61 - 1))
    if len(text) > 16:
        _known.append((text, hashes.copy()))
    return hashes


def expected_answer(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    state = prefix_hashes(tokens)[-1]
    for _ in range(count):
        tokens.append(state % VOCAB)
        state = hash((state, tokens[-1])) & (2**61 - 1)
    return tokens[len(prompt) :]


class SymbolicLaunch:
    """A step that was computed when it was launched; its result may be asked for once."""

    def __init__(
        self, runner: SymbolicRunner, result: StepResult, error: BaseException | None
    ) -> None:
        self._runner, self._result, self._error = runner, result, error

    def result(self) -> StepResult:
        assert self._runner.in_flight.pop(0) is self, "results are asked for in order, and once"
        if self._error is not None:
            self._runner.in_flight.clear()  # nobody asks for what was launched behind it
            raise self._error
        return self._result


class GoodGuesses:
    """A drafter that knows how answers go on, and is wrong now and then."""

    def __init__(self, max_requests: int, right: float, seed: int = 0) -> None:
        """`right`: how likely each guess is right."""
        self.texts: list[list[int]] = [[] for _ in range(max_requests)]
        self._right = right
        self._random = np.random.default_rng(seed)

    def begin(self, row: int, text: np.ndarray, cache_salt: str) -> None:
        self.texts[row] = text.tolist()

    def extend(self, rows: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        assert len(set(rows.tolist())) == len(rows) and counts.sum() == len(tokens)
        for row, part in zip(rows, np.split(tokens, counts.cumsum())[:-1], strict=True):
            self.texts[row] += part.tolist()

    def guess(self, rows: np.ndarray, width: int) -> np.ndarray:
        found = np.full((len(rows), width), NO_DRAFT, dtype=np.int64)
        for guesses, row in zip(found, rows.tolist(), strict=True):
            count = width - self._random.choice([0, 0, 1, width])
            answer = np.asarray(expected_answer(self.texts[row], count), dtype=np.int64)
            wrong = self._random.random(count) > self._right
            guesses[:count] = np.where(wrong, (answer + 1) % VOCAB, answer)
        return found


class SymbolicRunner:
    """Holds what the tensors would hold. `fail_next` makes the coming launch raise, `lose_next` the
    result of the coming step.

    `asynchronous`: it takes the tokens that rows go on with from its own memory, as a device does,
    and the engine must not know them when it launches.
    """

    def __init__(
        self, context: DynamicInferenceContext, *, asynchronous: bool = False, drafts: int = 0
    ) -> None:
        self._context = context
        self.asynchronous = asynchronous
        self.ring_length = context.geometry.granule + 2 * drafts
        self.in_flight: list[SymbolicLaunch] = []
        # by row: what its last step has added to its text, with the drafts that hold
        self._emitted: list[list[int]] = [[] for _ in range(context.geometry.max_requests)]
        self._fed: list[list[int]] = [[] for _ in range(context.geometry.max_requests)]  # before
        self.lose_next: BaseException | None = None
        self.launches = 0  # those before the present one
        self._kv = SymbolicMemory({}, lambda: self.launches)
        self._window: dict[int, int] = {}  # KV of layers with a sliding window, by place
        self._states = SymbolicMemory({0: EMPTY}, lambda: self.launches)
        self.roundings: dict[int, int] = {0: 0}  # by slot: how often what is in it was packed
        # by row and place: of tokens since the states of batch-invariant mode, which lie on a grid
        self._rings: dict[tuple[int, int], int] = {}
        # by slot: the hash that the next token comes from
        self._logits = SymbolicMemory({}, lambda: self.launches)
        self.fail_next = False
        self.plans: list[StepPlan] = []
        self.updates: list[object] = []
        self.wrong: AssertionError | None = None

    def dummy_forward(self, agreed: StepDemand | None = None) -> None:
        pass

    def capture_next(self) -> bool:
        return False

    def update_weights(self, source: object) -> frozenset[str]:
        """Nothing is computed with them; an exception is raised."""
        assert not self.in_flight, "weights change under a step"
        self.updates.append(source)
        if isinstance(source, BaseException):
            raise source
        return source if isinstance(source, frozenset) else frozenset()

    def load_adapter(
        self, slot: int | None, source: object, config: Mapping[str, object] | None
    ) -> str:
        """`source`: the digest of its weights."""
        if slot is None:
            raise WeightsError("no room")
        return str(source)

    def launch(self, plan: StepPlan, agreed: StepDemand | None = None) -> SymbolicLaunch:
        self.plans.append(plan)
        try:
            assert len(self.in_flight) <= self.asynchronous, "too many steps in flight"
            result = self._execute(plan)
        except AssertionError as error:  # the engine survives a failing step, the test must not
            self.wrong = error
            raise
        finally:
            self.launches += 1
        launched = SymbolicLaunch(self, result, self.lose_next)
        self.in_flight.append(launched)
        self.lose_next = None
        return launched

    def _text(self, row: int) -> list[int]:
        """What a row that decodes has written and its state includes, and drafts that hold; then
        the token that it feeds now."""
        request, rows = self._context.requests[row], self._context.rows
        assert request is not None
        position, held = int(rows.position[row]), len(self._emitted[row]) - 1
        if not self.asynchronous or not self.in_flight:  # the engine has asked for all results
            assert request.num_tokens == position + held + 1
            assert request.output[-1] == self._emitted[row][-1]
            assert rows.accepted[row] == held and not rows.unknown[row]
        else:
            assert request.num_tokens == position, "the engine knows a token that is in flight"
            assert rows.accepted[row] == 0 and held <= rows.unknown[row]
        if not self.asynchronous:
            assert request.output[-1] == rows.last_token[row]
        return request.tokens(0, position).tolist() + self._emitted[row]

    def catch_up(self, catch_ups: Sequence[CatchUp]) -> None:
        assert not self.in_flight, "states change under a step"
        for catch_up in catch_ups:
            self._catch_up(catch_up)
        self.launches += 1

    def _catch_up(self, one: CatchUp) -> None:
        """The state of a row whose request has left; the engine knows all that it has written."""
        text = self._fed[one.row] + self._emitted[one.row]
        hashes = prefix_hashes(text)
        assert one.position == len(text) - 1 and one.unfolded >= len(self._emitted[one.row]) - 1
        if self._context.geometry.has_recurrent:
            begin = one.position - one.unfolded
            end = self._context.geometry.floor_granule(one.position)
            assert self._states[one.slot] == hashes[begin], "wrong state to fold into"
            assert not self._is_packed(one.slot) and not self._is_packed(one.checkpoint_slot)
            self._replay(one.row, hashes, begin, one.position)
            assert end > begin, "nothing to catch up with"
            self._states[one.slot] = hashes[end]
            if one.checkpoint_slot:
                assert begin < one.checkpoint_position <= end
                self._states[one.checkpoint_slot] = hashes[one.checkpoint_position]
                self.roundings[one.checkpoint_slot] = self.roundings[one.slot]

    def _is_packed(self, slot: int) -> bool:
        return 0 < self._context.geometry.num_full_slots < slot

    def _move_states(self, plan: StepPlan) -> None:
        for source, slot in plan.packs:
            assert source and not self._is_packed(source) and self._is_packed(slot)
            self._states[slot] = self._states[source]
            self.roundings[slot] = self.roundings[source] + 1
        assert len({move.destination for move in plan.packs}) == len(plan.packs)
        for slot, destination in plan.unpacks:
            assert self._is_packed(slot) and destination and not self._is_packed(destination)
            self._states[destination] = self._states[slot]
            self.roundings[destination] = self.roundings[slot]

    def _decode(
        self, plan: StepPlan, index: int, writes: list[tuple[int, int]]
    ) -> tuple[list[int], int]:
        """The tokens that a row adds, and how many of its drafts are accepted."""
        rows, row = self._context.rows, int(plan.decode_rows[index])
        text = self._fed[row] = self._text(row)
        if plan.drafts is None:
            assert len(self._emitted[row]) == 1, "accepted drafts are not in the state"
            hashes, end = prefix_hashes(text), len(text)
            self._attend(row, hashes, end - 1)
            self._attend_window(row, hashes, end - 1)
            is_written = plan.writes is None or plan.writes[index]
            slots = int(rows.read_slot[row]), int(rows.write_slot[row]) if is_written else None
            begin = end - 1 - int(rows.unfolded[row])
            self._advance(row, hashes, begin, end - 1, end, slots, (), writes)
            return [hashes[end] % VOCAB], 0
        runs, held = plan.drafts, len(self._emitted[row]) - 1
        assert rows.write_slot[row] == self._context.running_in(row).lease.write_slot
        checkpoint = int(runs.checkpoint_position[index]), int(runs.checkpoint_slot[index])
        passed = [checkpoint] if checkpoint[1] and checkpoint[0] <= len(text) else []
        drafts, start = [], int(runs.window_start[index])
        window = dict(enumerate(runs.windows[index].tolist(), start))
        if all(window.get(p, text[p]) == text[p] for p in range(start, len(text))):
            wanted = range(len(text), len(text) + int(runs.num_drafts[index]))
            drafts = [window.get(p, NO_DRAFT) for p in wanted]
        fed = text + [max(draft, 0) for draft in drafts]
        hashes, end = prefix_hashes(fed), len(text)
        self._attend(row, hashes, end - 1)
        self._attend_window(row, hashes, end - 1)
        # the state takes up what was accepted, and the next token, but no draft
        slots = int(rows.read_slot[row]), int(rows.write_slot[row])
        begin = end - 1 - held - int(rows.unfolded[row])
        self._advance(row, hashes, begin, end - 1, end, slots, passed, writes)
        sampled = [value % VOCAB for value in hashes[end:]]
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == sampled[accepted]:
            accepted += 1
        return sampled[: accepted + 1], accepted

    def _execute(self, plan: StepPlan) -> StepResult:
        context, rows = self._context, self._context.rows
        fed = len(plan.decode_rows) + plan.num_drafts + plan.num_prefill_tokens
        assert fed <= context.max_tokens
        writes: list[tuple[int, int]] = []  # of states: all reads come first
        self._written_roundings: dict[int, int] = {}
        written: list[list[int]] = []  # tokens by sampled row
        accepted: list[int] = []
        prompt_logprobs: dict[int, list[TokenLogprob]] = {}
        # what is read was stored by an earlier step
        kept_logits = {one.logits_slot: self._logits.get(one.logits_slot) for one in plan.resumed}
        for catch_up in plan.catch_ups:
            self._catch_up(catch_up)
        self._move_states(plan)
        self._copy_blocks(plan)
        for index in range(len(plan.decode_rows)):
            tokens, holds = self._decode(plan, index, writes)
            written.append(tokens)
            accepted.append(holds)
        for chunk in plan.prefills:
            assert chunk.length >= 1
            history = chunk.owner.tokens(0, chunk.end)
            assert (history[chunk.start :] == chunk.tokens).all()
            token = self._segment(
                chunk.row,
                history,
                chunk.start,
                chunk.end,
                chunk.write_from,
                chunk.read_slot,
                chunk.write_slot,
                chunk.checkpoints,
                writes,
            )
            if chunk.samples:
                written.append([token])
                if chunk.logits_slot:
                    self._logits[chunk.logits_slot] = prefix_hashes(history.tolist())[-1]
            else:
                assert not chunk.logits_slot, "there are no logits to keep"
            if chunk.logprob_targets is not None:
                prompt_logprobs[chunk.row] = [
                    TokenLogprob(int(t), -1.0) for t in chunk.logprob_targets
                ]
        for resumed in plan.resumed:
            history = resumed.owner.tokens(0, resumed.owner.num_tokens)
            expected = prefix_hashes(history.tolist())[-1]
            assert kept_logits[resumed.logits_slot] == expected, "wrong logits"
            self._check_kv(resumed.row, history)
            written.append([expected % VOCAB])
        slots = [slot for slot, _ in writes]
        assert 0 not in slots or not context.geometry.has_recurrent, "the null slot is written"
        assert len(set(slots)) == len(slots) or not context.geometry.has_recurrent
        assert not any(map(self._is_packed, slots)), "a kernel writes to a packed slot"
        self._states.update(writes)
        self._states[0] = EMPTY
        self.roundings.update(self._written_roundings | {0: 0})
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the step was made to fail")
        sampled = list(zip(plan.sampled_rows.tolist(), written, strict=True))
        for row, tokens in sampled:
            self._emitted[row] = tokens
        logprobs: dict[int, list[TokenLogprob | float]] = {
            row: [TokenLogprob(token, -2.0) for token in tokens]
            for row, tokens in sampled
            if rows.logprobs[row] >= 0
        }
        flat = np.asarray([token for tokens in written for token in tokens], dtype=np.int64)
        held = None if plan.drafts is None else np.asarray(accepted, dtype=np.int64)
        return StepResult(flat, logprobs, prompt_logprobs, held)

    def _segment(
        self, row: int, history: np.ndarray, start: int, end: int, write_from: int,
        read_slot: int, write_slot: int, checkpoints: Sequence[tuple[int, int]],
        writes: list[tuple[int, int]],
    ) -> int:  # fmt: skip
        hashes = prefix_hashes(history.tolist())
        self._attend(row, hashes[: end + 1], max(start, write_from))
        self._attend_window(row, hashes[: end + 1], start)
        assert all(start < position < end for position, _ in checkpoints)
        begin = self._context.geometry.floor_granule(start)
        slots = read_slot, write_slot
        self._advance(row, hashes[: end + 1], begin, start, end, slots, checkpoints, writes)
        return hashes[end] % VOCAB

    def _attend(self, row: int, hashes: Sequence[int], write_from: int) -> None:
        """Write the KV of tokens from this position on, and read that of all."""
        if not self._context.geometry.has_attention:
            return
        size = self._context.geometry.block_size
        table = self._context.rows.block_table[row].tolist()
        for begin in range(0, len(hashes) - 1, size):
            block, end = table[begin // size], min(begin + size, len(hashes) - 1)
            assert block, "the dummy block is in a table"
            if write_from < end:
                first = max(begin, write_from)
                assert begin // size < self._context.rows.num_blocks[row]
                # what others can find is never written again
                assert not self._is_mapped(block)
                assert not self._in_tail(block, first)
                for position in range(first, end):
                    self._kv[block * size + position - begin] = hashes[position + 1]
            self._check_block(block, hashes, begin, end)

    def _check_block(self, block: int, hashes: Sequence[int], begin: int, end: int) -> None:
        """Read the KV of tokens [begin, end), which a block has from its first place on."""
        place = block * self._context.geometry.block_size
        found = self._kv.read(range(place, place + end - begin))
        if found != (expected := list(hashes[begin + 1 : end + 1])):
            wrong = [a == b for a, b in zip(found, expected, strict=True)].index(False)
            raise AssertionError(f"wrong KV at {begin + wrong}")

    def _attend_window(self, row: int, hashes: Sequence[int], start: int) -> None:
        """Write the KV of the tokens from `start` on, and read what they see."""
        geometry, table = self._context.geometry, self._context.rows.window_table
        if not geometry.has_window:
            return
        assert table is not None
        size, first = geometry.block_size, self._context.rows.window_first[row]
        for position in range(max(0, start - geometry.window + 1), len(hashes) - 1):
            block = int(table[row, position // size])
            assert position // size >= first, f"the window's KV at {position} was given back"
            place = block * size + position % size
            assert block, "the dummy block is in a table"
            if position >= start:
                assert not self._is_kept(block, position), "what others go on from is written"
                self._window[place] = hashes[position + 1]
            assert self._window.get(place) == hashes[position + 1], f"wrong KV at {position}"

    def _is_kept(self, block: int, position: int) -> bool:
        """Whether a cached state needs this place."""
        size = self._context.geometry.block_size
        for state in self._context.cache.states.cached():
            if state.window and block in state.window:
                whole = state.window[-1] != block or state.position % size == 0
                if whole or position % size < state.position % size:
                    return True
        return False

    def _advance(
        self, row: int, hashes: Sequence[int], begin: int, start: int, end: int,
        slots: tuple[int, int | None], checkpoints: Sequence[tuple[int, int]],
        writes: list[tuple[int, int]],
    ) -> None:  # fmt: skip
        """From the state in the first slot, after `begin` tokens, to that after `end` in the second
        one; None: that is not written. The row's own tokens are those from `start` on, drafts
        behind `end`, of which the hashes are."""
        geometry = self._context.geometry
        if geometry.has_recurrent:
            assert self._states.get(slots[0]) == hashes[begin], f"wrong state at {begin}"
            assert not self._is_packed(slots[0]), "a kernel reads a packed slot"
            self._replay(row, hashes, begin, start)
            last = geometry.floor_granule(end)
            self._keep(row, hashes, max(start, last))
            written = [(slots[1], last)] if slots[1] is not None else []
            if geometry.granule > 1 and slots[0] == slots[1] and last == begin:
                written = []  # as it is
            assert all(position % geometry.granule == 0 for position, _ in checkpoints)
            assert geometry.granule > 1 or all(p % geometry.grid == 0 for p, _ in checkpoints)
            for slot, position in [*written, *((slot, p) for p, slot in checkpoints)]:
                assert begin <= position <= end
                writes.append((slot, hashes[position]))
                self._written_roundings[slot] = self.roundings[slots[0]]

    def _replay(self, row: int, hashes: Sequence[int], begin: int, start: int) -> None:
        """Tokens [begin, start), which a step computes again from what the row's ring has."""
        if self._context.geometry.granule == 1:
            return
        assert begin % self._context.geometry.granule == 0, "a state off the grid is read"
        assert start - begin <= self.ring_length
        for position in range(begin, start):
            kept = self._rings.get((row, position % self.ring_length))
            assert kept == hashes[position + 1], f"the ring of row {row} has another at {position}"

    def _keep(self, row: int, hashes: Sequence[int], begin: int) -> None:
        """Tokens from `begin` on go to the row's ring."""
        if self._context.geometry.granule > 1:
            assert len(hashes) - 1 - begin <= self.ring_length
            for position in range(begin, len(hashes) - 1):
                self._rings[row, position % self.ring_length] = hashes[position + 1]

    def _check_kv(self, row: int, history: np.ndarray) -> None:
        if self._context.geometry.has_attention:
            size, table = self._context.geometry.block_size, self._context.rows.block_table[row]
            hashes = prefix_hashes(history.tolist())
            for begin in range(0, len(history), size):
                end = min(begin + size, len(history))
                self._check_block(int(table[begin // size]), hashes, begin, end)

    def _copy_blocks(self, plan: StepPlan) -> None:
        size = self._context.geometry.block_size
        destinations = [copy.destination for copy in plan.copies]
        assert len(set(destinations)) == len(destinations)
        assert not set(destinations) & {copy.source for copy in plan.copies}
        for copy in plan.copies:  # none reads what another one writes
            assert 0 < copy.num_tokens < size and copy.source and copy.destination
            for i in range(copy.num_tokens):
                self._kv[copy.destination * size + i] = self._kv[copy.source * size + i]
        for copy in plan.window_copies:
            assert 0 < copy.num_tokens < size and copy.source and copy.destination
            for i in range(copy.num_tokens):
                place = copy.source * size + i
                self._window[copy.destination * size + i] = self._window.get(place, EMPTY)

    def _is_mapped(self, block: int) -> bool:
        return block in self._context.kv_hash_to_block_id.values()

    def _in_tail(self, block: int, position: int) -> bool:
        tails = self._context.cache.kv.tails.items()
        size = self._context.geometry.block_size
        return any(tail.block == block and position % size < tail.fill for _, tail in tails)


class CheckedEngine(DynamicInferenceEngine):
    """Fails when its runner read something wrong."""

    runner: SymbolicRunner

    def step(self) -> list[RequestEvent]:
        events = super().step()
        if self.runner.wrong is not None:
            raise self.runner.wrong
        return events

    def preempt(self, running: Running) -> None:
        """As the scheduler would."""
        if self._in_flight is not None:
            self.scheduler.settle(self._receive())
        if running.request.running is running:  # else its last token has ended it
            self.scheduler._preempt(running)


def make_engine(
    *,
    block_size: int = 4,
    kernel_chunk: int = 4,
    num_blocks: int = 64,
    max_requests: int = 4,
    cached_slots: int = 8,
    max_tokens: int = 64,
    max_seq_length: int = 256,
    attention: bool = True,
    recurrent: bool = True,
    prefix_caching: bool = True,
    mode: str = "extract",
    eos: tuple[int, ...] = (),
    exact_ends: bool = False,
    interval: int = 0,
    policy: str = "replay_cost",
    asynchronous: bool | None = None,
    clock: Callable[[], float] = time.monotonic,
    drafts: int = 0,
    right: float = 0.7,
    write_interval: int | None = None,
    packed: bool = False,
    batch_invariant: bool = False,
    window: int = 0,
    spare_window_blocks: int = 8,
    host_pages: int = 0,
    slowest_copy: int = 1,
    bytes_per_token: float = 1.0,
    store: SymbolicStore | None = None,
    ranks: Ranks | None = None,
    seed: int = 0,
) -> CheckedEngine:
    """`asynchronous`: None for what the test is run with, see conftest.py. `drafts`: the most of a
    request in a step. `right`: see GoodGuesses. `write_interval`: None for 3 with a step in flight,
    1 without. `packed`: cached states are. `batch_invariant`: states lie on the grid of the kernel
    chunk alone, and are not packed. `window`: of layers with one; `spare_window_blocks`: beside
    those which are promised to running requests. `host_pages`: of what the device forgets;
    `slowest_copy`: steps that one takes to come or go, at most; `bytes_per_token`: see HostTier.
    `store`: below that, as slow; its engines have the same weights. `ranks`: that decide alike;
    `seed`: of how long each copy of this one takes."""
    asynchronous = default_asynchronous if asynchronous is None else asynchronous
    if write_interval is None:
        write_interval = 3 if asynchronous else 1
    granule = kernel_chunk if batch_invariant and recurrent else 1
    if batch_invariant:
        write_interval, packed = granule, False
    geometry = CacheGeometry(
        block_size=block_size,
        kernel_chunk=kernel_chunk if recurrent else 1,
        num_blocks=num_blocks if attention else 0,
        max_requests=max_requests,
        num_cached_slots=cached_slots,
        bytes_per_block=1 if attention else 0,
        bytes_per_state=2 if recurrent else 0,
        bytes_per_logits=int(host_pages > 0),
        bytes_per_packed_state=1 if packed and recurrent else None,
        granule=granule,
    )
    if window:
        geometry = replace(
            geometry,
            window=window,
            bytes_per_window_block=1,
            most_ahead=2 * drafts + 2 if drafts else 1,
            window_alignment=2 * block_size if batch_invariant else 0,
        )
        least = max_requests * geometry.window_quota + 1
        geometry = replace(geometry, num_window_blocks=least + spare_window_blocks)
    placement = CheckpointPlacement(geometry, exact_ends=exact_ends, interval=interval)
    context = DynamicInferenceContext(
        geometry,
        max_tokens=max_tokens,
        max_seq_length=max_seq_length,
        cache=HybridCache(geometry, enabled=prefix_caching, policy=policy, checkpoints=placement),
        write_interval=write_interval if recurrent else 1,
    )
    runner = SymbolicRunner(context, asynchronous=asynchronous, drafts=drafts)
    if host_pages and context.cache.enabled and policy != "ref_zero":
        tier = HostTier(context.cache.store, host_pages, queue_of(policy), bytes_per_token)
        copier, agreement = SymbolicCopier(runner, block_size, slowest_copy, seed), Agreement(ranks)
        context.transfers = HostTransfers(context.cache, tier, copier, agreement)
        if store is not None:
            lower = LowerTransfers(
                LowerTier(tier),
                StoredPrefixes(store, tier.host.geometry),
                lambda pages: [PageView(copier, page) for page in pages],  # type: ignore[misc]
                lambda: f"weights {context.cache.epoch}",
                1e3,
                agreement=agreement,
                executor=lambda name: SlowExecutor(slowest_copy, seed),
                clock=lambda: 0.0,
            )
            context.transfers.add_lower(lower)
    engine = CheckedEngine(
        context,
        runner,
        vocab_size=VOCAB,
        eos_token_ids=eos,
        break_at_checkpoints=mode == "break",
        clock=clock,
        speculation=Speculation(context.rows, GoodGuesses(max_requests, right), drafts)
        if drafts
        else None,
        adapters=Adapters(len(ADAPTERS)),
    )
    for name in ADAPTERS:
        engine.load_adapter(name, "")
    return engine


def run(engine: DynamicInferenceEngine, limit: int = 10_000) -> dict[str, list[RequestEvent]]:
    """Step until there is no work; events by request. Integrity is checked after every step."""
    events: dict[str, list[RequestEvent]] = {}
    while engine.has_work():
        limit -= 1
        assert limit > 0, "the engine makes no progress"
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
        engine.check_integrity()
    return events


def answer(events: list[RequestEvent]) -> list[int]:
    assert [e.finish_reason is not None for e in events] == [False] * (len(events) - 1) + [True]
    return [token for event in events for token in event.token_ids]


def generate(
    engine: DynamicInferenceEngine, prompts: Sequence[Sequence[int]], max_tokens: int = 4
) -> list[RequestEvent]:
    """Run prompts together and check every answer; returns each one's last event."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add_request(f"g{i}", prompt, params)
    events = run(engine)
    for i, prompt in enumerate(prompts):
        assert answer(events[f"g{i}"]) == expected_answer(prompt, max_tokens)
        assert events[f"g{i}"][-1].finish_reason is FinishReason.LENGTH
    return [events[f"g{i}"][-1] for i in range(len(prompts))]


def random_tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()
