"""Sampling kernels in Triton's interpreter, on a CPU, with groups and lists so small that rows of a
few hundred logits go every way."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_hybrid.kernels.sampling import reference
from megatron_hybrid.kernels.sampling.protocol import Filters
from tests.kernels.sampling_cases import Draws, check_argmax, check_draws
from tests.thorough import A_THIRD, usually

if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    pytest.skip("for machines with triton and without CUDA", allow_module_level=True)
from megatron_hybrid.kernels.sampling import triton as sampling  # noqa: E402

SLACK = 1e-5
SMALL = sampling.Sizes(
    group=4, program=128, groups=16, tile=8, listed=32, list_block=16, row_block=128
)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was never written must never matter."""

    def empty(*shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        worst = torch.nan if dtype.is_floating_point else 2**30
        return unwritten(*shape, dtype=dtype, device=device).fill_(worst)

    unwritten = torch.empty
    monkeypatch.setattr(torch, "empty", empty)


def draw_small(logits: Tensor, filters: Filters, point: Tensor) -> Tensor:
    return sampling.draw(logits, filters, point, SMALL)


small = SimpleNamespace(draw=draw_small)


@A_THIRD
@pytest.mark.parametrize(
    ("rows", "vocabulary", "dtype"),
    [(8, 1, torch.float32), (25, 7, torch.float16), (25, 300, torch.float32)]
    + usually([(60, 250, torch.bfloat16)], [(200, v, torch.bfloat16) for v in (2, 129, 250)]),
)
def test_draws_are_those_of_brute_force(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    check_draws(small, Draws.random(rows, vocabulary, dtype=dtype), SLACK)


def test_draws_from_groups_of_the_usual_sizes() -> None:
    check_draws(sampling, Draws.random(12, 9001, dtype=torch.bfloat16), SLACK)


@A_THIRD
@pytest.mark.parametrize("top_k", [0, 3, 130])
@pytest.mark.parametrize("scale", usually([0.01, 3.0], [0.01, 0.3, 1.0, 3.0, 10.0]))
def test_flat_and_peaked_rows(scale: float, top_k: int) -> None:
    """From lists, and from rows that keep too much for one."""
    draws = Draws.random(12, 257, dtype=torch.bfloat16)
    draws.logits.mul_(scale)
    draws.top_k.fill_(top_k)
    draws.top_p.copy_(torch.tensor([0.3, 0.9, 0.9999, 1.0]).repeat(3))
    draws.min_p.mul_(0.1)
    check_draws(small, draws, SLACK)


@A_THIRD
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(6, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.3), (6, 1.0, 0.7), (0, 0.95, 0.7)],
)
def test_filters_alone_and_beside_min_p(top_k: int, top_p: float, min_p: float) -> None:
    draws = Draws.random(24, 200, dtype=torch.bfloat16)
    for name, value in (("top_k", top_k), ("top_p", top_p), ("min_p", min_p)):
        getattr(draws, name).fill_(value)
    draws.temperature.fill_(2.0)
    draws.point.copy_(torch.linspace(0.02, 0.98, 24))
    check_draws(small, draws, SLACK)


def test_likely_tokens_that_lie_together() -> None:
    """Few groups, of which all tokens would be listed."""
    draws = Draws.random(12, 200, dtype=torch.bfloat16)
    draws.logits = draws.logits.sort(dim=1, descending=True).values
    draws.top_k.fill_(14)
    draws.top_p.fill_(1.0)
    draws.min_p.fill_(0.0)
    draws.temperature.fill_(4.0)
    check_draws(small, draws, SLACK)


@pytest.mark.parametrize("distinct", [1, 5])
def test_of_equal_logits_the_first_are_kept(distinct: int) -> None:
    generator = torch.Generator().manual_seed(distinct)
    draws = Draws.random(24, 150)
    draws.logits = torch.randint(distinct, (24, 150), generator=generator) * 0.25 - 0.25
    draws.logits[:, ::3] *= -1.0  # also -0, which is 0
    draws.logits = draws.logits.bfloat16()
    draws.top_k = torch.randint(1, 150, (24,), generator=generator).int()
    draws.min_p.fill_(0.0)
    check_draws(small, draws, SLACK)


def test_draws_mostly_equal_the_reference() -> None:
    draws = Draws.random(40, 300)
    same = draw_small(*draws.used()) == reference.draw(*draws.used())
    assert same.float().mean() > 0.9


def test_a_row_depends_neither_on_the_others_nor_on_flags() -> None:
    draws = Draws.random(16, 300, dtype=torch.bfloat16)
    tokens = draw_small(*draws.all())
    for row in range(0, 16, 3):
        alone = draws.rows(slice(row, row + 1))
        assert draw_small(*alone.used()) == tokens[row]


def test_a_masked_token_is_never_drawn() -> None:
    draws = Draws.random(24, 200)
    draws.logits[:, ::2] = -torch.inf
    assert (draw_small(*draws.all()) % 2 == 1).all()
    check_draws(small, draws, SLACK)


@pytest.mark.parametrize("allowed", [[7], [0, 1, 2, 199]])
def test_few_allowed_tokens_are_drawn_as_by_brute_force(allowed: list[int]) -> None:
    """As grammars leave them: fewer than top-k keeps."""
    draws = Draws.random(16, 200)
    own = draws.logits[:, allowed].clone()
    draws.logits.fill_(-torch.inf)
    draws.logits[:, allowed] = own
    check_draws(small, draws, SLACK)


def test_rows_that_are_parts_of_longer_ones() -> None:
    draws = Draws.random(8, 200)
    wide = torch.full((8, 230), 100.0)
    wide[:, :200] = draws.logits
    tokens = draw_small(*draws.all())
    draws.logits = wide[:, :200]
    assert torch.equal(draw_small(*draws.all()), tokens)
    assert torch.equal(sampling.argmax(draws.logits, 64), draws.logits.argmax(1))


@pytest.mark.filterwarnings("ignore:All-NaN")
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_rows_without_any_number_give_a_token_of_the_vocabulary(value: float) -> None:
    draws = Draws.random(8, 200)
    draws.logits.fill_(value)
    for tokens in (draw_small(*draws.all()), sampling.argmax(draws.logits, 64)):
        assert ((tokens >= 0) & (tokens < 200)).all()


def test_no_rows() -> None:
    draws = Draws.random(3, 20).rows(slice(0, 0))
    assert sampling.draw(*draws.all()).shape == (0,)
    assert sampling.argmax(draws.logits).shape == (0,)


def test_argmax_leaves_nothing_for_later_calls():
    generator = torch.Generator().manual_seed(0)
    for rows, vocabulary in ((3, 1000), (1, 64), (usually(1030, 1500), 130), (5, 65), (3, 1000)):
        logits = torch.randn(rows, vocabulary, generator=generator)
        assert torch.equal(sampling.argmax(logits, 64), logits.argmax(1))
        assert all(not counters.any() for counters in sampling._KNOWN_COUNTERS.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [1, 128, 300])
def test_argmax_takes_the_first_of_equal_ones(vocabulary: int, dtype: torch.dtype) -> None:
    check_argmax(lambda logits: sampling.argmax(logits, 64), 20, vocabulary, dtype)
