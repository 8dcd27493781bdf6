"""Residual streams by their formulas in float64, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_hybrid.kernels.streams.protocol import StreamWeights
from tests.kernels.norm_cases import draw

SHAPES = [(0, 4, 16), (1, 4, 64), (5, 2, 12), (3, 3, 700), (2, 5, 1025)]  # tokens, streams, size
TYPES = (torch.float32, torch.bfloat16)


def check_all(
    streams: Any, shape: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Results may be in the streams' place: they get a copy."""
    torch.manual_seed(0)
    tokens, count, size = shape
    own = torch.randn(shape, device=device, dtype=dtype)
    other = torch.randn(shape, device=device, dtype=dtype)
    x = draw(tokens, size, dtype=dtype, device=device)
    close = _Close(dtype)
    close(streams.gated_mean(other, own), (other.double().sigmoid() * own.double()).mean(1))
    weights = draw(tokens, count, dtype=torch.float32, device=device)
    close(streams.weighted(own, weights), (weights.double()[:, :, None] * own).sum(1))
    gates = draw(tokens, count, dtype=dtype, device=device)
    added = 2 * gates.double().sigmoid()[:, :, None] * x.double()[:, None]
    close(streams.injected(own.clone(), x, gates), own.double() + added)
    after, mixing = weights.contiguous(), torch.randn(tokens, count, count, device=device)
    found = streams.mixed(own.clone(), x, StreamWeights(after, after, mixing))
    total = torch.einsum("tij,tih->tjh", mixing.double(), own.double())
    close(found, total + after.double()[:, :, None] * x.double()[:, None])
    check_attended(streams, own, torch.cat((own, other), dim=1))
    alike = (own.double() * other.double()).sum(2, keepdim=True) / size**0.5
    if tokens:
        other[0, 0] = 0  # nothing alike: a gate of one half
        alike[0, 0] = 0
    gate = (alike.abs().clamp_min(1e-6).sqrt() * alike.sign()).sigmoid()
    close(streams.keyed(own, other, x), gate * x.double()[:, None])


def check_attended(streams: Any, own: Tensor, wider: Tensor) -> None:
    """`wider`: more streams of the same tokens, of which `own` are the first."""
    (_, count, size), dtype, device = own.shape, own.dtype, str(own.device)
    normed = own.double() / (own.double().square().mean(2, keepdim=True) + 1e-3).sqrt()
    queries = draw(3, size, dtype=torch.float32, device=device, scale=3).contiguous()
    norms = draw(3, size, dtype=dtype, device=device).contiguous()
    shares = (torch.einsum("tsh,qh->tqs", normed, queries.double()) / size**0.5).softmax(2)
    inputs = torch.einsum("tqs,tsh->tqh", shares, normed)
    inputs = inputs / (inputs.square().mean(2, keepdim=True) + 0.01).sqrt() * norms.double()
    for some in (own, wider[:, :count]):
        _Close(dtype)(streams.attended(some, queries, norms, 1e-3, 0.01), inputs)


class _Close:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, actual: Tensor, expected: Tensor) -> None:
        """Within one rounding, which Triton's interpreter does towards zero."""
        assert actual.dtype == self.dtype and actual.is_contiguous()
        rough = 2**-7 if self.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(actual.double(), expected, atol=2e-5, rtol=rough)


def check_balanced(streams: Any, tokens: int, count: int, times: int, device: str = "cpu") -> None:
    torch.manual_seed(1)
    logits = 3 * draw(tokens, (2 + count) * count, dtype=torch.float32, device=device)
    eps = 1e-3
    before, after, mixing = streams.balanced(logits, count, times, eps)
    wide = logits.double()
    kinds = wide.split([count, count, count * count], dim=1)
    rows = kinds[2].unflatten(1, (count, count)).softmax(2) + eps
    for turn in range(2 * times - 1):  # columns, rows, columns, ...
        rows = rows / (rows.sum(1 + turn % 2, keepdim=True) + eps)
    expected = kinds[0].sigmoid() + eps, 2 * kinds[1].sigmoid(), rows
    for found, wanted in zip((before, after, mixing), expected, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), wanted, atol=1e-6, rtol=1e-5)


def check_alone(streams: Any, dtype: torch.dtype, device: str = "cpu") -> None:
    """A token's bits beside others are those that it has alone."""
    torch.manual_seed(2)
    own, other = torch.randn(2, 9, 4, 200, device=device).to(dtype)
    x, gates = own[:, 0].clone(), other[:, :, 0].clone()
    logits = torch.randn(9, 24, device=device)
    weights = streams.balanced(logits, 4, 20, 1e-6)
    queries = torch.randn(2, 200, device=device)

    def every(rows: slice) -> list[Tensor]:
        few = StreamWeights(*(kind[rows] for kind in weights))
        return [
            streams.gated_mean(other[rows], own[rows]),
            streams.weighted(own[rows], few.before),
            streams.injected(own[rows].clone(), x[rows], gates[rows]),
            streams.mixed(own[rows].clone(), x[rows], few),
            streams.keyed(own[rows], other[rows], x[rows]),
            streams.attended(own[rows], queries, queries.to(dtype), 1e-6, 1e-6),
            *streams.balanced(logits[rows], 4, 20, 1e-6),
        ]

    together = every(slice(9))
    for i in range(9):
        for alone, beside in zip(every(slice(i, i + 1)), together, strict=True):
            assert torch.equal(alone[0], beside[i])
