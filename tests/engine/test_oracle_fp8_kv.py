"""Keys and values in FP8: the engine against transformers' full recompute, whose attention rounds
its keys and values to the same numbers. Whether a prefix was computed at once, in chunks, with
drafts or by another request, the numbers that are stored are the same, and so are the answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.engine.oracle_tests import (  # noqa: F401
    Oracle,
    make_oracle,
    test_batched_cold_and_warm_equal_transformers,
    test_drafts_change_neither_answers_nor_what_is_cached,
    test_preempted_requests_give_the_right_answers,
    test_prompts_cut_into_chunks_equal_transformers,
    test_prompts_cut_into_tiny_chunks_equal_transformers,
    test_prompts_that_part_anywhere_share_all_that_they_have_in_common,
    test_the_next_turns_compute_exactly_what_is_new,
)
from tests.kernels.attention_cases import FP8, kept
from tests.thorough import usually

# The names that a family's scales have in our folder: there are several customs. None: no scales.
SCALES = {
    "nemotron_h": "{attention}.{x}_proj.{x}_scale",
    "qwen3_next": "{attention}.attn.{x}_scale",
    "falcon_h1": "{attention}.{x}_scale",  # whose keys have a multiplier, too
    "zamba2": None,  # whose layers share their attention
    "in_flight": None,
}
# The two differ in the last bits, and where a number lies between two of FP8, by that step.
TOLERANCE = 2e-2
KINDS = usually(("nemotron_h", "qwen3_next"), tuple(SCALES))


# What one kind shows for both.
ELSEWHERE = {
    "test_preempted_requests_give_the_right_answers": "",  # those of test_oracle_mamba2.py
    "test_drafts_change_neither_answers_nor_what_is_cached": "nemotron_h",
    "test_prompts_that_part_anywhere_share_all_that_they_have_in_common": "nemotron_h",
    "test_the_next_turns_compute_exactly_what_is_new": "qwen3_next",
}


def is_thorough(
    test: str, oracle: str, mode: str = "", exact_ends: bool = True, **others: object
) -> bool:
    """Whether CI leaves this case out."""
    if test in ELSEWHERE:
        return oracle != ELSEWHERE[test]
    return mode == "break" or not exact_ends


def scales_of(layer: int) -> tuple[float, float]:
    """Of keys and of values: other ones in each layer, of which some saturate."""
    return 0.0007 + 0.0001 * layer, 0.0005 + 0.0001 * layer


def rounded_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: object, **options: object
) -> tuple[Tensor, None]:
    """transformers' attention over keys and values that are rounded as a cache in FP8 does."""
    k_scale, v_scale = module.kv_scales
    k = kept(key, FP8, k_scale).float() * k_scale
    v = kept(value, FP8, v_scale).float() * v_scale
    return sdpa_attention_forward(module, query, k, v, *args, **options)


def round_keys_and_values(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The attentions of a model of transformers, which round by their `kv_scales` from now on."""
    ALL_ATTENTION_FUNCTIONS.register("rounded", rounded_attention)
    for path, module in model.named_modules():
        if hasattr(module, "k_proj"):
            module.config._attn_implementation = "rounded"
            yield path, module


def add_scales(model: PreTrainedModel, folder: Path, name: str | None) -> None:
    """To the folder, and to the attentions of transformers' model."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for path, module in round_keys_and_values(model):
        module.kv_scales = (1.0, 1.0) if name is None else scales_of(module.layer_idx)
        for x, scale in zip("kv", module.kv_scales, strict=True):
            if name is not None:  # some have no dimension, and some have one
                shape = () if module.layer_idx % 2 else (1,)
                tensors[name.format(attention=path, x=x)] = torch.full(shape, scale)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture(scope="module", params=KINDS)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp(request.param)
    made = make_oracle(
        request.param, folder, lambda model: add_scales(model, folder, SCALES[request.param])
    )
    made.options["kv_cache_dtype"] = "fp8_e4m3"
    made.tolerance = TOLERANCE
    return made


def test_half_of_the_memory_is_enough_for_a_token(oracle: Oracle) -> None:
    """Of a model in float32 a quarter."""
    as_stored, whole = oracle.llm().engine, oracle.llm(kv_cache_dtype="auto").engine
    sizes = [engine.context.geometry.bytes_per_block for engine in (as_stored, whole)]
    assert sizes[1] == 4 * sizes[0]
    blocks = [engine.context.geometry.num_blocks for engine in (as_stored, whole)]
    assert blocks[0] > 3 * blocks[1]
    assert oracle.llm(kv_cache_dtype="auto") is not oracle.llm()
