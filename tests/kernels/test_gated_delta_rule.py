from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from megatron_hybrid.kernels.contract import DecodeSlots
from megatron_hybrid.kernels.gated_delta_rule import reference as delta_rule
from megatron_hybrid.kernels.slots import plan_decode
from tests.kernels.segments import Segment, int64, poisoned, prefill_segments

K_HEADS, HEADS, K_DIM, V_DIM = 2, 4, 6, 5
CHUNK = 16
SHAPE = (HEADS, V_DIM, K_DIM)
VARYING = ("q", "k", "v", "a", "b")


@dataclass
class Data:
    q: Tensor  # [T, k_heads, k_dim]
    k: Tensor
    v: Tensor  # [T, v_heads, v_dim]
    a: Tensor  # [T, v_heads]
    b: Tensor
    A: Tensor
    dt_bias: Tensor

    @classmethod
    def draw(cls, length: int, seed: int = 0) -> Data:
        """q, k, v, a and b are columns of one wider tensor, as in the model; keys are alike, which
        makes the systems of the chunked form harder; head 0 hardly decays, the last one at once."""
        g = torch.Generator().manual_seed(seed)
        widths = [K_HEADS * K_DIM, K_HEADS * K_DIM, HEADS * V_DIM, HEADS, HEADS, 3]
        q, k, v, a, b, _ = torch.randn(length, sum(widths), generator=g).split(widths, dim=1)
        k += 1
        b *= 2
        return cls(
            q=q.unflatten(1, (K_HEADS, K_DIM)),
            k=k.unflatten(1, (K_HEADS, K_DIM)),
            v=v.unflatten(1, (HEADS, V_DIM)),
            a=a,
            b=b,
            A=-torch.tensor([0.001, 0.3, 2.0, 16.0]),
            dt_bias=torch.tensor([-1.0, 0.5, -2.0, 3.0]),
        )

    def rows(self, begin: int, end: int) -> Data:
        return replace(self, **{name: getattr(self, name)[begin:end] for name in VARYING})

    def arguments(self) -> tuple[Tensor, ...]:
        return (*(getattr(self, name) for name in VARYING), self.A, self.dt_bias)

    @classmethod
    def join(cls, parts: list[Data]) -> Data:
        joined = {name: torch.cat([getattr(p, name) for p in parts]) for name in VARYING}
        return replace(parts[0], **joined)


