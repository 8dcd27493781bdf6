"""Whatever happens in an engine, a router that applies its events knows what its cache holds."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant

from megatron_hybrid.cache.block_hash import SequenceKeys, root_key
from megatron_hybrid.cache.changes import LOGITS, STATES
from megatron_hybrid.kv_events.messages import BlockRemoved, BlockStored
from megatron_hybrid.request import SamplingParams
from tests.engine.symbolic import make_engine, random_tokens
from tests.engine.test_fuzz import SCOPES, Crowd
from tests.engine.test_state_machine import EngineMachine
from tests.kv_events.observer import Observer
from tests.thorough import usually


class ObservedCrowd(Crowd):
    observer: Observer | None = None

    def act(self) -> None:
        if self.observer is None:
            self.observer = Observer(self.engine)
        if self.rng.random() < 0.01 and not self.engine.runner.in_flight:
            self.engine.update_weights("a folder")
        super().act()

    def step(self) -> None:
        super().step()
        assert self.observer is not None
        self.observer.look()
        self.observer.check_snapshot()
        for key in list(self.prompts)[-4:]:
            tokens = self.prompts[key] + self.outputs[key]
            for salt, adapter in SCOPES:
                self.observer.check_prompt(tokens, salt, adapter)
            self.observer.check_prompt(self.prompts[key])


@pytest.mark.parametrize("seed", range(0, 10, usually(3, 1)))
def test_a_router_knows_what_a_crowded_engine_holds(seed: int):
    crowd = ObservedCrowd(seed, steps=150, num_blocks=32 + 4 * (seed % 3))
    assert crowd.observer is not None
    kinds = Counter((type(event).__name__, getattr(event, "group_idx", 0)) for event in
                    crowd.observer.events)  # fmt: skip
    geometry = crowd.engine.context.geometry
    if geometry.has_attention:
        assert kinds["BlockStored", 0] > 20 and kinds["BlockRemoved", 0] > 10
    if geometry.has_recurrent:
        assert kinds["BlockStored", STATES] > 20 and kinds["BlockRemoved", STATES] > 10
    assert kinds["AllBlocksCleared", 0] >= 1


@pytest.mark.parametrize("seed", range(3, 6))  # attention alone, recurrent alone, both
def test_a_router_knows_what_is_in_memory_of_the_host(seed: int):
    crowd = ObservedCrowd(seed, steps=300, num_blocks=32, policy="replay_cost", host_pages=24)
    assert crowd.observer is not None
    kinds = Counter((type(event).__name__, event.group_idx) for event in crowd.observer.events
                    if getattr(event, "medium", "") == "CPU")  # fmt: skip
    geometry = crowd.engine.context.geometry
    if geometry.has_attention:
        assert kinds["BlockStored", 0] > 10 and kinds["BlockRemoved", 0] > 5
    if geometry.has_recurrent:
        assert kinds["BlockStored", STATES] > 5 and kinds["BlockRemoved", STATES] > 5


def test_the_logits_at_a_prompts_end_come_and_go():
    """In a model without recurrent layers the tail outlives them."""
    crowd = ObservedCrowd(
        3, steps=300, attention=True, recurrent=False, exact_ends=True, cached_slots=2
    )
    assert crowd.observer is not None
    events = crowd.observer.events
    assert any(isinstance(event, BlockStored) and event.has_logits for event in events)
    assert any(isinstance(event, BlockRemoved) and event.group_idx == LOGITS for event in events)


def test_logits_that_come_later_are_told_of():
    """A state that was left on the way becomes the end of a whole prompt."""
    engine = make_engine(exact_ends=True)
    observer = Observer(engine)
    prompt = random_tokens(1, 60)
    for name, length, checkpoints in (("long", 60, (40,)), ("short", 40, ())):
        params = SamplingParams(temperature=0.0, max_tokens=1)
        engine.add_request(name, prompt[:length], params, cache_checkpoints=checkpoints)
        while engine.has_work():
            engine.step()
        observer.look()
        observer.check_prompt(prompt[:40])
    array = np.asarray(prompt, dtype=np.int32)
    root = root_key(0, stored_as=observer.contents.stored_as)
    keys = SequenceKeys(root, observer.contents.block_size, lambda a, b: array[a:b])
    assert observer.contents.skippable(keys, 40) == 40


class ObservedMachine(EngineMachine):
    """The engine's state machine, with a router beside it that looks after every rule."""

    observer: Observer | None = None

    @invariant()
    def the_router_knows(self) -> None:
        if not hasattr(self, "engine"):
            return
        if self.observer is None:
            self.observer = Observer(self.engine)
        self.observer.look()
        self.observer.check_snapshot()
        for key in list(self.prompts)[-3:]:
            tokens = self.prompts[key] + self.outputs[key]
            for salt in ("", "other"):
                self.observer.check_prompt(tokens, salt)


TestObservedMachine = ObservedMachine.TestCase
TestObservedMachine.settings = settings(
    max_examples=usually(25, 40),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
