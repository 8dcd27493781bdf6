"""The Triton scan of Mamba1 on a GPU at the shapes of real models, against a loop over tokens in
float64 and, where it is installed, against mamba_ssm."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeSlots, PrefillSegments
from megatron_hybrid.kernels.devices import ChunkedSegments
from megatron_hybrid.kernels.protocols import Mamba1Constants, Mamba1Tokens

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from megatron_hybrid.kernels.mamba1_scan import triton as scan  # noqa: E402

CHUNK = 16
FALCON = (8192, 16)  # channels, state: Falcon-Mamba 7B and Jamba
# Those of Mamba 2.8b and 130m, and some that no model has.
SHAPES = pytest.mark.parametrize(
    "shape", [FALCON, (5120, 16), (1536, 16), (40, 16), (256, 4), (64, 128)], ids=str
)
# inputs, state, tolerance relative to the largest value
PRECISIONS = pytest.mark.parametrize(
    ("dtype", "state_dtype", "tolerance"),
    [
        (torch.float32, torch.float32, 1e-4),
        (torch.bfloat16, torch.float32, 1e-2),
        (torch.bfloat16, torch.bfloat16, 1e-2),
    ],
    ids=["fp32", "bf16", "bf16 states"],
)
TILINGS = [scan.Tiling(states, warps) for states in (2, 4, 8) for warps in (1, 2, 4)]

Shape = tuple[int, int]


def draw(shape: Shape, tokens: int, dtype: torch.dtype, more: int = 32) -> list[Tensor]:
    """x, z, dt, B, C, A, D, dt_bias as Mamba initialises them; the first five are columns of a
    wider tensor, as some are in the model; it has `more` columns besides."""
    channels, size = shape
    g = torch.Generator("cuda").manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, device="cuda")

    widths = [channels, channels, channels, size, size, more]
    x, z, dt, B, C, _ = normal(tokens, sum(widths)).to(dtype).split(widths, dim=1)
    step = torch.exp(torch.linspace(-6.9, -2.3, channels, device="cuda"))
    A = -torch.arange(1, size + 1, device="cuda", dtype=torch.float32).repeat(channels, 1)
    return [x, z, dt, B, C, A, normal(channels), step + torch.log(-torch.expm1(-step))]


def arguments(data: list[Tensor]) -> tuple[Mamba1Tokens, Mamba1Constants]:
    return Mamba1Tokens(*data[:5]), Mamba1Constants(*data[5:])


def rows(data: list[Tensor], begin: int, end: int) -> list[Tensor]:
    return [*(v[begin:end] for v in data[:5]), *data[5:]]


def token_loop(data: list[Tensor], state: Tensor, keep: set[int]) -> tuple[Tensor, dict]:
    """Outputs, and the states after the numbers of tokens in `keep`."""
    x, z, dt, B, C, A, D, bias = (v.double() for v in data)
    dt = torch.nn.functional.softplus(dt + bias)
    h, states, outputs = state.double(), {}, []
    for t in range(x.shape[0]):
        h = torch.exp(dt[t][:, None] * A) * h + (dt[t] * x[t])[:, None] * B[t]
        outputs.append(h @ C[t])
        if t + 1 in keep:
            states[t + 1] = h
    return (torch.stack(outputs) + D * x) * torch.nn.functional.silu(z), states


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (actual.double() - expected.double()).abs().max() / expected.abs().max()
    assert error < tolerance, f"relative error {error:.1e}"  # NaN fails as well


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def packed(
    lengths: list[int],
    starts: list[int],
    read: list[int],
    write: list[int],
    checkpoints: list[tuple[int, int, int]] = (),  # type: ignore[assignment]
) -> PrefillSegments:
    """checkpoints: (sequence, position, slot)."""
    counts = [sum(c[0] == s for c in checkpoints) for s in range(len(lengths))]
    sequences = torch.arange(len(lengths), device="cuda", dtype=torch.int32)
    return PrefillSegments(
        cu_seqlens=int32([0, *itertools.accumulate(lengths)]),
        start_position=int32(starts),
        read_slot=int32(read),
        write_slot=int32(write),
        cu_checkpoints=int32([0, *itertools.accumulate(counts)]),
        checkpoint_sequence=int32([c[0] for c in checkpoints]),
        checkpoint_position=int32([c[1] for c in checkpoints]),
        checkpoint_slot=int32([c[2] for c in checkpoints]),
        sequence_of_token=sequences.repeat_interleave(int32(lengths)),
        longest=max(lengths),
    )


def poisoned(slots: int, shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((slots, *shape), float("nan"), dtype=dtype, device="cuda")


def run(
    data: list[Tensor],
    segments: PrefillSegments,
    state: Tensor,
    tiling: scan.Tiling | None = None,
) -> Tensor:
    out = torch.full_like(data[0], float("nan"))
    return scan.prefill(*arguments(data), state, scan.plan(segments, CHUNK), out, tiling=tiling)


@pytest.mark.parametrize("more", [32, 29], ids=["aligned", "unaligned"])
@PRECISIONS
@SHAPES
def test_prefill_equals_the_token_loop(
    shape: Shape, dtype: torch.dtype, state_dtype: torch.dtype, tolerance: float, more: int
) -> None:
    lengths, starts = [300, 150, 1, 3, 0, 0], [0, 37, 15, 30, 16, 0]
    read, write = [0, 1, 2, 3, 4, 0], [5, 6, 2, 0, 7, -1]
    checkpoints = [(0, 16, 8), (0, 256, 9), (1, 48, 10), (1, 187, 11), (2, 16, 0), (3, 32, 12)]
    data, state = draw(shape, sum(lengths) + 7, dtype, more), poisoned(14, shape, state_dtype)
    state[1:5] = torch.randn(4, *shape, device="cuda") / 4
    before = state.clone()
    y = run(data, packed(lengths, starts, read, write, checkpoints), state)
    begin = 0
    for s, (length, start) in enumerate(zip(lengths[:4], starts, strict=False)):
        initial = before[read[s]] if read[s] else torch.zeros_like(before[1])
        stored = [(p - start, slot) for i, p, slot in checkpoints if i == s]
        part = rows(data, begin, begin + length)
        expected, states = token_loop(part, initial, {length, *(tokens for tokens, _ in stored)})
        close(y[begin : begin + length], expected, tolerance)
        for tokens, slot in [*stored, (length, write[s])]:
            if slot > 0:
                close(state[slot], states[tokens], tolerance)
        begin += length
    assert torch.equal(state[7], before[4])
    assert torch.equal(state[[1, 3, 4]], before[[1, 3, 4]])
    assert state[[0, 13]].isnan().all()


@pytest.mark.parametrize("cuts", [[16, 512], [7, 100, 333]], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_cut_prefill_gives_the_very_same_bits(cuts: list[int], dtype: torch.dtype) -> None:
    """On the grid and off it."""
    data = draw(FALCON, 700, dtype)
    whole, cut = poisoned(3, FALCON), poisoned(3, FALCON)
    y = run(data, packed([700], [0], [0], [1], [(0, 512, 2)]), whole)
    bounds, parts = [0, *cuts, 700], []
    for begin, end in itertools.pairwise(bounds):
        checkpoints = [(0, 512, 2)] if begin < 512 <= end else []
        segments = packed([end - begin], [begin], [1 if begin else 0], [1], checkpoints)
        parts.append(run(rows(data, begin, end), segments, cut))
    assert torch.equal(torch.cat(parts), y)
    assert torch.equal(whole[1:], cut[1:])


@pytest.mark.parametrize("shape", [FALCON, (1536, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_bits_depend_neither_on_the_neighbours_nor_on_the_tiling(
    shape: Shape, dtype: torch.dtype
) -> None:
    data, count = draw(shape, 64 * 20, dtype), 64
    together, alone = poisoned(count + 1, shape), poisoned(2, shape)
    segments = packed([20] * count, [0] * count, [0] * count, list(range(1, count + 1)))
    y = run(data, segments, together)
    for tiling in (None, *TILINGS):
        out = run(rows(data, 100, 120), packed([20], [0], [0], [1]), alone, tiling)
        assert torch.equal(out, y[100:120]), tiling
        assert torch.equal(alone[1], together[6]), tiling


def test_a_long_prompt_equals_the_token_loop() -> None:
    shape, tokens = (1536, 16), 5000
    data, state = draw(shape, tokens, torch.float32), poisoned(3, shape)
    y = run(data, packed([tokens], [0], [0], [1], [(0, 4096, 2)]), state)
    expected, states = token_loop(data, torch.zeros(shape, device="cuda"), {4096, tokens})
    close(y, expected, 1e-4)
    close(state[2], states[4096], 1e-4)
    close(state[1], states[tokens], 1e-4)


@PRECISIONS
@SHAPES
@pytest.mark.parametrize("count", [1, 32])
def test_decode_equals_the_token_loop(
    shape: Shape, dtype: torch.dtype, state_dtype: torch.dtype, tolerance: float, count: int
) -> None:
    """Every other sequence in place; where there are several, one from zeros and one padded row."""
    data, state = draw(shape, count, dtype), poisoned(2 * count + 1, shape, state_dtype)
    state[1 : count + 1] = torch.randn(count, *shape, device="cuda") / 4
    before = state.clone()
    read = list(range(1, count + 1))
    write = [slot + (count if slot % 2 else 0) for slot in read]
    if count > 1:
        read[2], read[-1], write[-1] = 0, 0, 0
    out = torch.full_like(data[0], float("nan"))
    scan.decode(*arguments(data), state, DecodeSlots(int32(read), int32(write)), out=out)
    for i in range(count - (count > 1)):
        initial = before[read[i]] if read[i] else torch.zeros_like(before[1])
        expected, states = token_loop(rows(data, i, i + 1), initial, {1})
        close(out[i : i + 1], expected, tolerance)
        close(state[write[i]], states[1], tolerance)
    assert state[0].isnan().all()
    if count > 1:
        assert out[-1].eq(0).all()
        assert torch.equal(state[count], before[count])


@pytest.mark.parametrize("shape", [FALCON, (1536, 16)], ids=str)
@pytest.mark.parametrize("lengths", [[2048], [256] * 8, [5, 1000, 129]], ids=str)
def test_prefill_equals_mamba_ssm(shape: Shape, lengths: list[int]) -> None:
    library = pytest.importorskip("mamba_ssm.ops.selective_scan_interface")
    data, count = draw(shape, sum(lengths), torch.bfloat16), len(lengths)
    state = poisoned(count + 1, shape)
    segments = packed(lengths, [0] * count, [0] * count, list(range(1, count + 1)))
    y = run(data, segments, state)
    *_, A, D, bias = data
    begin = 0
    for slot, length in enumerate(lengths, 1):
        x, z, dt, B, C = (v.t()[None].contiguous() for v in rows(data, begin, begin + length)[:5])
        expected, last = library.selective_scan_fn(
            x, dt, A, B, C, D, z, bias, delta_softplus=True, return_last_state=True
        )
        close(y[begin : begin + length], expected[0].t(), 2e-2)
        close(state[slot], last[0], 1e-3)
        begin += length


def test_decode_equals_mamba_ssm() -> None:
    library = pytest.importorskip("mamba_ssm.ops.triton.selective_state_update")
    data, state = draw(FALCON, 16, torch.bfloat16), poisoned(17, FALCON)
    state[1:] = torch.randn(16, *FALCON, device="cuda") / 4
    expected_state = state[1:].clone()
    slots = int32(list(range(1, 17)))
    y = scan.decode(*arguments(data), state, DecodeSlots(slots, slots))
    x, z, dt, B, C, A, D, bias = data
    expected = library.selective_state_update(
        expected_state, x, dt, A, B, C, D, z=z, dt_bias=bias, dt_softplus=True
    )
    close(y, expected, 2e-2)
    close(state[1:], expected_state, 1e-4)


def test_both_can_be_captured_in_a_graph() -> None:
    """Replayed twice; the second time with other lengths, starts and slots in the same tensors."""
    shape = (1536, 16)
    data, state = draw(shape, 64, torch.bfloat16), poisoned(68, shape)
    slots = int32(list(range(1, 65)))
    decode = DecodeSlots(slots, slots.clone())
    one = packed([40, 24], [0, 16], [0, 1], [65, 66], [(0, 32, 67)])
    two = packed([3, 61], [5, 0], [2, 0], [66, 65], [(1, 48, 67)])
    plan = scan.plan(one, CHUNK)

    def start() -> None:
        state[1:] = torch.linspace(-1, 1, 67, device="cuda")[:, None, None]

    def both(plan: ChunkedSegments) -> tuple[Tensor, Tensor]:
        return scan.prefill(*arguments(data), state, plan), scan.decode(
            *arguments(data), state, decode
        )

    wanted = []
    for segments in (one, two):
        start()
        y, z = both(scan.plan(segments, CHUNK))
        wanted.append((y, z, state[1:].clone()))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, z = both(plan)
    for segments, (expected_y, expected_z, expected_state) in zip((one, two), wanted, strict=True):
        for name in (
            "cu_seqlens start_position read_slot write_slot cu_checkpoints "
            "checkpoint_sequence checkpoint_position checkpoint_slot"
        ).split():
            getattr(one, name).copy_(getattr(segments, name))
        start()
        y.fill_(float("nan"))
        z.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, expected_y)
        assert torch.equal(z, expected_z)
        assert torch.equal(state[1:], expected_state)
