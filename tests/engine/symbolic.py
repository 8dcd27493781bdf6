"""A runner that computes prefix hashes instead of activations, and checks everything it reads.

A KV entry holds the hash of the tokens up to its position, a state slot the hash of the tokens it
has seen. So a wrong block, a wrong slot or a stale value is an assertion at the step that reads
it, and the "answer" of a prompt is known without any engine (`expected_answer`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from megatron_hybrid.cache.checkpoint_placement import CheckpointPlacement
from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.cache.hybrid_cache import HybridCache
from megatron_hybrid.engine.context import DynamicInferenceContext
from megatron_hybrid.engine.engine import DynamicInferenceEngine
from megatron_hybrid.engine.tracked_request import TrackedRequest
from megatron_hybrid.execution.plan import StepPlan, StepResult
from megatron_hybrid.request import FinishReason, RequestEvent, SamplingParams, TokenLogprob

VOCAB = 97
default_asynchronous = False
EMPTY = 0


def prefix_hashes(tokens: Sequence[int]) -> list[int]:
    """[i]: the hash of tokens[:i]."""
    hashes = [EMPTY]
    for token in tokens:
        hashes.append(hash((hashes[-1], int(token))) & (2**61 - 1))
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


class SymbolicRunner:
    """Holds what the tensors would hold. `fail_next` makes the coming launch raise, `lose_next` the
    result of the coming step.

    `asynchronous`: it takes the tokens that rows go on with from its own memory, as a device does,
    and the engine must not know them when it launches.
    """

    def __init__(self, context: DynamicInferenceContext, *, asynchronous: bool = False) -> None:
        self._context = context
        self.asynchronous = asynchronous
        self.in_flight: list[SymbolicLaunch] = []
        self._last_token = np.full(context.geometry.max_requests, -1)
        self.lose_next: BaseException | None = None
        self._kv: dict[int, int] = {}
        self._states: dict[int, int] = {0: EMPTY}
        self._logits: dict[int, int] = {}  # by slot: the hash that the next token comes from
        self.fail_next = False
        self.plans: list[StepPlan] = []
        self.updates: list[object] = []
        self.wrong: AssertionError | None = None

    def dummy_forward(self) -> None:
        pass

    def update_weights(self, source: object) -> None:
        """Nothing is computed with them; an exception is raised."""
        assert not self.in_flight, "weights change under a step"
        self.updates.append(source)
        if isinstance(source, BaseException):
            raise source

    def launch(self, plan: StepPlan) -> SymbolicLaunch:
        self.plans.append(plan)
        try:
            assert len(self.in_flight) <= self.asynchronous, "too many steps in flight"
            result = self._execute(plan)
        except AssertionError as error:  # the engine survives a failing step, the test must not
            self.wrong = error
            raise
        self._last_token[plan.sampled_rows] = result.tokens
        launched = SymbolicLaunch(self, result, self.lose_next)
        self.in_flight.append(launched)
        self.lose_next = None
        return launched

    def _history(self, row: int) -> np.ndarray:
        """The tokens of a row that decodes, the one that it feeds now being the last."""
        request, position = self._context.requests[row], int(self._context.rows.position[row])
        assert request is not None
        if not self.asynchronous:
            assert request.output[-1] == self._context.rows.last_token[row]
            return request.tokens(0, position + 1)
        if not self.in_flight:  # the engine has asked for all results
            assert request.output[-1] == self._last_token[row]
        else:
            assert request.num_tokens == position, "the engine knows a token that is in flight"
        return np.append(request.tokens(0, position), self._last_token[row])

    def _execute(self, plan: StepPlan) -> StepResult:
        context, rows = self._context, self._context.rows
        assert len(plan.decode_rows) + plan.num_prefill_tokens <= context.max_tokens
        writes: list[tuple[int, int]] = []  # of states: all reads come first
        tokens: list[int] = []
        prompt_logprobs: dict[int, list[TokenLogprob]] = {}
        kept_logits = dict(self._logits)  # what is read was stored by an earlier step
        self._copy_blocks(plan)
        for row in plan.decode_rows.tolist():
            history = self._history(row)
            end = len(history)
            reads = int(rows.read_slot[row]), int(rows.write_slot[row])
            tokens.append(self._segment(row, history, end - 1, end, 0, *reads, (), writes))
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
                tokens.append(token)
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
            assert kept_logits.get(resumed.logits_slot) == expected, "wrong logits"
            self._check_kv(resumed.row, history)
            tokens.append(expected % VOCAB)
        slots = [slot for slot, _ in writes]
        assert 0 not in slots or not context.geometry.has_recurrent, "the null slot is written"
        assert len(set(slots)) == len(slots) or not context.geometry.has_recurrent
        self._states.update(writes)
        self._states[0] = EMPTY
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the step was made to fail")
        sampled = zip(plan.sampled_rows.tolist(), tokens, strict=True)
        logprobs = {r: TokenLogprob(t, -2.0) for r, t in sampled if rows.logprobs[r] >= 0}
        return StepResult(np.asarray(tokens, dtype=np.int64), logprobs, prompt_logprobs)

    def _segment(
        self, row: int, history: np.ndarray, start: int, end: int, write_from: int,
        read_slot: int, write_slot: int, checkpoints: Sequence[tuple[int, int]],
        writes: list[tuple[int, int]],
    ) -> int:  # fmt: skip
        geometry = self._context.geometry
        hashes = prefix_hashes(history.tolist())
        if geometry.has_attention:
            size = geometry.block_size
            table = self._context.rows.block_table[row]
            for position in range(end):
                place = int(table[position // size]) * size + position % size
                assert place >= size, "the dummy block is in a table"
                if position >= max(start, write_from):
                    # what others can find is never written again
                    assert not self._is_mapped(int(table[position // size]))
                    assert not self._in_tail(int(table[position // size]), position)
                    self._kv[place] = hashes[position + 1]
                assert self._kv.get(place) == hashes[position + 1], f"wrong KV at {position}"
        if geometry.has_recurrent:
            assert self._states[read_slot] == hashes[start], f"wrong state at {start}"
            writes.append((write_slot, hashes[end]))
            for position, slot in checkpoints:
                assert start < position < end and position % geometry.grid == 0
                writes.append((slot, hashes[position]))
        return hashes[end] % VOCAB

    def _check_kv(self, row: int, history: np.ndarray) -> None:
        if self._context.geometry.has_attention:
            size, table = self._context.geometry.block_size, self._context.rows.block_table[row]
            for position, expected in enumerate(prefix_hashes(history.tolist())[1:]):
                place = int(table[position // size]) * size + position % size
                assert self._kv.get(place) == expected, f"wrong KV at {position}"

    def _copy_blocks(self, plan: StepPlan) -> None:
        size = self._context.geometry.block_size
        before = dict(self._kv)
        destinations = [copy.destination for copy in plan.copies]
        assert len(set(destinations)) == len(destinations)
        assert not set(destinations) & {copy.source for copy in plan.copies}
        for copy in plan.copies:
            assert 0 < copy.num_tokens < size and copy.source and copy.destination
            for i in range(copy.num_tokens):
                self._kv[copy.destination * size + i] = before[copy.source * size + i]

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

    def preempt(self, request: TrackedRequest) -> None:
        """As the scheduler would."""
        if self._in_flight is not None:
            self.scheduler.settle(self._receive())
        if request.lease is not None:  # else its last token has ended it
            self.scheduler._preempt(request)


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
) -> CheckedEngine:
    """`asynchronous`: None for what the test is run with, see conftest.py."""
    geometry = CacheGeometry(
        block_size=block_size,
        kernel_chunk=kernel_chunk if recurrent else 1,
        num_blocks=num_blocks if attention else 0,
        max_requests=max_requests,
        num_cached_slots=cached_slots,
        bytes_per_block=1 if attention else 0,
        bytes_per_state=1 if recurrent else 0,
    )
    placement = CheckpointPlacement(geometry, exact_ends=exact_ends, interval=interval)
    context = DynamicInferenceContext(
        geometry,
        max_tokens=max_tokens,
        max_seq_length=max_seq_length,
        cache=HybridCache(geometry, enabled=prefix_caching, policy=policy, checkpoints=placement),
    )
    return CheckedEngine(
        context,
        SymbolicRunner(
            context, asynchronous=default_asynchronous if asynchronous is None else asynchronous
        ),
        vocab_size=VOCAB,
        eos_token_ids=eos,
        break_at_checkpoints=mode == "break",
        clock=clock,
    )


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
