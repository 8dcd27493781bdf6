"""The driver runs the real scheduler, and fast-forward decides what the plain loop decides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hybrid.engine.integrity import check_integrity
from simulation.driver import Simulation
from simulation.policies import POLICIES
from simulation.pools import SHAPES, divide_pool, unlimited_pool
from simulation.traces import make_trace
from tests.thorough import A_THIRD, usually

SHAPE = SHAPES["nemotron-h-8b"]
GIB = 2**30


def simulate(name, requests, geometry, policy="ours", *, fast_forward=True, seed=1):
    """The simulation after its run, and each sample's skipped tokens in order of their ends."""
    skipped = []
    simulation = Simulation(
        make_trace(name, requests, seed),
        POLICIES[policy].builds[-1](geometry, SHAPE),
        twins=POLICIES[policy].twins,
        fast_forward=fast_forward,
        on_finish=lambda traced, tracked: skipped.append(
            (tracked.key, dict(tracked.counters), tracked.output)
        ),
    )
    simulation.run()
    return simulation, skipped


CASES = [
    # (trace, requests, GiB, share for states, policy)
    usually(("mixed", 600, 30, 0.7, "ours"), ("mixed", 1_000, 40, 0.7, "ours")),
    ("chat", 500, 12, 0.7, "ours"),
    ("agents", 400, 16, 0.95, "ours"),
    ("forks", 150, 8, 0.7, "ours"),
    ("mixed", 400, 20, 0.7, "block-lru"),
    ("mixed", 400, 20, 0.7, "periodic"),
    ("mixed", 400, 20, 0.7, "marconi"),
    ("forks", 100, 8, 0.7, "no-twins"),
]


@pytest.mark.parametrize(
    ("name", "requests", "gigabytes", "split", "policy"), usually(CASES[1:2], CASES)
)
def test_fast_forward_decides_what_the_plain_loop_decides(name, requests, gigabytes, split, policy):
    geometry = divide_pool(SHAPE, gigabytes * GIB, split)
    assert_alike(name, requests, geometry, policy)


def assert_alike(name, requests, geometry, policy):
    """Fast-forward and the plain loop decide alike; returns the fast simulation."""
    fast, skipped = simulate(name, requests, geometry, policy)
    plain, expected = simulate(name, requests, geometry, policy, fast_forward=False)
    assert skipped == expected
    a, b = fast.result, plain.result
    own = {"executed_steps": 0, "scheduler_seconds": 0, "seconds": 0}
    assert replace(a, **own) == replace(b, **own)
    assert a.kv_evictions > 0
    cache, other = fast.context.cache, plain.context.cache
    assert fast.statistics.lost_tokens == plain.statistics.lost_tokens
    assert list(cache.kv.kv_hash_to_block_id.items()) == list(other.kv.kv_hash_to_block_id.items())
    assert list(cache.kv.tails.items()) == list(other.kv.tails.items())
    assert list(cache.states.mamba_hash_to_slot_id.items()) == list(
        other.states.mamba_hash_to_slot_id.items()
    )
    assert cache.checkpoints_published == other.checkpoints_published
    assert cache.checkpoints_read == other.checkpoints_read
    assert a.executed_steps < b.executed_steps
    return fast


def test_rows_that_are_preempted_while_they_are_parked_are_brought_back():
    geometry = replace(unlimited_pool(SHAPE, blocks=270, slots=40), max_requests=24)
    simulation = assert_alike("forks", usually(60, 150), geometry, "ours")
    assert simulation.result.preemptions > 0


@A_THIRD
@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_held_after_the_last_answer(policy):
    simulation, skipped = simulate("mixed", 150, divide_pool(SHAPE, 30 * GIB, 0.7), policy)
    assert len(skipped) == simulation.result.sequences
    check_integrity(simulation.context)
    occupancy = simulation.context.cache.occupancy()
    assert occupancy.kv_used == 0 and occupancy.state_used == 0


def test_answers_are_the_scripted_ones():
    answers = {}
    simulation, finished = simulate("shared", 200, divide_pool(SHAPE, 30 * GIB, 0.7))
    trace = make_trace("shared", 200, seed=1)
    outputs = {key: output for key, _, output in finished}
    # first questions come at times that no engine changes
    for request in trace.take(10**9):
        answers[request.prompt().tobytes()] = request.answers[0].tolist()
    assert len(answers) == 200
    assert sum(output in answers.values() for output in outputs.values()) > 150
    assert simulation.result.generated_tokens == sum(map(len, outputs.values()))


def test_an_unlimited_pool_evicts_nothing_and_skips_most():
    simulation, _ = simulate("chat", 500, unlimited_pool(SHAPE, 30_000, 3_000))
    result = simulation.result
    assert result.kv_evictions == result.state_evictions == 0
    assert 0.6 < result.skipped_share < 1
    assert result.held_bytes > 0


def test_a_pool_too_small_for_a_request_is_refused():
    with pytest.raises(ValueError, match="live states and KV of"):
        divide_pool(SHAPE, GIB, 0.9)


def test_policies_differ_where_they_should():
    geometry = divide_pool(SHAPE, 40 * GIB, 0.8)
    published = {}
    for policy in ("ours", "block-lru", "periodic", "marconi"):
        simulation, _ = simulate("chat", 200, geometry, policy)
        published[policy] = simulation.context.cache.checkpoints_published
    assert published["ours"]["prompt_end"] and published["ours"]["answer_end"]
    assert not published["block-lru"].keys() & {"prompt_end", "interval", "hint", "decode"}
    assert published["periodic"]["interval"] and not published["periodic"]["divergence"]
    assert published["marconi"].keys() <= {"divergence", "answer_end", "fork"}
    assert published["marconi"]["answer_end"] == 200
