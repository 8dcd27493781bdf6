"""Steps of the causal convolution and their results by hand, in float64, on any device."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeSlots, PrefillSegments
from megatron_hybrid.kernels.protocols import ConvConstants
from tests.kernels.runs_cases import Play
from tests.kernels.segments import Segment, int64, prefill_segments

NAN = float("nan")


@dataclass
class Conv:
    """Slots that are not in `seen` hold NaN."""

    x: Tensor  # [T, channels], columns of a wider tensor
    weight: Tensor  # [channels, W]
    bias: Tensor | None
    state: Tensor  # [slots, channels, W - 1]

    @classmethod
    def random(
        cls, tokens: int, slots: int, seen: set[int], channels: int, width: int = 4,
        device: str = "cpu", dtype: torch.dtype = torch.float32, packed: bool = True,
        bias: bool = True,
    ) -> Conv:  # fmt: skip
        """`packed`: channels are the fastest dimension of weight and state."""
        generator = torch.Generator(device).manual_seed(tokens)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        weight, state = draw(width, channels).t(), draw(slots, width - 1, channels).mT
        state[[slot for slot in range(slots) if slot not in seen]] = NAN
        if not packed:
            weight, state = weight.contiguous(), state.contiguous()
        x = draw(tokens, channels + 16)[:, 8:-8]
        return cls(x, weight, draw(channels) if bias else None, state)

    def constants(self, silu: bool = True) -> ConvConstants:
        return ConvConstants(self.weight, self.bias, silu)

    def by_hand(
        self, begin: int, length: int, read: int, silu: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Outputs [length, channels] in float64 of x[begin:], and its inputs behind the window."""
        width = self.weight.shape[1]
        old = self.state[read].t() if read > 0 else self.x.new_zeros(width - 1, self.x.shape[1])
        rows = torch.cat((old.to(self.x.dtype), self.x[begin : begin + length]))
        y = torch.zeros(length, rows.shape[1], dtype=torch.float64, device=rows.device)
        for k in range(width):
            y += rows[k : k + length].double() * self.weight[:, k].double()
        if self.bias is not None:
            y += self.bias.double()
        return y * torch.sigmoid(y) if silu else y, rows


