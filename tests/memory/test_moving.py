"""Weights that move: everything that held them has them at their new place."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megatron_hybrid import EngineConfig
from megatron_hybrid.engine.build import load_weights
from megatron_hybrid.memory import moving
from megatron_hybrid.memory.arena import Arena
from megatron_hybrid.memory.moving import move_in
from megatron_hybrid.memory.pages import HostPages
from megatron_hybrid.models.hybrid_model import HybridModel
from tests.thorough import A_THIRD, usually
from tests.tiny_models import FAMILIES, make_tiny_model


@pytest.fixture(autouse=True)
def small_ones_move_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "LEAST_BYTES", 512)


def all_tensors() -> Iterator[Tensor]:
    for one in gc.get_objects():
        if (
            issubclass(type(one), Tensor)
            and one.device.type == "cpu"
            and one.layout is torch.strided
        ):
            yield one


def held(model: HybridModel) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


@A_THIRD
@pytest.mark.parametrize(
    "family", usually(["nemotron_h_moe", "jamba", "qwen3_5", "zamba2", "lfm2", "llama"], FAMILIES)
)
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_nobody_holds_the_old_memory_of_a_model(
    family: str, quantization: str | None, tmp_path: Path
) -> None:
    make_tiny_model(family, tmp_path)
    model = load_weights(EngineConfig(load=str(tmp_path), device="cpu", quantization=quantization))
    before = {name: value.clone() for name, value in held(model).items()}
    old = {
        value.untyped_storage().data_ptr()
        for value in held(model).values()
        if value.untyped_storage().nbytes() >= moving.LEAST_BYTES
    }
    # what has no name among the weights but is in the same memory: views, and tensors of formats
    aliases = [one for one in all_tensors() if one.untyped_storage().data_ptr() in old]
    assert len(aliases) > len(old)
    arena = Arena(HostPages())
    move_in(model, arena)
    first = arena._pages.view(0, 1).data_ptr()  # type: ignore[attr-defined]
    for one in aliases:
        assert first <= one.data_ptr() < first + arena.nbytes or not one.numel()
    after = held(model)
    for name, value in before.items():
        assert after[name].stride() == value.stride()
        assert torch.equal(after[name].view(torch.uint8), value.view(torch.uint8)), name
    moved = sum(v.nbytes for v in after.values() if first <= v.data_ptr() < first + arena.nbytes)
    assert moved > 0.9 * sum(value.nbytes for value in after.values())


def test_what_is_small_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "LEAST_BYTES", 4000)
    layer = nn.Linear(100, 100)
    places = layer.weight.data_ptr(), layer.bias.data_ptr()
    move_in(layer, Arena(HostPages()))
    assert layer.weight.data_ptr() != places[0] and layer.bias.data_ptr() == places[1]


def test_a_tensor_that_somebody_else_holds_is_no_silent_copy() -> None:
    layer = nn.Linear(100, 100)
    elsewhere = layer.weight.data[:50]
    with pytest.raises(AssertionError, match="somebody holds a tensor"):
        move_in(layer, Arena(HostPages()))
    assert elsewhere.shape == (50, 100)
