"""Drafts of a model's own head, whose keys and values are in FP8 like the model's: they are those
of an oracle that rounds its own, and change no answer."""

from __future__ import annotations

import pytest

from tests.engine.test_head_drafts import (  # noqa: F401
    test_answers_are_those_without_drafts,
    test_drafts_are_those_that_the_oracle_makes,
)
from tests.engine.test_oracle_fp8_kv import TOLERANCE, round_keys_and_values
from tests.mtp_models import MTP_FAMILIES, MTPOracle, make_mtp_model
from tests.thorough import usually


@pytest.fixture(scope="module", params=usually(["qwen3_next"], MTP_FAMILIES))
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MTPOracle:
    folder = tmp_path_factory.mktemp(request.param)
    made = make_mtp_model(request.param, folder, agrees=True, chunk_size=16)
    for part in (made.model, made):
        for _, module in round_keys_and_values(part):
            module.kv_scales = (1.0, 1.0)
    made.options["kv_cache_dtype"] = "fp8_e4m3"
    made.tolerance = TOLERANCE
    return made


def is_thorough(
    test: str, oracle: str, asynchronous: bool = False, budget: int = 25, **others: object
) -> bool:
    """Whether CI leaves this case out."""
    if test == "test_answers_are_those_without_drafts":  # their drafts, below; test_head_drafts.py
        return True
    return asynchronous or budget != 25
