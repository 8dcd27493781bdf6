"""Mamba1's decodes from x_proj's result on, against a loop over the tokens in float64, on any
device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeSlots
from megatron_hybrid.kernels.projected import LowRank
from megatron_hybrid.kernels.protocols import Mamba1Constants
from tests.kernels.conv_cases import on
from tests.kernels.segments import int64, poisoned

EPS = 1e-3  # large enough to show
# In place, moved, new, dropped, and two padded rows.
READS, WRITES = [1, 2, 0, 4, 0, -1], [1, 3, 5, 0, 0, -1]
SLOTS = 7


@dataclass
class Layer:
    """A layer's inputs, in rows of wider tensors whose other columns are NaN, and constants."""

    x: Tensor  # [T, channels]
    z: Tensor
    low: LowRank
    constants: Mamba1Constants

    @classmethod
    def random(
        cls, tokens: int, channels: int, rank: int, size: int, *, normed: bool,
        dtype: torch.dtype = torch.float32, device: str = "cpu",
    ) -> Layer:  # fmt: skip
        generator = torch.Generator(device).manual_seed(rank)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        norms = normal(rank + 2 * size).to(dtype) if normed else None
        weight = normal(channels, rank).mul_(rank**-0.5).to(dtype)
        projected = wide(2 * normal(tokens, rank + 2 * size).to(dtype))
        return cls(
            wide(normal(tokens, channels).to(dtype)),
            wide(normal(tokens, channels).to(dtype)),
            LowRank(projected, weight, norms, EPS),
            Mamba1Constants(-normal(channels, size).exp(), normal(channels), normal(channels) - 1),
        )

    def as_whole_numbers(self) -> Layer:
        """A layer whose float32 sums are exact, so that their order does not show."""
        projected, weight, norms, eps = self.low
        signs = (weight.sign() * (weight.abs() > weight.abs().mean())).to(weight.dtype)
        norms = None if norms is None else (2 * norms).round().clamp(-3, 3)
        low = LowRank(wide(projected.round().clamp(-3, 3)), signs, norms, eps)
        return Layer(self.x, self.z, low, self.constants)

    def by_hand(self, row: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """The output [channels] and the state after one token, in float64."""
        projected, weight, norms, eps = self.low
        (_, rank), size, dtype = weight.shape, state.shape[1], projected.dtype
        sections = (rank, size, size)
        parts = list(projected[row].double().split(sections))
        if norms is not None:
            for i, scale in enumerate(norms.double().split(sections)):
                normed = parts[i] / (parts[i].square().mean() + eps).sqrt()
                parts[i] = (normed.to(dtype).double() * scale).to(dtype).double()
        low, b, c = parts
        dt = (weight.double() @ low).to(dtype).double()
        A, D, bias = (values.double() for values in self.constants[:3])
        dt, x = F.softplus(dt + bias), self.x[row].double()
        state = torch.exp(dt[:, None] * A) * state.double() + (dt * x)[:, None] * b
        return (state @ c + D * x) * F.silu(self.z[row].double()), state


def wide(values: Tensor) -> Tensor:
    """The same as columns of a wider tensor, as a projection leaves them."""
    rows = values.new_full((values.shape[0], values.shape[1] + 16), float("nan"))
    rows[:, 8:-8] = values
    return rows[:, 8:-8]


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Relative to the largest value. dtype: what was rounded to, in Triton's interpreter towards
    zero and so all numbers in one direction."""
    tolerance = 1e-5
    if dtype == torch.bfloat16:
        tolerance = 2e-2 if actual.is_cuda else 8e-2
    scale = max(float(expected.abs().max()), 1.0)
    torch.testing.assert_close(actual.double(), expected, atol=tolerance * scale, rtol=tolerance)


def check_decodes(
    decode: Any, channels: int, rank: int, size: int, *, normed: bool,
    dtype: torch.dtype = torch.float32, state_dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> None:  # fmt: skip
    """What no row writes stays as it was, and nobody reads it."""
    count = len(READS)
    layer = Layer.random(
        count, channels, rank, size, normed=normed, dtype=dtype, device=device
    )  # fmt: skip
    state = poisoned(SLOTS, channels, size, dtype=state_dtype).to(device)
    generator = torch.Generator(device).manual_seed(size)
    for slot in {slot for slot in READS if slot > 0}:
        state[slot] = torch.randn(channels, size, generator=generator, device=device)
    before = state.clone()
    slots = on(DecodeSlots(int64(READS), int64(WRITES)), device)
    y = decode(layer.x, layer.z, layer.low, layer.constants, state, slots)
    loosest = max(dtype, state_dtype, key=lambda kind: torch.finfo(kind).eps)
    for row, (read, write) in enumerate(zip(READS[:-2], WRITES, strict=False)):
        initial = before[read] if read else torch.zeros_like(before[1])
        expected, after = layer.by_hand(row, initial)
        close(y[row], expected, dtype)
        if write:
            close(state[write], after, loosest)
    assert y.dtype == dtype and y[-2:].eq(0).all()
    kept = [slot for slot in range(SLOTS) if slot not in WRITES or slot == 0]
    torch.testing.assert_close(state[kept], before[kept], atol=0, rtol=0, equal_nan=True)
