from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeSlots
from megatron_hybrid.kernels.mamba1_scan import reference as mamba1_scan
from megatron_hybrid.kernels.slots import plan_decode
from tests.kernels.segments import Segment, int64, poisoned, prefill_segments

CHANNELS, SIZE = 5, 6
CHUNK = 16
SHAPE = (CHANNELS, SIZE)

Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


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
    def draw(cls, length: int, seed: int = 0) -> Data:
        """The first five are columns of one wider tensor."""
        g = torch.Generator().manual_seed(seed)
        h = torch.Generator().manual_seed(99)  # the layer's constants
        wide = torch.randn(length, 3 * CHANNELS + 2 * SIZE + 3, generator=g)
        x, z, dt, B, C, _ = wide.split([CHANNELS, CHANNELS, CHANNELS, SIZE, SIZE, 3], dim=1)
        return cls(
            *(x, z, 2 * dt, B, C),
            A=-8 * torch.rand(CHANNELS, SIZE, generator=h) - 0.05,
            D=torch.randn(CHANNELS, generator=h),
            dt_bias=torch.randn(CHANNELS, generator=h) - 3,
        )

    def rows(self, begin: int, end: int) -> Data:
        cut = slice(begin, end)
        varying = (self.x[cut], self.z[cut], self.dt[cut], self.B[cut], self.C[cut])
        return Data(*varying, self.A, self.D, self.dt_bias)

    @classmethod
    def cat(cls, parts: list[Data]) -> Data:
        varying = (torch.cat([getattr(p, name) for p in parts]) for name in "x z dt B C".split())
        return cls(*varying, parts[0].A, parts[0].D, parts[0].dt_bias)

    def arguments(self) -> Arguments:
        return (self.x, self.z, self.dt, self.B, self.C, self.A, self.D, self.dt_bias)


def naive(data: Data, initial: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    """Token by token in float64: outputs [T, channels] and the states after 0..T tokens."""
    state = torch.zeros(SHAPE, dtype=torch.float64) if initial is None else initial.double()
    states, outputs = [state], []
    x, z, dt, B, C, A, D, bias = (values.double() for values in data.arguments())
    for t in range(x.shape[0]):
        step = torch.nn.functional.softplus(dt[t] + bias)
        state = torch.exp(step[:, None] * A) * state + (step * x[t])[:, None] * B[t]
        outputs.append((state @ C[t] + D * x[t]) * torch.nn.functional.silu(z[t]))
        states.append(state)
    return torch.stack(outputs), states


def run(
    data: Data, segments: list[Segment], state: Tensor, chunk: int = CHUNK, padding: int = 0
) -> Tensor:
    plan = mamba1_scan.plan(prefill_segments(segments, padding), chunk)
    out = torch.full_like(data.x, float("nan"))
    assert mamba1_scan.prefill(*data.arguments(), state, plan, out) is out
    return out


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("chunk", [1, 16, 24, 64])
@pytest.mark.parametrize("length", [1, 2, 3, 15, 16, 17, 32, 100])
def test_one_sequence_equals_the_token_loop(length: int, chunk: int, padding: int) -> None:
    data, state = Data.draw(length), poisoned(3, *SHAPE)
    y = run(data, [Segment(0, length, 0, 2)], state, chunk, padding)
    expected, states = naive(data)
    close(y, expected)
    close(state[2], states[length])


def test_without_an_output_tensor_the_result_is_a_new_one() -> None:
    data, state = Data.draw(20), poisoned(3, *SHAPE)
    plan = mamba1_scan.plan(prefill_segments([Segment(0, 20, 0, 1)]), CHUNK)
    close(mamba1_scan.prefill(*data.arguments(), state, plan), naive(data)[0])


def test_packed_sequences_equal_each_one_alone() -> None:
    lengths, starts = [40, 1, 7, 33, 16], [0, 5, 16, 30, 0]
    data, state = Data.draw(sum(lengths)), poisoned(20, *SHAPE)
    initial = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(3))
    for i, start in enumerate(starts):
        if start:
            state[i + 1] = initial[i]
    y = run(
        data,
        [
            Segment(start, n, i + 1 if start else 0, i + 10)
            for i, (n, start) in enumerate(zip(lengths, starts, strict=True))
        ],
        state,
    )
    begin = 0
    for i, n in enumerate(lengths):
        expected, states = naive(data.rows(begin, begin + n), initial[i] if starts[i] else None)
        close(y[begin : begin + n], expected)
        close(state[i + 10], states[n])
        begin += n


