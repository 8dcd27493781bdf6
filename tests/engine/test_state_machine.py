"""Any order of events leaves every invariant intact and every answer right."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from megatron_hybrid.engine.engine import DynamicInferenceEngine
from megatron_hybrid.request import FinishReason, SamplingParams
from tests.engine.symbolic import SymbolicRunner, expected_answer, make_engine, random_tokens

BASES = [random_tokens(seed, 120) for seed in range(3)]


class EngineMachine(RuleBasedStateMachine):
    """Submits, steps, aborts, fails, idles and resets an engine with small pools."""

    @initialize(
        kernel_chunk=st.sampled_from([2, 4, 8]),
        num_blocks=st.integers(40, 70),
        max_requests=st.integers(1, 4),
        cached_slots=st.integers(0, 6),
        max_tokens=st.sampled_from([4, 7, 16, 64]),
        kind=st.sampled_from(["hybrid", "hybrid", "attention", "recurrent"]),
        mode=st.sampled_from(["extract", "break"]),
        prefix_caching=st.sampled_from([True, True, True, False]),
    )
    def start(self, kind: str, **options) -> None:  # type: ignore[no-untyped-def]
        self.engine: DynamicInferenceEngine = make_engine(
            attention=kind != "recurrent", recurrent=kind != "attention", **options
        )
        self.prompts: dict[str, list[int]] = {}
        self.max_tokens: dict[str, int] = {}
        self.aborted: set[str] = set()
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.cached: dict[str, int] = {}

    @rule(
        base=st.integers(0, 2),
        shared=st.integers(0, 90),
        own=st.lists(st.integers(0, 96), max_size=12),
        count=st.integers(1, 10),
        salt=st.sampled_from(["", "", "", "other"]),
        wants_prompt_logprobs=st.sampled_from([False] * 7 + [True]),
    )
    def submit(self, base, shared, own, count, salt, wants_prompt_logprobs) -> None:  # type: ignore[no-untyped-def]
        prompt = BASES[base][:shared] + own or [1]
        name = f"r{len(self.prompts)}"
        self.prompts[name], self.max_tokens[name] = prompt, count
        self.outputs[name] = []
        params = SamplingParams(
            temperature=0.0,
            max_tokens=count,
            ignore_eos=True,
            prompt_logprobs=0 if wants_prompt_logprobs else None,
        )
        self.engine.add_request(name, prompt, params, cache_salt=salt)

    @rule(data=st.data())
    def continue_a_conversation(self, data) -> None:  # type: ignore[no-untyped-def]
        done = [n for n, r in self.reasons.items() if r is FinishReason.LENGTH]
        if done:
            name = data.draw(st.sampled_from(done))
            prompt = (self.prompts[name] + self.outputs[name])[:110]
            self.submit(0, 0, prompt + [5, 6], 3, "", False)

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            before = self.engine.stats()
            for event in self.engine.step():
                assert event.request_id not in self.reasons, "an event after the last one"
                self.outputs[event.request_id] += event.token_ids
                self.cached[event.request_id] = event.cached_tokens
                if event.finish_reason is not None:
                    self.reasons[event.request_id] = event.finish_reason
            after = self.engine.stats()
            assert after["steps"] >= before["steps"]
            self.engine.check_integrity()

    @rule(data=st.data())
    def abort(self, data) -> None:  # type: ignore[no-untyped-def]
        open_requests = sorted(self.prompts.keys() - self.reasons.keys())
        if open_requests:
            name = data.draw(st.sampled_from(open_requests))
            self.aborted.add(name)
            self.engine.abort(name)
            self.engine.abort(name)

    @rule()
    def fail_a_step(self) -> None:
        runner = self.engine.runner
        assert isinstance(runner, SymbolicRunner)
        runner.fail_next = True
        self.step(1)
        runner.fail_next = False

    @rule()
    def idle(self) -> None:
        before = self.engine.stats()
        self.engine.dummy_forward()
        assert self.engine.stats() == before

    @rule(preserve=st.booleans())
    def reset(self, preserve: bool) -> None:
        maps = self.engine.context.kv_hash_to_block_id, self.engine.context.mamba_hash_to_slot_id
        before = tuple(map(dict, maps))
        self.engine.reset(preserve_prefix_cache=preserve)
        assert tuple(map(dict, maps)) == (before if preserve else ({}, {}))

    @rule()
    def new_weights(self) -> None:
        cache = self.engine.context.cache
        if not self.engine.scheduler.has_work:  # the runner's "weights" never change
            cache.set_epoch(cache.epoch + 1)

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.check_integrity()
        for name, output in self.outputs.items():
            assert output == expected_answer(self.prompts[name], len(output)), name
            assert len(output) <= self.max_tokens[name]
        for name, cached in self.cached.items():
            assert 0 <= cached <= len(self.prompts[name]) - 1
            assert cached % self.engine.context.geometry.block_size == 0

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(5000):
            if not self.engine.has_work():
                break
            self.step(1)
        assert self.reasons.keys() == self.prompts.keys(), "a request never ended"
        for name, reason in self.reasons.items():
            if reason is FinishReason.LENGTH:
                assert len(self.outputs[name]) == self.max_tokens[name]
            elif reason is FinishReason.ABORT:
                assert name in self.aborted
        use = self.engine.context.cache.occupancy()
        assert use.kv_used == 0 and use.state_used == 0, "something leaked"
        assert not self.engine.context.cache._reserved
        stats = self.engine.stats()
        if not any(r in (FinishReason.ABORT, FinishReason.ERROR) for r in self.reasons.values()):
            assert stats["computed_tokens"] + stats["skipped_tokens"] == stats["prompt_tokens"]


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
