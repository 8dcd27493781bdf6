"""A runner that computes prefix hashes instead of activations, and checks everything it reads.

A KV entry holds the hash of the tokens up to its position, a state slot the hash of the tokens it
has seen. So a wrong block, a wrong slot or a stale value is an assertion at the step that reads
it, and the "answer" of a prompt is known without any engine (`expected_answer`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hybrid.cache.checkpoint_placement import CheckpointPlacement
from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.cache.hybrid_cache import HybridCache
from megatron_hybrid.engine.context import DynamicInferenceContext
from megatron_hybrid.engine.engine import DynamicInferenceEngine
from megatron_hybrid.execution.plan import StepPlan, StepResult
from megatron_hybrid.request import FinishReason, RequestEvent, SamplingParams, TokenLogprob

VOCAB = 97
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


class SymbolicRunner:
    """Holds what the tensors would hold. `fail_next` makes the coming step raise."""

    def __init__(self, context: DynamicInferenceContext) -> None:
        self._context = context
        self._kv: dict[int, int] = {}
        self._states: dict[int, int] = {0: EMPTY}
        self._logits: dict[int, int] = {}  # by slot: the hash that the next token comes from
        self.fail_next = False
        self.plans: list[StepPlan] = []
        self.wrong: AssertionError | None = None

    def dummy_forward(self) -> None:
        pass

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        try:
            return self._execute(plan)
        except AssertionError as error:  # the engine survives a failing step, the test must not
            self.wrong = error
            raise

    def _execute(self, plan: StepPlan) -> StepResult:
        context, rows = self._context, self._context.rows
        assert len(plan.decode_rows) + plan.num_prefill_tokens <= context.max_tokens
        writes: list[tuple[int, int]] = []  # of states: all reads come first
        tokens: list[int] = []
        prompt_logprobs: dict[int, list[TokenLogprob]] = {}
        kept_logits = dict(self._logits)  # what is read was stored by an earlier step
        self._copy_blocks(plan)
        for row in plan.decode_rows.tolist():
            request = context.requests[row]
            assert request is not None
            end = int(rows.position[row]) + 1
            history = request.tokens(0, end)
            assert history[-1] == rows.last_token[row]
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
        return StepResult(np.asarray(tokens, dtype=np.int64), {}, prompt_logprobs)

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

    def step(self) -> list[RequestEvent]:
        events = super().step()
        if isinstance(self.runner, SymbolicRunner) and self.runner.wrong is not None:
            raise self.runner.wrong
        return events


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
) -> DynamicInferenceEngine:
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
        SymbolicRunner(context),
        vocab_size=VOCAB,
        eos_token_ids=eos,
        break_at_checkpoints=mode == "break",
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
