"""Scales of keys and values in FP8, as checkpoints bring them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_hybrid.errors import WeightsError
from megatron_hybrid.layers.attention import Attention
from megatron_hybrid.models.checkpoints.updates import ModelUpdates
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import ParallelContext
from tests.models.conftest import TinyModel, load
from tests.models.test_weights import copy_with
from tests.mtp_models import make_mtp_model

Tiny = Callable[[str], TinyModel]
FP8 = torch.float8_e4m3fn
# By what a family's attentions are called, k and v in the place of {x}.
NAMES = [
    ("nemotron_h", "model.layers.2.mixer.{x}_proj.{x}_scale"),
    ("bamba", "model.layers.2.self_attn.{x}_proj.{x}_scale"),
    ("bamba", "model.layers.2.self_attn.{x}_scale"),
    ("bamba", "model.layers.2.self_attn.attn.{x}_scale"),
    ("bamba", "model.layers.2.attn.{x}_scale"),
    ("zamba2", "model.layers.1.shared_transformer.self_attn.{x}_proj.{x}_scale"),
]


def scales(model: HybridModel) -> list[tuple[float, float]]:
    """Of all attentions that are in it."""
    found = [module for module in model.modules() if isinstance(module, Attention)]
    return [(one.k_scale, one.v_scale) for one in found]


def with_scales(tiny: Tiny, family: str, folder: Path, added: dict[str, Tensor]) -> Path:
    return copy_with(tiny(family), folder, lambda tensors: tensors | added)


@pytest.mark.parametrize(("family", "name"), NAMES)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_scales_are_read_by_all_their_names(
    tiny: Tiny, tmp_path: Path, parallel: ParallelContext,
    family: str, name: str, shape: tuple[int, ...],
) -> None:  # fmt: skip
    added = {name.format(x=x): torch.full(shape, n) for x, n in (("k", 0.25), ("v", 0.5))}
    with_scales(tiny, family, tmp_path, added)
    assert (0.25, 0.5) in scales(load(tmp_path, parallel, kv_dtype=FP8))
    assert set(scales(load(tmp_path, parallel))) == {(1.0, 1.0)}  # and they do no harm


def test_without_scales_they_are_one(tiny: Tiny, tmp_path: Path, parallel: ParallelContext) -> None:
    """Also where there is only one of them."""
    with_scales(
        tiny, "bamba", tmp_path, {"model.layers.2.self_attn.k_proj.k_scale": torch.tensor(0.5)}
    )
    assert scales(load(tmp_path, parallel, kv_dtype=FP8)) == [(0.5, 1.0)]
    model = load(tiny("bamba").folder, parallel, kv_dtype=FP8, load_format="dummy")
    assert scales(model) == [(1.0, 1.0)]


def test_keys_that_are_stored_without_their_multiplier_have_a_scale_without_it(
    tiny: Tiny, tmp_path: Path, parallel: ParallelContext
) -> None:
    """Falcon-H1's keys are 0.8 times what we store."""
    name = "model.layers.0.self_attn.k_proj.k_scale"
    with_scales(tiny, "falcon_h1", tmp_path, {name: torch.tensor(0.5)})
    assert tiny("falcon_h1").theirs.config.key_multiplier == 0.8
    first, second = scales(load(tmp_path, parallel, kv_dtype=FP8))
    assert first == (0.5 / 0.8, 1.0) and second == (1 / 0.8, 1.0)
    assert scales(load(tmp_path, parallel)) == [(1.0, 1.0)] * 2


def test_a_heads_scales_are_its_own(tmp_path: Path, parallel: ParallelContext) -> None:
    made = make_mtp_model("qwen3_next", tmp_path)
    added = {
        "model.layers.1.self_attn.k_proj.k_scale": torch.tensor(0.5),
        "mtp.layers.0.self_attn.k_proj.k_scale": torch.tensor(0.25),
    }
    folder = tmp_path / "scaled"
    folder.mkdir()
    copy_with(made, folder, lambda tensors: tensors | added)
    model = load(folder, parallel, kv_dtype=FP8, mtp=True)
    assert model.mtp is not None and model.mtp.attention.k_scale == 0.25
    assert scales(model) == [(0.5, 1.0), (0.25, 1.0)]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.tensor(math.nan), "k_scale' in .* is nan; .* a positive number"),
        (torch.tensor(math.inf), "k_scale' in .* is inf; .* a positive number"),
        (torch.tensor(0.0), r"k_scale' in .* is 0\.0; .* a positive number"),
        (torch.tensor([-1.0]), r"k_scale' in .* is -1\.0; .* a positive number"),
        (torch.ones(2), r"k_scale' in .* has shape \[2\]; .* one number for a whole layer"),
    ],
)
def test_what_is_no_scale_is_refused_by_name(
    tiny: Tiny, tmp_path: Path, parallel: ParallelContext, value: Tensor, words: str
) -> None:
    with_scales(tiny, "bamba", tmp_path, {"model.layers.2.self_attn.k_proj.k_scale": value})
    with pytest.raises(WeightsError, match=words):
        load(tmp_path, parallel, kv_dtype=FP8)


def test_two_scales_of_the_same_keys_have_to_be_equal(
    tiny: Tiny, tmp_path: Path, parallel: ParallelContext
) -> None:
    names = "model.layers.2.self_attn.k_proj.k_scale", "model.layers.2.self_attn.k_scale"
    with_scales(tiny, "bamba", tmp_path, {name: torch.tensor([0.5]) for name in names})
    assert scales(load(tmp_path, parallel, kv_dtype=FP8)) == [(0.5, 1.0)]
    with_scales(tiny, "bamba", tmp_path, {n: torch.tensor(0.5 + i) for i, n in enumerate(names)})
    with pytest.raises(WeightsError, match="scales of the same keys"):
        load(tmp_path, parallel, kv_dtype=FP8)


def test_new_weights_leave_the_scales_of_what_is_cached(
    tiny: Tiny, tmp_path: Path, parallel: ParallelContext
) -> None:
    name = "model.layers.2.self_attn.k_proj.k_scale"
    folder = with_scales(tiny, "bamba", tmp_path, {name: torch.tensor(0.5)})
    model = load(folder, parallel, kv_dtype=FP8)
    ModelUpdates(model).update(tiny("bamba").folder)
    ModelUpdates(model).update({name: torch.tensor(2.0)})
    assert scales(model) == [(0.5, 1.0)]
