from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_hybrid.kernels.causal_conv1d import reference as causal_conv1d
from megatron_hybrid.kernels.contract import DecodeSlots
from megatron_hybrid.kernels.protocols import ConvConstants
from megatron_hybrid.kernels.slots import plan_decode
from tests.kernels.conv_cases import check_decode, check_prefill, check_runs
from tests.kernels.runs_cases import Play
from tests.kernels.segments import Segment, int64, poisoned, prefill_segments
from tests.thorough import A_THIRD

CHANNELS, WIDTH = 6, 4


@pytest.fixture
def weights() -> ConvConstants:
    generator = torch.Generator().manual_seed(1)
    return ConvConstants(
        torch.randn(CHANNELS, WIDTH, generator=generator),
        torch.randn(CHANNELS, generator=generator),
    )


def naive(x: Tensor, old: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Token by token in float64: x [T, channels] behind the window old [channels, W - 1]."""
    rows = torch.cat((old.t(), x)).double()
    outputs = []
    for t in range(x.shape[0]):
        window = rows[t : t + WIDTH]
        outputs.append((window * weight.double().t()).sum(0) + bias.double())
    y = torch.stack(outputs)
    return y * torch.sigmoid(y)


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, CHANNELS, generator=torch.Generator().manual_seed(seed))


def window_after(x: Tensor, position: int) -> Tensor:
    """[channels, W - 1]: the last inputs of a sequence of which `position` tokens went in."""
    padded = torch.cat((torch.zeros(WIDTH - 1, CHANNELS), x))
    return padded[position : position + WIDTH - 1].t()


def test_packed_sequences_equal_each_one_alone(weights: ConvConstants) -> None:
    lengths = [5, 1, 300, 2]
    x = tokens(sum(lengths))
    state = poisoned(10, CHANNELS, WIDTH - 1)
    segments = [Segment(0, n, 0, i + 1) for i, n in enumerate(lengths)]
    plan = causal_conv1d.plan(prefill_segments(segments, padding=2), WIDTH)
    y = causal_conv1d.prefill(x, weights, state, plan)
    for part, own in zip(y.split(lengths), x.split(lengths), strict=True):
        expected = naive(own, torch.zeros(CHANNELS, WIDTH - 1), *weights[:2])
        torch.testing.assert_close(part.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lengths", [[1] * 7, [2, 1, 4], [3, 3, 1], [5, 2]])
def test_any_segmentation_gives_the_same_outputs_and_window(
    weights: ConvConstants, lengths: list[int]
) -> None:
    x = tokens(7)
    state = poisoned(4, CHANNELS, WIDTH - 1)
    outputs, position = [], 0
    for n in lengths:
        read = 0 if position == 0 else 2
        segments = prefill_segments([Segment(position, n, read, 2)])
        plan = causal_conv1d.plan(segments, WIDTH)
        outputs.append(causal_conv1d.prefill(x[position : position + n], weights, state, plan))
        position += n
        assert torch.equal(state[2], window_after(x, position))
    expected = naive(x, torch.zeros(CHANNELS, WIDTH - 1), *weights[:2])
    torch.testing.assert_close(torch.cat(outputs).double(), expected, atol=1e-5, rtol=1e-5)


def test_checkpoints_hold_the_window_at_their_position(weights: ConvConstants) -> None:
    x = tokens(9)
    state = poisoned(12, CHANNELS, WIDTH - 1)
    first = Segment(0, 3, 0, 1, [(1, 5), (3, 6)])
    other = Segment(0, 6, 0, 2, [(2, 7), (4, 8)])
    plan = causal_conv1d.plan(prefill_segments([first, other], padding=1), WIDTH)
    causal_conv1d.prefill(x, weights, state, plan)
    for slot, position in ((5, 1), (6, 3), (1, 3)):
        assert torch.equal(state[slot], window_after(x[:3], position))
    for slot, position in ((7, 2), (8, 4), (2, 6)):
        assert torch.equal(state[slot], window_after(x[3:], position))


def test_a_checkpoint_shortly_after_the_start_keeps_older_columns(
    weights: ConvConstants,
) -> None:
    x = tokens(10)
    state = poisoned(5, CHANNELS, WIDTH - 1)
    state[3] = window_after(x, 6)
    segments = prefill_segments([Segment(6, 2, 3, 4, [(7, 1)])])
    causal_conv1d.prefill(x[6:8], weights, state, causal_conv1d.plan(segments, WIDTH))
    assert torch.equal(state[1], window_after(x, 7))
    assert torch.equal(state[4], window_after(x, 8))
    assert torch.equal(state[3], window_after(x, 6))  # only read


@A_THIRD
@pytest.mark.parametrize("packed", [False, True], ids=["alone", "packed"])
@pytest.mark.parametrize("length", range(1, 34))
def test_a_segment_may_start_and_end_anywhere(
    weights: ConvConstants, length: int, packed: bool
) -> None:
    """From the stored window at every position modulo a grid of 16, each with text of its own."""
    starts = list(range(33))
    texts = [tokens(s + length, seed=100 * length + s) for s in starts]
    state = poisoned(2 * len(starts) + 1, CHANNELS, WIDTH - 1)
    segments = []
    for s, text in zip(starts, texts, strict=True):
        read, write = 2 * s, 2 * s + 1
        if s:
            left = causal_conv1d.plan(prefill_segments([Segment(0, s, 0, read)]), WIDTH)
            causal_conv1d.prefill(text[:s], weights, state, left)
        segments.append(Segment(s, length, read, write))
    parts = [text[s:] for s, text in zip(starts, texts, strict=True)]
    if packed:
        plan = causal_conv1d.plan(prefill_segments(segments), WIDTH)
        outputs = causal_conv1d.prefill(torch.cat(parts), weights, state, plan).split(length)
    else:
        plans = [causal_conv1d.plan(prefill_segments([segment]), WIDTH) for segment in segments]
        outputs = tuple(
            causal_conv1d.prefill(part, weights, state, plan)
            for part, plan in zip(parts, plans, strict=True)
        )
    fresh = torch.zeros(CHANNELS, WIDTH - 1)
    for s, text, segment, y in zip(starts, texts, segments, outputs, strict=True):
        expected = naive(text, fresh, *weights[:2])[s:]
        torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(state[segment.write], window_after(text, s + length))
        if s:
            assert torch.equal(state[segment.read], window_after(text, s))


def test_a_sequence_may_read_the_slot_that_another_one_writes(
    weights: ConvConstants,
) -> None:
    x, state = tokens(4), poisoned(4, CHANNELS, WIDTH - 1)
    old = tokens(3, seed=5).t()
    state[1] = old
    segments = prefill_segments([Segment(3, 2, 1, 1), Segment(3, 2, 1, 2)])
    y = causal_conv1d.prefill(x, weights, state, causal_conv1d.plan(segments, WIDTH))
    expected = torch.cat((naive(x[:2], old, *weights[:2]), naive(x[2:], old, *weights[:2])))
    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-5)


def test_decode_equals_prefill_of_one_token(weights: ConvConstants) -> None:
    x = tokens(8)
    state = poisoned(6, CHANNELS, WIDTH - 1)
    state[2], state[3] = window_after(x, 6), window_after(x, 7)
    batch = torch.stack((x[6], x[7], x[0], x[1]))
    plan = plan_decode(DecodeSlots(int64([2, 3, 0, -1]), int64([2, 4, 0, -1])))
    y = causal_conv1d.decode(batch, weights, state, plan)
    expected = naive(x, torch.zeros(CHANNELS, WIDTH - 1), *weights[:2])
    torch.testing.assert_close(y[:3].double(), expected[[6, 7, 0]], atol=1e-5, rtol=1e-5)
    assert torch.equal(state[2], window_after(x, 7))
    assert torch.equal(state[4], window_after(x, 8))
    assert torch.equal(state[3], window_after(x, 7))
    assert y.isfinite().all()


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_every_width_with_silu_and_without(width: int, silu: bool) -> None:
    lengths = [40, 1, 2, 0, 3, 300, 5, 1, 1, 19]
    check_prefill(causal_conv1d, lengths, channels=6, width=width, silu=silu)
    check_prefill(causal_conv1d, [9], channels=6, width=width, silu=silu, bias=False)
    check_decode(causal_conv1d, 4, silu, plan_decode, channels=6, width=width)
    check_decode(causal_conv1d, 4, silu, plan_decode, channels=6, width=width, bias=False)


def test_slot_0_and_padding_are_never_written(weights: ConvConstants) -> None:
    state = poisoned(3, CHANNELS, WIDTH - 1)
    segments = prefill_segments([Segment(0, 4, 0, 0), Segment(0, 4, -1, -1)], padding=1)
    y = causal_conv1d.prefill(tokens(8), weights, state, causal_conv1d.plan(segments, WIDTH))
    causal_conv1d.decode(
        tokens(2), weights, state, plan_decode(DecodeSlots(int64([0, -1]), int64([0, -1])))
    )
    assert y.isfinite().all()
    assert state.isnan().all()


def test_bfloat16_follows_float32(weights: ConvConstants) -> None:
    x = tokens(20).bfloat16()
    narrow = ConvConstants(weights[0].bfloat16(), weights[1].bfloat16())
    state = poisoned(2, CHANNELS, WIDTH - 1, dtype=torch.bfloat16)
    plan = causal_conv1d.plan(prefill_segments([Segment(0, 20, 0, 1)]), WIDTH)
    y = causal_conv1d.prefill(x, narrow, state, plan)
    expected = naive(x.float(), torch.zeros(CHANNELS, WIDTH - 1), *(w.float() for w in narrow[:2]))
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), expected, atol=2e-2, rtol=1e-2)
    assert torch.equal(state[1].float(), window_after(x.float(), 20))


@pytest.mark.parametrize("seed", range(6))
def test_runs_equal_the_loop_by_hand_whatever_is_accepted(seed: int) -> None:
    options = {"bias": seed % 2 == 0, "packed": seed % 3 == 0}
    check_runs(causal_conv1d, Play(seed), seed % 4 != 3, channels=6, width=2 + seed % 3, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gates", ["before", "after", "before after"])
def test_gates_have_the_bits_of_kernels_apart(gates: str, dtype: torch.dtype) -> None:
    options = {"channels": 6, "width": 3, "dtype": dtype, "gates": gates, "silu": False}
    check_prefill(causal_conv1d, [40, 1, 2, 0, 3, 300, 5], **options)
    check_prefill(causal_conv1d, [9], **options)
    check_decode(causal_conv1d, 4, plan=plan_decode, **options)
    check_runs(causal_conv1d, Play(1), **options)
