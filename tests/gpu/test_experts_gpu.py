"""The Triton kernels of experts, compiled, at the sizes of real models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from megatron_hybrid.kernels.experts import (  # noqa: E402
    reference,
    routing,
    triton,
    triton_in_order,
)
from megatron_hybrid.kernels.experts.protocol import (  # noqa: E402
    Shared,
    SharedExpert,
    SharedResult,
)
from megatron_hybrid.kernels.linear.formats import WeightFormat  # noqa: E402
from megatron_hybrid.kernels.norm.triton import add_rms_norm  # noqa: E402
from tests.kernels.experts_by_hand import (  # noqa: E402
    Mixture,
    by_hand,
    mixture,
    quantized_mixture,
    quantized_shared,
    shared_by_hand,
    shared_mlp,
    shared_out,
)
from tests.kernels.pair_sum_cases import (  # noqa: E402
    check_rounded_sums,
    check_sums,
    of_kinds_and_types,
    of_readers,
)
from tests.kernels.routing_by_hand import KINDS, router  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16 = torch.bfloat16
GRANITE = {"num_experts": 64, "chosen": 6, "width": 1536, "inner": 512}
NEMOTRON = {
    "num_experts": 128, "chosen": 6, "width": 2688, "inner": 1856,
    "activation": "relu2", "gated": False,
}  # fmt: skip
QWEN = {"num_experts": 256, "chosen": 8, "width": 2048, "inner": 512}
ODD = {"num_experts": 5, "chosen": 3, "width": 200, "inner": 72}
SHAPES = {"granite": GRANITE, "nemotron": NEMOTRON, "qwen": QWEN, "odd": ODD}


def make(shape: str, tokens: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Mixture:
    sizes: dict[str, Any] = SHAPES[shape]
    return mixture(tokens, **sizes, device="cuda", dtype=dtype, seed=seed)


def mix_poisoned(m: Mixture, shared: Shared | None = None, elsewhere: int = 0) -> Tensor:
    """mix, with every buffer that it allocates filled with NaN or the largest integer."""
    torch.use_deterministic_algorithms(True)
    try:
        return triton.mix(*m.arguments(elsewhere), shared=shared)
    finally:
        torch.use_deterministic_algorithms(False)


def check(result: Tensor, m: Mixture) -> None:
    """bfloat16 is rounded to at the hidden layer, at each pair's part and at the end."""
    expected = by_hand(m)
    limit = 1e-5 if m.x.dtype == torch.float32 else 6e-3
    error = result.double() - expected
    assert error.norm() <= limit * expected.norm()
    # A wrong row or column must not hide in the norm of the whole.
    assert (error.norm(dim=1) <= 4 * limit * expected.norm(dim=1)).all()
    assert (error.norm(dim=0) <= 8 * limit * expected.norm() / error.shape[1] ** 0.5).all()


