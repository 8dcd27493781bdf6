"""Long random runs over small pools: more of everything than hypothesis makes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest

from megatron_hybrid.cache.block_hash import SequenceKeys
from megatron_hybrid.engine.engine import DynamicInferenceEngine
from megatron_hybrid.execution.plan import StepPlan
from megatron_hybrid.request import FinishReason, RequestEvent, SamplingParams
from tests.engine.symbolic import expected_answer, make_engine, random_tokens
from tests.thorough import usually

ROOT = Path(__file__).parents[2]
SEEDS = usually((1, 6), (1, 2, 6, 7))
Answer = tuple[str, int]  # request id and index
SCOPES = [("", ""), ("s", ""), ("", "a")]  # salt and adapter


class Crowd:
    """One engine, and everything that was asked of it and came out of it."""

    def __init__(
        self, seed: int, steps: int = 300, long_answers: float = 0.3, **fixed: object
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.long_answers = long_answers  # share of requests that ask for one
        self.preempted_by_hand = 0
        rng = self.rng
        options: dict[str, object] = {
            "kernel_chunk": int(rng.choice([2, 4, 8])),
            "num_blocks": int(rng.integers(32, 80)),
            "max_requests": int(rng.integers(1, 6)),
            "cached_slots": int(rng.integers(1, 9)),
            "max_tokens": int(rng.choice([6, 9, 24, 64])),
            "attention": seed % 5 != 4,
            "recurrent": seed % 5 != 3,
            "mode": str(rng.choice(["extract", "break"])),
            "exact_ends": bool(rng.random() < 0.7),
            "interval": int(rng.choice([0, 8, 24])),
            "policy": str(rng.choice(["replay_cost", "lru", "ref_zero"])),
            "asynchronous": seed // 5 % 2 == 1,
            "drafts": int(rng.choice([0, 1, 3])),
            "right": float(rng.choice([0.3, 0.8, 1.0])),
            "packed": bool(rng.random() < 0.4),
        }
        self.engine = make_engine(**(options | fixed))  # type: ignore[arg-type]
        self.runner = self.engine.runner
        self.bases = [random_tokens(seed * 10 + i, 100) for i in range(3)]
        self.prompts: dict[Answer, list[int]] = {}
        self.outputs: dict[Answer, list[int]] = {}
        self.ended: dict[Answer, RequestEvent] = {}
        for _ in range(steps):
            self.act()
            self.step()
            for key in list(self.prompts)[-6:]:
                check_that_no_block_is_an_orphan(self.engine, self.prompts[key] + self.outputs[key])
        self.runner.fail_next = False
        while self.engine.has_work():
            self.step()

    def act(self) -> None:
        rng, open_answers = self.rng, sorted(self.prompts.keys() - self.ended.keys())
        action = rng.random()
        if action < 0.4 and len(open_answers) < 10:
            self.submit()
        elif action < 0.43 and open_answers:
            name, index = open_answers[int(rng.integers(len(open_answers)))]
            self.engine.abort(name, index if rng.random() < 0.5 else None)
        elif action < 0.45:
            self.runner.fail_next = True
        elif action < 0.455:
            self.engine.reset()
        elif action < 0.47 and (running := list(self.engine.context.running())):
            self.engine.preempt(running[int(rng.integers(len(running)))])
            self.preempted_by_hand += 1

    def submit(self) -> None:
        rng, name = self.rng, f"r{len(self.prompts)}"
        ended = sorted(self.ended)
        if ended and rng.random() < 0.4:
            former = ended[int(rng.integers(len(ended)))]
            prompt = (self.prompts[former] + self.outputs[former])[: int(rng.integers(1, 105))]
            if rng.random() < 0.7:  # else the same once more, or a part of it
                prompt = prompt + [int(rng.integers(0, 97))]
        else:
            prompt = self.bases[int(rng.integers(0, 3))][: int(rng.integers(1, 100))]
            prompt = prompt + rng.integers(0, 97, int(rng.integers(0, 9))).tolist()
        n = int(rng.choice([1, 1, 1, 2, 3]))
        for index in range(n):
            self.prompts[name, index], self.outputs[name, index] = prompt, []
        wants_logprobs = rng.random() < 0.2
        params = SamplingParams(
            temperature=0.0,
            max_tokens=(
                int(rng.integers(1, 128 - len(prompt)))
                if rng.random() < self.long_answers
                else int(rng.choice([0, 4]))
            ),
            ignore_eos=True,
            prompt_logprobs=0 if wants_logprobs else None,
            prompt_logprobs_start=int(rng.integers(0, len(prompt))) if wants_logprobs else 0,
            n=n,
        )
        salt, adapter = SCOPES[int(rng.choice([0, 0, 0, 1, 2]))]
        self.engine.add_request(
            name,
            prompt,
            params,
            cache_salt=salt,
            adapter=adapter,
            priority=int(rng.choice([0, 0, -1, 3])),
            cache_checkpoints=sorted(rng.integers(1, len(prompt) + 1, 2).tolist()),
            message_ends=sorted(rng.integers(1, len(prompt) + 1, 3).tolist()),
        )

    def step(self) -> None:
        for event in self.engine.step():
            key = event.request_id, event.index
            self.outputs[key] += event.token_ids
            assert key not in self.ended, "an event after the last one"
            assert 0 <= event.cached_tokens <= len(self.prompts[key])
            if event.finish_reason is not None:
                self.ended[key] = event
                assert event.finish_reason in set(FinishReason)
        self.engine.check_integrity()

    def check(self) -> None:
        """Every answer is right and complete, and nothing leaked."""
        assert self.ended.keys() == self.prompts.keys(), "a request never ended"
        for key, output in self.outputs.items():
            assert output == expected_answer(self.prompts[key], len(output)), key
        for key, event in self.ended.items():
            if event.finish_reason is FinishReason.LENGTH:
                counters = event.counters or {}
                computed = counters.get("computed_tokens", 0)
                assert computed + event.cached_tokens == len(self.prompts[key])
        cache = self.engine.context.cache
        use = cache.occupancy()
        assert use.kv_used == use.state_used == 0
        assert not list(self.engine.scheduler.twins.pins)
        # everything can be allocated again
        assert len(cache.store.allocate_blocks(use.kv_blocks)) == use.kv_blocks
        geometry = cache.geometry
        live = geometry.max_requests if geometry.packs_states else use.state_slots
        slots = [
            cache.store.allocate_slot(for_checkpoint=number >= live)
            for number in range(use.state_slots)
        ]
        cache.packing.begin_step()  # what waits to be packed needs its slot no longer
        assert cache.packing.num_free == geometry.num_staged_slots
        assert len(set(slots)) == use.state_slots
        assert not cache.kv.kv_hash_to_block_id and not cache.states.mamba_hash_to_slot_id

    def decisions(self) -> str:
        """A digest of every step that was planned."""
        digest = hashlib.sha256()
        for plan in self.runner.plans:
            digest.update(repr(_decided(plan)).encode())
        return digest.hexdigest()


def _decided(plan: StepPlan) -> tuple[object, ...]:
    return (
        plan.step,
        plan.decode_rows.tolist(),
        [
            (c.row, c.start, c.end, c.write_from, c.read_slot, c.write_slot, c.checkpoints,
             c.logits_slot, c.tokens.tolist())
            for c in plan.prefills
        ],
        [(resumed.row, resumed.logits_slot) for resumed in plan.resumed],
        [tuple(copy) for copy in plan.copies],
        [tuple(one) for one in plan.catch_ups],
        [tuple(move) for move in [*plan.packs, *plan.unpacks]],
        None if plan.drafts is None else [str(part) for part in astuple(plan.drafts)],
        str(plan.writes),
    )  # fmt: skip


def check_that_no_block_is_an_orphan(engine: DynamicInferenceEngine, tokens: list[int]) -> None:
    cache = engine.context.cache
    array = np.asarray(tokens, dtype=np.int32)
    for salt, adapter in SCOPES:
        keys = SequenceKeys(cache.root(salt, adapter), 4, lambda start, end: array[start:end])
        keys.extend_to(len(array))
        mapped = [key in cache.kv.kv_hash_to_block_id for key in keys.blocks]
        assert mapped == sorted(mapped, reverse=True)
        fills = cache.kv.tails.fills
        for count in range(len(keys.blocks) + 1):
            if keys.of_block(count) in fills and engine.context.geometry.has_attention:
                assert all(mapped[:count]), "a tail without the blocks before it"


@pytest.mark.parametrize("seed", range(usually(4, 40)))
def test_a_crowded_engine_answers_every_request_right_and_leaks_nothing(seed: int):
    crowd = Crowd(seed)
    skipped = crowd.engine.stats()["skipped_tokens"]
    crowd.check()
    assert skipped > 0


@pytest.mark.parametrize("seed", range(100, usually(102, 116)))
def test_an_engine_short_of_everything_answers_every_request_right(seed: int):
    """The pool holds one request of the longest sort; the rest lives by preemption."""
    crowd = Crowd(
        seed,
        steps=400,
        long_answers=0.7,
        num_blocks=32,
        max_requests=6,
        max_tokens=40,
        cached_slots=int(seed % 3) + 1,
        attention=True,
        policy="lru" if seed % 2 else "replay_cost",
    )
    stats = crowd.engine.stats()
    crowd.check()
    assert stats["preemptions"] > 1 + crowd.preempted_by_hand
    assert stats["kv_evictions"] > 20
    if crowd.engine.context.geometry.has_recurrent:
        assert stats["state_evictions"] > 20


def test_the_same_stream_of_events_gives_the_same_decisions():
    """Every rank of a model-parallel group decides alike, however its process hashes strings."""
    code = (
        "from tests.engine.test_fuzz import Crowd\n"
        f"print([Crowd(seed, 150, num_blocks=32).decisions() for seed in {SEEDS}])"
    )
    mine = str([Crowd(seed, 150, num_blocks=32).decisions() for seed in SEEDS])
    for hash_seed in usually(("1",), ("1", "2")):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True,
            timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.strip() == mine


@pytest.mark.parametrize("exact_ends", [True, False])
@pytest.mark.parametrize("kind", ["hybrid", "attention", "recurrent"])
@pytest.mark.parametrize("what", ["salt", "adapter", "epoch"])
def test_another_salt_adapter_or_epoch_never_finds_what_was_computed(
    kind: str, exact_ends: bool, what: str
):
    engine = make_engine(
        attention=kind != "recurrent", recurrent=kind != "attention", exact_ends=exact_ends
    )
    prompt = random_tokens(7, 62)
    params = SamplingParams(temperature=0.0, max_tokens=2)
    scopes = ["", "a", "b", "a", ""]
    cached = []
    for i, scope in enumerate(scopes):
        salt, adapter = (scope if what == name else "" for name in ("salt", "adapter"))
        if what == "epoch":  # without what set_epoch throws away
            engine.context.cache.epoch = len(scope) and ord(scope)
        engine.add_request(f"r{i}", prompt, params, cache_salt=salt, adapter=adapter)
        while engine.has_work():
            for event in engine.step():
                last = event
        cached.append(last.cached_tokens)
    again = 62 if exact_ends else 60
    assert cached == [0, 0, 0, again, again]
