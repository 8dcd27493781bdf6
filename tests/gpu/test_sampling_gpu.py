"""Sampling kernels on a GPU against brute force in float64."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.sampling_cases import Draws, check_draws

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("flashinfer")
from megatron_hybrid.kernels.sampling import flashinfer, reference  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("rows", "vocabulary"), [(1, 131072), (40, 131072), (200, 100352), (30, 2049), (30, 500)]
)
def test_draws_are_those_of_brute_force(rows: int, vocabulary: int) -> None:
    check_draws(flashinfer, Draws.random(rows, vocabulary, "cuda"), slack=1e-5)


def test_draws_mostly_equal_the_reference() -> None:
    draws = Draws.random(500, 50000, "cuda")
    ours = flashinfer.draw(*draws.used())
    theirs = reference.draw(*draws.used())
    assert (ours == theirs).float().mean() > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    """Nor on which filters the others use."""
    draws = Draws.random(300, 131072, "cuda", dtype)
    tokens = flashinfer.draw(*draws.all())
    for row in range(0, 300, 7):
        alone = draws.rows(slice(row, row + 1))
        assert flashinfer.draw(*alone.used()) == tokens[row]


def test_equal_logits_are_kept_together() -> None:
    draws = Draws.random(100, 4096, "cuda")
    draws.logits[:] = 0
    draws.logits[:, 5:15] = 30
    draws.temperature.fill_(1.0)
    draws.top_k.fill_(4)
    tokens = flashinfer.draw(*draws.all())
    assert ((tokens >= 5) & (tokens < 15)).all()


def test_a_masked_token_is_never_drawn() -> None:
    draws = Draws.random(200, 5000, "cuda")
    draws.logits[:, ::2] = -torch.inf
    assert (flashinfer.draw(*draws.all()) % 2 == 1).all()


@pytest.mark.parametrize("allowed", [[7], [7, 4000], [0, 1, 2, 4999]])
def test_few_allowed_tokens_are_drawn_as_by_brute_force(allowed: list[int]) -> None:
    """As grammars leave them: fewer than top-k keeps."""
    draws = Draws.random(100, 5000, "cuda")
    own = draws.logits[:, allowed].clone()
    draws.logits.fill_(-torch.inf)
    draws.logits[:, allowed] = own
    check_draws(flashinfer, draws, slack=1e-5)


def test_penalties_equal_those_on_a_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    arguments = (
        torch.randn(20, 5000, generator=generator),
        torch.randint(0, 4, (20, 5000), generator=generator).short(),
        torch.rand(20, 5000, generator=generator) < 0.3,
        torch.rand(20, generator=generator) + 0.6,
        torch.rand(20, generator=generator) - 0.5,
        torch.rand(20, generator=generator) - 0.5,
    )
    found = flashinfer.penalise(*(argument.cuda() for argument in arguments))
    assert torch.allclose(found.cpu(), reference.penalise(*arguments), atol=1e-5)


def test_draws_can_be_captured() -> None:
    draws = Draws.random(16, 131072, "cuda")
    flashinfer.draw(*draws.all())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = flashinfer.draw(*draws.all())
    for point in (0.1, 0.7):
        draws.point.fill_(point)
        graph.replay()
        assert torch.equal(tokens, flashinfer.draw(*draws.all()))
