"""The Triton scan in Triton's interpreter, on a CPU, in float32."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeSlots, PrefillSegments
from megatron_hybrid.kernels.mamba2_scan import reference
from megatron_hybrid.kernels.protocols import Mamba2Constants, Mamba2Tokens
from megatron_hybrid.kernels.slots import plan_decode
from tests.thorough import A_THIRD, usually

if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    pytest.skip("for machines with triton and without CUDA", allow_module_level=True)
from megatron_hybrid.kernels.mamba2_scan import triton as scan  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # log2(0)

HEADS, HEAD_DIM, GROUPS, SIZE = 2, 16, 1, 32
SHAPE = (HEADS, HEAD_DIM, SIZE)
LIMIT = (0.02, 1.5)  # both bounds are reached
CHUNK = 32
PARTS = [None, 1, 2]  # what prefill() takes, and chunks a program


@dataclass
class Data:
    x: Tensor  # [T, heads, head_dim]
    B: Tensor  # [T, groups, state]
    C: Tensor
    dt: Tensor  # [T, heads]
    A: Tensor
    D: Tensor
    dt_bias: Tensor

    @classmethod
    def draw(cls, tokens: int, groups: int = GROUPS, seed: int = 0) -> Data:
        """x, B, C and dt are columns of one wider tensor, as in the model."""
        g = torch.Generator().manual_seed(seed)
        widths = [HEADS * HEAD_DIM, groups * SIZE, groups * SIZE, HEADS]
        wide = torch.randn(tokens, sum(widths) + 6, generator=g)
        x, B, C, dt, _ = wide.split([*widths, 6], dim=1)
        return cls(
            x=x.unflatten(1, (HEADS, HEAD_DIM)),
            B=B.unflatten(1, (groups, SIZE)),
            C=C.unflatten(1, (groups, SIZE)),
            dt=dt,
            A=torch.tensor([-0.05, -6.0]),
            D=torch.tensor([0.7, -1.2]),
            dt_bias=torch.tensor([-1.0, -3.0]),
        )

    def rows(self, begin: int, end: int) -> Data:
        cut = {n: getattr(self, n)[begin:end] for n in ("x", "B", "C", "dt")}
        return replace(self, **cut)

    def arguments(self) -> tuple[Mamba2Tokens, Mamba2Constants]:
        values = [getattr(self, f.name) for f in fields(self)]
        return Mamba2Tokens(*values[:4]), Mamba2Constants(*values[4:], LIMIT)


def token_loop(data: Data, state: Tensor) -> tuple[Tensor, list[Tensor]]:
    """In float64: outputs [T, heads, head_dim], and the states after 0, 1, ... T tokens."""
    states, outputs = [state.double()], []
    repeats = HEADS // data.B.shape[1]
    for t in range(data.x.shape[0]):
        dt = torch.nn.functional.softplus(data.dt[t].double() + data.dt_bias).clamp(*LIMIT)
        x = data.x[t].double()
        B, C = (v[t].double().repeat_interleave(repeats, 0) for v in (data.B, data.C))
        decay = torch.exp(dt * data.A)[:, None, None]
        states.append(decay * states[-1] + (dt[:, None] * x)[:, :, None] * B[:, None])
        outputs.append((states[-1] * C[:, None]).sum(-1) + data.D[:, None] * x)
    return torch.stack(outputs), states


@dataclass
class Segment:
    start: int
    length: int
    read: int
    write: int
    checkpoints: tuple[tuple[int, int], ...] = ()  # (position, slot)


def packed(*segments: Segment, dtype: torch.dtype = torch.int64) -> PrefillSegments:
    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    checkpoints = [(i, *c) for i, s in enumerate(segments) for c in s.checkpoints]
    counts = [len(s.checkpoints) for s in segments]
    return PrefillSegments(
        cu_seqlens=ints([0, *(s.length for s in segments)]).cumsum(0, dtype=dtype),
        start_position=ints([s.start for s in segments]),
        read_slot=ints([s.read for s in segments]),
        write_slot=ints([s.write for s in segments]),
        cu_checkpoints=ints([0, *counts]).cumsum(0, dtype=dtype),
        checkpoint_sequence=ints([c[0] for c in checkpoints]),
        checkpoint_position=ints([c[1] for c in checkpoints]),
        checkpoint_slot=ints([c[2] for c in checkpoints]),
        sequence_of_token=ints([i for i, s in enumerate(segments) for _ in range(s.length)]),
        longest=max(s.length for s in segments),
    )


def poisoned(slots: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[slots, ...] of NaN, with a slot stride larger than a state."""
    return torch.full((slots, 2, *SHAPE), float("nan"), dtype=dtype)[:, 1]


def run(
    data: Data,
    segments: PrefillSegments,
    state: Tensor,
    chunk: int = CHUNK,
    part: int | None = None,
) -> Tensor:
    out = torch.full_like(data.x, float("nan"))
    tiling = None if part is None else scan.Tiling(16, 16, num_warps=4, num_stages=1)
    plan = scan.plan(segments, chunk)
    y = scan.prefill(*data.arguments(), state, plan, out, tiling=tiling, part=part)
    assert y is out
    return y


