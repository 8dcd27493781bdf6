"""The Triton scan of Mamba1 in Triton's interpreter, on a CPU."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeSlots
from megatron_hybrid.kernels.mamba1_scan import reference
from megatron_hybrid.kernels.protocols import Mamba1Constants, Mamba1Tokens
from megatron_hybrid.kernels.slots import plan_decode
from tests.kernels.segments import Segment, int64, prefill_segments

if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    pytest.skip("for machines with triton and without CUDA", allow_module_level=True)
from megatron_hybrid.kernels.mamba1_scan import triton as scan  # noqa: E402
from tests.thorough import A_THIRD

CHANNELS, SIZE, CHUNK = 32, 16, 16
NARROW, MEDIUM, WIDE = scan.Tiling(2, 1), scan.Tiling(4, 1), scan.Tiling(4, 4)
TILINGS = pytest.mark.parametrize("tiling", [NARROW, WIDE], ids=str)


@dataclass
class Data:
    x: Tensor  # [T, channels]
    z: Tensor
    dt: Tensor
    B: Tensor  # [T, state]
    C: Tensor
    A: Tensor
    D: Tensor
    dt_bias: Tensor

    @classmethod
    def draw(cls, tokens: int, channels: int = CHANNELS, size: int = SIZE, seed: int = 0) -> Data:
        """The first five are columns of one wider tensor, with an odd row."""
        g = torch.Generator().manual_seed(seed)
        widths = [channels, channels, channels, size, size, 3]
        x, z, dt, B, C, _ = torch.randn(tokens, sum(widths), generator=g).split(widths, dim=1)
        h = torch.Generator().manual_seed(99)  # the layer's constants
        return cls(
            *(x, z, dt, B, C),
            A=-8 * torch.rand(channels, size, generator=h) - 0.05,
            D=torch.randn(channels, generator=h),
            dt_bias=torch.linspace(-6, 1, channels),
        )

    def rows(self, begin: int, end: int) -> Data:
        return replace(self, **{n: getattr(self, n)[begin:end] for n in "x z dt B C".split()})

    def arguments(self) -> tuple[Mamba1Tokens, Mamba1Constants]:
        values = [getattr(self, f.name) for f in fields(self)]
        return Mamba1Tokens(*values[:5]), Mamba1Constants(*values[5:])


def naive(data: Data, initial: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    """Token by token in float64: outputs [T, channels], and the states after 0, 1, ... T tokens."""
    x, z, dt, B, C, A, D, bias = (
        v.double() for part in data.arguments() for v in part if isinstance(v, Tensor)
    )
    states = [torch.zeros_like(A) if initial is None else initial.double()]
    outputs = []
    for t in range(x.shape[0]):
        step = torch.nn.functional.softplus(dt[t] + bias)
        states.append(torch.exp(step[:, None] * A) * states[-1] + (step * x[t])[:, None] * B[t])
        outputs.append((states[-1] @ C[t] + D * x[t]) * torch.nn.functional.silu(z[t]))
    return torch.stack(outputs), states


def poisoned(slots: int, data: Data, dtype: torch.dtype = torch.float32) -> Tensor:
    """[slots, channels, state] of NaN, with a slot stride larger than a state."""
    return torch.full((slots, 2, *data.A.shape), float("nan"), dtype=dtype)[:, 1]


def run(
    data: Data,
    segments: list[Segment],
    state: Tensor,
    tiling: scan.Tiling | None = None,
    chunk: int = CHUNK,
    padding: int = 1,
) -> Tensor:
    out = torch.full_like(data.x, float("nan"))
    plan = scan.plan(prefill_segments(segments, padding), chunk)
    assert scan.prefill(*data.arguments(), state, plan, out, tiling=tiling) is out
    return out


def close(actual: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(
        actual.double(), expected.double(), atol=tolerance, rtol=tolerance, equal_nan=False
    )


@A_THIRD
@TILINGS
@pytest.mark.parametrize("length", [1, 3, 16, 33])
def test_one_sequence_equals_the_token_loop(length: int, tiling: scan.Tiling) -> None:
    data = Data.draw(length)
    state = poisoned(3, data)
    y = run(data, [Segment(0, length, 0, 2)], state, tiling)
    expected, states = naive(data)
    close(y, expected)
    close(state[2], states[length])
    assert state[:2].isnan().all()


@pytest.mark.parametrize(
    ("channels", "size", "tiling"),
    [
        (5, 16, MEDIUM),
        (12, 16, WIDE),
        (32, 4, MEDIUM),
        (16, 8, NARROW),
        (4, 32, NARROW),
        (2, 128, MEDIUM),
    ],
    ids=str,
)
def test_any_number_of_channels_and_states(channels: int, size: int, tiling: scan.Tiling) -> None:
    data = Data.draw(20, channels, size)
    state = poisoned(3, data)
    y = run(data, [Segment(0, 20, 0, 2, [(16, 1)])], state, tiling)
    expected, states = naive(data)
    close(y, expected)
    close(state[1], states[16])
    close(state[2], states[20])


@pytest.mark.parametrize("chunk", [4, 24, 64])
def test_any_kernel_chunk(chunk: int) -> None:
    data = Data.draw(2 * chunk + 3)
    state = poisoned(4, data)
    y = run(
        data, [Segment(0, 2 * chunk + 3, 0, 1, [(chunk, 2), (2 * chunk, 3)])], state, chunk=chunk
    )
    expected, states = naive(data)
    close(y, expected)
    close(state[2], states[chunk])
    close(state[3], states[2 * chunk])


@A_THIRD
@TILINGS
def test_packed_sequences_with_checkpoints_equal_the_token_loop(tiling: scan.Tiling) -> None:
    """Starts and ends on and off the grid, segments of one to three tokens, checkpoints on the grid
    and at an end, an empty segment, padding, writes to slot 0, rows after the last sequence."""
    segments = [
        Segment(0, 38, 0, 6, [(16, 7), (32, 8)]),
        Segment(21, 45, 1, 1, [(32, 9), (48, 0), (66, 10)]),
        Segment(32, 17, 2, 11, [(48, 12)]),
        Segment(37, 3, 3, 0, [(40, 13)]),
        Segment(15, 2, 4, 4, [(16, 15)]),
        Segment(47, 1, 0, 16),
        Segment(40, 0, 5, 14),
    ]
    data = Data.draw(sum(s.length for s in segments) + 5)
    state = poisoned(19, data)
    state[1:6] = torch.randn(state[1:6].shape, generator=torch.Generator().manual_seed(3))
    before = state.clone()
    y = run(data, segments, state, tiling, padding=2)
    begin, written = 0, {14}
    for s in segments[:6]:
        initial = before[s.read] if s.read else None
        expected, states = naive(data.rows(begin, begin + s.length), initial)
        close(y[begin : begin + s.length], expected)
        for position, slot in (*s.checkpoints, (s.start + s.length, s.write)):
            if slot > 0:
                close(state[slot], states[position - s.start])
                written.add(slot)
        begin += s.length
    assert torch.equal(state[14], before[5])
    kept = [slot for slot in range(19) if slot not in written]
    assert torch.equal(state[kept].nan_to_num(7.0), before[kept].nan_to_num(7.0))


@A_THIRD
@pytest.mark.parametrize("start", [0, 5, 15, 16, 17, 30])
def test_a_segment_may_start_anywhere_and_equals_the_reference(start: int) -> None:
    data = Data.draw(35)
    state = poisoned(6, data)
    state[1] = torch.randn(state[1].shape, generator=torch.Generator().manual_seed(4))
    grid = [p for p in (16, 32, 48, 64) if start < p <= start + 35]
    checkpoints = [(p, 3 + i) for i, p in enumerate(grid)]
    segments = [Segment(start, 35, 1 if start else 0, 2, checkpoints)]
    other = state.clone()
    plan = reference.plan(prefill_segments(segments), CHUNK)
    expected = reference.prefill(*data.arguments(), other, plan)
    close(run(data, segments, state), expected)
    close(state[2 : 3 + len(grid)], other[2 : 3 + len(grid)])


@pytest.mark.parametrize("cuts", [[16, 48], [7, 8, 30]], ids=str)
def test_cut_segments_give_the_very_same_bits(cuts: list[int]) -> None:
    """On the grid and off it."""
    data = Data.draw(60)
    whole, cut = poisoned(3, data), poisoned(3, data)
    y = run(data, [Segment(0, 60, 0, 1, [(48, 2)])], whole)
    bounds = [0, *cuts, 60]
    parts = []
    for begin, end in zip(bounds, bounds[1:], strict=False):
        checkpoints = [(48, 2)] if begin < 48 <= end else []
        segment = Segment(begin, end - begin, 1 if begin else 0, 1, checkpoints)
        parts.append(run(data.rows(begin, end), [segment], cut))
    assert torch.equal(torch.cat(parts), y)
    assert torch.equal(whole[1:], cut[1:])


def test_the_bits_depend_neither_on_the_neighbours_nor_on_the_tiling() -> None:
    data = Data.draw(60)
    packed, alone = poisoned(4, data), poisoned(4, data)
    y = run(data, [Segment(0, 37, 0, 1), Segment(0, 2, 0, 2), Segment(0, 21, 0, 3)], packed, MEDIUM)
    for tiling in (NARROW, MEDIUM, WIDE):
        assert torch.equal(y[:37], run(data.rows(0, 37), [Segment(0, 37, 0, 1)], alone, tiling))
        assert torch.equal(packed[1], alone[1])


@pytest.mark.parametrize("bad", [0, 1])
def test_nan_in_one_sequence_stays_there(bad: int) -> None:
    data = Data.draw(40)
    state = poisoned(3, data)
    halves = [slice(0, 13), slice(13, 40)]
    for values in data.arguments()[0]:
        values[halves[bad]] = float("nan")
    y = run(data, [Segment(0, 13, 0, 1), Segment(0, 27, 0, 2)], state)
    good = halves[1 - bad]
    expected, states = naive(data.rows(good.start, good.stop))
    close(y[good], expected)
    close(state[2 - bad], states[-1])


def test_small_steps_keep_their_accuracy() -> None:
    """A state's decay is exp(dt A) with dt down to e^-9, over many tokens."""
    data = Data.draw(100, channels=8)
    data.dt_bias = torch.linspace(-9, -5, 8)
    state = poisoned(2, data)
    run(data, [Segment(0, 100, 0, 1)], state)
    expected = naive(data)[1][100]
    assert ((state[1] - expected).abs() < 1e-5 * expected.abs().max(1, keepdim=True).values).all()


