"""Checkpoints of megatron-core's own modules, at TP, PP and EP of 2, are the same model here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from convert.conversion import to_hugging_face, to_megatron
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.parallel import ParallelContext
from tests.models.conftest import load
from tests.models.driver import run_in_segments
from tests.models.megatron_models import MODELS, READ_BACK, TOKENS
from tests.parallel.ranks import start_ranks
from tests.thorough import usually
from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).parents[2]
# Ours, converted to Megatron's format.
CONVERTED: dict[str, dict[str, Any]] = {
    "nemotron_h_moe": {"num_experts_per_tok": 4},
    "qwen3_next": {},
    **usually({}, {"qwen3_5": {}, "llama": {"attention_bias": True, "mlp_bias": True}}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of everything, once."""
    folder = tmp_path_factory.mktemp("megatron")
    for family, overrides in CONVERTED.items():
        make_tiny_model(family, folder / family, **overrides)
        to_megatron(folder / family, folder / f"{family}-megatron", progress=False)
    converted = [str(folder / family) for family in CONVERTED]
    start_ranks(2, "tests.models.megatron_worker", folder, *converted)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_its_logits_are_ours(name: str, folder: Path, parallel: ParallelContext) -> None:
    """Read by one process, from the folder with the iterations, and by two tensor-parallel ranks,
    whatever wrote it."""
    config = ModelFolder.open(folder / name).config
    assert (config.model_type, config.pattern) == (MODELS[name]["family"], MODELS[name]["pattern"])
    expected = torch.load(folder / f"{name}.logits")
    scale = max(1.0, float(expected.std()))
    ours = [run_in_segments(load(folder / name, parallel), TOKENS, [10])]
    ours += [torch.load(folder / f"{name}.ours.{rank}") for rank in range(2)]
    for logits in ours:
        torch.testing.assert_close(logits, expected, atol=1e-5 * scale, rtol=1e-5)


def test_any_rank_has_the_weights_that_it_has_from_a_hugging_face_folder(folder: Path) -> None:
    """Tensor, pipeline and expert parallel, from checkpoints of any other split."""
    for rank in range(2):
        same = json.loads((folder / f"same.{rank}.json").read_text())
        models = {key.split()[0] for key in same}
        families = {name for name in MODELS if MODELS[name]["family"] != "megatron"}
        assert models == families | {f"{family}-megatron" for family in CONVERTED}
        assert {key.split(maxsplit=1)[1] for key in same} == {"2 1 1", "1 2 1", "1 1 2", "2 1 2"}
        assert [key for key, equal in same.items() if not equal] == []


@pytest.mark.parametrize("name", ["hybrid_tp2", "hybrid_ep2", "qwen_tp2", "gpt_pp2"])
def test_transformers_computes_its_logits_too(name: str, folder: Path) -> None:
    """From the Hugging Face folder that the checkpoint was converted to, whose config.json comes
    from the training job's arguments."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / f"{name}-hf", dtype=torch.float32)
    with torch.no_grad():
        logits = model.eval()(torch.tensor([TOKENS]), use_cache=False).logits[0]
    expected = torch.load(folder / f"{name}.logits")
    scale = max(1.0, float(expected.std()))
    torch.testing.assert_close(logits, expected, atol=2e-5 * scale, rtol=2e-5)


@pytest.mark.parametrize("name", READ_BACK)
def test_megatron_reads_what_we_write(name: str, folder: Path) -> None:
    """One process converts; megatron-core loads it at TP or EP of 2, and gives its first logits."""
    expected = torch.load(folder / f"{name}.logits")
    assert torch.equal(torch.load(folder / f"{name}.again"), expected)


def test_a_split_checkpoint_converted_there_and_back_has_the_same_logits(
    folder: Path, parallel: ParallelContext, tmp_path: Path
) -> None:
    to_megatron(folder / "hybrid_tp2-hf", tmp_path / "megatron", progress=False)
    to_hugging_face(tmp_path / "megatron", tmp_path / "back", progress=False)
    expected = run_in_segments(load(folder / "hybrid_tp2", parallel), TOKENS, [])
    for path in (tmp_path / "megatron", tmp_path / "back"):
        assert torch.equal(run_in_segments(load(path, parallel), TOKENS, []), expected)
