"""Steps of the causal convolution and their results by hand, in float64, on any device; with gates
also beside a kernel for each gate, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_hybrid.kernels.activation import reference as plain_activation
from megatron_hybrid.kernels.contract import DecodeSlots, PrefillSegments
from megatron_hybrid.kernels.protocols import ConvConstants, Gates
from tests.kernels.runs_cases import Call, Play
from tests.kernels.segments import Segment, int64, prefill_segments

NAN = float("nan")


@dataclass
class Conv:
    """Slots that are not in `seen` hold NaN."""

    x: Tensor  # [T, channels], columns of a wider tensor
    weight: Tensor  # [channels, W]
    bias: Tensor | None
    state: Tensor  # [slots, channels, W - 1]
    gates: Gates = Gates()  # columns of other wider tensors
    activation: Any = plain_activation  # whose `gate` does alone what a gate does

    @classmethod
    def random(
        cls, tokens: int, slots: int, seen: set[int], channels: int, width: int = 4,
        device: str = "cpu", dtype: torch.dtype = torch.float32, packed: bool = True,
        bias: bool = True, gates: str = "", activation: Any = plain_activation,
    ) -> Conv:  # fmt: skip
        """`packed`: channels are the fastest dimension of weight and state. `gates`: names those
        that there are."""
        generator = torch.Generator(device).manual_seed(tokens)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        weight, state = draw(width, channels).t(), draw(slots, width - 1, channels).mT
        state[[slot for slot in range(slots) if slot not in seen]] = NAN
        if not packed:
            weight, state = weight.contiguous(), state.contiguous()
        x = draw(tokens, channels + 16)[:, 8:-8]
        offset = draw(channels) if bias else None
        before = draw(tokens, channels + 24)[:, 8:-16] if "before" in gates else None
        after = draw(tokens, channels + 32)[:, 16:-16] if "after" in gates else None
        return cls(x, weight, offset, state, Gates(before, after), activation)

    def constants(self, silu: bool = True) -> ConvConstants:
        return ConvConstants(self.weight, self.bias, silu)

    @property
    def roundings(self) -> int:
        """Of an output."""
        return 1 if self.gates.after is None else 2

    def poison(self, tokens: slice | Tensor) -> None:
        """NaN in all that is given of padding."""
        for values in (self.x, *self.gates):
            if values is not None:
                values[tokens] = NAN

    def inputs(self, x: Tensor, gates: Gates) -> Tensor:
        """What is convolved: [tokens, channels]."""
        gate = gates.before
        return x if gate is None else self.activation.gate(x, gate, "none")

    def apart(self, convolve: Callable[[Tensor], Tensor], x: Tensor, gates: Gates) -> Tensor:
        """What `convolve` gives with a kernel for each gate around it."""
        y = convolve(self.inputs(x, gates))
        return y if gates.after is None else self.activation.gate(y, gates.after, "none")

    def by_hand(
        self, begin: int, length: int, read: int, silu: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Outputs [length, channels] in float64 of x[begin:], and its inputs behind the window."""
        width, tokens = self.weight.shape[1], slice(begin, begin + length)
        gates = self.gates.of(tokens)
        old = self.state[read].t() if read > 0 else self.x.new_zeros(width - 1, self.x.shape[1])
        rows = torch.cat((old.to(self.x.dtype), self.inputs(self.x[tokens], gates)))
        y = torch.zeros(length, rows.shape[1], dtype=torch.float64, device=rows.device)
        for k in range(width):
            y += rows[k : k + length].double() * self.weight[:, k].double()
        if self.bias is not None:
            y += self.bias.double()
        y = y * torch.sigmoid(y) if silu else y
        return y if gates.after is None else y * gates.after.double(), rows


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
    case.poison(slice(sum(lengths), None))
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
    out, other = torch.full_like(case.x, NAN), clone_of(case.state)
    plan, constants = conv.plan(step, width), case.constants(silu)
    y = conv.prefill(case.x, constants, case.state, plan, out, case.gates)
    assert y is out
    close(y[:begin], torch.cat(expected), case.roundings)
    assert (y[begin:] == 0).all()
    torch.testing.assert_close(case.state, state, atol=0, rtol=0, equal_nan=True)
    convolve = partial(conv.prefill, constants=constants, state=other, plan=plan)
    assert_same_bits(y[:begin], case.apart(convolve, case.x, case.gates)[:begin])
    assert_same_bits(case.state, other)


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
    is_padded = torch.tensor([kind == (0, 0) for kind in kinds], device=case.x.device)
    case.poison(is_padded)
    for i, (read, write) in enumerate(kinds):
        y, window = case.by_hand(i, 1, read, silu)
        expected.append(y)
        if write > 0:
            state[write] = window[1:].t()
    slots = DecodeSlots(int64([r for r, _ in kinds]), int64([w for _, w in kinds]))
    out, other = torch.full_like(case.x, NAN), clone_of(case.state)
    step, constants = plan(on(slots, str(case.x.device))), case.constants(silu)
    y = conv.decode(case.x, constants, case.state, step, out, case.gates)
    assert y is out
    close(y[~is_padded], torch.cat(expected)[~is_padded], case.roundings)
    assert (y[is_padded] == 0).all()
    torch.testing.assert_close(case.state, state, atol=0, rtol=0, equal_nan=True)
    convolve = partial(conv.decode, constants=constants, state=other, plan=step)
    assert_same_bits(y[~is_padded], case.apart(convolve, case.x, case.gates)[~is_padded])
    assert_same_bits(case.state, other)


