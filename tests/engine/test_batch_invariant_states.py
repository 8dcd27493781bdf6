"""In batch-invariant mode every state that is read is that after the last multiple of the granule,
and the rings hold the tokens since: see symbolic.py, which checks it in every step."""

from __future__ import annotations

import pytest

from megatron_hybrid.engine.decodes import Decodes
from megatron_hybrid.request import SamplingParams
from tests.engine.symbolic import answer, expected_answer, make_engine, random_tokens
from tests.engine.test_fuzz import Crowd
from tests.thorough import A_THIRD, usually

T = random_tokens(43, 3000)


@A_THIRD
@pytest.mark.parametrize("block_size", [4, 8, 12])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(usually(2, 40)))
def test_a_crowded_engine(seed: int, asynchronous: bool, block_size: int) -> None:
    crowd = Crowd(
        seed, steps=usually(150, 300), batch_invariant=True, asynchronous=asynchronous,
        block_size=block_size,
    )  # fmt: skip
    crowd.check()


def preempt_after(steps: int, length: int, **options: object) -> dict[str, int]:
    """A request that is preempted again and again behind drafts that hold, and goes on from its
    last state; returns the engine's figures."""
    fixed = {"batch_invariant": True, "exact_ends": True, "kernel_chunk": 4, "right": 1.0}
    engine = make_engine(**(fixed | options))  # type: ignore[arg-type]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    engine.add_request("a", T[:length], params)
    events = []
    while engine.has_work():
        for _ in range(steps):
            events += engine.step()
        for running in list(engine.context.running()):
            engine.preempt(running)
            engine.check_integrity()
        events += engine.step()
    assert answer(events) == expected_answer(T[:length], 30)
    return engine.stats()


@A_THIRD
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("drafts", [0, 1, 3, 6])
def test_preempted_requests_go_on_from_the_last_multiple(drafts: int, asynchronous: bool) -> None:
    for steps in (1, 2, 3):
        for length in (1, 7, 8, 9, 12):
            stats = preempt_after(steps, length, drafts=drafts, asynchronous=asynchronous)
            assert stats["preemptions"] > 0 and stats["recomputed_tokens"] > 0


def test_a_state_that_is_not_brought_up_to_date_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Decodes.bring_up_to_date

    def loses(self: Decodes, running: object) -> None:
        original(self, running)  # type: ignore[arg-type]
        self._catch_ups.clear()

    monkeypatch.setattr(Decodes, "bring_up_to_date", loses)
    with pytest.raises(AssertionError, match="wrong state"):
        for length in (1, 7, 8, 9, 12):
            preempt_after(2, length, drafts=3, asynchronous=False)
