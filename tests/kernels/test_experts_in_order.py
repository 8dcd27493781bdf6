"""Experts in batch-invariant mode, in Triton's interpreter, whose products are made in order."""

from __future__ import annotations

import importlib.util
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs these kernels compiled", allow_module_level=True)
if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from megatron_hybrid.kernels.experts import (  # noqa: E402
    in_order_few,
    in_order_routing,
    reference,
    triton,
    triton_prompts,
)
from megatron_hybrid.kernels.experts import triton_in_order as in_order  # noqa: E402
from megatron_hybrid.kernels.experts.in_order_few import Tile, Tiles  # noqa: E402
from megatron_hybrid.kernels.experts.in_order_sums import OrderedParts  # noqa: E402
from megatron_hybrid.kernels.experts.protocol import Router, Shared, SharedResult  # noqa: E402
from megatron_hybrid.kernels.linear import triton_in_order as linear  # noqa: E402
from megatron_hybrid.kernels.linear.formats import WeightFormat  # noqa: E402
from megatron_hybrid.kernels.norm import triton as norm  # noqa: E402
from tests.kernels.dots_in_order import dots_in_order as dots_in_order  # noqa: E402
from tests.kernels.experts_by_hand import (  # noqa: E402
    Mixture,
    by_hand,
    check_quantized,
    mixture,
    quantized_mixture,
    shared_by_hand,
    shared_mlp,
    shared_out,
)
from tests.kernels.routing_by_hand import (  # noqa: E402
    KINDS,
    chosen_by_hand,
    in_longer_rows,
    normed_inputs,
    router,
)
from tests.thorough import A_THIRD, usually

pytestmark = pytest.mark.usefixtures("poisoned", "dots_in_order")

BF16 = torch.bfloat16
ACTIVATIONS = pytest.mark.parametrize(
    ("activation", "gated"), [("silu_to_0.5", True), ("relu2", False)]
)
# Of 4 experts of which each token has 2: pairs one by one; blocks of 16 rows; of 32; triton.py's
# grouped products; triton_prompts.py's.
COUNTS = [1, 3, 17, 40, 70, 200]