def check_runs(conv: Any, play: Play, silu: bool = True, calls: int = 10, **options: Any) -> None:
    """Sequences with unfolded tokens, drafts accepted and not, calls that write nothing."""
    length = 80
    case = Conv.random(length * play.count, play.slots, set(), **options)
    (channels, width), device = case.weight.shape, str(case.x.device)
    texts = [case.by_hand(length * i, length, 0, silu) for i in range(play.count)]
    # Some channels of a wider ring, as of a layer with several convolutions.
    shape = play.count, play.ring_length, channels + 8
    ring = torch.full(shape, NAN, dtype=case.state.dtype, device=device)[..., 3:-5]
    for one, (_, rows) in zip(play.sequences, texts, strict=True):
        if one.slot:
            case.state[one.slot] = rows[one.position : one.position + width - 1].t()
    for step in range(calls):
        call, expected, state = play.call(padding=step % 3), [], case.state.clone()
        for s, (one, (outputs, rows)) in enumerate(zip(play.sequences, texts, strict=True)):
            right, folded = min(call.lengths[s], 1 + call.holds[s]), min(call.lengths[s], 1)
            expected += [outputs[one.position : one.position + right]]
            expected += [outputs[:1].expand(call.lengths[s] - right, -1) * NAN]
            if call.writes[s]:
                state[call.writes[s]] = rows[one.position + folded :][: width - 1].t()
            if call.reached(s):
                position, slot = one.checkpoint
                state[slot] = rows[position : position + width - 1].t()
        x, *pair = (  # with a stride each
            None if values is None else tokens_of(values, call, length).repeat(1, i)[:, :channels]
            for i, values in enumerate((case.x, *case.gates), start=2)
        )
        assert x is not None
        gates = Gates(*pair)
        plan = conv.plan_runs(on(call.runs(), device), width, play.ring_length)
        out, constants = torch.full_like(x, NAN), case.constants(silu)
        other, other_ring = clone_of(case.state), ring.clone()
        y = conv.decode_runs(x, constants, case.state, ring, plan, out, gates)
        assert y is out
        assert not y[sum(call.lengths) :].any()
        known = torch.cat(expected)
        is_known = ~known.isnan().any(dim=1)
        close(y[: len(known)][is_known], known[is_known], case.roundings)
        torch.testing.assert_close(case.state, state, atol=0, rtol=0, equal_nan=True)
        convolve = partial(
            conv.decode_runs, constants=constants, state=other, ring=other_ring, plan=plan
        )
        assert_same_bits(y[: len(known)], case.apart(convolve, x, gates)[: len(known)])
        assert_same_bits(case.state, other)
        assert_same_bits(ring, other_ring)
        call.done()


def tokens_of(values: Tensor, call: Call, length: int) -> Tensor:
    """What a call is given of values [sequences * length, channels], x or a gate: other values for
    drafts that don't hold, NaN in padding."""
    wrong, parts = values.new_full((sum(call.lengths), values.shape[1]), 3.0), []
    for s, one in enumerate(call.sequences):
        right = min(call.lengths[s], 1 + call.holds[s])
        first = length * s + one.position
        parts += [values[first : first + right], wrong[: call.lengths[s] - right]]
    padding = values.new_full((call.padding, values.shape[1]), NAN)
    return torch.cat([*parts, padding])


def clone_of(state: Tensor) -> Tensor:
    """With its strides."""
    return torch.empty_strided(
        state.shape, state.stride(), dtype=state.dtype, device=state.device
    ).copy_(state)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Of NaN and of zeros, too."""
    bits = {2: torch.int16, 4: torch.int32}[actual.element_size()]
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.contiguous().view(bits), expected.contiguous().view(bits))


def close(actual: Tensor, expected: Tensor, roundings: int = 1) -> None:
    """Within so many roundings of actual's dtype, a few times."""
    tolerance = roundings * (1e-2 if actual.dtype == torch.bfloat16 else 1e-5)
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)
