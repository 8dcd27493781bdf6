"""Sampling kernels on a GPU against brute force in float64."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.sampling_cases import Draws, check_argmax, check_draws

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
from megatron_hybrid.kernels.sampling import reference  # noqa: E402
from megatron_hybrid.kernels.sampling import triton as sampling  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "vocabulary"),
    [(1, 131072), (40, 131072), (200, 100352), (20, 262144), (30, 2049), (30, 500)],
)
def test_draws_are_those_of_brute_force(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    check_draws(sampling, Draws.random(rows, vocabulary, "cuda", dtype), slack=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.01, 0.3, 3.0])
def test_flat_and_peaked_rows(scale: float, dtype: torch.dtype) -> None:
    """From lists, and from rows that keep too much for one."""
    draws = Draws.random(60, 131072, "cuda", dtype)
    draws.logits.mul_(scale)
    draws.top_k[::2] = torch.tensor([0, 50, 1000, 3000, 60000], device="cuda").repeat(6).int()
    draws.min_p.mul_(0.1)
    check_draws(sampling, draws, slack=1e-5)


def test_draws_mostly_equal_the_reference() -> None:
    draws = Draws.random(500, 50000, "cuda")
    ours = sampling.draw(*draws.used())
    theirs = reference.draw(*draws.used())
    assert (ours == theirs).float().mean() > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    """Nor on which filters the others use."""
    draws = Draws.random(300, 131072, "cuda", dtype)
    tokens = sampling.draw(*draws.all())
    for row in range(0, 300, 7):
        alone = draws.rows(slice(row, row + 1))
        assert sampling.draw(*alone.used()) == tokens[row]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("vocabulary", "padded"), [(50280, 50288), (65536, 65544), (65536, 65537), (50257, 50258)]
)
def test_where_a_row_begins_in_memory_does_not_matter(
    vocabulary: int, padded: int, dtype: torch.dtype
) -> None:
    """Flat rows, in which top-p ends among tokens that hardly weigh more than sums are rounded."""
    logits = torch.randn(2000, padded, device="cuda", generator=torch.Generator("cuda")).to(dtype)
    draws = Draws.random(2000, 64, "cuda")
    draws.logits, draws.top_k = logits[:, :vocabulary], draws.top_k * 0
    draws.min_p, draws.temperature = draws.min_p * 0, draws.temperature.clamp(min=1.0)
    tokens = sampling.draw(*draws.all())
    draws.logits = logits[:, :vocabulary].contiguous()
    assert torch.equal(sampling.draw(*draws.all()), tokens)
    for row in range(0, 2000, 9):
        alone = draws.rows(slice(row, row + 1))
        alone.logits = logits[row : row + 1, :vocabulary]
        assert sampling.draw(*alone.all()) == tokens[row]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [50257, 65536])
def test_log_probabilities_are_those_of_a_row_alone(vocabulary: int, dtype: torch.dtype) -> None:
    logits = torch.randn(300, vocabulary, device="cuda", dtype=dtype)
    together = sampling.log_softmax(logits)
    for row in range(300):
        assert torch.equal(sampling.log_softmax(logits[row:])[0], together[row])
        assert torch.equal(sampling.log_softmax(logits[row : row + 1].clone())[0], together[row])


def test_of_equal_logits_the_first_are_kept() -> None:
    draws = Draws.random(100, 4096, "cuda")
    draws.logits[:] = 0
    draws.logits[:, 5:15] = 30
    draws.temperature.fill_(1.0)
    draws.top_k.fill_(4)
    tokens = sampling.draw(*draws.all())
    assert ((tokens >= 5) & (tokens < 9)).all()
    check_draws(sampling, draws, slack=1e-5)


def test_a_masked_token_is_never_drawn() -> None:
    draws = Draws.random(200, 5000, "cuda")
    draws.logits[:, ::2] = -torch.inf
    assert (sampling.draw(*draws.all()) % 2 == 1).all()


@pytest.mark.parametrize("allowed", [[7], [7, 4000], [0, 1, 2, 4999]])
def test_few_allowed_tokens_are_drawn_as_by_brute_force(allowed: list[int]) -> None:
    """As grammars leave them: fewer than top-k keeps."""
    draws = Draws.random(100, 5000, "cuda")
    own = draws.logits[:, allowed].clone()
    draws.logits.fill_(-torch.inf)
    draws.logits[:, allowed] = own
    check_draws(sampling, draws, slack=1e-5)


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
    found = sampling.penalise(*(argument.cuda() for argument in arguments))
    assert torch.allclose(found.cpu(), reference.penalise(*arguments), atol=1e-5)


def test_draws_can_be_captured() -> None:
    draws = Draws.random(16, 131072, "cuda")
    sampling.draw(*draws.all())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sampling.draw(*draws.all())
    for point in (0.1, 0.7):
        draws.point.fill_(point)
        graph.replay()
        assert torch.equal(tokens, sampling.draw(*draws.all()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 256])
def test_argmax_takes_the_first_of_equal_ones(rows: int, dtype: torch.dtype) -> None:
    check_argmax(sampling.argmax, rows, 131072, dtype, "cuda")
    check_argmax(sampling.argmax, rows, 100_003, dtype, "cuda")
