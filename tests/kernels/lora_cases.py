"""Adapters' products against a sum in float64, for any implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_hybrid.kernels.activation.reference import activate
from megatron_hybrid.kernels.experts import reference
from megatron_hybrid.kernels.experts.protocol import ExpertAdapters, ExpertWeights
from megatron_hybrid.kernels.lora.protocol import AdapterWeights, WideWeights
from megatron_hybrid.kernels.protocols import Linear

Add = Callable[[Tensor, Tensor, AdapterWeights, Tensor], None]


def make_weights(
    columns: int,
    counts: Sequence[int],
    *,
    slots: int = 3,
    rank: int = 8,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> AdapterWeights:
    """`counts`: rows of one role after the other's; roles take turns from the third one on."""
    generator = torch.Generator().manual_seed(columns)
    roles = min(len(counts), 2)
    a = torch.randn(slots, roles * rank, columns, generator=generator) / columns**0.5
    b = torch.randn(slots, sum(counts), rank, generator=generator)
    of_row = torch.tensor([i % roles for i, count in enumerate(counts) for _ in range(count)])
    numbers = a.to(device, dtype), b.to(device, dtype)
    return AdapterWeights(*numbers, of_row.to(device, torch.int32))


def make_slots(tokens: int, slots: int, device: str = "cpu") -> Tensor:
    """Decodes with all kinds of slots, and runs of prompts."""
    generator = torch.Generator().manual_seed(tokens)
    each = torch.randint(0, slots + 1, (tokens,), generator=generator)
    half = tokens // 2
    each[half:] = each[half:][:1].expand(tokens - half)
    return each.to(device, torch.int32)


def expected(y: Tensor, x: Tensor, weights: AdapterWeights, slots: Tensor) -> Tensor:
    """Token by token."""
    result = y.double()
    for t, slot in enumerate(slots.tolist()):
        if slot:
            low = weights.a[slot - 1].double() @ x[t].double()
            low = low.to(x.dtype).double().unflatten(0, (-1, weights.rank))
            rows = low[weights.roles.long()]  # [N, rank]
            result[t] += (weights.b[slot - 1].double() * rows).sum(1)
    return result


def check_add(
    add: Add, tokens: int, weights: AdapterWeights, tolerance: float, slots: Tensor | None = None
) -> None:
    """With rows that are strided."""
    columns, rows = weights.a.shape[2], weights.b.shape[1]
    device, dtype = weights.b.device, weights.b.dtype
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, columns + 16, generator=generator).to(device, dtype)[:, 8:-8]
    y = torch.randn(tokens, rows + 16, generator=generator).to(device, dtype)
    beside, own = y.clone(), y[:, 8:-8]
    if slots is None:
        slots = make_slots(tokens, len(weights.b), str(device))
    wanted = expected(own, x, weights, slots)
    none = slots == 0
    before = own[none].clone()
    add(own, x, weights, slots)
    torch.testing.assert_close(own.double(), wanted, atol=tolerance, rtol=tolerance)
    assert torch.equal(own[none], before)
    assert torch.equal(y[:, :8], beside[:, :8]) and torch.equal(y[:, -8:], beside[:, -8:])


def check_alone(add: Add, weights: AdapterWeights) -> None:
    """A token has the same bits alone as beside others, wherever it stands."""
    columns, rows = weights.a.shape[2], weights.b.shape[1]
    device, dtype = weights.b.device, weights.b.dtype
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(150, columns, generator=generator).to(device, dtype)
    y = torch.randn(150, rows, generator=generator).to(device, dtype)
    slots = make_slots(150, len(weights.b), str(device))
    every = y.clone()
    add(every, x, weights, slots)
    for part in (slice(3, 4), slice(70, 75), slice(20, 60), slice(99, 150)):
        own = y[part].clone()
        add(own, x[part], weights, slots[part].contiguous())
        assert torch.equal(own, every[part])


