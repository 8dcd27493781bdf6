"""The golden figures of the design, through scheduler and cache; the model's are in
oracle_tests.py."""

from __future__ import annotations

import pytest

from tests.engine.symbolic import generate, make_engine, random_tokens
from tests.thorough import A_THIRD, usually

T = random_tokens(1, 2000)
U = random_tokens(2, 2000)
pytestmark = pytest.mark.usefixtures("asynchronous")

MODES = pytest.mark.parametrize("mode", ["extract", "break"])
BUDGETS = pytest.mark.parametrize("budget", usually([8192, 100], [8192, 300, 256, 128, 100]))


def big_engine(mode: str, budget: int = 8192, **options):  # type: ignore[no-untyped-def]
    return make_engine(
        block_size=256, kernel_chunk=256, num_blocks=100, cached_slots=50, max_tokens=budget,
        max_seq_length=2048, mode=mode, **options,
    )  # fmt: skip


def is_thorough(test: str, mode: str = "", asynchronous: bool = False, **others: object) -> bool:
    """Whether CI leaves this case out: half of them."""
    return mode != "" and (mode == "break") == asynchronous


@A_THIRD
@MODES
@BUDGETS
def test_five_prompts_that_share_their_beginning_compute_1240_of_3800(mode, budget):
    engine = big_engine(mode, budget)
    prompts = [T[:300], T[:800], T[:800], T[:800], T[:800] + U[:300]]
    cached = [generate(engine, [prompt], max_tokens=64)[0].cached_tokens for prompt in prompts]
    computed = [len(prompt) - c for prompt, c in zip(prompts, cached, strict=True)]
    assert computed == [300, 544, 32, 32, 332]
    stats = engine.stats()
    assert stats["prompt_tokens"] == 3800
    assert stats["computed_tokens"] == 1240
    assert stats["skipped_tokens"] == 2560


@A_THIRD
@MODES
@BUDGETS
def test_the_same_five_at_once_compute_1240_too(mode, budget):
    engine = big_engine(mode, budget)
    generate(engine, [T[:300], T[:800], T[:800], T[:800], T[:800] + U[:300]], max_tokens=64)
    assert engine.stats()["computed_tokens"] == 1240


@A_THIRD
@MODES
@BUDGETS
@pytest.mark.parametrize("at_once", [True, False])
def test_with_exact_ends_the_five_compute_300_500_0_0_and_300(mode, budget, at_once):
    engine = big_engine(mode, budget, exact_ends=True)
    prompts = [T[:300], T[:800], T[:800], T[:800], T[:800] + U[:300]]
    if at_once:
        events = generate(engine, prompts, max_tokens=64)
    else:
        events = [generate(engine, [prompt], max_tokens=64)[0] for prompt in prompts]
    computed = [len(p) - event.cached_tokens for p, event in zip(prompts, events, strict=True)]
    assert computed == [300, 500, 0, 0, 300]
    assert engine.stats()["computed_tokens"] == 1100


@MODES
@BUDGETS
def test_sixteen_samples_of_40_tokens_compute_40(mode, budget):
    engine = big_engine(mode, budget, exact_ends=True)
    generate(engine, [T[:40]] * 16, max_tokens=3)
    assert engine.stats()["computed_tokens"] == 40


@MODES
@BUDGETS
def test_prompts_that_end_on_the_grid_resume_from_each_others_end(mode, budget):
    engine = big_engine(mode, budget)
    prompts = [T[:256], T[:256], T[:512], T[:512]]
    cached = [generate(engine, [prompt], max_tokens=1)[0].cached_tokens for prompt in prompts]
    assert [len(p) - c for p, c in zip(prompts, cached, strict=True)] == [256, 256, 256, 256]


@A_THIRD
@MODES
@pytest.mark.parametrize("length", range(480, 545))
def test_the_next_turn_skips_all_that_is_on_the_grid(mode, length):
    engine = make_engine(
        block_size=16, kernel_chunk=32, num_blocks=200, max_seq_length=1024, mode=mode
    )
    generate(engine, [T[:length]], max_tokens=5)
    (event,) = generate(engine, [T[:length] + U[:40]], max_tokens=2)
    assert event.cached_tokens == (length if length % 32 == 0 else (length - 1) // 32 * 32)


@MODES
def test_a_fork_point_gets_a_state_from_the_first_request_that_finds_it(mode):
    engine = make_engine(num_blocks=200, mode=mode)
    shared = T[:40]
    skips = [
        generate(engine, [shared + U[i * 20 : i * 20 + 13]])[0].cached_tokens for i in range(4)
    ]
    # the first leaves no state at 40; the second finds the KV and leaves one; the others use it
    assert skips == [0, 0, 40, 40]
    stats = engine.stats()
    assert stats["checkpoints_published"]["divergence"] == 1
    assert stats["lost_tokens"] == {"state_missing": 40}


def test_an_attention_only_model_skips_whole_blocks():
    engine = make_engine(recurrent=False)
    generate(engine, [T[:41]], max_tokens=6)
    assert generate(engine, [T[:41] + U[:9]])[0].cached_tokens == 40
    assert generate(engine, [T[:40]])[0].cached_tokens == 36  # one token at least is computed


def test_a_recurrent_only_model_resumes_from_its_states():
    engine = make_engine(attention=False)
    generate(engine, [T[:43]])
    assert generate(engine, [T[:43] + U[:9]])[0].cached_tokens == 40


def test_the_grid_is_the_least_common_multiple_of_block_and_kernel_chunk():
    engine = make_engine(block_size=6, kernel_chunk=4, num_blocks=100)
    assert engine.context.geometry.grid == 12
    generate(engine, [T[:40]])
    assert generate(engine, [T[:40]])[0].cached_tokens == 36


def test_without_room_for_a_state_a_hybrid_skips_nothing():
    engine = make_engine(cached_slots=0)
    generate(engine, [T[:40]])
    assert generate(engine, [T[:40]])[0].cached_tokens == 0
    assert engine.stats()["kv_cached"] == 0


def test_with_prefix_caching_off_nothing_is_kept():
    engine = make_engine(prefix_caching=False)
    generate(engine, [T[:40]])
    assert generate(engine, [T[:40]])[0].cached_tokens == 0
    assert engine.stats()["kv_cached"] == engine.stats()["state_cached"] == 0


def test_tokens_lost_to_the_grid_are_told_from_tokens_without_a_state():
    engine = make_engine(block_size=4, kernel_chunk=16, num_blocks=100)
    generate(engine, [T[:60]])  # leaves a state at 48
    (event,) = generate(engine, [T[:60] + U[:4]])
    assert event.cached_tokens == 48
    # 60 tokens matched: 48 to 60 are beyond the last grid position
    assert engine.stats()["lost_tokens"] == {"grid": 12}


def test_tokens_lost_to_an_evicted_state_are_counted_as_such():
    engine = make_engine(num_blocks=100, cached_slots=1, max_requests=1)
    generate(engine, [T[:40]])
    generate(engine, [U[:40]])  # one slot for cached states: evicts the state of T
    assert generate(engine, [T[:44]])[0].cached_tokens == 0
    assert engine.stats()["lost_tokens"]["state_evicted"] == 40
