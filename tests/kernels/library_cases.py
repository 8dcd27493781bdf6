"""Segments without a state in their middle, and decodes, of the kernels on mamba-ssm and
causal-conv1d, against our reference, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_hybrid.kernels.causal_conv1d import reference as conv_reference
from megatron_hybrid.kernels.contract import DecodeSlots
from megatron_hybrid.kernels.mamba1_scan import reference as mamba1_reference
from megatron_hybrid.kernels.mamba2_scan import reference as mamba2_reference
from megatron_hybrid.kernels.protocols import (
    ConvConstants,
    Mamba1Constants,
    Mamba1Tokens,
    Mamba2Constants,
    Mamba2Tokens,
)
from megatron_hybrid.kernels.slots import plan_decode
from megatron_hybrid.kernels.whole_segments import UpdatedSlots
from tests.kernels.conv_cases import on
from tests.kernels.segments import Segment, int64, prefill_segments

# A new sequence; one that goes on elsewhere; one in place, with a checkpoint at its end; one that
# is shorter than a window; one without tokens, whose state moves; a new one that is dropped.
SEGMENTS = [
    Segment(0, 37, 0, 1),
    Segment(16, 20, 2, 3),
    Segment(5, 65, 4, 4, [(70, 5)]),
    Segment(9, 1, 6, 6, [(10, 0)]),
    Segment(3, 0, 7, 8),
    Segment(0, 2, 0, 0, [(2, 9)]),
]
IN_PLACE = [(3, 3), (1, 1), (7, 7)]
MIXED = [(1, 1), (2, 3), (0, 4), (5, 0), (0, 0), (6, 6)]
SLOTS, CHUNK = 10, 16
KINDS = ["conv", "mamba1", "mamba2", "mamba2 with limits"]


class Case:
    """A layer's constants and tokens, columns of a wider tensor as in the models."""

    def __init__(self, kind: str, device: str, dtype: torch.dtype, large: bool = False) -> None:
        self.kind, self.device, self.dtype = kind, device, dtype
        self.random = torch.Generator().manual_seed(7)
        self.channels, self.size = (1024, 64) if large else (32, 16)
        self.heads, self.groups = self.channels // 16, 2
        if kind == "conv":
            weight = self.draw(4, self.channels).t()
            self.constants: Any = ConvConstants(weight, self.draw(self.channels))
            self.shape: tuple[int, ...] = (self.channels, 3)
            self.reference: Any = conv_reference
        elif kind == "mamba1":
            A = -torch.rand(self.channels, 16, generator=self.random) * 4
            self.constants = Mamba1Constants(A.to(device), *self.floats(self.channels))
            self.shape, self.reference = (self.channels, 16), mamba1_reference
        else:
            A = -torch.rand(self.heads, generator=self.random) * 4
            limit = (0.3, 0.9) if "limits" in kind else (0.0, float("inf"))
            self.constants = Mamba2Constants(A.to(device), *self.floats(self.heads), limit)
            self.shape, self.reference = (self.heads, 16, self.size), mamba2_reference

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random).to(self.device, self.dtype)

    def floats(self, size: int) -> tuple[Tensor, Tensor]:
        return tuple(self.draw(size).float() for _ in range(2))  # type: ignore[return-value]

    def tokens(self, count: int) -> Any:
        c, s = self.channels, self.size
        if self.kind == "conv":
            return self.draw(count, c + 16)[:, 8:-8]
        if self.kind == "mamba1":
            wide = self.draw(count, 3 * c + 40)
            return Mamba1Tokens(*wide.split([c, c, c, 16, 16, 8], dim=1)[:5])
        widths = [c, self.groups * s, self.groups * s, self.heads, 8]
        x, B, C, dt, _ = self.draw(count, sum(widths)).split(widths, dim=1)
        by_group = (self.groups, s)
        x = x.unflatten(1, (self.heads, 16))
        return Mamba2Tokens(x, B.unflatten(1, by_group), C.unflatten(1, by_group), dt)

    def states(self, dtype: torch.dtype) -> Tensor:
        """Nobody may read slot 0."""
        if self.kind == "conv":
            state = self.draw(SLOTS, 3, self.channels).mT
        else:
            state = self.draw(SLOTS, *self.shape)
        state[0] = float("nan")
        return state.to(dtype)


def check_prefill(kernel: Any, case: Case, state_dtype: torch.dtype, tolerance: float) -> None:
    """With two tokens and a sequence of padding."""
    count = sum(segment.length for segment in SEGMENTS)
    tokens, states = case.tokens(count + 2), case.states(state_dtype)
    expected_states = states.clone()
    size = 4 if case.kind == "conv" else CHUNK
    step = on(prefill_segments(SEGMENTS, 1), case.device)
    out = torch.full_like(_like(tokens), float("nan"))
    plan = kernel.plan(step, size)
    assert kernel.prefill(tokens, case.constants, states, plan, out) is out
    expected = case.reference.prefill(
        _rows(tokens, count), case.constants, expected_states,
        case.reference.plan(step, size),
    )  # fmt: skip
    _close(out[:count], expected, tolerance)
    assert (out[count:] == 0).all()
    _close(states, expected_states, tolerance)


def check_decode(
    kernel: Any, case: Case, pairs: list[tuple[int, int]], state_dtype: torch.dtype,
    tolerance: float,
) -> None:  # fmt: skip
    """`pairs`: of read and write slots."""
    tokens, states = case.tokens(len(pairs)), case.states(state_dtype)
    expected_states = states.clone()
    slots = DecodeSlots(int64([r for r, _ in pairs]), int64([w for _, w in pairs]))
    out = torch.full_like(_like(tokens), float("nan"))
    plan = UpdatedSlots.of(on(slots, case.device))
    assert kernel.decode(tokens, case.constants, states, plan, out) is out
    expected = case.reference.decode(
        tokens, case.constants, expected_states, plan_decode(on(slots, case.device))
    )
    padded = torch.tensor([pair == (0, 0) for pair in pairs], device=out.device)
    _close(out[~padded], expected[~padded], tolerance)
    assert (out[padded] == 0).all()
    _close(states, expected_states, tolerance)


def _like(tokens: Any) -> Tensor:
    return tokens if isinstance(tokens, Tensor) else tokens.like


def _rows(tokens: Any, count: int) -> Any:
    if isinstance(tokens, Tensor):
        return tokens[:count]
    return tokens._make(values[:count] for values in tokens)


def _close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Within so much of the largest value."""
    actual, expected = actual.double(), expected.double()
    assert torch.equal(actual.isnan(), expected.isnan())
    off = (actual - expected).nan_to_num().abs().max()
    assert off <= tolerance * expected.nan_to_num().abs().max(), off.item()
