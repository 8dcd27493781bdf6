"""The Triton convolution in Triton's interpreter, on a CPU."""

from __future__ import annotations

import importlib.util
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from megatron_hybrid.kernels.contract import DecodeRuns, DecodeSlots
from tests.kernels.conv_cases import Conv, check_decode, check_prefill, check_runs
from tests.kernels.runs_cases import Play
from tests.kernels.segments import Segment, int64, poisoned, prefill_segments
from tests.thorough import A_THIRD, usually

if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    pytest.skip("for machines with triton and without CUDA", allow_module_level=True)
from megatron_hybrid.kernels.activation import triton as activation  # noqa: E402
from megatron_hybrid.kernels.causal_conv1d import triton as conv  # noqa: E402

# Blocks have 16 tokens: some inside a sequence, some with its start, some with many sequences.
LENGTHS = [40, 1, 2, 0, 3, 50, 5, 1, 1, 19, 4]


@A_THIRD
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "strided"])
@pytest.mark.parametrize("width", [2, 3, 4, 10])
def test_prefill(width: int, packed: bool) -> None:
    check_prefill(conv, LENGTHS, padding=3, channels=6, width=width, packed=packed)


@A_THIRD
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_without_silu(width: int, dtype: torch.dtype) -> None:
    options = {"channels": 6, "width": width, "dtype": dtype, "bias": False, "silu": False}
    check_prefill(conv, LENGTHS, padding=3, **options)
    check_decode(conv, 11, **options)


@pytest.mark.parametrize("lengths", [[1], [2], [64], [0, 0], [1] * 7])
def test_prefill_of_few_tokens(lengths: list[int]) -> None:
    check_prefill(conv, lengths, channels=5, bias=False)


@pytest.mark.parametrize("padding", [1, 16, 40])
def test_padding_tokens_give_zeros(padding: int) -> None:
    check_prefill(conv, [17, 3], padding=padding, channels=520)


CUT = ([1] * 60, [7, 1, 30, 22], [20, 40], [59, 1])


@A_THIRD
@pytest.mark.parametrize(("width", "silu"), [(4, True), (3, False), (10, True)])
@pytest.mark.parametrize("lengths", usually([CUT[1], CUT[3]], CUT))
def test_outputs_have_the_same_bits_however_the_sequence_is_cut(
    lengths: list[int], width: int, silu: bool
) -> None:
    case = Conv.random(60, 2, set(), channels=6, width=width)
    whole = prefill_segments([Segment(0, 60, 0, 0)])
    expected = conv.prefill(case.x, case.constants(silu), case.state, whole)
    position = 0
    for length in lengths:
        step = prefill_segments([Segment(position, length, 1 if position else 0, 1)])
        part = slice(position, position + length)
        y = conv.prefill(case.x[part], case.constants(silu), case.state, step)
        assert torch.equal(y, expected[part])
        position += length


@A_THIRD
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "strided"])
@pytest.mark.parametrize("width", [2, 3, 4, 10])
def test_decode(width: int, packed: bool) -> None:
    check_decode(conv, 11, channels=6, width=width, packed=packed)
    check_decode(conv, 1, channels=300, width=width, packed=packed, bias=False)


@pytest.mark.parametrize("tile", [conv.Tile(64, warps=1), conv.Tile(128, warps=2)])
def test_decode_by_tiles(tile: conv.Tile) -> None:
    check_decode(SimpleNamespace(decode=partial(conv.decode, tile=tile)), 11, channels=70)


