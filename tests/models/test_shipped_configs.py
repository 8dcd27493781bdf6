"""The shapes in configs/models are those of the published models, and configs/*.yaml run them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_hybrid.cache.geometry import GIB
from megatron_hybrid.config import EngineConfig
from megatron_hybrid.engine.sizing import derive_geometry
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.models.families.registry import FAMILIES
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import ParallelContext
from tests.parallel.pretend import first_of
from tests.thorough import A_THIRD

CONFIGS = Path(__file__).parents[2] / "configs"
FOLDERS = sorted(path.parent for path in CONFIGS.glob("models/*/config.json"))
FILES = sorted(CONFIGS.glob("*.yaml"))

# Billions of parameters that are published, weights that are used several times counted once,
# without vision and multi-token prediction, and where: "Hub" is what the model's page on
# huggingface.co counts in its files. Independently of that, transformers 5's own classes have as
# many with these files (but for experts' biases, which they do not count, and for Falcon-Mamba's
# norms, which have no weights there).
PARAMETERS = {
    "bamba-9b": (9.78, "model card"),
    "falcon-h1-7b": (7.59, "Falcon-H1 report; 7 B in the model card"),
    "falcon-mamba-7b": (7.27, "Hub"),
    "glm-5.3-flash": (313.3, "313.33 in transformers' class"),
    "granite-4.0-h-tiny": (6.94, "Hub"),
    "inkling-2-small": (593.7, "593.72 in transformers' class"),
    "inkling-small": (263.7, "263.66 in transformers' class"),
    "jamba-mini-1.6": (51.6, "Hub; 52 B in the model card"),
    "kimi-linear-48b-a3b": (49.1, "48 B in the model card; 49.12 in transformers' class"),
    "lfm2-1.2b": (1.17, "model card"),
    "lfm2-8b-a1b": (8.34, "Hub; 8.3 B in the model card"),
    "ling-3.0-flash": (124.4, "124.41 in transformers' class"),
    "lfm3-1.7b": (1.73, "1.7 B in its name; 1.729 in transformers' class"),
    "llama-3.1-8b": (8.03, "Hub"),
    "mamba-2.8b": (2.77, "Hub"),
    "mamba-codestral-7b": (7.285, "model card: 7,285,403,648"),
    "minimax-text-01": (456.1, "456 B in the model card; 456.09 in transformers' class"),
    "nemotron-3-nano-30b-a3b": (31.58, "Hub: 31.6 B"),
    "nemotron-h-8b": (8.10, "Hub"),
    "olmo-hybrid-7b": (7.43, "7 B in the model card; 7.43 in transformers' class"),
    "qwen3-8b": (8.19, "Hub; 8.2 B in the model card"),
    "qwen3-next-80b-a3b": (79.7, "80 B in the model card; 79.67 in transformers' class"),
    "qwen3.8-flash-next": (176.9, "125 B, and 51 B of n-grams; 176.94 in transformers' class"),
    "qwen3.5-35b-a3b": (34.7, "35 B in the model card; 34.66 in transformers' class"),
    "qwen3.5-35b-a3b-nvfp4": (34.7, "as above"),
    "qwen3.5-9b": (8.95, "what llama.cpp counts in the text part"),
    "ring-mini-linear-2.0": (16.42, "16.4 B in the report, arXiv 2510.19338"),
    "recurrentgemma-9b": (8.58, "9 B in the model card; 8.58 in transformers' class"),
    "rwkv-4-7b": (7.39, "7 B in the model card; 7.39 in transformers' class"),
    "xlstm-7b": (6.87, "model card"),
    "zaya1-8b": (8.84, "8 B in its name; 8.840 in transformers' class"),
    "zamba-7b": (7.23, "7 B in the model card; 7.23 in transformers' class"),
    "zamba2-2.7b": (2.66, "2.7 B in the model card; 2.66 in transformers' class"),
}


def shape_of(
    folder: Path, parallel: ParallelContext, ranks: int = 1, tables_on_host: bool = False
) -> HybridModel:
    """The model without memory, as the first of `ranks` ranks has it."""
    several = first_of(parallel, ranks)
    config = ModelFolder.open(folder).config
    with torch.device("meta"):
        return HybridModel(
            config, several, torch.bfloat16, torch.bfloat16, torch.float32,
            tables_on_host=tables_on_host,
        )  # fmt: skip


@A_THIRD
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_shape_has_as_many_parameters_as_are_published(
    folder: Path, parallel: ParallelContext
) -> None:
    model = shape_of(folder, parallel)
    count = sum(weight.numel() for weight in model.parameters())
    assert count / 1e9 == pytest.approx(PARAMETERS[folder.name][0], rel=0.01)


def test_every_family_has_a_shape() -> None:
    types = {json.loads((f / "config.json").read_text())["model_type"] for f in FOLDERS}
    assert all(types & set(family.model_types) for family in FAMILIES)
    assert {folder.name for folder in FOLDERS} == set(PARAMETERS)
    assert {folder.name for folder in FOLDERS} <= {path.stem for path in FILES}


@A_THIRD
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_files_budgets_fit_its_gpus(path: Path, parallel: ParallelContext) -> None:
    config = EngineConfig.from_yaml(path)
    if config.load is None:
        return
    folder = Path(config.load)
    assert folder.name == path.stem
    on_host = config.ngram_embeddings_on_host
    model = shape_of(folder, parallel, config.tensor_model_parallel_size, on_host)
    length = config.inference_max_seq_length or model.config.max_position_embeddings
    assert length <= model.config.max_position_embeddings
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    geometry = derive_geometry(
        config,
        model.kv_specs.values(),
        model.state_specs.values(),
        model.config.vocab_size,
        int(0.95 * (139 * GIB - weights - 4 * GIB)),  # 4 GB for activations and graphs
    )
    assert not geometry.has_recurrent or geometry.num_cached_slots >= 2
    if geometry.bytes_per_block:
        assert geometry.num_blocks * geometry.block_size >= 4 * length