def naive(data: Data, initial: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    """Token by token in float64: outputs [T, v_heads, v_dim], the states after 0..T tokens."""
    state = torch.zeros(SHAPE, dtype=torch.float64) if initial is None else initial.double()
    states, outputs = [state], []
    for t in range(len(data.q)):
        q, k = (
            (rows[t].double() / (rows[t].double().square().sum(-1, keepdim=True) + 1e-6).sqrt())
            .repeat_interleave(HEADS // K_HEADS, 0)
            for rows in (data.q, data.k)
        )  # fmt: skip
        decay = torch.exp(data.A * F.softplus(data.a[t].double() + data.dt_bias))
        beta = torch.sigmoid(data.b[t].double())
        state = decay[:, None, None] * state
        error = data.v[t].double() - torch.einsum("hvk,hk->hv", state, k)
        state = state + torch.einsum("h,hv,hk->hvk", beta, error, k)
        outputs.append(torch.einsum("hvk,hk->hv", state, q) / K_DIM**0.5)
        states.append(state)
    return torch.stack(outputs), states


def run(data: Data, segments: list[Segment], state: Tensor, chunk: int = CHUNK) -> Tensor:
    plan = delta_rule.plan(prefill_segments(segments, padding=1), chunk)
    return delta_rule.prefill(*data.arguments(), state, plan)


def close(actual: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("length", [1, 3, 15, 16, 17, 32, 100])
def test_one_sequence_equals_the_token_loop(length: int) -> None:
    data, state = Data.draw(length), poisoned(3, *SHAPE)
    y = run(data, [Segment(0, length, 0, 2)], state)
    expected, states = naive(data)
    close(y, expected)
    close(state[2], states[length])


@pytest.mark.parametrize("chunk", [64, 96, 128])
def test_a_chunk_of_any_length_equals_the_token_loop(chunk: int) -> None:
    data, state = Data.draw(300), poisoned(4, *SHAPE)
    y = run(data, [Segment(0, 300, 0, 2, [(2 * chunk, 3)])], state, chunk)
    expected, states = naive(data)
    close(y, expected)
    close(state[3], states[2 * chunk])


@pytest.mark.parametrize("name", ["chunk", "recurrent"])
def test_it_equals_transformers(name: str) -> None:
    """Whose states are [k_dim, v_dim]."""
    data, state = Data.draw(70), poisoned(3, *SHAPE)
    state[1] = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    before = state[1].clone()
    y = run(data, [Segment(5, 70, 1, 2)], state)
    decay = data.A * F.softplus(data.a + data.dt_bias)
    expected, last = getattr(qwen3_next, f"torch_{name}_gated_delta_rule")(
        *(values[None] for values in (data.q, data.k, data.v, decay, data.b.sigmoid())),
        initial_state=before.transpose(1, 2)[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    close(y, expected[0].double())
    close(state[2], last[0].transpose(1, 2).double())


def test_equal_keys_without_decay_equal_the_token_loop() -> None:
    """Each token replaces what the one before it has stored."""
    data, state = Data.draw(100), poisoned(2, *SHAPE)
    data.k[:] = data.k[0]
    data.A[:] = 0
    data.b[:] = 9
    y = run(data, [Segment(0, 100, 0, 1)], state, chunk=64)
    expected, states = naive(data)
    close(y, expected)
    close(state[1], states[100])


def test_keys_of_zeros_add_nothing() -> None:
    data, state = Data.draw(20), poisoned(2, *SHAPE)
    data.k[:], data.q[:10] = 0, 0
    assert run(data, [Segment(0, 20, 0, 1)], state).eq(0).all() and state[1].eq(0).all()


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


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another"])
def test_segments_cut_on_the_grid_give_the_very_same_bits(beside: bool) -> None:
    """And so they do, each beside another sequence."""
    data, other = Data.draw(80), Data.draw(37, seed=5)
    whole, cut = poisoned(9, *SHAPE), poisoned(9, *SHAPE)
    y = run(data, [Segment(0, 80, 0, 1, [(16, 2), (48, 3)])], whole)
    parts = []
    for begin, end, read, write in ((0, 16, 0, 2), (16, 48, 2, 3), (48, 80, 3, 1)):
        part, segments = data.rows(begin, end), [Segment(begin, end - begin, read, write)]
        if beside:
            part = Data.join([other, part])
            segments.insert(0, Segment(3, 37, 0, 8, [(32, 7)]))
        parts.append(run(part, segments, cut)[begin - end :])
    assert torch.equal(torch.cat(parts), y)
    assert torch.equal(whole[1:4], cut[1:4])


def test_checkpoints_equal_a_run_that_ends_there() -> None:
    data, state = Data.draw(90), poisoned(20, *SHAPE)
    segments = [
        Segment(0, 50, 0, 1, [(16, 2), (48, 3), (50, 4)]),
        Segment(0, 40, 0, 5, [(32, 6)]),
    ]
    run(data, segments, state)
    for begin, position, slot in ((0, 16, 2), (0, 48, 3), (0, 50, 4), (50, 32, 6)):
        alone = poisoned(2, *SHAPE)
        run(data.rows(begin, begin + position), [Segment(0, position, 0, 1)], alone)
        close(state[slot], alone[1].double())
    assert torch.equal(state[4], state[1])  # at the segment's end


def test_a_checkpoint_in_a_segment_that_starts_off_the_grid() -> None:
    data, state = Data.draw(40), poisoned(4, *SHAPE)
    run(data.rows(0, 21), [Segment(0, 21, 0, 1)], state)
    run(data.rows(21, 40), [Segment(21, 19, 1, 1, [(32, 3)])], state)
    close(state[3], naive(data)[1][32])


@pytest.mark.parametrize("length", [1, 2, 3, 15, 16, 17, 33])
def test_a_segment_may_start_and_end_anywhere(length: int) -> None:
    """From a stored state at every position modulo the grid, one segment a start, each with text of
    its own, all packed; checkpoints at the grid positions inside."""
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
    parts = [text.rows(s, s + length) for s, text in zip(starts, texts, strict=True)]
    outputs = run(Data.join(parts), segments, state).split(length)
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
    for name in VARYING:
        getattr(data, name)[halves[bad]] = float("nan")
    y = run(data, [Segment(0, 10, 0, 1), Segment(0, 20, 0, 2)], state)
    good = halves[1 - bad]
    close(y[good], naive(data.rows(good.start, good.stop))[0])
    assert state[2 - bad].isfinite().all()


def test_slot_0_and_padding_are_never_written() -> None:
    data, state = Data.draw(20), poisoned(3, *SHAPE)
    out = torch.full_like(data.v, float("nan"))
    plan = delta_rule.plan(
        prefill_segments([Segment(0, 12, 0, 0), Segment(0, 8, -1, -1)], padding=2), CHUNK
    )
    assert delta_rule.prefill(*data.arguments(), state, plan, out) is out
    assert out.isfinite().all()
    for slots in ([0, -1], [0], [-1]):
        rows = data.rows(0, len(slots))
        decode = plan_decode(DecodeSlots(int64(slots), int64(slots)))
        z = delta_rule.decode(*rows.arguments(), state, decode)
        close(z[0], naive(data.rows(0, 1))[0][0])
    assert state.isnan().all()


def test_empty_segments_copy_their_state() -> None:
    data, state = Data.draw(5), poisoned(4, *SHAPE)
    state[1] = torch.randn(SHAPE, generator=torch.Generator().manual_seed(5))
    assert run(data.rows(0, 0), [Segment(3, 0, 1, 2), Segment(0, 0, 0, 3)], state).numel() == 0
    assert torch.equal(state[2], state[1]) and state[3].eq(0).all()


@pytest.mark.parametrize("slots", [[1, 2, 3, 4], [4, 2, 1, 3]], ids=["in place", "scattered"])
def test_decode_equals_the_token_loop(slots: list[int]) -> None:
    """Slots in a row are updated where they lie, others through a copy."""
    data = [Data.draw(6, seed=i) for i in range(4)]
    state = poisoned(6, *SHAPE)
    for one, slot in zip(data, slots, strict=True):
        run(one.rows(0, 3), [Segment(0, 3, 0, slot)], state)
    plan = plan_decode(DecodeSlots(int64(slots), int64(slots)))
    for t in range(3, 6):
        step = Data.join([one.rows(t, t + 1) for one in data])
        out = torch.full_like(step.v, float("nan"))
        y = delta_rule.decode(*step.arguments(), state, plan, out)
        assert y is out
        for i, one in enumerate(data):
            expected, states = naive(one)
            close(y[i], expected[t])
            close(state[slots[i]], states[t + 1])
    assert state[5].isnan().all() and state[0].isnan().all()


def test_decode_reads_one_slot_and_writes_another() -> None:
    data, state = Data.draw(5), poisoned(4, *SHAPE)
    run(data.rows(0, 4), [Segment(0, 4, 0, 1)], state)
    before = state[1].clone()
    plan = plan_decode(DecodeSlots(int64([1]), int64([3])))
    y = delta_rule.decode(*data.rows(4, 5).arguments(), state, plan)
    expected, states = naive(data)
    close(y[0], expected[4])
    close(state[3], states[5])
    assert torch.equal(state[1], before)


def test_bfloat16_inputs_and_states_follow_float64() -> None:
    data = Data.draw(50)
    for name in VARYING:
        setattr(data, name, getattr(data, name).bfloat16())
    state = poisoned(3, *SHAPE, dtype=torch.bfloat16)
    y = run(data, [Segment(0, 49, 0, 1, [(32, 2)])], state)
    expected, states = naive(data)
    assert y.dtype == torch.bfloat16 and state.dtype == torch.bfloat16
    close(y[:49], expected[:49], 2e-2)
    close(state[2], states[32], 2e-2)
    z = delta_rule.decode(
        *data.rows(49, 50).arguments(), state, plan_decode(DecodeSlots(int64([1]), int64([1])))
    )
    assert z.dtype == torch.bfloat16
    close(z[0], expected[49], 2e-2)
    close(state[1], states[50], 2e-2)
