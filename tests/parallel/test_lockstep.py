"""Replicas that share experts give the tokens of one process, whoever of them has the requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.parallel.lockstep_worker import Answers, answers_of
from tests.parallel.ranks import start_ranks
from tests.thorough import thorough, usually
from tests.tiny_models import FAMILIES as ALL_FAMILIES
from tests.tiny_models import make_tiny_model

# Every family with experts: latent experts and groups, softmax routers, a gate of the shared one,
# sinks.
FAMILIES = (
    "nemotron_h_moe",
    "granite_moe_hybrid",
    "jamba",
    "qwen3_next",
    "qwen3_5_moe",
    "lfm2_moe",
    "zaya",
    "inkling",
    "inkling2",
)
TENSOR_2 = {"tensor_model_parallel_size": 2}
EXPERT_2 = {"expert_model_parallel_size": 2}
ALL_TO_ALL = {"moe_token_dispatcher_type": "alltoall"}


class Layout(NamedTuple):
    options: dict[str, Any]
    families: tuple[str, ...]


# In one launch each: starting processes takes longer than what they do.
ON_TWO_RANKS = {
    "expert 2": Layout(EXPERT_2, ("zaya",)),
    "expert tensor 2": Layout({"expert_tensor_parallel_size": 2}, ("qwen3_next",)),
    "expert 2 among tensor 2": Layout(
        TENSOR_2 | EXPERT_2 | {"expert_tensor_parallel_size": 1}, ("nemotron_h_moe",)
    ),
}
ON_FOUR_RANKS = {
    "tensor 2 x expert 2, all-to-all": Layout(
        TENSOR_2 | EXPERT_2 | ALL_TO_ALL, ("nemotron_h_moe",)
    ),
    "two groups": Layout(EXPERT_2, ("lfm2_moe",)),
}
# Every family, in minutes: TESTS=all python -m pytest tests/parallel/test_lockstep.py
PIPELINE_2 = {"pipeline_model_parallel_size": 2}
EVERYTHING = {
    2: {
        "tensor 2": Layout(TENSOR_2, ALL_FAMILIES),
        "pipeline 2": Layout(PIPELINE_2, ALL_FAMILIES),
        "two replicas": Layout({}, ALL_FAMILIES),
        "expert 2": Layout(EXPERT_2, FAMILIES),
        "expert 2, all-to-all": Layout(EXPERT_2 | ALL_TO_ALL, FAMILIES),
        "expert tensor 2": Layout({"expert_tensor_parallel_size": 2}, FAMILIES),
        "whole experts among tensor 2": Layout(
            TENSOR_2 | {"expert_tensor_parallel_size": 1}, FAMILIES
        ),
    },
    4: {
        "tensor 2 x expert 2": Layout(TENSOR_2 | EXPERT_2, FAMILIES),
        "tensor 2 x expert 2, all-to-all": Layout(TENSOR_2 | EXPERT_2 | ALL_TO_ALL, FAMILIES),
        "tensor 2 x pipeline 2": Layout(TENSOR_2 | PIPELINE_2, ALL_FAMILIES),
        "expert 4": Layout({"expert_model_parallel_size": 4}, ("nemotron_h_moe", "lfm2_moe")),
        "pipeline 2 x expert 2": Layout(PIPELINE_2 | EXPERT_2, FAMILIES),
    },
}


class Models:
    """Tiny models, and what one process answers with them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._answers: dict[str, Answers] = {}

    def folder(self, family: str) -> Path:
        folder = self._root / family
        if not folder.exists():
            make_tiny_model(family, folder)
        return folder

    def answers(self, family: str) -> Answers:
        if family not in self._answers:
            self._answers[family] = answers_of(str(self.folder(family)), {})
        return self._answers[family]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    ("ranks", "layouts"), usually([(2, ON_TWO_RANKS)], [(2, ON_TWO_RANKS), (4, ON_FOUR_RANKS)])
)
def test_replicas_in_lockstep_answer_like_one_process(
    ranks: int, layouts: dict[str, Layout], models: Models, tmp_path: Path
) -> None:
    check_layouts(ranks, layouts, models, tmp_path)


@thorough
@pytest.mark.parametrize(
    ("ranks", "name"), [(ranks, name) for ranks, layouts in EVERYTHING.items() for name in layouts]
)
def test_every_family_in_every_layout(
    ranks: int, name: str, models: Models, tmp_path: Path
) -> None:
    check_layouts(ranks, {name: EVERYTHING[ranks][name]}, models, tmp_path)


def check_layouts(ranks: int, layouts: dict[str, Layout], models: Models, output: Path) -> None:
    """Run the layouts on so many ranks; their answers must be those of one process."""
    jobs = {
        name: {
            "options": layout.options,
            "folders": [str(models.folder(family)) for family in layout.families],
        }
        for name, layout in layouts.items()
    }
    start_ranks(ranks, "tests.parallel.lockstep_worker", output, json.dumps(jobs))
    by_rank = [json.loads((output / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    for name, layout in layouts.items():
        for family in layout.families:
            found = [jobs[name][family] for jobs in by_rank]
            check(found, models.answers(family), f"{family}, {name}")


def check(found: list[Answers], expected: Answers, what: str) -> None:
    """`found` by rank."""
    shared_out: dict[int, list[Any]] = {}
    for answers in found:
        ((number, count),) = answers["replica"]
        for scene in ("cold", "warm", "chunked", "idle"):
            assert answers[scene] == expected[scene], (what, scene)
        assert answers["refused"][0][0] == expected["refused"][0][0], what
        shared_out[number] = answers["shared out"]
        if number == 0:
            assert answers["stream"] == expected["stream"], what
    assert any(cached for _, cached in expected["warm"])
    assert sorted(shared_out) == list(range(count))
    for number, answers in shared_out.items():
        assert answers == expected["shared out"][number::count], what
