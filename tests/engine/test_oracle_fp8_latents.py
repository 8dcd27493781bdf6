"""Latents in FP8: the engine against transformers' full recompute, which makes its keys and values
of latents that are rounded to the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.engine.oracle_tests import (  # noqa: F401
    Oracle,
    make_oracle,
    test_batched_cold_and_warm_equal_transformers,
    test_drafts_change_neither_answers_nor_what_is_cached,
    test_prompts_cut_into_tiny_chunks_equal_transformers,
)
from tests.engine.test_oracle_fp8_kv import TOLERANCE
from tests.kernels.attention_cases import FP8, kept

# And its name in a layer.
FAMILIES = {"kimi_linear": "self_attn", "bailing_hybrid": "attention", "glm5_next": "self_attn"}
# What one of them shows for all.
ELSEWHERE = {
    "test_drafts_change_neither_answers_nor_what_is_cached",
    "test_prompts_cut_into_tiny_chunks_equal_transformers",
}


def is_thorough(
    test: str, oracle: str, mode: str = "", exact_ends: bool = True, **others: object
) -> bool:
    """Whether CI leaves this case out."""
    if test in ELSEWHERE and oracle != "bailing_hybrid":
        return True
    return mode == "break" or not exact_ends or others.get("budget") == 7


def scale_of(layer: int) -> float:
    """Another one in each layer, of which some saturate."""
    return 0.004 + 0.0005 * layer


def round_latents(model: PreTrainedModel, folder: Path, attention: str) -> None:
    """In transformers' model from now on, and in the engine's by scales in the folder."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for module in model.modules():
        if not hasattr(module, "expand_kv"):
            continue
        layer = module.layer_idx
        scale, expand = scale_of(layer), module.expand_kv

        def rounded(*parts: Tensor, scale: float = scale, expand: Any = expand) -> Any:
            return expand(*(kept(part, FP8, scale).float() * scale for part in parts))

        module.expand_kv = rounded
        tensors[f"model.layers.{layer}.{attention}.k_scale"] = torch.tensor(scale)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture(scope="module", params=FAMILIES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp(request.param)
    made = make_oracle(
        request.param, folder, lambda model: round_latents(model, folder, FAMILIES[request.param])
    )
    made.options["kv_cache_dtype"] = "fp8_e4m3"
    made.tolerance = TOLERANCE
    return made


def test_a_latent_takes_a_byte_a_number(oracle: Oracle) -> None:
    as_stored, whole = oracle.llm().engine, oracle.llm(kv_cache_dtype="auto").engine
    sizes = [engine.context.geometry.bytes_per_block for engine in (as_stored, whole)]
    numbers, index = 40, 0  # of 16 tokens, in one layer
    if oracle.kind == "glm5_next":  # in three; two have an index, whose entries stay in float32
        numbers, index = 3 * 32, 2 * 16 * 4
    assert sizes == [16 * (numbers + index), 16 * (numbers * 4 + index)]
