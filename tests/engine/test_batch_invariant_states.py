"""In batch-invariant mode every state that is read is that after the last multiple of the granule,
and the rings hold the tokens since: see symbolic.py, which checks it in every step."""

from __future__ import annotations

import pytest

from megatron_hybrid.request import SamplingParams
from tests.engine.symbolic import answer, expected_answer, make_engine, random_tokens, run
from tests.engine.test_fuzz import Crowd
from tests.thorough import usually

T = random_tokens(43, 3000)


@pytest.mark.parametrize("block_size", [4, 8, 12])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(usually(4, 40)))
def test_a_crowded_engine(seed: int, asynchronous: bool, block_size: int) -> None:
    crowd = Crowd(
        seed, steps=usually(150, 300), batch_invariant=True, asynchronous=asynchronous,
        block_size=block_size,
    )  # fmt: skip
    crowd.check()