def check(result: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    limit = 3e-2 if dtype == BF16 else 1e-5  # the interpreter rounds to bfloat16 towards zero
    torch.testing.assert_close(result.double(), expected, atol=limit, rtol=limit)


def some(m: Mixture, tokens: Any) -> Mixture:
    """These tokens alone."""
    return m._replace(x=m.x[tokens], experts=m.experts[tokens], weights=m.weights[tokens])


def check_bits(m: Mixture, elsewhere: int = 0, shared: SharedResult | None = None) -> Tensor:
    """Each of some tokens alone, among a few, and all in another order -> the result of all. Of the
    larger groups what each pair's expert makes: a program adds up one token's, whoever is there."""

    def parts(tokens: Any) -> OrderedParts:
        beside = None
        if shared is not None:
            beside = SharedResult(shared.values[tokens], shared.gate)
        found = in_order.mix_parts(*some(m, tokens).arguments(elsewhere), shared=beside)
        assert isinstance(found, OrderedParts)
        return found

    def own(found: OrderedParts) -> Tensor:
        """[tokens, chosen, width], without what experts that are elsewhere left."""
        is_here = found.experts < m.up_proj.shape[0]
        return found.parts.unflatten(0, is_here.shape).where(is_here[..., None], 0)

    count = len(m.x)
    all_parts = parts(slice(None))
    every, every_pair = all_parts.sum(), own(all_parts)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    assert torch.equal(own(parts(order)), every_pair[order])
    for token in {0, count - 1}:
        assert torch.equal(parts(slice(token, token + 1)).sum()[0], every[token])
    assert torch.equal(parts(order[:3]).sum(), every[order[:3]])
    for size in (2, 18):
        assert torch.equal(own(parts(order[:size])), every_pair[order[:size]])
    return every


# Numbers of float32 have one kernel for any number of tokens. test_tiles_change_no_bits has both
# activations of the others.
ALL_MIXES = list(product(COUNTS, [torch.float32, BF16], ["silu", "relu2"]))
MIXES = [
    (3, torch.float32, "silu_to_0.5"),
    (40, torch.float32, "relu2"),
    *zip(COUNTS, [BF16] * len(COUNTS), ["silu_to_0.5", "relu2"] * 3, strict=True),
]


@A_THIRD
@pytest.mark.parametrize(("tokens", "dtype", "activation"), usually(MIXES, ALL_MIXES))
def test_mix(tokens: int, dtype: torch.dtype, activation: str) -> None:
    gated = activation != "relu2"
    m = mixture(tokens, num_experts=4, activation=activation, gated=gated, dtype=dtype)
    mixed = check_bits(m)
    assert mixed.dtype == dtype
    check(mixed, by_hand(m), dtype)
    plain = reference.mix(*m._replace(x=m.x.float()).arguments()) if dtype != BF16 else mixed
    check(mixed, plain.double(), dtype)


@pytest.mark.parametrize(
    ("dtype", "width", "inner"),
    usually(
        [(BF16, 136, 72), (BF16, 130, 70), (torch.float32, 130, 70)],
        [
            (dtype, *size)
            for dtype in (torch.float32, BF16)
            for size in ((32, 32), (136, 72), (264, 136), (130, 70))
        ],
    ),
)
def test_sizes_that_tiles_divide_and_others(dtype: torch.dtype, width: int, inner: int) -> None:
    """The last ones have rows that no descriptor takes."""
    m = mixture(20, num_experts=2, width=width, inner=inner, dtype=dtype)
    check(check_bits(m), by_hand(m), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("tokens", usually([20], [2, 40, 90]))
def test_ranks_with_some_of_the_experts(tokens: int, dtype: torch.dtype) -> None:
    m = mixture(tokens, chosen=3, dtype=dtype)
    first, *others = parts = shared_out(m, 4)
    mixed = check_bits(first, 6).double()
    mixed += sum(in_order.mix(*part.arguments(6)).double() for part in others)
    check(mixed, by_hand(m), dtype)
    parts[0].experts.fill_(2)
    assert not in_order.mix(*parts[0].arguments(6)).any()


def test_tokens_that_all_share_their_experts_and_others() -> None:
    m = mixture(60, num_experts=5, dtype=BF16)
    m.experts[:40] = torch.tensor([4, 1])
    check(check_bits(m), by_hand(m), BF16)


@pytest.mark.parametrize("tokens", usually([3, 40, 130], [1, 3, 17, 40, 70, 130]))
def test_the_order_of_a_tokens_experts_changes_nothing(tokens: int) -> None:
    m = mixture(tokens, num_experts=4, chosen=3, dtype=BF16)
    expected = in_order.mix(*m.arguments())
    places = torch.tensor([2, 0, 1])
    other = m._replace(experts=m.experts[:, places], weights=m.weights[:, places])
    assert torch.equal(in_order.mix(*other.arguments()), expected)


@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize(("tokens", "width"), usually([(2, 40)], [(2, 40), (30, 40), (5, 2104)]))
def test_what_a_shared_mlp_gave_is_added(tokens: int, width: int, has_gate: bool) -> None:
    m = mixture(tokens, width=width, dtype=BF16)
    shared = shared_mlp(width, 32, True, has_gate, dtype=BF16)
    given = SharedResult(shared_by_hand(m, shared._replace(gate=None)).to(BF16), shared.gate)
    check(check_bits(m, shared=given), by_hand(m) + shared_by_hand(m, shared), BF16)


@A_THIRD
@ACTIVATIONS
@pytest.mark.parametrize("tokens", [1, 4])
def test_a_shared_mlp_has_the_bits_of_its_products(
    tokens: int, activation: str, gated: bool
) -> None:
    m = mixture(tokens, 4, chosen=3, width=136, inner=72, activation=activation, gated=gated)
    m = m._replace(x=m.x.half(), up_proj=m.up_proj.half(), down_proj=m.down_proj.half())
    shared = shared_mlp(136, 200, gated, True, dtype=torch.float16)
    assert in_order.takes_shared(m.x, m.arguments()[-1], shared)
    hidden = linear.multiply_activated(m.x, shared.up, None, activation, gated)
    assert hidden is not None
    values = linear.multiply(hidden, shared.down)
    given = in_order.mix_parts(*m.arguments(), shared=SharedResult(values, shared.gate))
    taken = in_order.mix_parts(*m.arguments(), shared=shared)
    assert isinstance(taken, OrderedParts) and torch.equal(taken.beside, values)  # type: ignore[arg-type]
    assert isinstance(given, OrderedParts) and torch.equal(taken.sum(), given.sum())


@pytest.mark.parametrize(("tokens", "dtype"), [(5, BF16), (0, BF16), (3, torch.float32)])
def test_a_shared_mlp_that_is_not_taken(tokens: int, dtype: torch.dtype) -> None:
    m, shared = mixture(tokens, dtype=dtype), shared_mlp(40, 24, True, True, dtype=dtype)
    assert not in_order.takes_shared(m.x, m.arguments()[-1], shared)


@pytest.mark.parametrize("has_gate", [True, False])
def test_routed_experts_and_a_shared_mlp_are_added(has_gate: bool) -> None:
    routed, values, x = torch.randn(3, 9, 72, generator=torch.Generator().manual_seed(0))
    gate = torch.ones(1, 72) * 0.1 if has_gate else None
    every = in_order.add_shared(routed, SharedResult(values, gate), x)
    torch.testing.assert_close(every, reference.add_shared(routed, SharedResult(values, gate), x))
    for t in range(9):
        mine = slice(t, t + 1)
        alone = in_order.add_shared(routed[mine], SharedResult(values[mine], gate), x[mine])
        assert torch.equal(alone, every[mine])


def test_no_tokens() -> None:
    assert in_order.mix(*mixture(0).arguments()).shape == (0, 40)
    to = router(8, 2, 40)
    assert [r.shape for r in in_order.route(torch.zeros(0, 40), to)] == [(0, 2), (0, 2)]


@pytest.mark.parametrize("kind", [(6, 0, False), (3, 1, False), (8, 1, True)])
@pytest.mark.parametrize(("tokens", "width"), [(5, 40), (3, 1100)])
def test_sums_and_their_norms(tokens: int, width: int, kind: tuple[int, int, bool]) -> None:
    """The sum as it is by hand, and the norm of it as of two kernels, bit for bit. Parts of experts
    elsewhere are NaN."""
    chosen, beside, has_gate = kind
    generator = torch.Generator().manual_seed(width)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(BF16)

    experts = torch.rand(tokens, 9, generator=generator).argsort(1)[:, :chosen].int()
    parts = drawn(tokens * chosen, width)
    is_here = (experts < 6).flatten()[:, None]
    ordered = OrderedParts(parts.masked_fill(~is_here, float("nan")), experts, 6)
    shared, x = drawn(tokens, width), drawn(tokens, width)
    gate = drawn(1, width) * 0.1 if has_gate else None
    expected = torch.where(is_here, parts.double(), 0.0).unflatten(0, experts.shape).sum(1)
    if beside:
        ordered = ordered.and_shared(SharedResult(shared, gate), x)
        factor = (x.double() @ gate.double().t()).sigmoid() if gate is not None else 1.0
        expected += shared.double() * factor
    total = ordered.sum()
    check(total, expected, BF16)
    residual, weight = torch.randn(tokens, width, generator=generator), torch.ones(width) * 0.7
    theirs = norm.add_rms_norm(total, residual.clone(), 0.22, weight, 1e-5, BF16)
    found = ordered.add_rms_norm(residual.clone(), 0.22, weight, 1e-5, BF16)
    for ours, expected_rows in zip(found, theirs, strict=True):
        assert isinstance(ours, Tensor) and torch.equal(ours, expected_rows)


def test_parts_are_added_in_the_order_of_experts() -> None:
    experts = torch.tensor([[7, 2, 5]])
    parts = torch.tensor([[1.0], [2.0**25], [-(2.0**25)]])  # 1 is lost, unless it comes last
    assert OrderedParts(parts, experts).sum().item() == 1.0
    assert OrderedParts(parts, torch.tensor([[2, 7, 5]])).sum().item() == 0.0


@A_THIRD
@ACTIVATIONS
@pytest.mark.parametrize("tokens", usually([3], [3, 30]))
def test_tiles_change_no_bits(tokens: int, activation: str, gated: bool) -> None:
    """Neither of these kernels, nor of those for more rows."""
    m = mixture(tokens, 4, chosen=3, width=136, inner=72, activation=activation, gated=gated)
    m = m._replace(x=m.x.half(), up_proj=m.up_proj.half(), down_proj=m.down_proj.half())
    expected, _ = in_order_few.expert_parts(*m.arguments())
    for rows in (16, 64):
        up, down = Tile(64, 64, 3), Tile(16, 32, 4, weights_first=False)
        for tiles in (Tiles(rows, True, up, down), Tiles(rows, False, down, up)):
            assert torch.equal(in_order_few.expert_parts(*m.arguments(), tiles)[0], expected)
    assert torch.equal(triton_prompts.expert_parts(*m.arguments()), expected)
    for average in (1, 50, 200):
        grouped = triton.choose_tiles(average, 1, gated, torch.float16)
        assert torch.equal(triton.mix_grouped(*m.arguments(), grouped).parts, expected)


def test_what_the_kernels_for_few_rows_are_for() -> None:
    x, experts, _, layer = mixture(60, num_experts=4, chosen=2, dtype=BF16).arguments()
    assert in_order_few.can_mix(x, layer, 128)
    assert not in_order_few.can_mix(x, layer, 129)
    assert in_order_few.can_mix(x, layer._replace(elsewhere=1), 129)
    assert not in_order_few.can_mix(x.float(), layer, 1)
    assert not in_order_few.can_mix(x, layer._replace(up=layer.up.float()), 1)
    assert not in_order_few.can_mix(x, layer._replace(up=layer.up[:, :, :-1]), 1)


QUANTIZED = {
    "fp8 by row": WeightFormat("float8_e4m3fn", activations="token"),
    "fp8 by block": WeightFormat("float8_e4m3fn", 32, 64, activations="group"),
    "fp8, weights alone": WeightFormat("float8_e4m3fn", 32, 64),
    "int8": WeightFormat("int8"),
    "int8, inputs too": WeightFormat("int8", activations="token"),
    "4 bits": WeightFormat("uint4", 1, 32, zero_points=True),
    "fp4": WeightFormat("float4_e2m1", 1, 16),
}


@pytest.mark.parametrize(
    ("tokens", "name"),
    usually(
        [((1, 30)[i % 2], name) for i, name in enumerate(QUANTIZED)],
        list(product((1, 30, 60), QUANTIZED)),
    ),
)
def test_quantized_weights(name: str, tokens: int) -> None:
    check_quantized(in_order, QUANTIZED[name], tokens, "silu", True, 64)


@A_THIRD
@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("dtype", usually([torch.float16], [torch.float32, torch.float16]))
def test_bits_of_quantized_weights(name: str, dtype: torch.dtype) -> None:
    """Among so many others that blocks have 128 rows. In float16: the interpreter makes no bfloat16
    of integers."""
    m = mixture(36, num_experts=2, width=64, inner=64, dtype=dtype)
    check_bits(quantized_mixture(m, QUANTIZED[name])[0])


def test_quantized_weights_that_are_written_out() -> None:
    """Rows of another size than descriptors take, and one of two weights alone."""
    m = mixture(40, num_experts=4, width=64, inner=40, dtype=BF16)
    packed, plain = quantized_mixture(m, QUANTIZED["int8"])
    check(check_bits(packed._replace(down_proj=plain.down_proj)), by_hand(plain), BF16)


def check_routes(x: Tensor, to: Router) -> None:
    """Against float64, and each of some tokens alone, and all in another order."""
    experts, weights = in_order.route(x, to)
    logits = x.double() @ to.weight.double().t()
    if to.scoring == "softmax":
        logits = in_order_routing.scores(x, to)
        limit = 2e-2 if x.dtype == BF16 else 1e-5
        torch.testing.assert_close(
            logits.double(), x.double() @ to.weight.double().t(), atol=limit, rtol=limit
        )
    expected, expected_weights = chosen_by_hand(logits, to)
    assert experts.tolist() == expected
    torch.testing.assert_close(weights.double(), expected_weights, atol=1e-5, rtol=1e-4)
    count = len(x)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    all_scores = in_order_routing.scores(x, to)  # of which a program chooses for each token
    assert torch.equal(in_order_routing.scores(x[order], to), all_scores[order])
    groups: list[Any] = [slice(0, 1), slice(count - 1, count), order[:3], order[:18]]
    for tokens in groups:
        some_experts, some_weights = in_order.route(x[tokens], to)
        assert torch.equal(some_experts, experts[tokens])
        assert torch.equal(some_weights, weights[tokens])


SIZES = [(1, 64, 300), (20, 32, 512), (35, 8, 40), (7, 160, 24)]  # tokens, experts, width
DTYPES = (torch.float32, BF16)
# Every kind with every size, in one type or the other.
ROUTES = [
    (size, DTYPES[(i + j) % 2], kind)
    for i, size in enumerate(SIZES)
    for j, kind in enumerate(KINDS)
]


@A_THIRD
@pytest.mark.parametrize(
    ("size", "dtype", "kind"), usually(ROUTES, list(product(SIZES, DTYPES, KINDS)))
)
def test_route(size: tuple[int, int, int], dtype: torch.dtype, kind: str) -> None:
    tokens, num_experts, width = size
    to = router(num_experts, 4, width, dtype=dtype, **KINDS[kind])
    generator = torch.Generator().manual_seed(tokens)
    check_routes(torch.randn(tokens, width, generator=generator).to(dtype), to)


def test_route_of_many_tokens() -> None:
    """By every tile."""
    to = router(8, 2, 300, dtype=BF16, scoring="sigmoid")  # in float32
    x = torch.randn(150, 300, generator=torch.Generator().manual_seed(0)).to(BF16)
    expected = in_order_routing.scores(x, to)
    for tokens in (1, 1000, 3000, 8000):
        tile = in_order_routing.choose_tile(tokens, True)
        assert torch.equal(in_order_routing.scores(x, to, tile), expected)


@A_THIRD
@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"softmax of all", "sinks"}))
@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "num_experts", "width"), [(1, 64, 1104), (4, 8, 304)])
def test_the_norm_and_the_router_in_one_kernel(
    tokens: int, num_experts: int, width: int, residual_dtype: torch.dtype, kind: str
) -> None:
    x, residual, weight, to = normed_inputs(
        tokens, num_experts, torch.float16, residual_dtype, kind, width
    )
    arguments = 0.22, weight, 1e-5, torch.float16
    normed, total = norm.add_rms_norm(x, in_longer_rows(residual), *arguments)
    assert isinstance(normed, Tensor)
    routes = in_order.route(normed, to)
    for _ in range(2):  # the counter is as it was
        found = in_order.add_norm_route(x, residual, *arguments, to)
        assert found is not None
        expected = [normed, total, *routes]
        for one, other in zip([*found[:2], *found.routes], expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("tokens", "width", "dtype", "kind"),
    [
        (5, 304, torch.float16, "sigmoid"),
        (0, 304, torch.float16, "sigmoid"),
        (1, 300, torch.float16, "sigmoid"),
        (1, 304, torch.float32, "sigmoid"),
        (1, 304, torch.float16, "softmax of all"),
    ],
)
def test_what_the_norm_and_the_router_have_two_kernels_for(
    tokens: int, width: int, dtype: torch.dtype, kind: str
) -> None:
    x, residual, weight, to = normed_inputs(tokens, 8, kind=kind, width=width)
    to = to._replace(weight=to.weight.to(dtype))
    assert in_order.add_norm_route(x.to(dtype), residual, 1.0, weight, 1e-5, dtype, to) is None


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_equal_logits_choose_the_lower_expert(scoring: str) -> None:
    to = Router(torch.zeros(16, 24), 3, scoring)
    experts, weights = in_order.route(torch.ones(2, 24), to)
    assert experts.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3))


def test_a_router_in_another_type_than_its_inputs() -> None:
    to = router(8, 2, 40, scoring="sigmoid")
    x = torch.randn(20, 40, generator=torch.Generator().manual_seed(0)).to(BF16)
    check_routes(x, to)


def test_mixed_parts_are_summed_or_normed() -> None:
    m = mixture(9, dtype=BF16)
    parts = in_order.mix_parts(*m.arguments())
    assert isinstance(parts, OrderedParts)
    assert torch.equal(parts.sum(), in_order.mix(*m.arguments()))
    shared: Shared = SharedResult(torch.ones(9, 40, dtype=BF16), None)
    with_shared = in_order.mix_parts(*m.arguments(), shared=shared)
    assert isinstance(with_shared, OrderedParts) and with_shared.beside is not None
