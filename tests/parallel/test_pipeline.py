"""Stages of a pipeline give the tokens of one process, and make its decisions."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_hybrid.parallel import ParallelContext, initialize
from tests.parallel.pipeline_worker import adjusted_answers, answers_of, logits_of
from tests.parallel.ranks import run_on_ranks
from tests.thorough import thorough, usually
from tests.tiny_models import FAMILIES, make_tiny_model

# Engines: the usual mixture (and new weights for it); a stage without attention before one without
# recurrent layers; a head that is tied to the embedding, on another stage.
MIXED, NEW, APART, TIED = "nemotron_h", "new_weights", "apart", "granite_moe_hybrid"
UPDATES = {MIXED: NEW}
ENGINES = usually((MIXED,), (MIXED, APART, TIED))  # zamba2's head is tied, too
IN_STAGES = usually(("nemotron_h", "zamba2", "glm5_next", "zaya"), tuple(FAMILIES))
# Both tensor and pipeline parallel: an engine, and logits.
FOUR_ENGINE, FOUR_LOGITS = "nemotron_h_moe", "zamba2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of models, by name."""
    root = tmp_path_factory.mktemp("models")
    for family in {*IN_STAGES, *ENGINES, FOUR_ENGINE, FOUR_LOGITS} - {APART}:
        make_tiny_model(family, root / family)
    make_tiny_model(MIXED, root / NEW, seed=1)
    layers = ["linear_attention"] * 2 + ["full_attention"] * 2
    make_tiny_model("nemotron_h", root / APART, layers_block_type=layers)
    return root


@pytest.fixture(scope="module")
def alone() -> ParallelContext:
    """The groups stay: other tests of this process use them too."""
    return initialize()


def engine_task(folder: Path, name: str) -> str:
    update = f",{folder / UPDATES[name]}" if name in UPDATES else ""
    return f"engine:{folder / name}{update}"


@pytest.fixture(scope="module")
def two_stages(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Where the logits are, and what both ranks found."""
    output = tmp_path_factory.mktemp("two")
    tasks = [f"logits:{folder / name}" for name in (*IN_STAGES, APART)]
    tasks += [engine_task(folder, name) for name in ENGINES]
    tasks.append("adjusted")
    return output, run_on_ranks(2, "tests.parallel.pipeline_worker", output, "1", "2", *tasks)


@pytest.fixture(scope="module")
def two_by_two(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    output = tmp_path_factory.mktemp("four")
    tasks = [engine_task(folder, FOUR_ENGINE), f"logits:{folder / FOUR_LOGITS}"]
    return output, run_on_ranks(4, "tests.parallel.pipeline_worker", output, "2", "2", *tasks)


@pytest.mark.parametrize("name", [*IN_STAGES, APART])
def test_two_stages_give_the_logits_of_one(
    name: str, folder: Path, two_stages: tuple[Path, Any], alone: ParallelContext
) -> None:
    found = torch.load(two_stages[0] / f"{name}.0.pt")
    expected = logits_of(str(folder / name), alone)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ENGINES)
def test_two_stages_decide_and_answer_like_one(
    name: str, folder: Path, two_stages: tuple[Path, Any]
) -> None:
    update = str(folder / UPDATES[name]) if name in UPDATES else None
    expected = answers_of(str(folder / name), 1, 1, update)
    assert any(cached for _, cached in expected["warm"])
    assert expected["preemptions"] > 0
    check(two_stages[1][name], expected, tolerance=1e-6)


def test_two_stages_adjust_logits_like_one(two_stages: tuple[Path, Any]) -> None:
    assert two_stages[1]["adjusted"] == adjusted_answers(1, 1)


@thorough
def test_two_stages_of_two_ranks_decide_and_answer_like_one(
    folder: Path, two_by_two: tuple[Path, Any]
) -> None:
    expected = answers_of(str(folder / FOUR_ENGINE), 1, 1, None)
    found = two_by_two[1][FOUR_ENGINE]
    # a rank has its part of each layer
    whole, part = expected.pop("geometry"), found.pop("geometry")
    assert 2 * part["bytes_per_block"] == whole["bytes_per_block"]
    assert part["bytes_per_logits"] == whole["bytes_per_logits"] > 0
    check(found, expected, tolerance=1e-4)


@thorough
@pytest.mark.parametrize("rank", [0, 1])
def test_both_ranks_of_the_last_stage_have_the_logits_of_one(
    rank: int, folder: Path, two_by_two: tuple[Path, Any], alone: ParallelContext
) -> None:
    found = torch.load(two_by_two[0] / f"{FOUR_LOGITS}.{rank}.pt")
    expected = logits_of(str(folder / FOUR_LOGITS), alone)
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=5e-5)


def check(found: Any, expected: Any, tolerance: float) -> None:
    """Log-probabilities may differ by as much, everything else not at all."""
    expected = json.loads(json.dumps(expected))
    found, told = dict(found), "log-probabilities"
    ours, theirs = list(numbers(found.pop(told))), list(numbers(expected.pop(told)))
    assert found == expected
    assert len(theirs) > 300
    assert ours == pytest.approx(theirs, abs=tolerance)


def numbers(nested: Any) -> Iterable[float]:
    if not isinstance(nested, list):
        yield nested
        return
    for part in nested:
        yield from numbers(part)
