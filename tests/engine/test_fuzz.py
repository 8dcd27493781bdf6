"""Long random runs over small pools: more sharing, eviction and waiting than hypothesis makes."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_hybrid.request import FinishReason, RequestEvent, SamplingParams
from tests.engine.symbolic import SymbolicRunner, expected_answer, make_engine, random_tokens


@pytest.mark.parametrize("seed", range(40))
def test_a_crowded_engine_answers_every_request_right_and_leaks_nothing(seed):
    rng = np.random.default_rng(seed)
    engine = make_engine(
        kernel_chunk=int(rng.choice([2, 4, 8])),
        num_blocks=int(rng.integers(32, 80)),
        max_requests=int(rng.integers(1, 6)),
        cached_slots=int(rng.integers(1, 8)),
        max_tokens=int(rng.choice([6, 9, 24, 64])),
        attention=seed % 5 != 4,
        recurrent=seed % 5 != 3,
        mode=str(rng.choice(["extract", "break"])),
    )
    runner = engine.runner
    assert isinstance(runner, SymbolicRunner)
    bases = [random_tokens(seed * 10 + i, 100) for i in range(3)]
    prompts: dict[str, list[int]] = {}
    outputs: dict[str, list[int]] = {}
    ended: dict[str, RequestEvent] = {}
    for _ in range(400):
        action = rng.random()
        if action < 0.4 and len(prompts) - len(ended) < 8:
            name = f"r{len(prompts)}"
            if ended and rng.random() < 0.4:
                former = str(rng.choice(sorted(ended)))
                prompt = (prompts[former] + outputs[former])[: int(rng.integers(1, 110))]
                prompt = prompt + [int(rng.integers(0, 97))]
            else:
                base = bases[int(rng.integers(0, 3))]
                prompt = base[: int(rng.integers(1, 100))]
                prompt = prompt + rng.integers(0, 97, int(rng.integers(0, 9))).tolist()
            prompts[name], outputs[name] = prompt, []
            params = SamplingParams(
                temperature=0.0,
                max_tokens=int(rng.integers(1, 16)),
                ignore_eos=True,
                prompt_logprobs=0 if rng.random() < 0.1 else None,
            )
            engine.add_request(name, prompt, params, cache_salt=str(rng.choice(["", "", "", "s"])))
        elif action < 0.43 and len(prompts) > len(ended):
            engine.abort(str(rng.choice(sorted(prompts.keys() - ended.keys()))))
        elif action < 0.45:
            runner.fail_next = True
        elif action < 0.46:
            engine.reset()
        _step(engine, outputs, ended)
        for name in list(prompts)[-6:]:
            _check_that_no_block_is_an_orphan(engine, prompts[name] + outputs[name])
    while engine.has_work():
        _step(engine, outputs, ended)
    assert ended.keys() == prompts.keys()
    for name, output in outputs.items():
        assert output == expected_answer(prompts[name], len(output)), name
    use = engine.context.cache.occupancy()
    assert use.kv_used == use.state_used == 0
    assert engine.stats()["skipped_tokens"] > 0


def _check_that_no_block_is_an_orphan(engine, tokens):  # type: ignore[no-untyped-def]
    cache = engine.context.cache
    for salt in ("", "s"):
        keys = cache.keys_of(np.asarray(tokens, dtype=np.int32), salt).blocks
        mapped = [key in cache.kv.kv_hash_to_block_id for key in keys]
        assert mapped == sorted(mapped, reverse=True)


def _step(engine, outputs, ended):  # type: ignore[no-untyped-def]
    for event in engine.step():
        outputs[event.request_id] += event.token_ids
        assert event.request_id not in ended
        if event.finish_reason is not None:
            ended[event.request_id] = event
            assert event.finish_reason in set(FinishReason)
    engine.check_integrity()


@pytest.mark.parametrize("kind", ["hybrid", "attention", "recurrent"])
def test_another_salt_never_finds_what_was_computed(kind):
    engine = make_engine(attention=kind != "recurrent", recurrent=kind != "attention")
    prompt = random_tokens(7, 60)
    params = SamplingParams(temperature=0.0, max_tokens=2)
    cached = []
    for i, salt in enumerate(["", "a", "b", "a", ""]):
        engine.add_request(f"r{i}", prompt, params, cache_salt=salt)
        while engine.has_work():
            for event in engine.step():
                last = event
        cached.append(last.cached_tokens > 0)
    assert cached == [False, False, False, True, True]