@pytest.mark.parametrize("tokens", [1, 3, 32, 256, 1000])
@pytest.mark.parametrize("shape", ["granite", "nemotron"])
def test_ranks_with_some_of_the_experts_add_up_to_all(shape: str, tokens: int) -> None:
    m = make(shape, tokens)
    num_experts = m.up_proj.shape[0]
    torch.use_deterministic_algorithms(True)
    try:
        parts = [triton.mix(*part.arguments(num_experts * 3 // 4)) for part in shared_out(m, 4)]
    finally:
        torch.use_deterministic_algorithms(False)
    check(torch.stack(parts).float().sum(0).to(m.x.dtype), m)


@pytest.mark.parametrize("tokens", [1, 3, 5, 32, 100, 256, 1000, 4096])
@pytest.mark.parametrize("shape", SHAPES)
def test_mix(shape: str, tokens: int) -> None:
    m = make(shape, tokens)
    check(mix_poisoned(m), m)


@pytest.mark.parametrize("tokens", [2, 40, 700])
@pytest.mark.parametrize("shape", ["granite", "odd"])
def test_mix_in_float32(shape: str, tokens: int) -> None:
    m = make(shape, tokens, torch.float32)
    check(mix_poisoned(m), m)


@pytest.mark.parametrize("tokens", [2, 33, 2048])
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_all_tokens_to_one_expert(tokens: int, integers: torch.dtype) -> None:
    m = make("granite", tokens)
    m.experts.fill_(63)
    m = m._replace(experts=m.experts.to(integers))
    check(mix_poisoned(m), m)


@pytest.mark.parametrize("tokens", [4, 256, 3000])
def test_the_same_input_gives_the_same_output(tokens: int) -> None:
    m = make("granite", tokens)
    first = triton.mix(*m.arguments())
    assert all(torch.equal(first, triton.mix(*m.arguments())) for _ in range(5))


@pytest.mark.parametrize("tokens", [1, 64, 512])
def test_a_captured_graph_follows_its_inputs(tokens: int) -> None:
    others = [make("granite", tokens, seed=seed) for seed in range(3)]
    others[2].experts.fill_(5)
    m = make("granite", tokens)
    to = router(64, 6, 1536, device="cuda", dtype=torch.bfloat16, scoring="sigmoid", eps=1e-20)

    def step() -> tuple[Tensor, Tensor]:
        return triton.mix(*m.arguments()), triton.route(m.x, to)[1]

    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, weights = step()
    for other in others:
        for target, source in zip(m[:3], other[:3], strict=True):
            target.copy_(source)
        y.fill_(torch.nan)
        graph.replay()
        check(y, m)
        torch.testing.assert_close(weights, reference.route(m.x, to)[1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_experts", [16, 64, 256, 512])
@pytest.mark.parametrize("tokens", [1, 8, 30, 512, 8192])
def test_route(tokens: int, num_experts: int, kind: str) -> None:
    to = router(num_experts, 6, 2048, device="cuda", dtype=torch.bfloat16, **KINDS[kind])
    x = torch.randn(tokens, 2048, device="cuda").bfloat16()
    experts, weights = triton.route(x, to)
    exact = reference.choose((x.double() @ to.weight.double().t()).float(), to)
    # Near ties may go either way: logits of softmax routers are rounded to bfloat16.
    alike = (experts.sort(1).values == exact[0].sort(1).values).all(1)
    assert alike.float().mean() > (0.6 if to.scoring == "softmax" else 0.99) or tokens < 100
    shares = torch.zeros(2, tokens, num_experts, device="cuda")
    shares[0].scatter_(1, experts.long(), weights)
    shares[1].scatter_(1, exact[0], exact[1])
    torch.testing.assert_close(shares[0][alike], shares[1][alike], atol=4e-3, rtol=2e-2)
    assert (experts.sort(1).values.diff(dim=1) > 0).all()
    logits = routing.scores(x, to)
    product = (x.double() @ to.weight.double().t()).to(logits.dtype)
    limit = 1.6e-2 if to.scoring == "softmax" else 1e-4
    torch.testing.assert_close(logits, product, atol=limit, rtol=limit)
    chosen = routing.choose(logits, to)
    expected = reference.choose(logits, to)
    torch.testing.assert_close(chosen[1], expected[1])
    if to.scoring == "sigmoid":  # softmax routers' logits are in bfloat16: many are equal
        assert (chosen[0] == expected[0]).float().mean() > 0.999  # and so are some large sigmoids


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"sinks"}))
@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "num_experts", "width"), [(1, 256, 2048), (4, 64, 1536)])
def test_the_norm_and_the_router_in_one_kernel_have_the_bits_of_two(
    tokens: int,
    num_experts: int,
    width: int,
    norm_dtype: torch.dtype,
    residual_dtype: torch.dtype,
    kind: str,
) -> None:
    to = router(num_experts, 6, width, device="cuda", dtype=torch.bfloat16, **KINDS[kind])
    norm = torch.rand(width, device="cuda").to(norm_dtype) + 0.5
    for _ in range(20):
        x, residual = torch.randn(2, tokens, width, device="cuda")
        x, residual = x.bfloat16(), residual.to(residual_dtype)
        arguments = 0.22, norm, 1e-5, torch.bfloat16
        normed, total = add_rms_norm(x, residual.clone(), *arguments)
        experts, weights = triton.route(normed, to)
        found = routing.add_norm_route(x, residual, *arguments, to)
        assert found is not None
        assert torch.equal(found.residual, total) and torch.equal(found.x, normed)
        assert torch.equal(found.routes[0], experts) and torch.equal(found.routes[1], weights)


