"""Recurrent layers whose kernels convolve for themselves: from the convolution's inputs on, against
a loop over the tokens in float64, on any device."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeSlots, RecurrentState
from megatron_hybrid.kernels.convolved import HeadsNorm
from tests.kernels import test_gated_delta_rule, test_mamba2_scan
from tests.kernels.conv_cases import Conv, on
from tests.kernels.recurrence_contract import Data
from tests.kernels.runs_cases import Play
from tests.kernels.segments import int64, poisoned

LENGTH = 40  # of a sequence's text


@dataclass
class Texts:
    """Of some sequences, one after the other: inputs, and what should come of them."""

    conv: Conv
    gates: list[Tensor]  # [T, heads] each
    constants: Any
    outputs: list[Tensor]  # of each sequence, [LENGTH, ...] float64
    states: list[list[Tensor]]  # after 0, 1, ... LENGTH tokens
    windows: list[Tensor]  # [LENGTH + width - 1, channels]: inputs behind the empty window

    @classmethod
    def random(
        cls, count: int, draw: Any, step: Any, sections: list[tuple[int, ...]], shape: Any,
        gates: int, **options: Any,
    ) -> Texts:  # fmt: skip
        """sections: the shapes of a token that are convolved to; gates: how many columns more."""
        tokens, constants = draw(LENGTH * count).arguments()
        names = type(tokens)._fields
        conv = Conv.random(
            LENGTH * count, 1, set(), sum(torch.Size(s).numel() for s in sections), **options
        )
        dtype, device = conv.x.dtype, conv.x.device
        own = [values.to(device, dtype) for values in tokens[len(names) - gates :]]
        constants = constants._make(c.to(device) if isinstance(c, Tensor) else c for c in constants)
        texts = cls(conv, own, constants, [], [], [])
        for s in range(count):
            rows = slice(s * LENGTH, (s + 1) * LENGTH)
            y, window = conv.by_hand(rows.start, LENGTH, 0)
            y = y.to(dtype).double()  # as one kernel leaves it for the other
            parts = y.split([torch.Size(shape).numel() for shape in sections], dim=1)
            parts = [part.unflatten(1, size) for part, size in zip(parts, sections, strict=True)]
            every = [*parts, *(values[rows].double() for values in own)]
            state = torch.zeros(shape, dtype=torch.float64, device=device)
            states, outputs = [state], []
            for t in range(LENGTH):
                token = {name: values[t] for name, values in zip(names, every, strict=True)}
                wide = {
                    name: c.double() if isinstance(c, Tensor) else c
                    for name, c in constants._asdict().items()
                }
                y, state = step(state, SimpleNamespace(**token, **wide))
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


def mamba2_texts(count: int, head_dim: int, size: int, **options: Any) -> Texts:
    heads, groups = test_mamba2_scan.HEADS, test_mamba2_scan.GROUPS

    def draw(length: int) -> Data:
        return test_mamba2_scan.draw(length, head_dim=head_dim, size=size)

    return Texts.random(
        count, draw, test_mamba2_scan.step, [(heads, head_dim), (groups, size), (groups, size)],
        (heads, head_dim, size), 1, **options,
    )  # fmt: skip


def check_mamba2_runs(
    decode_runs: Any, play: Play, head_dim: int, size: int, calls: int = 10, **options: Any
) -> None:
    """Calls that write no state, checkpoints, padding: what no call names stays as it was."""
    texts = mamba2_texts(play.count, head_dim, size, **options)
    conv, (dt,) = texts.conv, texts.gates
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


def delta_rule_texts(count: int, v_dim: int, k_dim: int, **options: Any) -> Texts:
    heads, k_heads = test_gated_delta_rule.HEADS, test_gated_delta_rule.K_HEADS

    def draw(length: int) -> Data:
        return test_gated_delta_rule.draw(length, v_dim=v_dim, k_dim=k_dim)

    return Texts.random(
        count, draw, test_gated_delta_rule.step,
        [(k_heads, k_dim), (k_heads, k_dim), (heads, v_dim)], (heads, v_dim, k_dim), 2, **options,
    )  # fmt: skip


def check_delta_rule_decodes(
    decode: Any, v_dim: int, k_dim: int, normed: bool = True, **options: Any
) -> None:
    """Rows in place, moved, new, dropped and padded."""
    reads, writes, positions = [1, 2, 0, 4, 0], [1, 3, 5, 0, 0], [7, 3, 0, 9, 0]
    texts = delta_rule_texts(len(reads), v_dim, k_dim, bias=False, **options)
    conv, device, dtype = texts.conv, texts.conv.x.device, texts.conv.x.dtype
    heads = test_gated_delta_rule.HEADS
    state = RecurrentState(
        poisoned(7, conv.weight.shape[1] - 1, conv.x.shape[1], dtype=dtype).to(device).mT,
        poisoned(7, heads, v_dim, k_dim).to(device),
    )
    for s, (slot, position) in enumerate(zip(reads, positions, strict=True)):
        if slot:
            state.conv[slot] = texts.window(s, position)
            state.ssm[slot] = texts.states[s][position]
    before = RecurrentState(state.conv.clone(), state.ssm.clone())
    rows = [LENGTH * s + position for s, position in enumerate(positions)]
    x, a, b = (wide(values[rows]) for values in (conv.x, *texts.gates))
    gate, weight = (wide(conv.x[: len(reads), : heads * v_dim]), conv.x[9, : heads * v_dim].clone())
    slots = on(DecodeSlots(int64(reads), int64(writes)), str(device))
    norm = HeadsNorm(gate, weight, 1e-5) if normed else None
    y = decode(x, a, b, conv.constants(), texts.constants, state, slots, norm)
    expected = torch.stack([texts.outputs[s][p] for s, p in enumerate(positions)])
    if normed:
        expected = expected.to(dtype).double()
        expected *= (expected.square().mean(dim=2, keepdim=True) + 1e-5).rsqrt()
        expected *= (weight.double() * torch.nn.functional.silu(gate.double())).view_as(expected)
    close(y[:-1], expected.flatten(1)[:-1], dtype)
    assert not y[-1].any()
    for s, slot in enumerate(writes):
        if slot:
            assert torch.equal(state.conv[slot], texts.window(s, positions[s] + 1))
            close(state.ssm[slot], texts.states[s][positions[s] + 1], dtype)
    same(state, before, set(writes) - {0})


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