def close(actual: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(
        actual.double(), expected.double(), atol=tolerance, rtol=tolerance, equal_nan=False
    )


@A_THIRD
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("chunk", [32, 16, 24, 8])
@pytest.mark.parametrize("length", usually([1, 33], [1, 31, 33, 64]))
def test_one_sequence_equals_the_token_loop(length: int, chunk: int, part: int | None) -> None:
    data, state = Data.draw(length), poisoned(3)
    y = run(data, packed(Segment(0, length, 0, 2)), state, chunk, part)
    expected, states = token_loop(data, torch.zeros(SHAPE))
    close(y, expected)
    close(state[2], states[length])
    assert state[:2].isnan().all()


@A_THIRD
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("dtype", usually([torch.int32], [torch.int32, torch.int64]))
@pytest.mark.parametrize("groups", usually([2], [1, 2]))
def test_packed_sequences_with_checkpoints_equal_the_token_loop(
    groups: int, dtype: torch.dtype, part: int | None
) -> None:
    """Starts and ends on and off the grid, checkpoints on the grid and at an end, an empty
    segment, padding, a write and a checkpoint to slot 0, rows after the last sequence."""
    segments = [
        Segment(0, 70, 0, 6, ((32, 7), (64, 8))),
        Segment(21, 45, 1, 1, ((32, 9), (64, 0), (66, 10))),
        Segment(32, 33, 2, 11, ((64, 12),)),
        Segment(37, 3, 3, 0, ((40, 13),)),
        Segment(40, 0, 4, 14),
        Segment(0, 0, 0, 0),
        Segment(0, 0, -1, -1),
    ]
    data, state = Data.draw(sum(s.length for s in segments) + 5, groups), poisoned(16)
    state[1:5] = torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(3))
    before = state.clone()
    y = run(data, packed(*segments, dtype=dtype), state, CHUNK, part)
    begin, written = 0, set()
    for s in segments[:4]:
        initial = before[s.read] if s.read else torch.zeros(SHAPE)
        expected, states = token_loop(data.rows(begin, begin + s.length), initial)
        close(y[begin : begin + s.length], expected)
        for position, slot in (*s.checkpoints, (s.start + s.length, s.write)):
            if slot > 0:
                close(state[slot], states[position - s.start])
                written.add(slot)
        begin += s.length
    assert torch.equal(state[14], before[4])
    kept = [slot for slot in range(16) if slot not in written | {14}]
    assert torch.equal(state[kept].nan_to_num(7.0), before[kept].nan_to_num(7.0))


@A_THIRD
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("start", [0, 5, 31, 32, 33, 60])
def test_a_segment_may_start_anywhere_and_equals_the_reference(
    start: int, part: int | None
) -> None:
    data = Data.draw(50)
    state = poisoned(6)
    state[1] = torch.randn(SHAPE, generator=torch.Generator().manual_seed(4))
    grid = [p for p in (32, 64, 96) if start < p <= start + 50]
    checkpoints = tuple((p, 3 + i) for i, p in enumerate(grid))
    segments = packed(Segment(start, 50, 1 if start else 0, 2, checkpoints))
    other = state.clone()
    expected = reference.prefill(*data.arguments(), other, reference.plan(segments, CHUNK))
    close(run(data, segments, state, CHUNK, part), expected)
    close(state[2 : 3 + len(grid)], other[2 : 3 + len(grid)])


def test_segments_cut_on_the_grid_give_the_very_same_bits() -> None:
    data, whole, cut = Data.draw(80), poisoned(4), poisoned(4)
    y = run(data, packed(Segment(0, 80, 0, 1, ((32, 2),))), whole)
    first = run(data.rows(0, 32), packed(Segment(0, 32, 0, 2)), cut)
    rest = run(data.rows(32, 80), packed(Segment(32, 48, 2, 1)), cut)
    assert torch.equal(torch.cat((first, rest)), y)
    assert torch.equal(whole[1:3], cut[1:3])


@pytest.mark.parametrize("starts", usually([(7, 30, 32)], [(0, 0, 0), (7, 30, 32), (33, 64, 1)]))
@pytest.mark.parametrize("part", usually([1, 3], [1, 2, 3]))
def test_parts_give_the_very_same_bits(part: int, starts: tuple[int, ...]) -> None:
    """Several sequences, some shorter than a part; the first in place, so that no part may read the
    slot after another has written it; checkpoints on the grid and at the ends."""
    lengths, slots = (150, 20, 97), [(1, 1), (2, 4), (0, 5)]
    segments, free = [], 6
    for start, length, (read, write) in zip(starts, lengths, slots, strict=True):
        end = start + length
        positions = [p for p in range(2 * CHUNK, end, 2 * CHUNK) if p > start] + [end]
        checkpoints = tuple((p, free + i) for i, p in enumerate(positions))
        segments.append(Segment(start, length, read, write, checkpoints))
        free += len(positions)
    data, whole = Data.draw(sum(lengths)), poisoned(24)
    whole[1:3] = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(7))
    split = whole.clone()
    expected = run(data, packed(*segments), whole, CHUNK, 0)
    assert torch.equal(run(data, packed(*segments), split, CHUNK, part), expected)
    assert torch.equal(split.nan_to_num(7.0), whole.nan_to_num(7.0))


