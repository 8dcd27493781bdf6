"""Batch-invariant mode on several ranks: each layout is the same as itself, alone and without a
cache; experts' tokens may travel either way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.ranks import run_on_ranks
from tests.thorough import thorough, usually
from tests.tiny_models import make_tiny_model

WORKER = "tests.parallel.batch_invariant_worker"
TENSOR, PIPELINE = "tensor_model_parallel_size", "pipeline_model_parallel_size"
EXPERT, DISPATCHER = "expert_model_parallel_size", "moe_token_dispatcher_type"
FAMILIES = usually(("nemotron_h_moe",), ("nemotron_h_moe", "qwen3_next", "jamba", "falcon_h1"))


def run(ranks: int, options: list[dict[str, Any]], families: tuple[str, ...], folder: Path) -> Any:
    """What is found with each of some options."""
    models = []
    for family in families:
        make_tiny_model(family, folder / family)
        models.append(str(folder / family))
    found = run_on_ranks(ranks, WORKER, folder, json.dumps(options), *models)["found"]
    assert len(found) == len(options)
    for each in found:
        for family in families:
            own = each[family]
            assert own["cold"] == own["warm"] == own["in chunks"] == [], family
            assert own["cached"] > 0
    return found


@pytest.mark.parametrize(
    "options",
    [
        {TENSOR: 2},
        pytest.param({PIPELINE: 2}, marks=thorough),
        pytest.param({TENSOR: 2, "dtype": "bfloat16"}, marks=thorough),
    ],
    ids=str,
)
def test_two_ranks_are_the_same_as_themselves(options: dict[str, Any], tmp_path: Path) -> None:
    run(2, [options], FAMILIES, tmp_path)


def test_experts_of_two_replicas_by_either_dispatcher(tmp_path: Path) -> None:
    options = [{EXPERT: 2, DISPATCHER: kind} for kind in ("allgather", "alltoall")]
    families = usually(("nemotron_h_moe",), ("nemotron_h_moe", "lfm2_moe", "qwen3_next"))
    one, other = run(2, options, families, tmp_path)
    assert one == other


@thorough
@pytest.mark.parametrize(
    "options",
    [
        {TENSOR: 4},
        {TENSOR: 2, PIPELINE: 2},
        {TENSOR: 2, EXPERT: 2, "expert_tensor_parallel_size": 1, PIPELINE: 2},
        {EXPERT: 4},
        {TENSOR: 2, EXPERT: 2},
    ],
    ids=str,
)
def test_four_ranks_are_the_same_as_themselves(options: dict[str, Any], tmp_path: Path) -> None:
    run(4, [options], ("nemotron_h_moe",), tmp_path)