def mixed_segments(lengths: list[int]) -> list[Segment]:
    """New and continued sequences; states that stay, move, are checkpointed; and some sequences
    read the slot in which the one before them leaves its state. No slot is written twice."""
    segments = []
    for i, length in enumerate(lengths):
        read = 0 if i % 3 == 0 else 4 * i + 1
        write = 4 * (i + 1) + 1 if i % 6 == 1 else 4 * i + (1 if i % 6 == 4 else 2)
        start = 0 if read == 0 else 5 + i
        positions = sorted({start + 1, start + length // 2, start + length} - {start})
        checkpoints = [(p, 4 * i + 3) for p in positions[-1:]] if length else []
        if length > 1:
            checkpoints.insert(0, (positions[0], 4 * i + 4 if i % 2 else 0))
        segments.append(Segment(start, length, read, write, checkpoints))
    return segments


def on(step: Any, device: str) -> Any:
    """PrefillSegments, DecodeSlots or DecodeRuns as they are on `device`."""
    if device == "cpu":
        return step
    values = {f.name: getattr(step, f.name) for f in fields(step)}
    moved = {k: v.int().to(device) if isinstance(v, Tensor) else v for k, v in values.items()}
    return type(step)(**moved)


def padded(step: PrefillSegments, tokens: int) -> PrefillSegments:
    values = {f.name: getattr(step, f.name) for f in fields(step)}
    marks = torch.full((tokens,), -1, dtype=step.sequence_of_token.dtype)
    values["sequence_of_token"] = torch.cat((step.sequence_of_token, marks))
    return PrefillSegments(**values)


def check_prefill(
    conv: Any, lengths: list[int], padding: int = 0, silu: bool = True, **options: Any
) -> None:
    """`padding`: that many tokens and sequences more."""
    segments = mixed_segments(lengths)
    reads = {s.read for s in segments}
    case = Conv.random(sum(lengths) + padding, 4 * len(lengths) + 5, reads, **options)
    case.x[sum(lengths) :] = NAN
    width, device = case.weight.shape[1], str(case.x.device)
    expected, state, begin = [], case.state.clone(), 0
    for s in segments:
        y, rows = case.by_hand(begin, s.length, s.read, silu)
        expected.append(y)
        for position, slot in [*s.checkpoints, (s.start + s.length, s.write)]:
            if slot > 0:
                taken = position - s.start
                state[slot] = rows[taken : taken + width - 1].t()
        begin += s.length
    step = on(padded(prefill_segments(segments, padding), padding), device)
    out = torch.full_like(case.x, NAN)
    plan = conv.plan(step, width)
    y = conv.prefill(case.x, case.constants(silu), case.state, plan, out)
    assert y is out
    close(y[:begin], torch.cat(expected))
    assert (y[begin:] == 0).all()
    torch.testing.assert_close(case.state, state, atol=0, rtol=0, equal_nan=True)


def check_decode(
    conv: Any, rows: int, silu: bool = True, plan: Any = lambda slots: slots, **options: Any
) -> None:
    """Rows in place, moved, new, dropped and padded in turn. `plan`: the kernel set's
    plan_decode."""
    kinds = []
    for i in range(rows):
        own, other = 1 + 2 * i, 2 + 2 * i
        kinds.append([(own, own), (own, other), (0, own), (own, 0), (0, 0)][i % 5])
    case = Conv.random(rows, 2 * rows + 2, {read for read, _ in kinds} - {0}, **options)
    state, expected = case.state.clone(), []
    for i, (read, write) in enumerate(kinds):
        y, window = case.by_hand(i, 1, read, silu)
        expected.append(y)
        if write > 0:
            state[write] = window[1:].t()
    slots = DecodeSlots(int64([r for r, _ in kinds]), int64([w for _, w in kinds]))
    out = torch.full_like(case.x, NAN)
    step = plan(on(slots, str(case.x.device)))
    y = conv.decode(case.x, case.constants(silu), case.state, step, out)
    assert y is out
    is_padded = torch.tensor([kind == (0, 0) for kind in kinds], device=y.device)
    close(y[~is_padded], torch.cat(expected)[~is_padded])
    assert (y[is_padded] == 0).all()
    torch.testing.assert_close(case.state, state, atol=0, rtol=0, equal_nan=True)


def check_runs(conv: Any, play: Play, silu: bool = True, calls: int = 10, **options: Any) -> None:
    """Sequences with unfolded tokens, drafts accepted and not, calls that write nothing."""
    length = 80
    case = Conv.random(length * play.count, play.slots, set(), **options)
    width, device = case.weight.shape[1], str(case.x.device)
    texts = [case.by_hand(length * i, length, 0, silu) for i in range(play.count)]
    # Like the state, in channels that lie side by side, or not.
    ring = torch.full_like(case.state[:1, :, :1].mT, NAN)
    ring = ring.repeat(play.count, play.ring_length, 1)
    wrong = case.x.new_full((play.most * play.count, case.x.shape[1]), 3.0)
    for one, (_, rows) in zip(play.sequences, texts, strict=True):
        if one.slot:
            case.state[one.slot] = rows[one.position : one.position + width - 1].t()
    for step in range(calls):
        call, inputs, expected, state = play.call(padding=step % 3), [], [], case.state.clone()
        for s, (one, (outputs, rows)) in enumerate(zip(play.sequences, texts, strict=True)):
            right, folded = min(call.lengths[s], 1 + call.holds[s]), min(call.lengths[s], 1)
            seen = one.position + width - 1
            inputs += [rows[seen : seen + right], wrong[: call.lengths[s] - right]]
            expected += [outputs[one.position : one.position + right]]
            expected += [outputs[:1].expand(call.lengths[s] - right, -1) * NAN]
            if call.writes[s]:
                state[call.writes[s]] = rows[one.position + folded :][: width - 1].t()
            if call.reached(s):
                position, slot = one.checkpoint
                state[slot] = rows[position : position + width - 1].t()
        x = torch.cat([*inputs, wrong[: call.padding]])
        plan = conv.plan_runs(on(call.runs(), device), width, play.ring_length)
        out = torch.full_like(x, NAN)
        y = conv.decode_runs(x, case.constants(silu), case.state, ring, plan, out)
        assert y is out
        assert not y[sum(call.lengths) :].any()
        known = torch.cat(expected)
        is_known = ~known.isnan().any(dim=1)
        close(y[: len(known)][is_known], known[is_known])
        torch.testing.assert_close(case.state, state, atol=0, rtol=0, equal_nan=True)
        call.done()


def close(actual: Tensor, expected: Tensor) -> None:
    """Within the rounding of actual's dtype, a few times."""
    narrow = actual.dtype == torch.bfloat16
    tolerance = {"atol": 1e-2, "rtol": 1e-2} if narrow else {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(actual.double(), expected, **tolerance)