@pytest.mark.parametrize("cuts", [[16, 32, 48], [1, 2, 3, 20], [7], [31, 33], [5, 16, 17, 49]])
def test_any_segmentation_gives_the_same_outputs_and_state(cuts: list[int]) -> None:
    data, state = Data.draw(60), poisoned(3, *SHAPE)
    outputs, bounds = [], [0, *cuts, 60]
    for begin, end in zip(bounds, bounds[1:], strict=False):
        segment = Segment(begin, end - begin, 1 if begin else 0, 1)
        outputs.append(run(data.rows(begin, end), [segment], state))
    expected, states = naive(data)
    close(torch.cat(outputs), expected)
    close(state[1], states[60])


def test_segments_cut_on_the_grid_give_the_very_same_bits() -> None:
    data = Data.draw(80)
    whole, cut = poisoned(9, *SHAPE), poisoned(9, *SHAPE)
    y = run(data, [Segment(0, 80, 0, 1, [(16, 2), (48, 3)])], whole)
    parts = [
        run(data.rows(0, 16), [Segment(0, 16, 0, 2)], cut),
        run(data.rows(16, 48), [Segment(16, 32, 2, 3)], cut),
        run(data.rows(48, 80), [Segment(48, 32, 3, 1)], cut),
    ]
    assert torch.equal(torch.cat(parts), y)
    assert torch.equal(whole[1:4], cut[1:4])


def test_the_bits_do_not_depend_on_the_neighbours() -> None:
    data, alone, packed = Data.draw(70), poisoned(4, *SHAPE), poisoned(4, *SHAPE)
    y = run(data, [Segment(0, 37, 0, 1), Segment(0, 3, 0, 2), Segment(0, 30, 0, 3)], packed)
    assert torch.equal(y[:37], run(data.rows(0, 37), [Segment(0, 37, 0, 1)], alone))
    assert torch.equal(packed[1], alone[1])


def test_a_checkpoint_at_a_block_s_end_is_the_same_however_the_prompt_was_cut() -> None:
    """Blocks of 2048: one pass, and a first segment that ends before the block does."""
    data, whole, cut = Data.draw(2966), poisoned(4, *SHAPE), poisoned(4, *SHAPE)
    run(data, [Segment(0, 2966, 0, 1, [(2048, 2)])], whole)
    run(data.rows(0, 1866), [Segment(0, 1866, 0, 1)], cut)
    run(data.rows(1866, 2966), [Segment(1866, 1100, 1, 1, [(2048, 2)])], cut)
    close(cut[1:3], whole[1:3])
    states = naive(data)[1]
    close(whole[2], states[2048])
    close(whole[1], states[2966])


def test_checkpoints_equal_a_run_that_ends_there() -> None:
    data, state = Data.draw(90), poisoned(20, *SHAPE)
    segments = [
        Segment(0, 50, 0, 1, [(16, 2), (48, 3), (50, 4)]),
        Segment(0, 40, 0, 5, [(16, 0), (32, 6)]),
    ]
    run(data, segments, state)
    for begin, position, slot in ((0, 16, 2), (0, 48, 3), (0, 50, 4), (50, 32, 6)):
        alone = poisoned(2, *SHAPE)
        run(data.rows(begin, begin + position), [Segment(0, position, 0, 1)], alone)
        close(state[slot], alone[1])
    assert torch.equal(state[4], state[1])  # at the segment's end


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33])
def test_a_segment_may_start_and_end_anywhere(length: int) -> None:
    """From a stored state at every position modulo the grid, packed, one segment a start, each
    with text of its own; checkpoints at the grid positions inside."""
    starts = list(range(2 * CHUNK + 1))
    texts = [Data.draw(s + length, seed=100 * length + s) for s in starts]
    state = poisoned(5 * len(starts) + 1, *SHAPE)
    segments = []
    for s, text in zip(starts, texts, strict=True):
        if s:
            run(text.rows(0, s), [Segment(0, s, 0, 5 * s + 1)], state)
        inside = [p for p in range(CHUNK, s + length, CHUNK) if p > s]
        checkpoints = [(p, 5 * s + 3 + i) for i, p in enumerate(inside)]
        segments.append(Segment(s, length, 5 * s + 1 if s else 0, 5 * s + 2, checkpoints))
    before = state.clone()
    batch = Data.cat([text.rows(s, s + length) for s, text in zip(starts, texts, strict=True)])
    outputs = run(batch, segments, state).split(length)
    written = set()
    for s, text, segment, y in zip(starts, texts, segments, outputs, strict=True):
        expected, states = naive(text)
        close(y, expected[s:])
        for position, slot in [*segment.checkpoints, (s + length, segment.write)]:
            close(state[slot], states[position])
            written.add(slot)
    kept = [slot for slot in range(len(state)) if slot not in written]
    assert torch.equal(state[kept].nan_to_num(7.0), before[kept].nan_to_num(7.0))


