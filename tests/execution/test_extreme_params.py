"""The least and largest values that SamplingParams takes, as rows hold them: in float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_hybrid.execution.rows import RowTable
from megatron_hybrid.kernels.sampling import reference
from megatron_hybrid.kernels.sampling.protocol import Filters
from megatron_hybrid.request import (
    MAX_REPETITION_PENALTY,
    MIN_REPETITION_PENALTY,
    MIN_TOP_P,
    SamplingParams,
)

LOGITS = torch.tensor([[3.0, -2.0, 1e4, 9.9e3, -1e4]])


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-300},
        {"temperature": 1e-40},
        {"temperature": 1e-5},
        {"temperature": 0.001, "top_p": MIN_TOP_P},
        {"temperature": 100.0, "top_p": MIN_TOP_P},
        {"temperature": 100.0, "min_p": 1.0},
        {"temperature": 1.0, "min_p": 5e-324},
    ],
)
@pytest.mark.parametrize("point", [0.0, 1 - 2**-53])
def test_the_likeliest_token_is_drawn(options, point):
    params, rows = SamplingParams(**options), RowTable(1, 1)
    params.validate()
    rows.temperature[0], rows.top_p[0], rows.min_p[0] = (
        params.temperature, params.top_p, params.min_p,
    )  # fmt: skip
    assert rows.top_p[0] > 0
    columns = [torch.from_numpy(c) for c in (rows.temperature, rows.top_k, rows.top_p, rows.min_p)]
    filters, at = Filters(*columns), torch.tensor([point], dtype=torch.float64)
    token = reference.draw(LOGITS, filters, at)
    assert token.tolist() == [2]


@pytest.mark.parametrize("penalty", [MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY])
def test_penalised_logits_stay_finite(penalty):
    SamplingParams(repetition_penalty=penalty).validate()
    column = torch.from_numpy(np.asarray([penalty], dtype=np.float32))
    logits = LOGITS * 1e30
    none = torch.zeros(1)
    written = torch.full(logits.shape, 32767, dtype=torch.int16)
    found = reference.penalise(logits, written, written > 0, column, none + 2.0, none - 2.0)
    assert torch.isfinite(found).all()
