"""The Triton kernels of experts, in Triton's interpreter."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs these kernels compiled", allow_module_level=True)
if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from megatron_hybrid.kernels.experts import fp4_rows, reference, triton  # noqa: E402
from megatron_hybrid.kernels.experts.protocol import SharedResult  # noqa: E402
from megatron_hybrid.kernels.linear.formats import WeightFormat  # noqa: E402
from tests.kernels.experts_by_hand import (  # noqa: E402
    Mixture,
    by_hand,
    check_quantized,
    mixture,
    quantized_mixture,
    quantized_shared,
    shared_by_hand,
    shared_mlp,
    shared_out,
)
from tests.thorough import A_THIRD, combined, usually  # noqa: E402

pytestmark = pytest.mark.usefixtures("poisoned")


def check(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)


@A_THIRD
@pytest.mark.parametrize(
    ("activation", "gated"),
    [
        ("silu", True),
        ("relu2", False),
        ("silu", False),
        ("silu_to_0.25", True),
        ("silu_capped_0.5_0.25", True),
    ],
)
@pytest.mark.parametrize("tokens", [1, triton.FEW_TOKENS, triton.FEW_TOKENS + 1, 60])
def test_mix(tokens: int, activation: str, gated: bool) -> None:
    m = mixture(tokens, chosen=3, activation=activation, gated=gated)
    check(triton.mix(*m.arguments()), by_hand(m))


@pytest.mark.parametrize("tokens", [2, 60])
def test_ranks_with_some_of_the_experts_add_up_to_all(tokens: int) -> None:
    m = mixture(tokens, chosen=3)
    parts = shared_out(m, usually(2, 4))
    check(sum(triton.mix(*part.arguments(6)) for part in parts), by_hand(m))
    nobodys = shared_out(m, 4)[0]
    nobodys.experts.fill_(2)
    assert not triton.mix(*nobodys.arguments(6)).any()


@pytest.mark.parametrize(("width", "inner"), [(32, 32), (130, 70)])
def test_sizes_that_tiles_divide_and_others(width: int, inner: int) -> None:
    m = mixture(30, width=width, inner=inner)
    check(triton.mix(*m.arguments()), by_hand(m))
    few = mixture(2, width=width, inner=inner)
    check(triton.mix(*few.arguments()), by_hand(few))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("average", [1, 20, 50, 200])
def test_tiles_for_16_bits(average: int, gated: bool) -> None:
    """The tiles, not the type: the interpreter has no products of bfloat16."""
    m = mixture(9, num_experts=3, gated=gated)
    tiles = triton.choose_tiles(3 * average, 3, gated, torch.bfloat16)
    check(triton.mix_grouped(*m.arguments(), tiles).sum(), by_hand(m))


def test_many_blocks_of_one_expert_and_empty_experts() -> None:
    m = mixture(1100, num_experts=5)
    m.experts.fill_(2)
    check(triton.mix(*m.arguments()), by_hand(m))


def test_no_tokens() -> None:
    assert triton.mix(*mixture(0).arguments()).shape == (0, 40)


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("pairs", [1, 2, 3, 100, 9000])
def test_groups(pairs: int, rows: int) -> None:
    """Blocks hold each row once, in order, and only rows of their expert."""
    num_experts = 7
    generator = torch.Generator().manual_seed(pairs)
    # Two of seven experts have nothing.
    experts = torch.randint(1, num_experts - 1, (pairs, 1), generator=generator)
    groups = triton.group(experts, num_experts, rows)
    assert groups.order.tolist() == experts.flatten().argsort(stable=True).tolist()
    row = 0
    for expert, begin, end in groups.blocks.t().tolist():
        assert end - begin <= rows
        if begin < end:
            assert begin == row
            assert set(experts.flatten()[groups.order[begin:end]].tolist()) == {expert}
            row = end
    assert row == pairs


ACTIVATIONS = [("silu", True), ("relu2", False)]
WITH_SHARED = combined(
    5,
    [True, False],
    ACTIVATIONS,
    [(32, 32, 32), (130, 70, 41), (40, 24, 100)],
    [1, triton.FEW_TOKENS],
)
IN_SLICES = combined(
    5,
    [True, False],
    ACTIVATIONS,
    [(32, 32, 1), (130, 70, 2), (40, 24, 3)],
    [triton.FEW_TOKENS + 1, 37],
)


@A_THIRD
@pytest.mark.parametrize(("has_gate", "kind", "sizes", "tokens"), WITH_SHARED)
def test_mix_with_a_shared_mlp(
    has_gate: bool, kind: tuple[str, bool], sizes: tuple[int, int, int], tokens: int
) -> None:
    (activation, gated), (width, inner, beside) = kind, sizes
    m = mixture(tokens, width=width, inner=inner, activation=activation, gated=gated)
    check_shared(m, beside, has_gate)


@A_THIRD
@pytest.mark.parametrize(("has_gate", "kind", "sizes", "tokens"), IN_SLICES)
def test_mix_with_a_shared_mlp_in_slices(
    has_gate: bool, kind: tuple[str, bool], sizes: tuple[int, int, int], tokens: int
) -> None:
    (activation, gated), (width, inner, slices) = kind, sizes
    m = mixture(tokens, chosen=3, width=width, inner=inner, activation=activation, gated=gated)
    check_shared(m, slices * inner, has_gate)


def check_shared(m: Mixture, beside: int, has_gate: bool) -> None:
    shared = shared_mlp(m.x.shape[1], beside, m.gated, has_gate)
    layer = m.arguments()[-1]
    assert triton.takes_shared(m.x, layer, shared)
    result = triton.mix(*m.arguments(), shared=shared)
    check(result, by_hand(m) + shared_by_hand(m, shared))


@pytest.mark.parametrize(("gated", "average"), combined(3, [True, False], [1, 20, 50, 200]))
def test_tiles_for_16_bits_and_a_shared_mlp(average: int, gated: bool) -> None:
    """Whole blocks of tokens, and one that is filled in part."""
    m = mixture(150, num_experts=3, gated=gated)
    shared = shared_mlp(40, 48, gated, True)
    tiles = triton.choose_tiles(3 * average, 3, gated, torch.bfloat16)
    result = triton.mix_grouped(*m.arguments(), tiles, shared).sum()
    check(result, by_hand(m) + shared_by_hand(m, shared))


@pytest.mark.parametrize("tokens", [2, 40])
def test_mix_of_no_expert_that_is_here_and_a_shared_mlp(tokens: int) -> None:
    m = mixture(tokens)
    nobodys = shared_out(m, 4)[0]
    nobodys.experts.fill_(2)
    shared = shared_mlp(40, 24, True, True)
    check(triton.mix(*nobodys.arguments(6), shared=shared), shared_by_hand(m, shared))


def test_one_rank_of_several_adds_the_shared_mlp() -> None:
    m = mixture(40, chosen=3)
    shared = shared_mlp(40, 48, True, False)
    first, *others = [part.arguments(6) for part in shared_out(m, usually(2, 4))]
    mixed = triton.mix(*first, shared=shared) + sum(triton.mix(*other) for other in others)
    check(mixed, by_hand(m) + shared_by_hand(m, shared))


def test_a_shared_mlp_that_every_token_shares_with_one_expert() -> None:
    m = mixture(70, num_experts=5)
    m.experts.fill_(2)
    check_shared(m, 48, True)


def test_a_shared_mlp_is_taken_in_slices_of_an_experts_size_and_by_few_tokens() -> None:
    layer = mixture(1, inner=24).arguments()[-1]

    def takes(tokens: int, inner: int) -> bool:
        x = torch.zeros(tokens, 40)
        return triton.takes_shared(x, layer, shared_mlp(40, inner, True, False))

    assert [takes(tokens, 48) for tokens in (0, 1, 5, 512, 513)] == [False, True, True, True, False]
    assert [takes(tokens, 40) for tokens in (0, 1, 4, 5)] == [False, True, True, False]


@A_THIRD
@pytest.mark.parametrize(
    ("has_gate", "size"), combined(3, [True, False], [(2, 40), (30, 40), (5, 1100), (5, 2100)])
)
def test_what_a_shared_mlp_gave_is_added(size: tuple[int, int], has_gate: bool) -> None:
    tokens, width = size
    m = mixture(tokens, chosen=3, width=width)
    shared = shared_mlp(width, 32, True, has_gate)
    given = shared_by_hand(m, shared._replace(gate=None))
    # Rows that lie apart.
    values = torch.stack((given, given), dim=1).float()[:, 0]
    expected = by_hand(m) + shared_by_hand(m, shared)
    for experts in (triton, reference):
        check(experts.mix(*m.arguments(), shared=SharedResult(values, shared.gate)), expected)


@pytest.mark.parametrize("tokens", [1, 30])
def test_what_a_shared_mlp_gave_is_added_to_quantized_experts(tokens: int) -> None:
    m, plain = quantized_mixture(mixture(tokens, width=64, inner=64), QUANTIZED["int8"])
    shared = shared_mlp(64, 32, True, True)
    given = shared_by_hand(plain, shared._replace(gate=None)).float()
    result = triton.mix(*m.arguments(), shared=SharedResult(given, shared.gate))
    check(result, by_hand(plain) + shared_by_hand(plain, shared))


QUANTIZED = {
    "fp8 by row": WeightFormat("float8_e4m3fn", activations="token"),
    "fp8 by block": WeightFormat("float8_e4m3fn", 32, 64, activations="group"),
    "int8": WeightFormat("int8"),
    "int8, inputs too": WeightFormat("int8", activations="token"),
    "4 bits": WeightFormat("uint4", 1, 32, zero_points=True),
    "fp4": WeightFormat("float4_e2m1", 1, 16),
}


GATED, PLAIN = ("silu_to_1.0", True, 64), ("relu2", False, 96)  # activation, gated, inner
# Every format with few tokens and with many, gated and not; TESTS=all: with each of these shapes.
SHAPES = usually(
    [((1, *GATED), (60, *PLAIN)), ((5, *PLAIN), (60, *GATED))],
    [tuple((tokens, *shape) for tokens in (1, 5, 60) for shape in (GATED, PLAIN))] * 2,
)


@A_THIRD
@pytest.mark.parametrize(
    ("name", "tokens", "activation", "gated", "inner"),
    [(name, *shape) for i, name in enumerate(QUANTIZED) for shape in SHAPES[i % 2]],
)
def test_quantized_weights(
    name: str, tokens: int, activation: str, gated: bool, inner: int
) -> None:
    check_quantized(triton, QUANTIZED[name], tokens, activation, gated, inner)


FP4 = QUANTIZED["fp4"]


def close_in_16_bits(result: Tensor, expected: Tensor) -> None:
    """bfloat16 is rounded to at the hidden layer and at the end: twice up to 2^-7, since the
    interpreter cuts off."""
    error = (result.double() - expected).norm(dim=1)
    assert (error <= 1.2e-2 * expected.norm(dim=1)).all()


FP4_SIZES = [(1, 64, 32, 16, 128), (2, 48, 16, 32, 4), (1, 16, 48, None, 4)]
FP4_CASES = [
    (*size, *activation, has_gate)
    for has_gate in (True, False)
    for size in FP4_SIZES
    for activation in ACTIVATIONS
]


@A_THIRD
@pytest.mark.parametrize(
    ("tokens", "width", "inner", "beside", "words", "activation", "gated", "has_gate"),
    # Each size, activation and gate at least once.
    usually([FP4_CASES[i] for i in (0, 3, 7, 10)], FP4_CASES),
)
def test_few_tokens_in_fp4_and_a_shared_mlp(
    activation: str, gated: bool, tokens: int, width: int, inner: int, beside: int | None,
    words: int, has_gate: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """words: of a step."""
    monkeypatch.setattr(fp4_rows, "_MOST_WORDS", words)
    monkeypatch.setattr(fp4_rows, "_DOWN_STEPS", 3)
    m = mixture(
        tokens, chosen=3, width=width, inner=inner, activation=activation, gated=gated,
        dtype=torch.bfloat16,
    )  # fmt: skip
    packed, plain = quantized_mixture(m, FP4)
    expected, shared = by_hand(plain), None
    if beside is not None:
        mlp = shared_mlp(width, beside, gated, has_gate, dtype=torch.bfloat16)
        shared, plain_shared = quantized_shared(mlp, FP4)
        expected += shared_by_hand(plain, plain_shared)
        assert triton.takes_shared(m.x, packed.arguments()[-1], shared)
    assert fp4_rows.can_mix(packed.arguments()[-1], tokens, torch.bfloat16, shared)
    close_in_16_bits(triton.mix(*packed.arguments(), shared=shared), expected)


def test_few_tokens_in_fp4_of_ranks_with_some_of_the_experts() -> None:
    m = mixture(2, chosen=3, width=32, inner=16, dtype=torch.bfloat16)
    mlp, plain_mlp = quantized_shared(shared_mlp(32, 16, True, True, dtype=torch.bfloat16), FP4)
    parts = [quantized_mixture(part, FP4) for part in shared_out(m, usually(2, 4))]
    first, *others = [packed.arguments(6) for packed, _ in parts]
    mixed = triton.mix(*first, shared=mlp).float()
    mixed += sum(triton.mix(*other).float() for other in others)
    whole = m._replace(
        up_proj=torch.cat([plain.up_proj for _, plain in parts]),
        down_proj=torch.cat([plain.down_proj for _, plain in parts]),
    )
    close_in_16_bits(mixed, by_hand(whole) + shared_by_hand(whole, plain_mlp))


def test_a_shared_mlp_in_fp4_beside_many_tokens_or_other_inputs_is_left_alone() -> None:
    m = mixture(triton.FEW_TOKENS + 1, width=64, inner=32, dtype=torch.bfloat16)
    layer = quantized_mixture(m, FP4)[0].arguments()[-1]
    shared, plain = quantized_shared(shared_mlp(64, 32, True, True, dtype=torch.bfloat16), FP4)
    assert triton.takes_shared(m.x[1:], layer, shared)
    assert not triton.takes_shared(m.x, layer, shared)
    assert not triton.takes_shared(m.x[:0], layer, shared)
    assert not triton.takes_shared(m.x[1:].float(), layer, shared)
    assert not triton.takes_shared(m.x[1:], layer, plain)


def test_ranks_with_quantized_weights_add_up_to_all() -> None:
    for tokens in (2, 30):
        m = mixture(tokens, chosen=3, width=64, inner=64)
        format = QUANTIZED["int8"]
        whole, _ = quantized_mixture(m, format)
        parts = [quantized_mixture(part, format)[0] for part in shared_out(m, usually(2, 4))]
        mixed = [triton.mix(*part.arguments(6)) for part in parts]
        torch.testing.assert_close(sum(mixed), triton.mix(*whole.arguments()))


@pytest.mark.parametrize(("tokens", "width"), [(0, 24), (1, 24), (3, 2100)])
@pytest.mark.parametrize("has_gate", [True, False])
def test_routed_experts_and_a_shared_mlp_are_added(has_gate: bool, tokens: int, width: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    routed, shared, x = (torch.randn(tokens, width, generator=generator) for _ in range(3))
    gate = torch.randn(1, width, generator=generator) * width**-0.5
    given = SharedResult(shared, gate if has_gate else None)
    expected = reference.add_shared(routed, given, x)
    torch.testing.assert_close(triton.add_shared(routed, given, x), expected)
