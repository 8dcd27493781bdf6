"""Waiting for a twin: only where the tokens that it spares are worth the steps that it takes."""

from __future__ import annotations

import pytest

from megatron_hybrid.engine import twins
from megatron_hybrid.engine.twins import STEP_TOKENS, Twins
from megatron_hybrid.request import SamplingParams
from tests.engine import symbolic
from tests.engine.unchecked import make_engine, random_tokens
from tests.thorough import A_THIRD

T, OWN = random_tokens(61, 40_000), random_tokens(62, 40_000)
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def run(prompts: list[list[int]], **options: int) -> tuple[int, int]:
    """(steps, computed tokens) of prompts that come at once."""
    engine = make_engine(**{"block_size": 64, **options})
    for i, prompt in enumerate(prompts):
        engine.add_request(f"r{i}", prompt, ONE)
    while engine.has_work():
        engine.step()
    stats = engine.stats()
    return stats["steps"], stats["computed_tokens"]


def cost(prompts: list[list[int]], **options: int) -> int:
    """In tokens."""
    steps, computed = run(prompts, **options)
    return STEP_TOKENS * steps + computed


def growing(by: int, count: int) -> list[list[int]]:
    """Prompts of which each is so many tokens longer than the last."""
    return [T[: by * i] for i in range(1, count + 1)]


def test_five_hundred_prompts_that_grow_by_8_tokens_are_not_admitted_one_a_step():
    steps, computed = run(growing(8, 500))
    assert steps < 100  # 501 if everybody waits
    assert computed < 16_000  # 64,000 if nobody does, 4,000 if everybody


@A_THIRD
@pytest.mark.parametrize("by", [1, 8, 32, 64, 100, 300])
@pytest.mark.parametrize(("ascending", "most"), [(True, 1.02), (False, 1.3)])
def test_it_costs_little_more_than_the_better_of_waiting_always_and_never(
    by: int, ascending: bool, most: float, monkeypatch: pytest.MonkeyPatch
):
    prompts = growing(by, 50)
    if not ascending:
        prompts.reverse()
    chosen = cost(prompts)
    with monkeypatch.context() as patch:
        patch.setattr(Twins, "must_wait", lambda *arguments: False)
        never = cost(prompts)
    monkeypatch.setattr(twins, "STEP_TOKENS", 0)
    always = cost(prompts)
    assert chosen <= most * min(never, always)


@pytest.mark.parametrize(
    ("prompts", "computed"),
    [
        ([T[:2000]] * 30, 2000),
        ([T[:40]] * 30, 40),  # the same prompt is waited for, however short
        ([T[:2000] + [i] for i in range(30)], 2000 + 30),
        ([T[:2048] + OWN[100 * i :][:100] for i in range(30)], 2048 + 30 * 100),
        ([T[: STEP_TOKENS + 2] + OWN[100 * i :][:100] for i in range(30)], STEP_TOKENS + 2 + 3000),
        # the second does not wait for 100 tokens, the third does for twice as many
        ([T[:100] + OWN[100 * i :][:100] for i in range(30)], 2 * 100 + 30 * 100),
        ([T[:9000], T[:9000] + OWN[:50]], 9050),
    ],
)
def test_bursts_compute_what_they_share_once(prompts: list[list[int]], computed: int):
    assert run(prompts)[1] == computed


def test_who_would_not_be_computed_sooner_waits_for_few_tokens_too():
    engine = make_engine(max_tokens=256)
    engine.add_request("first", T[:200], ONE)
    engine.add_request("second", T[:80] + OWN[:100], ONE)
    engine.step()  # leaves room for 56 of the second's tokens
    assert engine.num_waiting == 1
    while engine.has_work():
        engine.step()
    assert engine.stats()["computed_tokens"] == 300


def test_who_has_begun_to_wait_goes_on_until_it_gets_what_it_waits_for():
    """The state at 128 comes a step before that at 200, and from there on 72 are not worth one."""
    engine = make_engine(block_size=64, kernel_chunk=128)
    engine.scheduler.twins.break_at_checkpoints = True
    engine.add_request("first", T[:264], ONE)
    engine.add_request("second", T[:264] + OWN[:20], ONE)
    engine.step()
    engine.step()
    assert engine.stats()["requests_waiting"] == 1
    while engine.has_work():
        engine.step()
    assert engine.stats()["computed_tokens"] == 284


def test_who_does_not_wait_leaves_no_state_that_another_one_leaves(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(twins, "STEP_BLOCKS", 1000)
    engine = symbolic.make_engine(
        num_blocks=400, max_tokens=400, max_requests=8, cached_slots=40, exact_ends=True
    )
    for i in range(3):
        engine.add_request(f"r{i}", [t % 90 for t in T[:41] + OWN[50 * i :][:20]], ONE)
    engine.step()
    ends = {chunk.owner.request_id: chunk.end for chunk in engine.runner.plans[0].prefills}
    assert ends == {"r0": 41, "r1": 61, "r2": 61}
    symbolic.run(engine)
