"""DecodeRuns on the host; the recurrences' own tests compute them."""

from __future__ import annotations

import pytest

from megatron_hybrid.kernels.runs import plan_runs
from tests.kernels.runs_cases import Call, Sequence


def test_a_ring_that_is_too_short_is_refused() -> None:
    call = Call([Sequence(1, 0, 9, unfolded=3)], [5], [0], [1])
    with pytest.raises(ValueError, match="3 unfolded tokens and 5 to compute; the ring has 7"):
        plan_runs(call.runs(), 7)
