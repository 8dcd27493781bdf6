"""Mamba2's decodes by kernels that convolve for themselves: from the convolution's inputs on,
against a loop over the tokens in float64, on any device."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import RecurrentState
from megatron_hybrid.kernels.protocols import Mamba2Constants
from tests.kernels import test_mamba2_scan
from tests.kernels.conv_cases import Conv, on
from tests.kernels.runs_cases import Play
from tests.kernels.segments import poisoned

LENGTH = 40  # of a sequence's text


@dataclass
class Texts:
    """Of some sequences, one after the other: inputs, and what should come of them."""

    conv: Conv
    dt: Tensor  # [T, heads]
    constants: Mamba2Constants
    outputs: list[Tensor]  # of each sequence, [LENGTH, ...] float64
    states: list[list[Tensor]]  # after 0, 1, ... LENGTH tokens
    windows: list[Tensor]  # [LENGTH + width - 1, channels]: inputs behind the empty window

    @classmethod
    def random(cls, count: int, head_dim: int, size: int, **options: Any) -> Texts:
        heads, groups = test_mamba2_scan.HEADS, test_mamba2_scan.GROUPS
        drawn = test_mamba2_scan.draw(LENGTH * count, head_dim=head_dim, size=size)
        tokens, constants = drawn.arguments()
        sections = [heads * head_dim, groups * size, groups * size]
        conv = Conv.random(LENGTH * count, 1, set(), sum(sections), **options)
        dtype, device = conv.x.dtype, conv.x.device
        dt = tokens.dt.to(device, dtype)
        constants = constants._make(c.to(device) if isinstance(c, Tensor) else c for c in constants)
        texts = cls(conv, dt, constants, [], [], [])
        every = {
            name: c.double() if isinstance(c, Tensor) else c
            for name, c in constants._asdict().items()
        }
        for s in range(count):
            rows = slice(s * LENGTH, (s + 1) * LENGTH)
            y, window = conv.by_hand(rows.start, LENGTH, 0)
            y = y.to(dtype).double()  # as one kernel leaves it for the other
            x, b, c = y.split(sections, dim=1)
            x = x.unflatten(1, (heads, head_dim))
            b, c = (part.unflatten(1, (groups, size)) for part in (b, c))
            state = torch.zeros(heads, head_dim, size, dtype=torch.float64, device=device)
            states, outputs = [state], []
            for token in zip(x, b, c, dt[rows].double(), strict=True):
                named = dict(zip(type(tokens)._fields, token, strict=True))
                y, state = test_mamba2_scan.step(state, SimpleNamespace(**named, **every))
                outputs.append(y)
                states.append(state)
            texts.outputs.append(torch.stack(outputs))
            texts.states.append(states)
            texts.windows.append(window)
        return texts

    def window(self, s: int, position: int) -> Tensor:
        """[channels, width - 1] behind this many tokens."""
        width = self.conv.weight.shape[1]
        return self.windows[s][position : position + width - 1].t()


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Relative to the largest value. dtype: of the convolution's outputs, which Triton's
    interpreter rounds towards zero."""
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-5
    scale = max(float(expected.abs().max()), 1.0) if expected.numel() else 1.0
    torch.testing.assert_close(
        actual.double(), expected, atol=tolerance * scale, rtol=2 * tolerance
    )


def check_mamba2_runs(
    decode_runs: Any, play: Play, head_dim: int, size: int, calls: int = 10, **options: Any
) -> None:
    """Calls that write no state, checkpoints, padding: what no call names stays as it was."""
    texts = Texts.random(play.count, head_dim, size, **options)
    conv, dt = texts.conv, texts.dt
    device, dtype, channels = conv.x.device, conv.x.dtype, conv.x.shape[1]
    heads, groups = test_mamba2_scan.HEADS, test_mamba2_scan.GROUPS
    state = RecurrentState(
        poisoned(play.slots, conv.weight.shape[1] - 1, channels, dtype=dtype).to(device).mT,
        poisoned(play.slots, heads, head_dim, size).to(device),
    )
    for s, one in enumerate(play.sequences):
        if one.slot:
            state.conv[one.slot] = texts.window(s, one.position)
            state.ssm[one.slot] = texts.states[s][one.position]

    def ring(*shape: int) -> Tensor:
        return poisoned(play.count, play.ring_length, *shape, dtype=dtype).to(device)

    rings = ring(channels), (ring(heads, head_dim), ring(groups, size), ring(heads))
    for number in range(calls):
        call = play.call(padding=number % 3)
        rows = [
            LENGTH * s + one.position
            for s, (one, length) in enumerate(zip(play.sequences, call.lengths, strict=True))
            if length
        ]
        rows += [0] * call.padding
        x, gate = (wide(values[rows]) for values in (conv.x, dt))
        before = RecurrentState(state.conv.clone(), state.ssm.clone())
        y = decode_runs(
            x, gate, conv.constants(), texts.constants, state, rings, on(call.runs(), str(device))
        )
        assert not y[sum(call.lengths) :].any()
        written, begin = set(), 0
        for s, one in enumerate(play.sequences):
            after = one.position + call.lengths[s]
            if call.lengths[s]:
                close(y[begin], texts.outputs[s][one.position], dtype)
                begin += 1
            ends = [(call.writes[s], after)] if call.writes[s] else []
            if call.reached(s):
                ends.append((one.checkpoint[1], one.checkpoint[0]))
            for slot, position in ends:
                written.add(slot)
                assert torch.equal(state.conv[slot], texts.window(s, position))
                close(state.ssm[slot], texts.states[s][position], dtype)
        same(state, before, written)
        call.done()


def same(state: RecurrentState, before: RecurrentState, but: set[int]) -> None:
    """All slots but these."""
    kept = [slot for slot in range(len(state.ssm)) if slot not in but]
    for now, then in ((state.conv, before.conv), (state.ssm, before.ssm)):
        torch.testing.assert_close(now[kept], then[kept], atol=0, rtol=0, equal_nan=True)


def wide(values: Tensor) -> Tensor:
    """The same as columns of a wider tensor, as a projection leaves them."""
    rows = values.new_full((values.shape[0], values.shape[1] + 16), float("nan"))
    rows[:, 8:-8] = values
    return rows[:, 8:-8]