def test_bfloat16_inputs_and_states_follow_float32() -> None:
    data = Data.draw(40)
    for name in "x z dt B C".split():
        setattr(data, name, getattr(data, name).bfloat16())
    state = poisoned(3, data, torch.bfloat16)
    y = run(data, [Segment(0, 40, 0, 1, [(32, 2)])], state)
    expected, states = naive(data)
    assert y.dtype == torch.bfloat16
    close(y, expected, 2e-2)
    close(state[2], states[32], 2e-2)
    slots = DecodeSlots(int64([2]), int64([2]))
    close(scan.decode(*data.rows(32, 33).arguments(), state, slots)[0], expected[32], 2e-2)
    close(state[2], states[33], 2e-2)


@pytest.mark.parametrize("block_bytes", [256, 4096])
def test_decode_equals_the_token_loop(block_bytes: int) -> None:
    """In place, from one slot to another, from zeros, to nowhere, and two padded rows."""
    read, write = [1, 2, 0, 3, 0, -1], [1, 4, 5, 0, 0, -1]
    data = Data.draw(6)
    state = poisoned(7, data)
    state[1:4] = torch.randn(state[1:4].shape, generator=torch.Generator().manual_seed(5))
    before = state.clone()
    out = torch.full_like(data.x, float("nan"))
    slots = DecodeSlots(int64(read), int64(write))
    assert scan.decode(*data.arguments(), state, slots, out, block_bytes=block_bytes) is out
    for row in range(4):
        expected, states = naive(data.rows(row, row + 1), before[read[row]] if read[row] else None)
        close(out[row : row + 1], expected)
        if write[row]:
            close(state[write[row]], states[1])
    assert out[4:].eq(0).all()
    assert torch.equal(state[2:4], before[2:4])
    assert state[[0, 6]].isnan().all()


def test_decode_equals_the_reference() -> None:
    data = Data.draw(3)
    state = poisoned(8, data)
    state[1:4] = torch.randn(state[1:4].shape, generator=torch.Generator().manual_seed(6))
    other = state.clone()
    slots = DecodeSlots(int64([1, 2, 0]), int64([5, 2, 6]))
    expected = reference.decode(*data.arguments(), other, plan_decode(slots))
    close(scan.decode(*data.arguments(), state, slots), expected)
    close(state[[2, 5, 6]], other[[2, 5, 6]])


@pytest.mark.parametrize("name", ["x", "B", "A"])
def test_strides_that_the_kernels_do_not_take_are_refused(name: str) -> None:
    data = Data.draw(24)
    setattr(data, name, getattr(data, name).t().contiguous().t())
    with pytest.raises(ValueError, match=f"{name} has strides"):
        run(data, [Segment(0, 24, 0, 1)], poisoned(3, data))


@pytest.mark.parametrize("size", [2, 12, 256])
def test_other_state_sizes_are_refused(size: int) -> None:
    data = Data.draw(4, channels=2, size=size)
    with pytest.raises(ValueError, match=f"state size is {size}"):
        run(data, [Segment(0, 4, 0, 1)], poisoned(3, data))
