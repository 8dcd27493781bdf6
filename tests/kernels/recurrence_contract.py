"""What every recurrence's kernels promise (kernels/contract.py), against a loop over the tokens in
float64: slots, checkpoints, cuts, neighbours and padding.

test_mamba1_scan.py, test_mamba2_scan.py and test_gated_delta_rule.py import these tests and run
them on their kernel: each has a fixture `recurrence` of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeRuns, DecodeSlots
from megatron_hybrid.kernels.runs import plan_runs
from megatron_hybrid.kernels.slots import plan_decode
from tests.kernels.runs_cases import Play
from tests.kernels.segments import Segment, int64, poisoned, prefill_segments
from tests.thorough import A_THIRD, usually

CHUNK = 16
LONGEST = 2 * CHUNK + 1

# A padded sequence makes one sequence two, which the kernels compute in another way.
PADDING = pytest.mark.parametrize("padding", [0, 1])


@dataclass
class Data:
    """A recurrence's arguments: the tokens [T, ...], and the layer's constants."""

    tokens: Any
    constants: Any

    def rows(self, begin: int, end: int) -> Data:
        return replace(self, tokens=self.tokens._make(v[begin:end] for v in self.tokens))

    @classmethod
    def join(cls, parts: list[Data]) -> Data:
        columns = zip(*(part.tokens for part in parts), strict=True)
        return replace(parts[0], tokens=parts[0].tokens._make(map(torch.cat, columns)))

    def to(self, dtype: torch.dtype) -> Data:
        return replace(self, tokens=self.tokens._make(v.to(dtype) for v in self.tokens))

    def arguments(self) -> tuple[Any, Any]:
        return self.tokens, self.constants


def draw_columns(length: int, widths: list[int], seed: int) -> list[Tensor]:
    """Normal values [length, width] each, columns of one wider tensor as in the models."""
    g = torch.Generator().manual_seed(seed)
    return list(torch.randn(length, sum(widths) + 3, generator=g).split([*widths, 3], dim=1)[:-1])


@dataclass(frozen=True)
class Recurrence:
    kernel: Any  # the module: plan, prefill, decode
    shape: tuple[int, ...]  # of a state
    draw: Callable[..., Data]  # (length, seed=0)
    # One token in float64: (state, its arguments as attributes) -> its output, the state after it.
    step: Callable[[Tensor, Any], tuple[Tensor, Tensor]]
    plan_runs: Callable[[DecodeRuns, int], Any] = plan_runs

    def token_loop(self, data: Data, initial: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """Outputs [T, ...] and the states after 0, 1, ... T tokens, in float64."""
        state = torch.zeros(self.shape) if initial is None else initial
        states, outputs = [state.double()], []
        tokens = data.tokens._make(values.double() for values in data.tokens)
        for t in range(len(tokens.like)):
            token = data.tokens._make(values[t] for values in tokens)._asdict()
            y, after = self.step(states[-1], SimpleNamespace(**token, **data.constants._asdict()))
            outputs.append(y)
            states.append(after)
        return torch.stack(outputs), states

    def poisoned(self, slots: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return poisoned(slots, *self.shape, dtype=dtype)

    def prefill(
        self,
        data: Data,
        segments: list[Segment],
        state: Tensor,
        chunk: int = CHUNK,
        padding: int = 1,
    ) -> Tensor:
        plan = self.kernel.plan(prefill_segments(segments, padding), chunk)
        out = self.empty_output(data)
        assert self.kernel.prefill(*data.arguments(), state=state, plan=plan, out=out) is out
        return out

    def decode(self, data: Data, read: list[int], write: list[int], state: Tensor) -> Tensor:
        plan = plan_decode(DecodeSlots(int64(read), int64(write)))
        out = self.empty_output(data)
        assert self.kernel.decode(*data.arguments(), state=state, plan=plan, out=out) is out
        return out

    def decode_runs(
        self, data: Data, runs: DecodeRuns, ring: tuple[Tensor, ...], state: Tensor
    ) -> Tensor:
        plan = self.plan_runs(runs, ring[0].shape[1])
        out = self.empty_output(data)
        arguments = data.arguments()
        assert (
            self.kernel.decode_runs(*arguments, state=state, ring=ring, plan=plan, out=out) is out
        )
        return out

    def rings(self, rows: int, length: int) -> tuple[Tensor, ...]:
        """Of NaN."""
        kept = self.draw(1).tokens.kept
        return tuple(poisoned(rows, length, *values.shape[1:]) for values in kept)

    def empty_output(self, data: Data) -> Tensor:
        return torch.full_like(data.tokens.like, float("nan"))


def close(actual: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance, rtol=tolerance)


@A_THIRD
@PADDING
@pytest.mark.parametrize("chunk", [1, 16, 24, 64])
@pytest.mark.parametrize("length", [1, 2, 3, 15, 16, 17, 32, 100])
def test_one_sequence_equals_the_token_loop(
    recurrence: Recurrence, length: int, chunk: int, padding: int
) -> None:
    data, state = recurrence.draw(length), recurrence.poisoned(3)
    y = recurrence.prefill(data, [Segment(0, length, 0, 2)], state, chunk, padding)
    expected, states = recurrence.token_loop(data)
    close(y, expected)
    close(state[2], states[length])
    assert state[:2].isnan().all()


@pytest.mark.parametrize("chunk", [64, 96, 128, 256])
def test_a_chunk_of_any_length_equals_the_token_loop(recurrence: Recurrence, chunk: int) -> None:
    """Also one larger than the tiles."""
    data, state = recurrence.draw(300), recurrence.poisoned(7)
    checkpoints = [(p, 2 + p // chunk) for p in range(chunk, 301, chunk)]
    y = recurrence.prefill(data, [Segment(0, 300, 0, 2, checkpoints)], state, chunk)
    expected, states = recurrence.token_loop(data)
    close(y, expected)
    for position, slot in checkpoints:
        close(state[slot], states[position])


def test_without_an_output_tensor_the_result_is_a_new_one(recurrence: Recurrence) -> None:
    data, state = recurrence.draw(21), recurrence.poisoned(3)
    expected = recurrence.token_loop(data)[0]
    plan = recurrence.kernel.plan(prefill_segments([Segment(0, 20, 0, 1)]), CHUNK)
    y = recurrence.kernel.prefill(*data.rows(0, 20).arguments(), state=state, plan=plan)
    close(y, expected[:20])
    step = plan_decode(DecodeSlots(int64([1]), int64([1])))
    y = recurrence.kernel.decode(*data.rows(20, 21).arguments(), state=state, plan=step)
    close(y, expected[20:])


@PADDING
def test_packed_sequences_equal_each_one_alone(recurrence: Recurrence, padding: int) -> None:
    lengths, starts = [40, 1, 7, 33, 16], [0, 5, 16, 30, 0]
    data, state = recurrence.draw(sum(lengths)), recurrence.poisoned(20)
    initial = torch.randn(5, *recurrence.shape, generator=torch.Generator().manual_seed(3))
    for i, start in enumerate(starts):
        if start:
            state[i + 1] = initial[i]
    segments = [
        Segment(start, n, i + 1 if start else 0, i + 10)
        for i, (n, start) in enumerate(zip(lengths, starts, strict=True))
    ]
    y = recurrence.prefill(data, segments, state, padding=padding)
    begin = 0
    for i, n in enumerate(lengths):
        expected, states = recurrence.token_loop(
            data.rows(begin, begin + n), initial[i] if starts[i] else None
        )
        close(y[begin : begin + n], expected)
        close(state[i + 10], states[n])
        begin += n


@A_THIRD
@PADDING
@pytest.mark.parametrize("cuts", [[16, 32, 48], [1, 2, 3, 20], [7], [31, 33], [5, 16, 17, 49]])
def test_any_segmentation_gives_the_same_outputs_and_state(
    recurrence: Recurrence, cuts: list[int], padding: int
) -> None:
    data, state = recurrence.draw(60), recurrence.poisoned(3)
    outputs, bounds = [], [0, *cuts, 60]
    for begin, end in zip(bounds, bounds[1:], strict=False):
        segment = Segment(begin, end - begin, 1 if begin else 0, 1)
        part = data.rows(begin, end)
        outputs.append(recurrence.prefill(part, [segment], state, padding=padding))
    expected, states = recurrence.token_loop(data)
    close(torch.cat(outputs), expected)
    close(state[1], states[60])


@PADDING
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another"])
def test_segments_cut_on_the_grid_give_the_very_same_bits(
    recurrence: Recurrence, beside: bool, padding: int
) -> None:
    """And so they do, each beside another sequence."""
    data, other = recurrence.draw(80), recurrence.draw(37, seed=5)
    whole, cut = recurrence.poisoned(9), recurrence.poisoned(9)
    segments = [Segment(0, 80, 0, 1, [(16, 2), (48, 3)])]
    y = recurrence.prefill(data, segments, whole, padding=padding)
    parts = []
    for begin, end, read, write in ((0, 16, 0, 2), (16, 48, 2, 3), (48, 80, 3, 1)):
        part, segments = data.rows(begin, end), [Segment(begin, end - begin, read, write)]
        if beside:
            part = Data.join([other, part])
            segments.insert(0, Segment(3, 37, 0, 8, [(32, 7)]))
        parts.append(recurrence.prefill(part, segments, cut, padding=padding)[begin - end :])
    assert torch.equal(torch.cat(parts), y)
    assert torch.equal(whole[1:4], cut[1:4])


@PADDING
def test_the_bits_do_not_depend_on_the_neighbours(recurrence: Recurrence, padding: int) -> None:
    data = recurrence.draw(70)
    alone, packed = recurrence.poisoned(4), recurrence.poisoned(4)
    segments = [Segment(0, 37, 0, 1), Segment(0, 3, 0, 2), Segment(0, 30, 0, 3)]
    y = recurrence.prefill(data, segments, packed, padding=padding)
    first = recurrence.prefill(data.rows(0, 37), segments[:1], alone, padding=padding)
    assert torch.equal(y[:37], first)
    assert torch.equal(packed[1], alone[1])


def test_checkpoints_equal_a_run_that_ends_there(recurrence: Recurrence) -> None:
    data, state = recurrence.draw(90), recurrence.poisoned(20)
    segments = [
        Segment(0, 50, 0, 1, [(16, 2), (48, 3), (50, 4)]),
        Segment(0, 40, 0, 5, [(16, 0), (32, 6)]),
    ]
    recurrence.prefill(data, segments, state)
    for begin, position, slot in ((0, 16, 2), (0, 48, 3), (0, 50, 4), (50, 32, 6)):
        alone = recurrence.poisoned(2)
        part = data.rows(begin, begin + position)
        recurrence.prefill(part, [Segment(0, position, 0, 1)], alone)
        close(state[slot], alone[1])
    assert torch.equal(state[4], state[1])  # at the segment's end
    assert state[0].isnan().all()


@PADDING
def test_a_checkpoint_in_a_segment_that_starts_off_the_grid(
    recurrence: Recurrence, padding: int
) -> None:
    data, state = recurrence.draw(40), recurrence.poisoned(4)
    for begin, end, segment in (
        (0, 21, Segment(0, 21, 0, 1)),
        (21, 40, Segment(21, 19, 1, 1, [(32, 3)])),
    ):
        recurrence.prefill(data.rows(begin, end), [segment], state, padding=padding)
    close(state[3], recurrence.token_loop(data)[1][32])


@dataclass(frozen=True)
class Text:
    data: Data
    outputs: Tensor
    states: list[Tensor]


@pytest.fixture(scope="module")
def texts(recurrence: Recurrence) -> list[Text]:
    """With what the token loop makes of them: text s has LONGEST tokens behind the first s."""
    drawn = [recurrence.draw(s + LONGEST, seed=100 + s) for s in range(LONGEST)]
    return [Text(data, *recurrence.token_loop(data)) for data in drawn]


LENGTHS = range(1, LONGEST + 1)


@pytest.mark.parametrize(
    ("length", "packed"),
    [(length, False) for length in LENGTHS[:: usually(6, 1)]]
    + [(length, True) for length in LENGTHS[:: usually(2, 1)]],
)
def test_a_segment_may_start_and_end_anywhere(
    recurrence: Recurrence, texts: list[Text], length: int, packed: bool
) -> None:
    """From a stored state at every position modulo the grid, one segment a start, each with text of
    its own; checkpoints at the grid positions inside."""
    state = recurrence.poisoned(5 * len(texts) + 1)
    segments = []
    for s, text in enumerate(texts):
        if s:
            state[5 * s + 1] = text.states[s]
        inside = [p for p in range(CHUNK, s + length, CHUNK) if p > s]
        checkpoints = [(p, 5 * s + 3 + i) for i, p in enumerate(inside)]
        segments.append(Segment(s, length, 5 * s + 1 if s else 0, 5 * s + 2, checkpoints))
    before = state.clone()
    parts = [text.data.rows(s, s + length) for s, text in enumerate(texts)]
    if packed:
        outputs = recurrence.prefill(Data.join(parts), segments, state).split(length)
    else:
        outputs = tuple(
            recurrence.prefill(part, [segment], state, padding=0)
            for part, segment in zip(parts, segments, strict=True)
        )
    written = set()
    for s, (text, segment, y) in enumerate(zip(texts, segments, outputs, strict=True)):
        close(y, text.outputs[s : s + length])
        for position, slot in [*segment.checkpoints, (s + length, segment.write)]:
            close(state[slot], text.states[position])
            written.add(slot)
    kept = [slot for slot in range(len(state)) if slot not in written]
    assert torch.equal(state[kept].nan_to_num(7.0), before[kept].nan_to_num(7.0))


@PADDING
def test_states_are_read_before_any_is_written(recurrence: Recurrence, padding: int) -> None:
    data, state = recurrence.draw(20), recurrence.poisoned(4)
    old = torch.randn(2, *recurrence.shape, generator=torch.Generator().manual_seed(4))
    state[1:3] = old
    segments = [Segment(16, 10, 1, 2), Segment(16, 10, 2, 1)]
    y = recurrence.prefill(data, segments, state, padding=padding)
    first, states_first = recurrence.token_loop(data.rows(0, 10), old[0])
    second, states_second = recurrence.token_loop(data.rows(10, 20), old[1])
    close(y, torch.cat((first, second)))
    close(state[2], states_first[10])
    close(state[1], states_second[10])


@pytest.mark.parametrize("bad", [0, 1])
def test_nan_in_one_sequence_stays_there(recurrence: Recurrence, bad: int) -> None:
    data, state = recurrence.draw(30), recurrence.poisoned(5)
    halves = [slice(0, 10), slice(10, 30)]
    for values in data.tokens:
        values[halves[bad]] = float("nan")
    y = recurrence.prefill(data, [Segment(0, 10, 0, 1), Segment(0, 20, 0, 2)], state)
    good = halves[1 - bad]
    close(y[good], recurrence.token_loop(data.rows(good.start, good.stop))[0])
    assert state[2 - bad].isfinite().all()


@pytest.mark.parametrize("padding", [1, 2])
def test_slot_0_and_padding_are_never_written(recurrence: Recurrence, padding: int) -> None:
    data, state = recurrence.draw(20), recurrence.poisoned(3)
    segments = [Segment(0, 12, 0, 0), Segment(0, 8, -1, -1)]
    assert recurrence.prefill(data, segments, state, padding=padding).isfinite().all()
    first = recurrence.token_loop(data.rows(0, 1))[0][0]
    for slots in ([0, -1], [0], [-1]):
        close(recurrence.decode(data.rows(0, len(slots)), slots, slots, state)[0], first)
    assert state.isnan().all()


def test_empty_segments_copy_their_state(recurrence: Recurrence) -> None:
    data, state = recurrence.draw(0), recurrence.poisoned(4)
    state[1] = torch.randn(recurrence.shape, generator=torch.Generator().manual_seed(5))
    assert recurrence.prefill(data, [Segment(16, 0, 1, 2), Segment(0, 0, 0, 3)], state).numel() == 0
    assert torch.equal(state[2], state[1])
    assert state[3].eq(0).all() and state[0].isnan().all()


@pytest.mark.parametrize("slots", [[1, 2, 3, 4], [4, 2, 1, 3]], ids=["in place", "scattered"])
def test_decode_equals_the_token_loop(recurrence: Recurrence, slots: list[int]) -> None:
    """Slots in a row are updated where they lie, others through a copy."""
    data = [recurrence.draw(6, seed=i) for i in range(4)]
    expected = [recurrence.token_loop(one) for one in data]
    state = recurrence.poisoned(6)
    for one, slot in zip(data, slots, strict=True):
        recurrence.prefill(one.rows(0, 3), [Segment(0, 3, 0, slot)], state)
    for t in range(3, 6):
        step = Data.join([one.rows(t, t + 1) for one in data])
        y = recurrence.decode(step, slots, slots, state)
        for i, (outputs, states) in enumerate(expected):
            close(y[i], outputs[t])
            close(state[slots[i]], states[t + 1])
    assert state[5].isnan().all() and state[0].isnan().all()


@PADDING
def test_decode_reads_one_slot_and_writes_another(recurrence: Recurrence, padding: int) -> None:
    data, state = recurrence.draw(5 + padding), recurrence.poisoned(4)
    recurrence.prefill(data.rows(0, 4), [Segment(0, 4, 0, 1)], state)
    before = state.clone()
    none = [-1] * padding
    y = recurrence.decode(data.rows(4, 5 + padding), [1, *none], [3, *none], state)
    expected, states = recurrence.token_loop(data)
    close(y[0], expected[4])
    close(state[3], states[5])
    assert torch.equal(state[1], before[1])
    assert state[[0, 2]].isnan().all()


def test_bfloat16_inputs_and_states_follow_float64(recurrence: Recurrence) -> None:
    data = recurrence.draw(50).to(torch.bfloat16)
    state = recurrence.poisoned(3, torch.bfloat16)
    y = recurrence.prefill(data.rows(0, 49), [Segment(0, 49, 0, 1, [(32, 2)])], state)
    expected, states = recurrence.token_loop(data)
    assert y.dtype == torch.bfloat16 and state.dtype == torch.bfloat16
    close(y, expected[:49], 2e-2)
    close(state[1], states[49], 2e-2)
    close(state[2], states[32], 2e-2)
    for position, slot in ((49, 1), (32, 2)):
        row = data.rows(position, position + 1)
        unwritten = recurrence.decode(row, [slot], [0], state)
        y = recurrence.decode(row, [slot], [slot], state)
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, unwritten)  # the step itself is computed in float32
        close(y[0], expected[position], 2e-2)
        close(state[slot], states[position + 1], 2e-2)


@A_THIRD
@PADDING
@pytest.mark.parametrize("seed", range(6))
def test_runs_equal_the_token_loop_whatever_is_accepted(
    recurrence: Recurrence, seed: int, padding: int
) -> None:
    check_runs(recurrence, Play(seed), padding, calls=10)


def check_runs(recurrence: Recurrence, play: Play, padding: int, calls: int) -> None:
    """Sequences with unfolded tokens, drafts accepted and not, calls that write no state."""
    texts = [recurrence.draw(80, seed=10 * play.seed + i) for i in range(play.count)]
    wrong = recurrence.draw(400, seed=77)
    expected = [recurrence.token_loop(text) for text in texts]
    state = recurrence.poisoned(play.slots)
    for one, (_, states) in zip(play.sequences, expected, strict=True):
        if one.slot:
            state[one.slot] = states[one.position]
    ring = recurrence.rings(play.count, play.ring_length)
    for number in range(calls):
        call = play.call(padding)
        parts = []
        for one, text, length, holds in zip(
            play.sequences, texts, call.lengths, call.holds, strict=True
        ):
            right = min(length, 1 + holds)
            parts.append(text.rows(one.position, one.position + right))
            parts.append(wrong.rows(20 * number, 20 * number + length - right))
        parts.append(wrong.rows(300, 300 + padding))
        before = state.clone()
        y = recurrence.decode_runs(Data.join(parts), call.runs(), ring, state)
        assert not y[sum(call.lengths) :].any()
        written, begin = set(), 0
        for s, (one, (outputs, states)) in enumerate(zip(play.sequences, expected, strict=True)):
            right = min(call.lengths[s], 1 + call.holds[s])
            close(y[begin : begin + right], outputs[one.position : one.position + right])
            begin += call.lengths[s]
            if call.writes[s]:
                close(state[call.writes[s]], states[one.position + min(call.lengths[s], 1)])
                written.add(call.writes[s])
            if call.reached(s):
                close(state[one.checkpoint[1]], states[one.checkpoint[0]])
                written.add(one.checkpoint[1])
        kept = [slot for slot in range(len(state)) if slot not in written]
        assert torch.equal(state[kept].nan_to_num(7.0), before[kept].nan_to_num(7.0))
        call.done()