def test_decodes_have_the_bits_of_prompts() -> None:
    case = Conv.random(9, 3, set(), channels=20, dtype=torch.bfloat16)
    whole, ring = prefill_segments([Segment(0, 9, 0, 1)]), case.state.new_zeros(1, 4, 20)
    expected = conv.prefill(case.x, case.constants(), case.state, whole)
    own, read = case.state.clone(), int64([0])
    for t in range(9):
        x, write = case.x[t : t + 1], int64([2])
        y = conv.decode(x, case.constants(), case.state, DecodeSlots(read, write))
        assert torch.equal(y[0], expected[t])
        unfolded = t % 3  # every third state is written
        written = write if unfolded == 2 else int64([0])
        runs = DecodeRuns(
            int64([0, 1]), int64([t]), int64([unfolded]), int64([0 if t < 3 else 2]), written,
            *(int64([0]) for _ in range(3)), most_unfolded=2,
        )  # fmt: skip
        y = conv.decode_runs(x, case.constants(), own, ring, runs)
        assert torch.equal(y[0], expected[t])
        read = write
    assert torch.equal(own[2], case.state[2])


def test_bfloat16() -> None:
    check_prefill(conv, LENGTHS, padding=3, channels=6, dtype=torch.bfloat16)
    check_decode(conv, 11, channels=6, dtype=torch.bfloat16)


def test_sequences_may_share_the_slot_that_one_of_them_writes() -> None:
    case = Conv.random(4, 4, {1}, channels=6)
    expected = torch.cat([case.by_hand(begin, 2, 1)[0] for begin in (0, 2)])
    windows = [case.by_hand(begin, 2, 1)[1][2:].t() for begin in (0, 2)]
    step = prefill_segments([Segment(3, 2, 1, 1), Segment(3, 2, 1, 2)])
    y = conv.prefill(case.x, case.constants(), case.state, step)
    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(case.state[1], windows[0])
    assert torch.equal(case.state[2], windows[1])


def test_a_state_of_another_dtype_holds_the_rounded_inputs() -> None:
    case = Conv.random(30, 3, set(), channels=6)
    state = poisoned(3, 6, 3, dtype=torch.float64)
    step = prefill_segments([Segment(0, 30, 0, 2, [(20, 1)])])
    conv.prefill(case.x, case.constants(), state, step)
    assert torch.equal(state[1], case.x[17:20].t().double())
    assert torch.equal(state[2], case.x[27:].t().double())


GATES = ["before", "after", "before after"]
TYPES = [torch.float32, torch.bfloat16]
GATES_AND_TYPES = usually(
    list(zip(GATES, [*TYPES, TYPES[0]], strict=True)), list(product(GATES, TYPES))
)
GATED = {"width": 3, "silu": False, "activation": activation}


@A_THIRD
@pytest.mark.parametrize(("gates", "dtype"), GATES_AND_TYPES)
def test_gates_of_prompts_have_the_bits_of_kernels_apart(gates: str, dtype: torch.dtype) -> None:
    options = GATED | {"dtype": dtype, "gates": gates}
    check_prefill(conv, LENGTHS, padding=19, channels=6, **options)
    check_prefill(conv, [17, 3], channels=520, **options)


@A_THIRD
@pytest.mark.parametrize(("gates", "dtype"), GATES_AND_TYPES)
def test_gates_of_decodes_have_the_bits_of_kernels_apart(gates: str, dtype: torch.dtype) -> None:
    tile = conv.Tile(64, warps=1)
    tiled = SimpleNamespace(
        decode=partial(conv.decode, tile=tile),
        plan_runs=conv.plan_runs,
        decode_runs=partial(conv.decode_runs, tile=tile),
    )
    options = GATED | {"dtype": dtype, "gates": gates, "channels": 70}
    check_decode(tiled, 11, **options)
    single_tokens = Play(1, count=5, ring_length=4, most=1)
    check_runs(tiled, single_tokens, calls=6, **options)


@A_THIRD
@pytest.mark.parametrize(("gates", "dtype"), GATES_AND_TYPES)
def test_gates_of_drafts_have_the_bits_of_kernels_apart(gates: str, dtype: torch.dtype) -> None:
    options = GATED | {"dtype": dtype, "gates": gates, "channels": 260}
    check_runs(conv, Play(2), calls=5, **options)


def test_gates_stand_around_bias_and_silu() -> None:
    options = {"channels": 70, "gates": "before after", "activation": activation}
    check_prefill(conv, LENGTHS, **options)
    check_decode(conv, 5, **options)
    check_runs(conv, Play(3), calls=3, **options)
