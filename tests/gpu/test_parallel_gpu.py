"""Several GPUs give the tokens of one: tensor, expert and pipeline parallel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parallel.launches import check_server, make_chat_model
from tests.parallel.test_lockstep import (
    ALL_TO_ALL,
    EXPERT_2,
    TENSOR_2,
    Layout,
    Models,
    check_layouts,
)
from tests.parallel.test_lockstep import FAMILIES as WITH_EXPERTS
from tests.tiny_models import FAMILIES

GPUS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices"),
]

IDLE = {"idle_tokens": 1000}  # as many steps
NO_GRAPHS = {"inference_dynamic_batching_num_cuda_graphs": 0}
GRAPHS_LATER = {"inference_dynamic_batching_cuda_graph_capture": "serving"}
PIPELINE_2 = {"pipeline_model_parallel_size": 2}
ON_TWO_GPUS = {
    "tensor 2": Layout(TENSOR_2, FAMILIES),
    "tensor 2, 1,000 idle steps": Layout(TENSOR_2 | IDLE, ("nemotron_h",)),
    "tensor 2, NCCL": Layout(
        TENSOR_2 | {"symmetric_memory_all_reduce": False}, ("nemotron_h", "bamba")
    ),
    "tensor 2, no graphs": Layout(TENSOR_2 | NO_GRAPHS, ("nemotron_h", "bamba")),
    "expert 2": Layout(EXPERT_2, WITH_EXPERTS),
    "expert 2, 1,000 idle steps": Layout(EXPERT_2 | IDLE, ("nemotron_h_moe",)),
    "expert 2, all-to-all": Layout(EXPERT_2 | NO_GRAPHS | ALL_TO_ALL, WITH_EXPERTS),
    "expert tensor 2": Layout({"expert_tensor_parallel_size": 2}, ("nemotron_h_moe", "qwen3_next")),
    "pipeline 2": Layout(PIPELINE_2, ("nemotron_h", "zamba2", "qwen3_next")),
    "tensor 2, graphs between steps": Layout(TENSOR_2 | GRAPHS_LATER | IDLE, ("nemotron_h",)),
    "expert 2, graphs between steps": Layout(EXPERT_2 | GRAPHS_LATER | IDLE, ("nemotron_h_moe",)),
    "pipeline 2, graphs between steps": Layout(PIPELINE_2 | GRAPHS_LATER | IDLE, ("nemotron_h",)),
}
ON_FOUR_RANKS = {
    "expert 4": Layout(
        {"expert_model_parallel_size": 4}, ("nemotron_h_moe", "qwen3_next", "lfm2_moe")
    ),
    "expert 4, 1,000 idle steps": Layout(
        IDLE | {"expert_model_parallel_size": 4}, ("nemotron_h_moe",)
    ),
    "tensor 2 x expert 2": Layout(TENSOR_2 | EXPERT_2, WITH_EXPERTS),
    "tensor 2 x expert 2, all-to-all": Layout(
        TENSOR_2 | EXPERT_2 | NO_GRAPHS | ALL_TO_ALL, ("nemotron_h_moe",)
    ),
    "tensor 2 x pipeline 2": Layout(TENSOR_2 | PIPELINE_2, ("nemotron_h", "jamba")),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("name", ON_TWO_GPUS)
def test_two_gpus_answer_like_one(name: str, models: Models, tmp_path: Path) -> None:
    check_layouts(2, {name: ON_TWO_GPUS[name]}, models, tmp_path)


@pytest.mark.parametrize("name", ON_FOUR_RANKS)
def test_four_ranks_answer_like_one(name: str, models: Models, tmp_path: Path) -> None:
    """With a GPU each, or two of them on each of two."""
    check_layouts(4, {name: ON_FOUR_RANKS[name]}, models, tmp_path)


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"replicas": 2}], ids=["tensor", "expert"])
def test_a_server_on_two_gpus_answers_like_one_and_ends_in_order(
    layout: dict[str, int], tmp_path: Path
) -> None:
    """Its groups are left although its CUDA graphs use them."""
    model = make_chat_model("nemotron_h_moe", tmp_path / "tiny")
    check_server(model, tmp_path, **layout, device="cuda")
