"""Triton's routers, in Triton's interpreter."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs these kernels compiled", allow_module_level=True)
if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from megatron_hybrid.kernels.experts import routing  # noqa: E402
from megatron_hybrid.kernels.experts.protocol import Router  # noqa: E402
from megatron_hybrid.kernels.norm import triton as triton_norm  # noqa: E402
from tests.kernels.routing_by_hand import (  # noqa: E402
    KINDS,
    chosen_by_hand,
    in_longer_rows,
    normed_inputs,
    router,
)
from tests.thorough import A_THIRD  # noqa: E402

pytestmark = pytest.mark.usefixtures("poisoned")


@A_THIRD
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # with equal logits among 16 bits
@pytest.mark.parametrize("num_experts", [8, 11, 64, 512])
def test_choose(num_experts: int, dtype: torch.dtype, kind: str) -> None:
    if num_experts % KINDS[kind].get("num_groups", 1):
        pytest.skip("no groups of one size")
    to = router(num_experts, 4, **KINDS[kind])
    logits = torch.randn(11, num_experts, generator=torch.Generator().manual_seed(0))
    logits[1::2] -= 8  # all negative
    logits = logits.to(dtype)
    experts, weights = routing.choose(logits, to)
    expected, expected_weights = chosen_by_hand(logits, to)
    assert experts.tolist() == expected
    torch.testing.assert_close(weights.double(), expected_weights, atol=1e-6, rtol=1e-5)


@A_THIRD
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("tokens", "num_experts", "width"),
    [
        *[(1, 64, 1100), (3, 8, 24), (1, 100, 16), (1, 200, 16)],
        *[(9, 8, 24), (9, 64, 300), (40, 32, 512), (9, 100, 300)],
    ],
)
def test_route(tokens: int, num_experts: int, width: int, kind: str) -> None:
    to = router(num_experts, 4, width, dtype=torch.float16, **KINDS[kind])
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, width, generator=generator).half()
    logits = x.double() @ to.weight.double().t()
    if to.scoring == "softmax":  # rounded as the product in that type is
        logits = logits.half()
    experts, weights = routing.route(x, to)
    expected, expected_weights = chosen_by_hand(logits, to)
    assert experts.tolist() == expected
    torch.testing.assert_close(weights.double(), expected_weights, atol=1e-5, rtol=1e-4)
    again, _ = routing.route(x, to)  # the counters are as they were
    assert torch.equal(again, experts)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("tokens", "num_experts"), [(1, 5), (33, 64), (130, 70)])
def test_scores_in_tiles(tokens: int, num_experts: int, scoring: str) -> None:
    to = router(num_experts, 2, 300, dtype=torch.float16, scoring=scoring)
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 2, 300, generator=generator).half()[:, 1]
    logits = routing.tiled_scores(x, to)
    assert logits.dtype == (torch.float16 if scoring == "softmax" else torch.float32)
    expected = x.double() @ to.weight.double().t()
    torch.testing.assert_close(logits.double(), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_more_tokens_than_are_scored_in_tiles(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "_MOST_TILED", 10)
    to = router(8, 4, 24, **KINDS[kind])
    x = torch.randn(11, 24, generator=torch.Generator().manual_seed(0))
    experts, weights = routing.route(x, to)
    expected, expected_weights = chosen_by_hand(x @ to.weight.t(), to)
    assert experts.tolist() == expected
    torch.testing.assert_close(weights.double(), expected_weights, atol=1e-6, rtol=1e-5)


def test_route_of_groups_of_other_sizes_and_of_no_tokens() -> None:
    to = router(12, 2, 24, scoring="sigmoid", num_groups=3, chosen_groups=1)
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(0))
    experts, _ = routing.route(x, to)
    assert experts.tolist() == chosen_by_hand(x @ to.weight.t(), to)[0]
    experts, weights = routing.route(torch.empty(0, 24), router(8, 2, 24))
    assert experts.shape == weights.shape == (0, 2)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # the interpreter's numpy
def test_rows_that_are_no_numbers_among_many_stay_within_the_experts() -> None:
    x = torch.randn(20, 24).half()
    x[7] = torch.nan
    for scoring in ("softmax", "sigmoid"):
        to = router(5, 3, 24, dtype=torch.float16, scoring=scoring)
        experts, weights = routing.route(x, to)
        assert experts.min() >= 0 and experts.max() < 5
        assert weights[7].isnan().all() and not weights[8].isnan().any()


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # the interpreter's numpy
@pytest.mark.parametrize("normalize", [True, False])
def test_rows_that_are_no_numbers_stay_within_the_experts(normalize: bool) -> None:
    logits = torch.randn(3, 5)
    logits[1] = torch.nan
    logits[2, 1:] = -torch.inf
    experts, weights = routing.choose(logits, router(5, 3, normalize=normalize))
    assert experts.min() >= 0 and experts.max() < 5
    assert weights[1].isnan().all()
    assert weights[2].tolist() == [1.0, 0.0, 0.0]
    experts, _ = routing.choose(logits, router(5, 3, scoring="sigmoid", bias=True))
    assert experts.min() >= 0 and experts.max() < 5


def routed(logits: torch.Tensor, to: Router) -> tuple[torch.Tensor, torch.Tensor]:
    """`routing.route` of tokens with these logits [tokens, experts]."""
    one = torch.ones(1, 1, dtype=logits.dtype)
    found = [routing.route(one, to._replace(weight=row[:, None].contiguous())) for row in logits]
    experts, weights = zip(*found, strict=True)
    return torch.cat(experts), torch.cat(weights)


# Of float32 and of 16 bits, and the choice of programs of several warps.
WAYS = [(routing.choose, torch.float32), (routing.choose, torch.float16), (routed, torch.float16)]


@pytest.mark.parametrize(("choose", "dtype"), WAYS)
def test_logits_of_both_signs_and_both_zeros(choose, dtype) -> None:  # type: ignore[no-untyped-def]
    logits = torch.tensor([[-0.0, -3.0, 0.0, -1e-30], [-2.0, -0.5, -torch.inf, -0.25]]).to(dtype)
    experts, weights = choose(logits, router(4, 3))
    assert experts.tolist() == [[0, 2, 3], [3, 1, 0]]
    expected = torch.tensor([[0.0, 0.0, -1e-30], [-0.25, -0.5, -2.0]]).softmax(1)
    torch.testing.assert_close(weights, expected)


def routed_together(logits: torch.Tensor, to: Router) -> tuple[torch.Tensor, torch.Tensor]:
    """Likewise of many tokens at once, by programs that choose for several."""
    same = torch.eye(logits.shape[1], dtype=logits.dtype)
    experts, weights = routing.route(logits.repeat(20, 1), to._replace(weight=same))
    return experts[-len(logits) :], weights[-len(logits) :]


@pytest.mark.parametrize(("choose", "dtype"), [*WAYS, (routed_together, torch.float16)])
@pytest.mark.parametrize("value", [0.0, 1.5, -1.5])
@pytest.mark.parametrize(("normalize", "share"), [(True, 1 / 3), (False, 1 / 6)])
def test_equal_logits_go_to_the_lower_expert(  # type: ignore[no-untyped-def]
    normalize: bool, share: float, value: float, choose, dtype
) -> None:
    logits = torch.full((2, 6), value).to(dtype)
    experts, weights = choose(logits, router(6, 3, normalize=normalize))
    assert experts.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), share))
    experts, _ = choose(logits, router(6, 3, scoring="sigmoid", bias=False))
    assert experts.tolist() == [[0, 1, 2]] * 2


@A_THIRD
@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"sinks"}))
@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("norm_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "num_experts"), [(1, 64), (4, 8)])
def test_the_norm_and_the_router_in_one_kernel(
    tokens: int,
    num_experts: int,
    norm_dtype: torch.dtype,
    residual_dtype: torch.dtype,
    kind: str,
) -> None:
    x, residual, weight, to = normed_inputs(tokens, num_experts, norm_dtype, residual_dtype, kind)
    norm = 0.22, weight, 1e-5, torch.float16
    normed, total = triton_norm.add_rms_norm(x, in_longer_rows(residual), *norm)
    assert isinstance(normed, torch.Tensor)
    experts, weights = routing.route(normed, to)
    for _ in range(2):  # the counters are as they were
        found = routing.add_norm_route(x, in_longer_rows(residual), *norm, to)
        assert found is not None
        assert torch.equal(found.residual, total)
        assert torch.equal(found.x, normed)
        assert torch.equal(found.routes[0], experts)
        assert torch.equal(found.routes[1], weights)


def test_the_norm_is_not_made_by_many_programs_nor_of_rows_of_other_lengths() -> None:
    def is_one_kernel(tokens: int, num_experts: int, width: int = 1100) -> bool:
        x, residual, weight, to = normed_inputs(tokens, num_experts, width=width)
        before = residual.clone()
        found = routing.add_norm_route(x, residual, 1.0, weight, 1e-5, torch.float16, to)
        assert found is not None or torch.equal(residual, before)
        return found is not None

    assert is_one_kernel(1, 256) and is_one_kernel(4, 64) and is_one_kernel(8, 8)
    assert not is_one_kernel(1, 258) and not is_one_kernel(5, 64)
    assert not is_one_kernel(9, 8) and not is_one_kernel(0, 8)  # the router's are two, or none
    assert not is_one_kernel(1, 8, width=1024) and not is_one_kernel(1, 8, width=2056)