def test_states_are_read_before_any_is_written() -> None:
    data, state = Data.draw(20), poisoned(4, *SHAPE)
    old = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(4))
    state[1:3] = old
    y = run(data, [Segment(16, 10, 1, 2), Segment(16, 10, 2, 1)], state)
    first, states_first = naive(data.rows(0, 10), old[0])
    second, states_second = naive(data.rows(10, 20), old[1])
    close(y, torch.cat((first, second)))
    close(state[2], states_first[10])
    close(state[1], states_second[10])


@pytest.mark.parametrize("bad", [0, 1])
def test_nan_in_one_sequence_stays_there(bad: int) -> None:
    data, state = Data.draw(30), poisoned(5, *SHAPE)
    halves = [slice(0, 10), slice(10, 30)]
    for values in data.arguments()[:5]:
        values[halves[bad]] = float("nan")
    y = run(data, [Segment(0, 10, 0, 1), Segment(0, 20, 0, 2)], state)
    good = halves[1 - bad]
    close(y[good], naive(data.rows(good.start, good.stop))[0])
    assert state[2 - bad].isfinite().all()


def test_slot_0_and_padding_are_never_written() -> None:
    data, state = Data.draw(20), poisoned(3, *SHAPE)
    y = run(data, [Segment(0, 12, 0, 0), Segment(0, 8, -1, -1)], state, padding=2)
    assert y.isfinite().all()
    for slots in ([0, -1], [0], [-1]):
        rows = data.rows(0, len(slots))
        plan = plan_decode(DecodeSlots(int64(slots), int64(slots)))
        y = mamba1_scan.decode(*rows.arguments(), state, plan)
        close(y[0], naive(data.rows(0, 1))[0][0])
    assert state.isnan().all()


def test_a_step_without_tokens_only_copies_states() -> None:
    data, state = Data.draw(0), poisoned(4, *SHAPE)
    state[1] = 3.0
    assert run(data, [Segment(16, 0, 1, 2), Segment(0, 0, 0, 3)], state).shape == (0, CHANNELS)
    assert state[2].eq(3.0).all() and state[3].eq(0).all() and state[0].isnan().all()


@pytest.mark.parametrize("slots", [[1, 2, 3, 4], [4, 2, 1, 3]], ids=["in place", "scattered"])
def test_decode_equals_the_token_loop(slots: list[int]) -> None:
    """Slots in a row are updated where they lie, others through a copy."""
    data = [Data.draw(6, seed=i) for i in range(4)]
    state = poisoned(6, *SHAPE)
    for one, slot in zip(data, slots, strict=True):
        run(one.rows(0, 3), [Segment(0, 3, 0, slot)], state)
    plan = plan_decode(DecodeSlots(int64(slots), int64(slots)))
    for t in range(3, 6):
        step = Data.cat([one.rows(t, t + 1) for one in data])
        out = torch.full_like(step.x, float("nan"))
        assert mamba1_scan.decode(*step.arguments(), state, plan, out) is out
        for i, one in enumerate(data):
            expected, states = naive(one)
            close(out[i], expected[t])
            close(state[slots[i]], states[t + 1])
    assert state[5].isnan().all() and state[0].isnan().all()


def test_decode_reads_one_slot_and_writes_another() -> None:
    data, state = Data.draw(5), poisoned(4, *SHAPE)
    run(data.rows(0, 4), [Segment(0, 4, 0, 1)], state)
    before = state[1].clone()
    plan = plan_decode(DecodeSlots(int64([1]), int64([3])))
    y = mamba1_scan.decode(*data.rows(4, 5).arguments(), state, plan)
    expected, states = naive(data)
    close(y[0], expected[4])
    close(state[3], states[5])
    assert torch.equal(state[1], before)


def test_bfloat16_inputs_and_states_follow_float32() -> None:
    data = Data.draw(50)
    for name in "x z dt B C".split():
        setattr(data, name, getattr(data, name).bfloat16())
    state = poisoned(3, *SHAPE, dtype=torch.bfloat16)
    y = run(data, [Segment(0, 50, 0, 1, [(32, 2)])], state)
    expected, states = naive(data)
    assert y.dtype == torch.bfloat16 and state.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(state[2].double(), states[32], atol=2e-2, rtol=2e-2)
    plan = plan_decode(DecodeSlots(int64([2]), int64([2])))
    y = mamba1_scan.decode(*data.rows(32, 33).arguments(), state, plan)
    torch.testing.assert_close(y[0].double(), expected[32], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(state[2].double(), states[33], atol=2e-2, rtol=2e-2)
