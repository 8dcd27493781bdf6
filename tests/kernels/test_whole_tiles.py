"""Products of whole tiles: a row's bits do not depend on the rows beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megatron_hybrid.config import EngineConfig
from megatron_hybrid.engine import checks
from megatron_hybrid.engine.build import build_engine
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.kernels.experts import reference as experts
from megatron_hybrid.kernels.experts import whole_tiles as experts_by_tiles
from megatron_hybrid.kernels.experts.protocol import ExpertWeights
from megatron_hybrid.kernels.linear import whole_tiles
from megatron_hybrid.kernels.linear.whole_tiles import TILE_ROWS, linear, places_matter
from tests.thorough import A_THIRD, usually
from tests.tiny_models import make_tiny_model

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WIDTHS = usually(
    (1, 2, 3, 13, 16, 17, 63, 64, 100, 513), (1, 2, 3, 7, 8, 13, 16, 17, 31, 32, 63, 64, 96, 100,
    128, 255, 300, 513, 1024)
)  # fmt: skip


def drawn(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@A_THIRD
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("inputs", WIDTHS)
def test_rows_are_alike_beside_any_others(inputs: int, dtype: torch.dtype) -> None:
    for outputs in WIDTHS:
        if inputs * outputs > 70_000:
            continue
        weight, bias = drawn(dtype, outputs, inputs, seed=1), drawn(dtype, outputs, seed=2)
        wider = drawn(dtype, 2 * TILE_ROWS + 5, inputs + 3)
        x = wider[:, 1:-2]  # columns of a wider tensor
        whole = linear(x, weight, bias)
        close = F.linear(x.double(), weight.double(), bias.double())
        tolerance = 16 * inputs**0.5 * torch.finfo(dtype).eps
        torch.testing.assert_close(whole.double(), close, atol=tolerance, rtol=tolerance)
        assert not places_matter(weight), (outputs, inputs)
        for begin in (0, 1, 5, 15, 16, 20):
            for count in (1, 2, 16, 17):
                part = slice(begin, begin + count)
                assert torch.equal(linear(x[part], weight, bias), whole[part]), (outputs, part)


def test_of_no_rows() -> None:
    assert linear(torch.zeros(0, 5), torch.zeros(3, 5)).shape == (0, 3)
    assert whole_tiles.multiply(torch.zeros(0, 5), torch.zeros(3, 5)).shape == (0, 3)


def test_places_that_matter_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    weight = drawn(torch.float32, 8, 48)

    def uneven(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The last rows in two parts, as a library's last rows of a tile."""
        y = x @ w.t()
        y[13:] = x[13:, :20] @ w[:, :20].t() + x[13:, 20:] @ w[:, 20:].t()
        return y

    monkeypatch.setattr(whole_tiles.F, "linear", uneven)
    assert places_matter(weight)
    make_tiny_model("llama", tmp_path)
    with pytest.raises(ConfigurationError, match=r"cannot hold on this CPU: with weights of \d+ x"):
        build_engine(EngineConfig(load=str(tmp_path), batch_invariant=True))


def test_every_size_of_a_model_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = []

    def note(weight: torch.Tensor) -> bool:
        seen.append(tuple(weight.shape))
        return False

    monkeypatch.setattr(checks, "places_matter", note)
    make_tiny_model("granite_moe_hybrid", tmp_path)
    engine = build_engine(EngineConfig(load=str(tmp_path), batch_invariant=True))
    config = json.loads((tmp_path / "config.json").read_text())
    width, experts = config["hidden_size"], config["num_local_experts"]
    expert = 2 * config["intermediate_size"], width
    assert {(engine.vocab_size, width), (experts, width), expert} <= set(seen)
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize("gated", [False, True])
def test_a_token_s_experts_give_the_same_bits_beside_any_others(gated: bool) -> None:
    """And those of reference.py, nearly."""
    count, width, inner = 6, 24, 17
    up = drawn(torch.float32, count, inner * (1 + gated), width, seed=3)
    layer = ExpertWeights(up, drawn(torch.float32, count, width, inner, seed=4), "silu", gated)
    x = drawn(torch.float32, 41, width)
    chosen = torch.stack([torch.randperm(count)[:3] for _ in range(len(x))])
    weights = torch.rand(len(x), 3)
    whole = experts_by_tiles.mix(x, chosen, weights, layer)
    torch.testing.assert_close(whole, experts.mix(x, chosen, weights, layer))
    for begin in range(0, 41, 3):
        for end in (begin + 1, begin + 2, begin + 18):
            part = slice(begin, end)
            one = experts_by_tiles.mix(x[part], chosen[part], weights[part], layer)
            assert torch.equal(one, whole[part])