NORMED = [(1, 256, 2048), (3, 64, 1536), (4, 128, 2688), (2, 32, 1024), (1, 512, 4096)]
TYPES = [(torch.float32, torch.float32), (BF16, BF16), (BF16, torch.float32), (torch.float32, BF16)]
# Every size with every kind, of some types each.
NORMED_KINDS = [
    (size, TYPES[(i + j) % len(TYPES)], kind)
    for i, size in enumerate(NORMED)
    for j, kind in enumerate(sorted(set(KINDS) - {"softmax of all", "sinks"}))
]


@pytest.mark.parametrize(("size", "types", "kind"), NORMED_KINDS)
def test_in_order_they_have_the_bits_of_three_among_any_number_of_tokens(
    size: tuple[int, int, int], types: tuple[torch.dtype, torch.dtype], kind: str
) -> None:
    """The norm and the router."""
    (tokens, num_experts, width), (norm_dtype, residual_dtype) = size, types
    to = router(num_experts, 6, width, device="cuda", dtype=torch.bfloat16, **KINDS[kind])
    norm = torch.rand(width, device="cuda").to(norm_dtype) + 0.5
    arguments = 0.22, norm, 1e-5, torch.bfloat16
    x, residual = torch.randn(2, 40, width, device="cuda")
    x, residual = x.bfloat16(), residual.to(residual_dtype)
    normed, total = add_rms_norm(x, residual.clone(), *arguments)
    routes = triton_in_order.route(normed, to)
    for first in range(0, 40 - tokens):
        own = slice(first, first + tokens)
        found = triton_in_order.add_norm_route(x[own], residual[own], *arguments, to)
        assert found is not None
        assert torch.equal(found.x, normed[own]) and torch.equal(found.residual, total[own])
        assert torch.equal(found.routes[0], routes[0][own])
        assert torch.equal(found.routes[1], routes[1][own])


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("tokens", "num_experts", "width"), [(1, 5, 200), (33, 70, 2688), (500, 256, 2048)]
)
def test_scores_in_tiles(tokens: int, num_experts: int, width: int, scoring: str) -> None:
    """Of a token, the same bits in every batch."""
    to = router(num_experts, 2, width, device="cuda", dtype=torch.bfloat16, scoring=scoring)
    x = torch.randn(tokens, width, device="cuda").bfloat16()
    logits = routing.tiled_scores(x, to)
    product = (x.double() @ to.weight.double().t()).to(logits.dtype)
    limit = 1.6e-2 if scoring == "softmax" else 1e-4
    torch.testing.assert_close(logits, product, atol=limit, rtol=limit)
    last = routing.tiled_scores(x[tokens // 2 :], to)
    assert torch.equal(last, logits[tokens // 2 :])


@of_kinds_and_types
@pytest.mark.parametrize(("tokens", "width"), [(5, 2048), (300, 1536), (7, 2688)])
def test_sums_of_pairs_and_their_norms(tokens: int, width: int, kind: Any, types: Any) -> None:
    """Of a wide row's gate the sum alone adds up pieces."""
    has_gate = kind[2]
    check_sums(tokens, min(width, 2048) if has_gate else width, kind, types, "cuda")


@of_readers
@pytest.mark.parametrize("plain", [True, False])
def test_norms_of_sums_that_are_rounded_for_who_reads_them(reader: str, plain: bool) -> None:
    check_rounded_sums(reader, plain, "cuda")


def check_beside(y: Tensor, m: Mixture, shared: SharedExpert) -> None:
    expected = by_hand(m) + shared_by_hand(m, shared)
    limit = 1e-2 if y.dtype == torch.bfloat16 else 1e-5
    assert ((y - expected).abs() <= limit * expected.abs().amax(1, keepdim=True)).all()


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 32, 100, 256, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("shape", "beside", "has_gate"),
    [
        ("granite", 1024, False),
        ("nemotron", 3712, False),
        ("odd", 72, True),
        ("odd", 216, True),
        ("granite", 512, True),
    ],
)
def test_mix_with_a_shared_mlp(
    shape: str, beside: int, has_gate: bool, dtype: torch.dtype, tokens: int
) -> None:
    m = make(shape, tokens, dtype)
    shared = shared_mlp(m.x.shape[1], beside, m.gated, has_gate, "cuda", dtype)
    assert triton.takes_shared(m.x, m.arguments()[-1], shared)
    check_beside(mix_poisoned(m, shared), m, shared)


@pytest.mark.parametrize("tokens", [5, 512])
def test_a_shared_mlp_beside_one_expert_that_all_tokens_go_to(tokens: int) -> None:
    m = make("granite", tokens)
    m.experts.fill_(63)
    shared = shared_mlp(m.x.shape[1], 1024, True, True, "cuda", m.x.dtype)
    check_beside(mix_poisoned(m, shared), m, shared)


@pytest.mark.parametrize("tokens", [3, 40, 300])
def test_a_shared_mlp_on_a_rank_that_no_token_goes_to(tokens: int) -> None:
    m = make("granite", tokens)
    part = shared_out(m, 4)[1]
    part.experts.fill_(16)
    shared = shared_mlp(m.x.shape[1], 1024, True, True, "cuda", m.x.dtype)
    check_beside(mix_poisoned(part, shared, 48), part, shared)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [2, 100, 3000])
def test_what_a_shared_mlp_gave_is_added(
    tokens: int, shape: str, has_gate: bool, dtype: torch.dtype
) -> None:
    m = make(shape, tokens, dtype)
    shared = shared_mlp(m.x.shape[1], 96, m.gated, has_gate, "cuda", dtype)
    values = shared_by_hand(m, shared._replace(gate=None)).to(dtype)
    check_beside(mix_poisoned(m, SharedResult(values, shared.gate)), m, shared)


@pytest.mark.parametrize("tokens", [5, 64, 512])
@pytest.mark.parametrize("has_gate", [True, False])
def test_a_captured_graph_with_a_shared_mlp_follows_its_inputs(tokens: int, has_gate: bool) -> None:
    """Several layers one after the other: kernels start before those in front of them end."""
    others = [make("granite", tokens, seed=seed) for seed in range(1, 4)]
    others[2].experts.fill_(5)
    m = make("granite", tokens)
    shared = shared_mlp(m.x.shape[1], 1024, True, has_gate, "cuda", m.x.dtype)
    to = router(64, 6, 1536, device="cuda", dtype=torch.bfloat16)

    def step() -> list[Tensor]:
        results = []
        for _ in range(4):
            experts, weights = triton.route(m.x, to)
            layer = m.arguments()[-1]
            results.append(triton.mix(m.x, experts, weights, layer, shared))
            results.append(triton.mix(*m.arguments(), shared=shared))
        return results

    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for other in others:
        for target, source in zip(m[:3], other[:3], strict=True):
            target.copy_(source)
        for y in results:
            y.fill_(torch.nan)
        graph.replay()
        experts, weights = triton.route(m.x, to)
        routed = m._replace(experts=experts, weights=weights)
        for y in results[::2]:
            check_beside(y, routed, shared)
        for y in results[1::2]:
            check_beside(y, m, shared)
            assert torch.equal(y, results[1])


@pytest.mark.parametrize("shape", ["granite", "nemotron"])
def test_a_token_has_the_same_bits_beside_others_in_a_batch_of_one_kind(shape: str) -> None:
    """Of other tokens as many: tiles depend on their number alone."""
    m = make(shape, 64)
    other = make(shape, 64, seed=1)
    shared = shared_mlp(m.x.shape[1], m.down_proj.shape[2], m.gated, True, "cuda", m.x.dtype)
    whole = mix_poisoned(m, shared)
    for own, theirs in zip(m[:3], other[:3], strict=True):
        own[20:] = theirs[20:]
    assert torch.equal(mix_poisoned(m, shared)[:20], whole[:20])


@pytest.mark.parametrize("pairs", [6, 192, 49152])
def test_groups(pairs: int) -> None:
    experts = torch.randint(0, 64, (pairs, 1), device="cuda")
    groups = triton.group(experts, 64, 32)
    assert torch.equal(groups.order.long(), experts.flatten().argsort(stable=True))
    expert, begin, end = groups.blocks.long()
    used = begin < end
    assert (end - begin <= 32).all() and (end - begin)[used].sum() == pairs
    in_order = experts.flatten()[groups.order.long()]
    assert torch.equal(in_order[begin[used]], expert[used])
    assert torch.equal(in_order[end[used] - 1], expert[used])


QUANTIZED = {
    "fp8 by row": WeightFormat("float8_e4m3fn", activations="token"),
    "fp8 by block": WeightFormat("float8_e4m3fn", 64, 128, activations="group"),
    "int8": WeightFormat("int8"),
    "int8, inputs too": WeightFormat("int8", activations="token"),
    "4 bits": WeightFormat("uint4", 1, 128),
    "4 bits with zero points": WeightFormat("uint4", 1, 32, zero_points=True),
    "fp4": WeightFormat("float4_e2m1", 1, 16),
}


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("tokens", [1, 4, 32, 256, 2000])
@pytest.mark.parametrize("shape", ["granite", "nemotron"])
def test_quantized_weights(shape: str, tokens: int, name: str) -> None:
    m = make(shape, tokens)
    packed, plain = quantized_mixture(m, QUANTIZED[name])
    torch.use_deterministic_algorithms(True)
    try:
        result = triton.mix(*packed.arguments())
    finally:
        torch.use_deterministic_algorithms(False)
    if QUANTIZED[name].activations == "none":
        check(result, plain)
        return
    # A hidden value that is rounded to bfloat16 the other way, 2^-9, is near an edge between two
    # codes, 2^-4 apart, in 3 cases of 100; it moves by 6 %: 1 % in the norm, and its sums as much.
    expected = reference.mix(*packed.arguments()).double()
    assert (result.double() - expected).norm() <= 3e-2 * expected.norm()
    # and what rounding costs
    exact = by_hand(plain)
    assert (result.double() - exact).norm() <= 6e-2 * exact.norm()


FP4 = QUANTIZED["fp4"]


def mix_fp4_poisoned(m: Mixture, elsewhere: int = 0) -> Tensor:
    torch.use_deterministic_algorithms(True)
    try:
        return triton.mix(*m.arguments(elsewhere))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("tokens", [1, 3, 5, 32, 80])
@pytest.mark.parametrize("shape", ["granite", "nemotron"])
def test_ranks_with_some_of_the_experts_in_fp4_add_up_to_all(shape: str, tokens: int) -> None:
    m = make(shape, tokens)
    num_experts = m.up_proj.shape[0]
    parts, plain = [], []
    for part in shared_out(m, 4):
        packed, unpacked = quantized_mixture(part, FP4)
        parts.append(mix_fp4_poisoned(packed, num_experts * 3 // 4))
        plain.append(unpacked)
    whole = m._replace(
        up_proj=torch.cat([one.up_proj for one in plain]),
        down_proj=torch.cat([one.down_proj for one in plain]),
    )
    check(torch.stack(parts).float().sum(0).to(m.x.dtype), whole)


@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, triton.FEW_TOKENS])
@pytest.mark.parametrize(
    ("shape", "beside"), [("granite", 1024), ("nemotron", 3712), ("qwen", 512)]
)
def test_few_tokens_in_fp4_and_a_shared_mlp(
    shape: str, beside: int, tokens: int, has_gate: bool
) -> None:
    m = make(shape, tokens)
    packed, plain = quantized_mixture(m, FP4)
    mlp = shared_mlp(m.x.shape[1], beside, m.gated, has_gate, "cuda", torch.bfloat16)
    shared, plain_shared = quantized_shared(mlp, FP4)
    taken = triton.takes_shared(m.x, packed.arguments()[-1], shared)
    assert taken or (shape == "nemotron" and tokens > 2)
    if taken:
        check_beside(mix_poisoned(packed, shared), plain, plain_shared)


@pytest.mark.parametrize("tokens", [2, 6, 33])
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_all_tokens_to_one_expert_in_fp4(tokens: int, integers: torch.dtype) -> None:
    m = make("granite", tokens)
    m.experts.fill_(63)
    packed, plain = quantized_mixture(m._replace(experts=m.experts.to(integers)), FP4)
    check(mix_fp4_poisoned(packed), plain)


@pytest.mark.parametrize("shape", ["granite", "nemotron"])
@pytest.mark.parametrize(
    ("tokens", "crowds"),
    [(2, [(0, 1), (1, 2)]), (40, [(7, 12), (3, 10), (11, 40)])],
)
def test_a_token_in_fp4_has_the_same_bits_in_every_crowd(
    shape: str, tokens: int, crowds: list[tuple[int, int]]
) -> None:
    """Of few tokens, and of more: of few it is not on tensor cores."""
    m = make(shape, tokens)
    packed, _ = quantized_mixture(m, FP4)
    whole = mix_fp4_poisoned(packed)
    assert torch.equal(whole, mix_fp4_poisoned(packed))
    for rows in (slice(*crowd) for crowd in crowds):
        some = packed._replace(
            x=packed.x[rows], experts=packed.experts[rows], weights=packed.weights[rows]
        )
        assert torch.equal(whole[rows], mix_fp4_poisoned(some))


@pytest.mark.parametrize("tokens", [1, 32])
def test_a_captured_graph_in_fp4_follows_its_inputs(tokens: int) -> None:
    packed, plain = quantized_mixture(make("granite", tokens), FP4)
    others = [make("granite", tokens, seed=seed) for seed in range(1, 4)]
    triton.mix(*packed.arguments())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = triton.mix(*packed.arguments())
    for other in others:
        for target, source in zip(packed[:3], other[:3], strict=True):
            target.copy_(source)
        y.fill_(torch.nan)
        graph.replay()
        check(y, plain._replace(x=packed.x, experts=packed.experts, weights=packed.weights))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "width"), [(1, 2048), (37, 2688), (3, 200), (5, 9000)])
def test_a_shared_mlp_is_added_by_its_gate(tokens: int, width: int, dtype: torch.dtype) -> None:
    routed, shared, x = (torch.randn(tokens, width, device="cuda").to(dtype) for _ in range(3))
    gate = (torch.randn(1, width, device="cuda") * width**-0.5).to(dtype)
    shares = (x.double() @ gate.double().T).sigmoid()
    expected = routed.double() + shared.double() * shares
    result = triton.add_shared(routed, SharedResult(shared, gate), x)
    assert result.dtype == dtype
    limit = 4e-3 if dtype == torch.bfloat16 else 1e-6
    assert ((result - expected).abs() <= limit * (expected.abs() + shared.double().abs())).all()
