"""The Triton scan on a GPU at the shapes of real models, against a loop over tokens in float64 and,
where it is installed, against mamba_ssm."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeSlots, PrefillSegments
from megatron_hybrid.kernels.protocols import Mamba2Constants, Mamba2Tokens

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from megatron_hybrid.kernels.mamba2_scan import triton as scan  # noqa: E402

NO_LIMIT = (0.0, float("inf"))
CHUNK = 256


@dataclass(frozen=True)
class Shape:
    heads: int
    head_dim: int
    groups: int
    size: int

    @property
    def state(self) -> tuple[int, int, int]:
        return self.heads, self.head_dim, self.size


NEMOTRON, GRANITE = Shape(128, 64, 8, 128), Shape(48, 64, 1, 128)
SMALL, LARGE = Shape(4, 16, 2, 16), Shape(4, 128, 2, 256)
FALCON, NARROW = Shape(24, 64, 1, 256), Shape(4, 32, 2, 256)
LIGHTNING = Shape(16, 128, 16, 128)  # Ring-mini-linear-2.0's lightning attention
SHAPES = pytest.mark.parametrize(
    "shape", [NEMOTRON, GRANITE, SMALL, LARGE, FALCON, NARROW, LIGHTNING], ids=str
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


def draw(shape: Shape, tokens: int, dtype: torch.dtype, more: int = 64) -> list[Tensor]:
    """x, B, C, dt, A, D, dt_bias as Mamba2 initialises them; the first four are columns of a wider
    tensor, as in the model; it has `more` columns besides."""
    g = torch.Generator("cuda").manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, device="cuda")

    widths = [shape.heads * shape.head_dim, *[shape.groups * shape.size] * 2, shape.heads, more]
    x, B, C, dt, _ = normal(tokens, sum(widths)).to(dtype).split(widths, dim=1)
    step = torch.exp(torch.linspace(-6.9, -2.3, shape.heads, device="cuda"))
    return [
        x.unflatten(1, (shape.heads, shape.head_dim)),
        B.unflatten(1, (shape.groups, shape.size)),
        C.unflatten(1, (shape.groups, shape.size)),
        dt,
        -torch.linspace(16, 1, shape.heads, device="cuda"),
        normal(shape.heads),
        step + torch.log(-torch.expm1(-step)),
    ]


def arguments(data: list[Tensor]) -> tuple[Mamba2Tokens, Mamba2Constants]:
    return Mamba2Tokens(*data[:4]), Mamba2Constants(*data[4:], NO_LIMIT)


def rows(data: list[Tensor], begin: int, end: int) -> list[Tensor]:
    return [*(v[begin:end] for v in data[:4]), *data[4:]]


def token_loop(data: list[Tensor], state: Tensor, keep: set[int]) -> tuple[Tensor, dict]:
    """Outputs, and the states after the numbers of tokens in `keep`."""
    x, B, C, dt, A, D, bias = (v.double() for v in data)
    dt = torch.nn.functional.softplus(dt + bias)
    h, states, outputs = state.double(), {}, []
    repeats = x.shape[1] // B.shape[1]
    for t in range(x.shape[0]):
        Bt, Ct = B[t].repeat_interleave(repeats, 0), C[t].repeat_interleave(repeats, 0)
        decay = torch.exp(dt[t] * A)[:, None, None]
        h = decay * h + (dt[t][:, None] * x[t])[:, :, None] * Bt[:, None]
        outputs.append((h * Ct[:, None]).sum(-1) + D[:, None] * x[t])
        if t + 1 in keep:
            states[t + 1] = h
    return torch.stack(outputs), states


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
    checkpoints: list[tuple[int, int, int]] = [],  # noqa: B006
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


def poisoned(slots: int, shape: Shape, dtype: torch.dtype) -> Tensor:
    return torch.full((slots, *shape.state), float("nan"), dtype=dtype, device="cuda")


@pytest.mark.parametrize("more", [64, 60], ids=["aligned", "unaligned"])
@PRECISIONS
@SHAPES
def test_prefill_equals_the_token_loop(
    shape: Shape, dtype: torch.dtype, state_dtype: torch.dtype, tolerance: float, more: int
) -> None:
    lengths, starts = [600, 300, 1, 0, 0], [0, 37, 255, 256, 0]
    read, write = [0, 1, 2, 3, 0], [4, 5, 2, 6, 0]
    checkpoints = [(0, 256, 7), (0, 512, 8), (1, 256, 9), (1, 337, 10), (2, 256, 0)]
    data, state = draw(shape, 910, dtype, more), poisoned(12, shape, state_dtype)
    state[1:4] = torch.randn(3, *shape.state, device="cuda") / 4
    before = state.clone()
    out = torch.full_like(data[0], float("nan"))
    plan = scan.plan(packed(lengths, starts, read, write, checkpoints), CHUNK)
    scan.prefill(*arguments(data), state, plan, out=out)
    begin = 0
    for s, (length, start) in enumerate(zip(lengths[:3], starts, strict=False)):
        initial = before[read[s]] if read[s] else torch.zeros_like(before[1])
        stored = {p - start: slot for i, p, slot in checkpoints if i == s and slot > 0}
        part = rows(data, begin, begin + length)
        expected, states = token_loop(part, initial, {length, *stored})
        close(out[begin : begin + length], expected, tolerance)
        close(state[write[s]], states[length], tolerance)
        for tokens, slot in stored.items():
            close(state[slot], states[tokens], tolerance)
        begin += length
    assert torch.equal(state[6], before[3])
    assert state[[0, 11]].isnan().all()


def test_prefill_cut_on_the_grid_gives_the_very_same_bits() -> None:
    data = draw(NEMOTRON, 1000, torch.bfloat16)
    whole, cut = (poisoned(4, NEMOTRON, torch.float32) for _ in range(2))

    def run(begin: int, end: int, read: int, write: int, state: Tensor) -> Tensor:
        plan = scan.plan(packed([end - begin], [begin], [read], [write]), CHUNK)
        return scan.prefill(*arguments(rows(data, begin, end)), state, plan)

    y = run(0, 1000, 0, 1, whole)
    assert torch.equal(torch.cat([run(0, 256, 0, 2, cut), run(256, 1000, 2, 1, cut)]), y)
    assert torch.equal(whole[1], cut[1])


@PRECISIONS
@SHAPES
@pytest.mark.parametrize("part", [1, 2, 4])
def test_parts_of_a_sequence_give_the_very_same_bits(
    shape: Shape, dtype: torch.dtype, state_dtype: torch.dtype, tolerance: float, part: int
) -> None:
    """The second sequence in place, the third within a chunk; checkpoints in several parts."""
    lengths, starts, read, write = [1700, 1300, 100], [0, 37, 256], [0, 1, 2], [3, 1, 4]
    checkpoints = [(0, 256, 5), (0, 1536, 6), (1, 512, 7), (1, 1280, 8), (1, 1337, 9)]
    plan = scan.plan(packed(lengths, starts, read, write, checkpoints), CHUNK)
    data, whole = draw(shape, sum(lengths), dtype), poisoned(11, shape, state_dtype)
    whole[1:3] = torch.randn(2, *shape.state, device="cuda") / 4
    split = whole.clone()
    expected = scan.prefill(*arguments(data), whole, plan, part=0)
    assert torch.equal(scan.prefill(*arguments(data), split, plan, part=part), expected)
    assert torch.equal(split.nan_to_num(7.0), whole.nan_to_num(7.0))


def test_one_long_sequence_is_split_and_many_are_not() -> None:
    def chunks(lengths: list[int], shape: Shape) -> int:
        zeros = [0] * len(lengths)
        x = draw(shape, sum(lengths), torch.bfloat16)[0]
        return scan._chunks_per_part(packed(lengths, zeros, zeros, zeros), CHUNK, x, 32)

    assert chunks([8192], GRANITE) > 0
    assert chunks([6000, 100, 100], GRANITE) > 0
    assert chunks([1024] * 8, GRANITE) == 0
    assert chunks([1024], GRANITE) == 0
    assert chunks([8192], NEMOTRON) == 0


@PRECISIONS
@SHAPES
@pytest.mark.parametrize("count", [1, 32])
def test_decode_equals_the_token_loop(
    shape: Shape, dtype: torch.dtype, state_dtype: torch.dtype, tolerance: float, count: int
) -> None:
    """Every other sequence in place; where there are several, one from zeros and one padded row."""
    data, state = draw(shape, count, dtype), poisoned(2 * count + 1, shape, state_dtype)
    state[1 : count + 1] = torch.randn(count, *shape.state, device="cuda") / 4
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


@pytest.mark.parametrize("shape", [NEMOTRON, GRANITE], ids=str)
@pytest.mark.parametrize("lengths", [[8192], [256] * 8, [5, 1000, 129]], ids=str)
def test_prefill_equals_mamba_ssm(shape: Shape, lengths: list[int]) -> None:
    combined = pytest.importorskip("mamba_ssm.ops.triton.ssd_combined")
    data, count = draw(shape, sum(lengths), torch.bfloat16), len(lengths)
    state = poisoned(count + 1, shape, torch.float32)
    segments = packed(lengths, [0] * count, [0] * count, list(range(1, count + 1)))
    y = scan.prefill(*arguments(data), state, scan.plan(segments, CHUNK))
    x, B, C, dt, A, D, bias = data
    for begin, length, slot in zip(
        segments.cu_seqlens.tolist(), lengths, range(1, count + 1), strict=False
    ):
        cut = [v[None, begin : begin + length].contiguous() for v in (x, dt, B, C)]
        expected, last = combined.mamba_chunk_scan_combined(
            cut[0], cut[1], A, cut[2], cut[3], CHUNK,
            D=D, dt_bias=bias, dt_softplus=True, return_final_states=True,
        )  # fmt: skip
        close(y[begin : begin + length], expected[0].double(), 2e-2)
        close(state[slot], last[0].double(), 2e-2)


@pytest.mark.parametrize("shape", [NEMOTRON, GRANITE], ids=str)
def test_decode_equals_mamba_ssm(shape: Shape) -> None:
    update = pytest.importorskip("mamba_ssm.ops.triton.selective_state_update")
    data, state = draw(shape, 16, torch.bfloat16), poisoned(17, shape, torch.float32)
    state[1:] = torch.randn(16, *shape.state, device="cuda") / 4
    expected_state = state[1:].clone()
    slots = int32(list(range(1, 17)))
    y = scan.decode(*arguments(data), state, DecodeSlots(slots, slots))
    x, B, C, dt, A, D, bias = data
    dim, size = shape.head_dim, shape.size
    expected = update.selective_state_update(
        expected_state, x, dt[:, :, None].expand(-1, -1, dim),
        A[:, None, None].expand(-1, dim, size), B, C, D[:, None].expand(-1, dim),
        dt_bias=bias[:, None].expand(-1, dim), dt_softplus=True,
    )  # fmt: skip
    close(y, expected.double(), 2e-2)
    close(state[1:], expected_state.double(), 1e-4)


def test_both_can_be_captured_in_a_graph() -> None:
    data, state = draw(GRANITE, 64, torch.bfloat16), poisoned(66, GRANITE, torch.float32)
    state[1:] = 0
    slots = int32(list(range(1, 65)))
    decode, plan = DecodeSlots(slots, slots), scan.plan(packed([64], [0], [0], [65]), CHUNK)
    first = scan.decode(*arguments(data), state, decode)  # compiles
    second = scan.prefill(*arguments(data), state, plan)
    state[1:] = 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = scan.decode(*arguments(data), state, decode)
        z = scan.prefill(*arguments(data), state, plan)
    y.fill_(float("nan"))
    z.fill_(float("nan"))
    state[1:] = 0
    graph.replay()
    assert torch.equal(y, first)
    assert torch.equal(z, second)
