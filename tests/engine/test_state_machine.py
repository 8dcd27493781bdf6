"""Any order of events leaves every invariant intact and every answer right."""

from __future__ import annotations

import os

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from megatron_hybrid.pause_mode import PAUSE_MODES
from megatron_hybrid.request import FinishReason, SamplingParams
from tests.engine.symbolic import expected_answer, make_engine, random_tokens
from tests.engine.symbolic_store import SymbolicStore
from tests.thorough import usually

BASES = [random_tokens(seed, 120) for seed in range(3)]
Answer = tuple[str, int]  # request id and index


class EngineMachine(RuleBasedStateMachine):
    """Submits, steps, aborts, fails, preempts, pauses, idles and resets an engine with small pools,
    and gives it new weights."""

    @initialize(
        kernel_chunk=st.sampled_from([2, 4, 8]),
        num_blocks=st.integers(31, 70),
        max_requests=st.integers(1, 5),
        cached_slots=st.integers(0, 8),
        max_tokens=st.sampled_from([5, 7, 16, 64]),
        kind=st.sampled_from(["hybrid", "hybrid", "hybrid", "attention", "recurrent"]),
        mode=st.sampled_from(["extract", "break"]),
        prefix_caching=st.sampled_from([True] * 5 + [False]),
        exact_ends=st.sampled_from([True, True, False]),
        interval=st.sampled_from([0, 8, 20]),
        policy=st.sampled_from(["replay_cost", "replay_cost", "lru", "ref_zero"]),
        asynchronous=st.booleans(),
        drafts=st.sampled_from([0, 1, 3]),
        right=st.sampled_from([0.3, 0.8, 1.0]),
        packed=st.booleans(),
        batch_invariant=st.sampled_from([False, False, True]),
        window=st.sampled_from([0, 0, 1, 3, 9, 24]),
        spare_window_blocks=st.sampled_from([0, 0, 3, 20]),
        host_pages=st.sampled_from([0, 40, 150]),
        slowest_copy=st.integers(1, 5),
        store=st.sampled_from([None, (0.0, 0.0), (0.2, 0.05)]),
    )
    def start(self, kind: str, store: tuple[float, float] | None, **options) -> None:  # type: ignore[no-untyped-def]
        self.exact_ends = options["exact_ends"]
        if store is not None:
            loses, fails = store
            options["store"] = SymbolicStore(loses=loses, fails=fails)
        self.options = options | {
            "attention": kind != "recurrent",
            "recurrent": kind != "attention",
        }
        if options["window"]:  # which memory of the host does not have
            self.options |= {"host_pages": 0, "store": None}
        self.engine = make_engine(**self.options)
        self.submitted, self.restarted = 0, False
        self.prompts: dict[Answer, list[int]] = {}
        self.max_tokens: dict[Answer, int] = {}
        self.most_skipped: dict[Answer, int] = {}
        self.aborted: set[Answer] = set()
        self.outputs: dict[Answer, list[int]] = {}
        self.reasons: dict[Answer, FinishReason] = {}
        self.cached: dict[Answer, int] = {}

    @rule(
        base=st.integers(0, 2),
        shared=st.integers(0, 90),
        own=st.lists(st.integers(0, 96), max_size=12),
        count=st.integers(0, 12),
        salt=st.sampled_from(["", "", "", "other"]),
        adapter=st.sampled_from(["", "", "", "tuned"]),
        logprobs_from=st.sampled_from([None] * 6 + [0.0, 0.5, 0.99]),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        priority=st.sampled_from([0, 0, -1, 2]),
        data=st.data(),
    )
    def submit(  # type: ignore[no-untyped-def]
        self, base, shared, own, count, salt, adapter, logprobs_from, n, priority, data
    ) -> None:
        prompt = BASES[base][:shared] + own or [1]
        positions = st.lists(st.integers(1, len(prompt)), max_size=3)
        self.add(
            prompt, count, n, logprobs_from, cache_salt=salt, adapter=adapter,
            priority=priority, cache_checkpoints=data.draw(positions),
            message_ends=sorted(set(data.draw(positions))),
        )  # fmt: skip

    def add(self, prompt, count, n=1, logprobs_from=None, **options) -> None:  # type: ignore[no-untyped-def]
        name = f"r{self.submitted}"
        self.submitted += 1
        for index in range(n):
            self.prompts[name, index], self.max_tokens[name, index] = prompt, count
            self.outputs[name, index] = []
        start = int((logprobs_from or 0) * len(prompt))
        if logprobs_from is not None:
            self.most_skipped[name, 0] = max(0, start - 1)
        params = SamplingParams(
            temperature=0.0,
            max_tokens=count,
            ignore_eos=True,
            prompt_logprobs=None if logprobs_from is None else 0,
            prompt_logprobs_start=start,
            n=n,
        )
        self.engine.add_request(name, prompt, params, **options)

    @rule(data=st.data())
    def continue_a_conversation(self, data) -> None:  # type: ignore[no-untyped-def]
        done = sorted(key for key, r in self.reasons.items() if r is FinishReason.LENGTH)
        if done:
            key = data.draw(st.sampled_from(done))
            self.add((self.prompts[key] + self.outputs[key])[:104] + [5, 6], 3)

    @rule(data=st.data())
    def ask_again(self, data) -> None:  # type: ignore[no-untyped-def]
        if self.prompts:
            self.add(self.prompts[data.draw(st.sampled_from(sorted(self.prompts)))], 2)

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            before = self.engine.stats()
            for event in self.engine.step():
                key = event.request_id, event.index
                assert key not in self.reasons, "an event after the last one"
                self.outputs[key] += event.token_ids
                self.cached[key] = event.cached_tokens
                if event.finish_reason is not None:
                    self.reasons[key] = event.finish_reason
                    self.check_counters(key, event.counters or {})
            after = self.engine.stats()
            assert after["steps"] >= before["steps"]
            self.engine.check_integrity()

    def check_counters(self, key: Answer, counters: dict[str, int]) -> None:
        # a preempted one may skip what is left of a block that it had begun to compute
        if not self.exact_ends and not counters.get("preemptions"):
            assert self.cached[key] % self.engine.context.geometry.block_size == 0
            assert self.cached[key] < len(self.prompts[key])
        if self.reasons[key] is FinishReason.LENGTH:
            computed, skipped = counters.get("computed_tokens", 0), self.cached[key]
            assert skipped == counters.get("skipped_tokens", 0)
            assert computed + skipped == counters["prompt_tokens"] == len(self.prompts[key])
            assert skipped <= self.most_skipped.get(key, skipped)

    @rule(data=st.data(), whole=st.booleans())
    def abort(self, data, whole: bool) -> None:  # type: ignore[no-untyped-def]
        open_answers = sorted(self.prompts.keys() - self.reasons.keys())
        if open_answers:
            name, index = data.draw(st.sampled_from(open_answers))
            self.aborted |= {k for k in open_answers if k[0] == name and (whole or k[1] == index)}
            self.engine.abort(name, None if whole else index)
            self.engine.abort(name, None if whole else index)

    @rule()
    def fail_a_step(self) -> None:
        runner = self.engine.runner
        runner.fail_next = True
        self.step(1)
        runner.fail_next = False

    @rule()
    def lose_a_result(self) -> None:
        runner = self.engine.runner
        runner.lose_next = RuntimeError("the result was made to be lost")
        self.step(1)
        runner.lose_next = None
        self.step(1)

    @rule(data=st.data())
    def preempt(self, data) -> None:  # type: ignore[no-untyped-def]
        running = sorted(self.engine.context.running(), key=lambda one: one.request.key)
        if running:
            self.engine.preempt(data.draw(st.sampled_from(running)))

    @rule()
    def idle(self) -> None:
        before = self.engine.stats()
        self.engine.dummy_forward()
        assert self.engine.stats() == before
        if not self.engine.has_work():
            self.engine.use_idle_time()
            self.engine.check_integrity()

    @rule()
    def restart(self) -> None:
        """Where nobody waits: what the store has stays."""
        if not self.prompts.keys() - self.reasons.keys() and self.engine.epoch == 0:
            self.engine, self.restarted = make_engine(**self.options), True

    @rule(preserve=st.booleans())
    def reset(self, preserve: bool) -> None:
        maps = self.engine.context.kv_hash_to_block_id, self.engine.context.mamba_hash_to_slot_id
        before = tuple(map(dict, maps))
        self.engine.reset(preserve_prefix_cache=preserve)
        assert tuple(map(dict, maps)) == (before if preserve else ({}, {}))

    @rule(mode=st.sampled_from(PAUSE_MODES))
    def pause(self, mode: str) -> None:
        if mode == "abort":
            self.aborted |= self.prompts.keys() - self.reasons.keys()
        self.engine.pause(mode)

    @rule(mode=st.sampled_from(["", *PAUSE_MODES]))
    def new_weights(self, mode: str) -> None:
        """Those of the runner never change; what was computed with the old ones must not be found.
        With a mode: as a trainer does, when the engine has come to rest."""
        if mode:
            self.pause(mode)
            while not self.engine.is_quiet:
                self.step(1)
            open_answers = {request.key for request in self.engine.scheduler.started()}
            assert mode == "keep" or not open_answers
            assert self.engine.step() == []
        epoch = self.engine.epoch
        self.engine.update_weights("a folder")
        assert self.engine.epoch == epoch + 1
        context = self.engine.context
        assert not context.kv_hash_to_block_id and not context.mamba_hash_to_slot_id

    @rule()
    def resume(self) -> None:
        self.engine.resume()

    @rule(limit=st.sampled_from([6, 12, 64]))
    def change_the_load(self, limit: int) -> None:
        """Another step budget: as if the load that is offered to a step changed."""
        context = self.engine.context
        context.max_tokens = max(limit, context.geometry.max_requests)

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.check_integrity()
        for key, output in self.outputs.items():
            assert output == expected_answer(self.prompts[key], len(output)), key
            assert len(output) <= self.max_tokens[key]
        for key, cached in self.cached.items():
            assert 0 <= cached <= len(self.prompts[key])

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.resume()
        for _ in range(5000):
            if not self.engine.has_work():
                break
            self.step(1)
        assert self.reasons.keys() == self.prompts.keys(), "a request never ended"
        for key, reason in self.reasons.items():
            if reason is FinishReason.LENGTH:
                assert len(self.outputs[key]) == self.max_tokens[key]
            elif reason is FinishReason.ABORT:
                assert key in self.aborted
        transfers = self.engine.context.transfers
        for _ in range(100):  # what is under way comes to its end
            transfers.begin_step(10**6)
        use = self.engine.context.cache.occupancy()
        assert use.kv_used == use.state_used == use.window_used == 0, "something leaked"
        assert not list(self.engine.scheduler.twins.pins), "something is kept for nobody"
        assert not list(transfers.pins()), "something is kept for nobody"
        stats = self.engine.stats()
        ended_early = (FinishReason.ABORT, FinishReason.ERROR)
        if not self.restarted and not any(r in ended_early for r in self.reasons.values()):
            assert stats["computed_tokens"] + stats["skipped_tokens"] == stats["prompt_tokens"]


# HYPOTHESIS_EXAMPLES: fewer for a quick look, more for a long one.
TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", usually("60", "300"))),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