def make_wide(weights: AdapterWeights) -> WideWeights:
    """The same adapters, behind the weight of a layer."""
    (slots, low, columns), (rows, rank) = weights.a.shape, weights.b.shape[1:]
    device, dtype = weights.b.device, weights.b.dtype
    generator = torch.Generator().manual_seed(rows)
    own = torch.randn(rows, columns, generator=generator) / columns**0.5
    wide = torch.cat([own.to(device, dtype), weights.a.flatten(0, 1)])
    b = torch.zeros(rows, slots, low // rank, rank, device=device, dtype=dtype)
    b[torch.arange(rows, device=device), :, weights.roles.long()] = weights.b.transpose(0, 1)
    slot_of = torch.arange(slots, device=device, dtype=torch.int32).repeat_interleave(low) + 1
    return WideWeights(wide, b.flatten(1), weights.roles, slot_of, low, rank)


Multiply = Callable[..., Tensor]


def check_wide(
    multiply: Multiply,
    linear: Linear,
    tokens: int,
    weights: AdapterWeights,
    tolerance: float,
    activation: str = "none",
    gated: bool = False,
) -> None:
    """With tokens of all slots and of none."""
    columns, wide = weights.a.shape[2], make_wide(weights)
    device, dtype = weights.b.device, weights.b.dtype
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, columns, generator=generator).to(device, dtype)
    slots = make_slots(tokens, len(weights.b), str(device))
    product = (x.double() @ wide.wide[: len(wide.b)].double().t()).to(dtype)
    wanted = activate(expected(product, x, weights, slots).to(dtype), activation, gated)
    assert isinstance(wanted, Tensor)
    found = multiply(x, wide, slots, linear, activation, gated)
    assert found.is_contiguous() and found.dtype == dtype
    size = wanted.abs().mean().item()  # of factors, one may be small because terms cancelled
    torch.testing.assert_close(found, wanted, atol=tolerance * size, rtol=tolerance)


def check_wide_alone(multiply: Multiply, linear: Linear, weights: AdapterWeights) -> None:
    """A token has the same bits alone as beside others, wherever it stands."""
    columns, wide = weights.a.shape[2], make_wide(weights)
    device, dtype = weights.b.device, weights.b.dtype
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(150, columns, generator=generator).to(device, dtype)
    slots = make_slots(150, len(weights.b), str(device))
    every = multiply(x, wide, slots, linear, "silu", True)
    for part in (slice(3, 4), slice(70, 75), slice(20, 60), slice(99, 150)):
        own = multiply(x[part], wide, slots[part].contiguous(), linear, "silu", True)
        assert torch.equal(own, every[part])


def check_experts(
    mix: Callable[..., Tensor],
    *,
    tokens: int,
    gated: bool,
    elsewhere: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    tolerance: float = 1e-4,
) -> None:
    """`Experts.mix_adapted` against reference.py."""
    generator = torch.Generator().manual_seed(tokens)
    count, width, inner, chosen, slots, rank = 5, 48, 32, 2, 3, 4
    rows = 2 * inner if gated else inner

    def drawn(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        return values.to(device, dtype)

    def adapters(columns: int, outputs: int, roles: int) -> AdapterWeights:
        of_row = torch.arange(outputs, device=device, dtype=torch.int32) * roles // outputs
        copies = slots * count
        a, b = drawn(copies, roles * rank, columns), drawn(copies, outputs, rank)
        return AdapterWeights(a, b, of_row.int(), count)

    layer = ExpertWeights(
        drawn(count, rows, width), drawn(count, width, inner), "silu", gated, elsewhere
    )
    of_tokens = make_slots(tokens, slots, device)
    adapted = ExpertAdapters(
        of_tokens, adapters(width, rows, 2 if gated else 1), adapters(inner, width, 1)
    )
    scores = torch.rand(tokens, count + elsewhere, generator=generator)
    experts = scores.topk(chosen).indices.clamp(max=count).to(device, torch.int32)
    weights = torch.rand(tokens, chosen, generator=generator).to(device)
    x = drawn(tokens, width)
    wanted = reference.mix_adapted(x, experts.long(), weights, layer, adapted)
    plain = reference.mix(x, experts.long(), weights, layer)
    assert not torch.equal(wanted, plain)
    found = mix(x, experts, weights, layer, adapted)
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