@pytest.mark.parametrize("part", usually([0], [0, 1]))
def test_more_sequences_than_are_looked_at_at_once(part: int) -> None:
    lengths = [1 + i % 3 for i in range(70)]
    lengths[66] = 40
    data, state = Data.draw(sum(lengths)), poisoned(71)
    y = run(
        data, packed(*(Segment(0, n, 0, i + 1) for i, n in enumerate(lengths))), state, 16, part
    )
    for begin, n, slot in ((0, 1, 1), (sum(lengths[:66]), 40, 67), (sum(lengths[:69]), 1, 70)):
        expected, states = token_loop(data.rows(begin, begin + n), torch.zeros(SHAPE))
        close(y[begin : begin + n], expected)
        close(state[slot], states[n])


@pytest.mark.parametrize("bad", [0, 1])
def test_nan_in_one_sequence_stays_there(bad: int) -> None:
    data, state = Data.draw(40), poisoned(3)
    halves = [slice(0, 13), slice(13, 40)]
    for values in (data.x, data.B, data.C, data.dt):
        values[halves[bad]] = float("nan")
    y = run(data, packed(Segment(0, 13, 0, 1), Segment(0, 27, 0, 2)), state)
    good = halves[1 - bad]
    expected, states = token_loop(data.rows(good.start, good.stop), torch.zeros(SHAPE))
    close(y[good], expected)
    close(state[2 - bad], states[-1])


@pytest.mark.parametrize("block_p", [8, 16])
@pytest.mark.parametrize("groups", [1, 2])
def test_decode_equals_the_token_loop(groups: int, block_p: int) -> None:
    """In place, from one slot to another, from zeros, to nowhere, and a padded row."""
    read, write = [1, 2, 0, 3, 0], [1, 4, 5, 0, 0]
    data, state = Data.draw(5, groups), poisoned(7)
    state[1:4] = torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(5))
    before = state.clone()
    slots = DecodeSlots(torch.tensor(read), torch.tensor(write))
    out = torch.full_like(data.x, float("nan"))
    launch = {"block_p": block_p, "num_warps": 4}
    y = scan.decode(*data.arguments(), state, slots, out, **launch)
    for row in range(4):
        initial = before[read[row]] if read[row] else torch.zeros(SHAPE)
        expected, states = token_loop(data.rows(row, row + 1), initial)
        close(y[row : row + 1], expected)
        if write[row]:
            close(state[write[row]], states[1])
    assert y[4].eq(0).all()
    assert torch.equal(state[2:4], before[2:4])
    assert state[[0, 6]].isnan().all()


def test_decode_equals_the_reference() -> None:
    data, state = Data.draw(3), poisoned(8)
    state[1:4] = torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(6))
    other = state.clone()
    slots = DecodeSlots(torch.tensor([1, 2, 0]), torch.tensor([5, 2, 6]))
    expected = reference.decode(*data.arguments(), other, plan_decode(slots))
    close(scan.decode(*data.arguments(), state, slots), expected)
    close(state[[2, 5, 6]], other[[2, 5, 6]])


def test_strides_that_the_kernels_do_not_take_are_refused() -> None:
    data, state = Data.draw(4), poisoned(3)
    data.x = data.x.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="x has strides"):
        run(data, packed(Segment(0, 4, 0, 1)), state)


def test_steps_of_one_without_a_skip_are_lightning_attention() -> None:
    """As the layer calls it: step sizes are one row of zeros, for all tokens, clamped to 1."""
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 41, HEADS, SIZE, generator=g)
    v, initial = torch.randn(41, HEADS, HEAD_DIM, generator=g), torch.randn(SHAPE, generator=g)
    slopes, nothing = torch.tensor([0.03, 0.7]), torch.zeros(HEADS)
    constants = Mamba2Constants(-slopes, nothing, nothing, (1.0, 1.0))
    s, outputs, states = initial.double(), [], []
    for t in range(41):
        s = torch.exp(-slopes.double())[:, None, None] * s + v[t, :, :, None] * k[t, :, None, :]
        outputs.append((s * q[t, :, None]).sum(-1))
        states.append(s)

    def tokens(rows: slice) -> Mamba2Tokens:
        steps = torch.zeros(1, HEADS).expand(len(v[rows]), -1)
        return Mamba2Tokens(v[rows], k[rows], q[rows], steps)

    for kernel in (scan, reference):
        state = poisoned(4)
        state[1] = initial
        plan = kernel.plan(packed(Segment(5, 40, 1, 2)), CHUNK)
        y = kernel.prefill(tokens(slice(40)), constants, state, plan)
        close(y, torch.stack(outputs[:40]))
        close(state[2], states[39])
        slots = DecodeSlots(torch.tensor([2]), torch.tensor([3]))
        plan = slots if kernel is scan else plan_decode(slots)
        close(kernel.decode(tokens(slice(40, 41)), constants, state, plan), outputs[40][None])
        close(state[3], states[40])
