"""The Triton gated delta rule on a GPU at the shapes of real models, against a loop over tokens in
float64 and, where it is installed, against flash-linear-attention."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeSlots, PrefillSegments, chunk_bounds
from megatron_hybrid.kernels.protocols import DeltaRuleConstants, DeltaRuleTokens

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from megatron_hybrid.kernels.gated_delta_rule import triton as delta_rule  # noqa: E402

DEVICE = "cuda"
CHUNK = 64


@dataclass(frozen=True)
class Shape:
    k_heads: int
    heads: int
    k_dim: int
    v_dim: int
    beta_scale: float = 1.0

    @property
    def state(self) -> tuple[int, int, int]:
        return self.heads, self.v_dim, self.k_dim


QWEN, RANK = Shape(16, 32, 128, 128), Shape(4, 8, 128, 128)  # Qwen3-Next, on one of four ranks
DENSE, SMALL, UNEVEN = Shape(16, 48, 128, 128), Shape(2, 2, 16, 16), Shape(1, 4, 64, 32)
OLMO = Shape(30, 30, 96, 192, beta_scale=2.0)  # Olmo-Hybrid-7B
SHAPES = pytest.mark.parametrize("shape", [QWEN, RANK, DENSE, SMALL, UNEVEN, OLMO], ids=str)
# inputs, state, tolerance relative to the largest value
PRECISIONS = pytest.mark.parametrize(
    ("dtype", "state_dtype", "tolerance"),
    [
        (torch.float32, torch.float32, 1e-4),
        (torch.bfloat16, torch.float32, 1.5e-2),
        (torch.bfloat16, torch.bfloat16, 1.5e-2),
    ],
    ids=["fp32", "bf16", "bf16 states"],
)


def draw(shape: Shape, tokens: int, dtype: torch.dtype, more: int = 64) -> list[Tensor]:
    """q, k, v, a, b, A, dt_bias as Qwen3-Next initialises them; the first five are columns of a
    wider tensor, which has `more` columns besides. Keys are alike."""
    g = torch.Generator(DEVICE).manual_seed(0)
    keys, values = shape.k_heads * shape.k_dim, shape.heads * shape.v_dim
    widths = [keys, keys, values, shape.heads, shape.heads, more]
    wide = torch.randn(tokens, sum(widths), generator=g, device=DEVICE)
    wide[:, keys : 2 * keys] += 0.5
    q, k, v, a, b, _ = wide.to(dtype).split(widths, dim=1)
    return [
        q.unflatten(1, (shape.k_heads, shape.k_dim)),
        k.unflatten(1, (shape.k_heads, shape.k_dim)),
        v.unflatten(1, (shape.heads, shape.v_dim)),
        a,
        b,
        -torch.linspace(0.01, 16, shape.heads, device=DEVICE),
        torch.linspace(1, -6, shape.heads, device=DEVICE),
        torch.tensor(shape.beta_scale),
    ]


def arguments(data: list[Tensor]) -> tuple[DeltaRuleTokens, DeltaRuleConstants]:
    A, dt_bias, beta_scale = data[5:]
    constants = DeltaRuleConstants(A, dt_bias, beta_scale=float(beta_scale))
    return DeltaRuleTokens(*data[:5]), constants


def rows(data: list[Tensor], begin: int, end: int) -> list[Tensor]:
    return [*(x[begin:end] for x in data[:5]), *data[5:]]


def token_loop(data: list[Tensor], state: Tensor, keep: set[int]) -> tuple[Tensor, dict]:
    """Outputs, and the states after the numbers of tokens in `keep`."""
    q, k, v, a, b, A, bias, scale = (x.double() for x in data)
    repeats = v.shape[1] // q.shape[1]
    q, k = (
        (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(repeats, 1)
        for x in (q, k)
    )
    decay, beta = torch.exp(A * F.softplus(a + bias)), scale * torch.sigmoid(b)
    s, states, outputs = state.double(), {}, []
    for t in range(len(q)):
        s = s * decay[t][:, None, None]
        error = v[t] - (s @ k[t][:, :, None]).squeeze(2)
        s = s + (beta[t][:, None] * error)[:, :, None] * k[t][:, None]
        outputs.append((s @ q[t][:, :, None]).squeeze(2) * q.shape[2] ** -0.5)
        if t + 1 in keep:
            states[t + 1] = s
    return torch.stack(outputs), states


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (actual.double() - expected.double()).abs().max() / expected.abs().max()
    assert error < tolerance, f"relative error {error:.1e}"  # NaN fails as well


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def packed(
    lengths: list[int],
    starts: list[int],
    read: list[int],
    write: list[int],
    checkpoints: list[tuple[int, int, int]] = [],  # noqa: B006
    chunk: int = CHUNK,
    longest: int = 0,
) -> PrefillSegments:
    """checkpoints: (sequence, position, slot). Bounds of chunks are padded as in a captured step;
    `longest`: instead of the true one."""
    counts = [sum(c[0] == s for c in checkpoints) for s in range(len(lengths))]
    sequences = torch.arange(len(lengths), device=DEVICE, dtype=torch.int32)
    bounds = chunk_bounds(np.array(starts), np.array(lengths), chunk).tolist()
    most = (longest or sum(lengths)) // chunk + 2 * len(lengths)
    bounds += bounds[-1:] * (most + 1 - len(bounds))
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
        longest=longest or max(lengths),
        cu_chunk_seqlens={chunk: int32(bounds)},
    )


def poisoned(slots: int, shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((slots, *shape.state), float("nan"), dtype=dtype, device=DEVICE)


def check_prefill(
    shape: Shape,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    tolerance: float,
    chunk: int = CHUNK,
    more: int = 64,
) -> None:
    """Starts and ends on and off the grid, one token, none, and padding, in one batch."""
    lengths, starts = [9 * chunk + 24, 4 * chunk + 44, 1, 0, 0], [0, 7, chunk - 1, chunk, 0]
    read, write = [0, 1, 2, 3, 0], [4, 5, 2, 6, 0]
    end = starts[1] + lengths[1]
    checkpoints = [(0, 2 * chunk, 7), (0, 8 * chunk, 8), (1, chunk, 9), (1, end, 10), (2, chunk, 0)]
    data, state = draw(shape, sum(lengths) + 9, dtype, more), poisoned(12, shape, state_dtype)
    state[1:4] = torch.randn(3, *shape.state, device=DEVICE) / 4
    before = state.clone()
    out = torch.full_like(data[2], float("nan"))
    plan = delta_rule.plan(packed(lengths, starts, read, write, checkpoints, chunk), chunk)
    delta_rule.prefill(*arguments(data), state, plan, out=out)
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


@pytest.mark.parametrize("more", [64, 60], ids=["aligned", "unaligned"])
@PRECISIONS
@SHAPES
def test_prefill_equals_the_token_loop(
    shape: Shape, dtype: torch.dtype, state_dtype: torch.dtype, tolerance: float, more: int
) -> None:
    check_prefill(shape, dtype, state_dtype, tolerance, more=more)


@pytest.mark.parametrize("chunk", [16, 32, 128])
@PRECISIONS
@pytest.mark.parametrize("shape", [RANK, SMALL], ids=str)
def test_other_kernel_chunks_equal_the_token_loop(
    shape: Shape, dtype: torch.dtype, state_dtype: torch.dtype, tolerance: float, chunk: int
) -> None:
    check_prefill(shape, dtype, state_dtype, tolerance, chunk)


def test_equal_keys_without_decay_equal_the_token_loop() -> None:
    """The hardest systems: every token replaces what the one before it has stored."""
    data, state = draw(RANK, 200, torch.bfloat16), poisoned(2, RANK)
    data[1].copy_(data[1][:1].expand_as(data[1]))
    data[4].fill_(6)
    data[5].zero_()
    plan = delta_rule.plan(packed([200], [0], [0], [1]), CHUNK)
    y = delta_rule.prefill(*arguments(data), state, plan)
    expected, states = token_loop(data, torch.zeros_like(state[0]), {200})
    close(y, expected, 2e-2)
    close(state[1], states[200], 2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cut", [64, 576, 100, 639])
def test_prefill_cut_in_two_equals_one_piece(cut: int, dtype: torch.dtype) -> None:
    """To the very last bit where the cut is on the grid, also beside other sequences."""
    data, count = draw(RANK, 1000, dtype), 12
    whole, two = (poisoned(count + 4, RANK) for _ in range(2))

    def run(begin: int, end: int, read: int, write: int, state: Tensor) -> Tensor:
        plan = delta_rule.plan(packed([end - begin], [begin], [read], [write]), CHUNK)
        return delta_rule.prefill(*arguments(rows(data, begin, end)), state, plan)

    y = run(0, 1000, 0, 1, whole)
    first = run(0, cut, 0, 2, two)
    beside = [torch.cat((x[cut:], *[x[:30]] * count)) for x in data[:5]]
    segments = packed(
        [1000 - cut] + [30] * count,
        [cut] + [5] * count,
        [2] + [0] * count,
        [1, *range(3, 3 + count)],
    )
    plan = delta_rule.plan(segments, CHUNK)
    rest = delta_rule.prefill(*arguments([*beside, *data[5:]]), two, plan)[: 1000 - cut]
    if cut % CHUNK == 0:
        assert torch.equal(torch.cat([first, rest]), y)
        assert torch.equal(two[1], whole[1])
    else:
        tolerance = 1e-4 if dtype == torch.float32 else 1.5e-2
        close(torch.cat([first, rest]), y, tolerance)
        close(two[1], whole[1], tolerance)


@pytest.mark.parametrize("stages", [1, 2])
def test_loads_ahead_change_no_bits(stages: int) -> None:
    """So a sequence's bits do not depend on those beside it, for which the stages are chosen."""
    tiling = delta_rule.Tiling(64, 64, walk_warps=4, walk_stages=stages)
    lengths, starts, checkpoints = [700, 300], [0, 37], [(0, 64, 5), (0, 640, 6), (1, 128, 7)]
    plan = delta_rule.plan(packed(lengths, starts, [0, 1], [3, 1], checkpoints), CHUNK)
    data, state = draw(RANK, 1000, torch.bfloat16), poisoned(8, RANK)
    state[1] = torch.randn(RANK.state, device=DEVICE) / 4
    other = state.clone()
    expected = delta_rule.prefill(*arguments(data), state, plan)
    assert torch.equal(delta_rule.prefill(*arguments(data), other, plan, tiling=tiling), expected)
    assert torch.equal(other.nan_to_num(7.0), state.nan_to_num(7.0))


@PRECISIONS
@SHAPES
@pytest.mark.parametrize("count", [1, 32])
def test_decode_equals_the_token_loop(
    shape: Shape, dtype: torch.dtype, state_dtype: torch.dtype, tolerance: float, count: int
) -> None:
    """Every other sequence in place; where there are several, one from zeros and one padded row."""
    data, state = draw(shape, count, dtype), poisoned(2 * count + 1, shape, state_dtype)
    state[1 : count + 1] = torch.randn(count, *shape.state, device=DEVICE) / 4
    before = state.clone()
    read = list(range(1, count + 1))
    write = [slot + (count if slot % 2 else 0) for slot in read]
    if count > 1:
        read[2], read[-1], write[-1] = 0, 0, 0
    out = torch.full_like(data[2], float("nan"))
    delta_rule.decode(*arguments(data), state, DecodeSlots(int32(read), int32(write)), out=out)
    for i in range(count - (count > 1)):
        initial = before[read[i]] if read[i] else torch.zeros_like(before[1])
        expected, states = token_loop(rows(data, i, i + 1), initial, {1})
        close(out[i : i + 1], expected, tolerance)
        close(state[write[i]], states[1], tolerance)
    assert state[0].isnan().all()
    if count > 1:
        assert out[-1].eq(0).all()
        assert torch.equal(state[count], before[count])


def test_a_captured_prefill_follows_other_lengths() -> None:
    """Replayed over segments that lie elsewhere, with and without a state, and padding."""
    tokens, shape = 512, RANK
    data, state = draw(shape, tokens, torch.bfloat16), poisoned(10, shape)
    state[1:3] = torch.randn(2, *shape.state, device=DEVICE) / 4
    initial = state.clone()

    def step(lengths: list[int], starts: list[int], read: list[int]) -> PrefillSegments:
        ends = [(s, starts[s] + lengths[s], 6 + s) for s in range(3)]
        return packed(lengths, starts, read, [3, 4, 5], ends, longest=tokens)

    steps = [
        step([512, 0, 0], [0, 0, 0], [0, 0, 0]),
        step([100, 1, 200], [30, 63, 0], [1, 2, 0]),
        step([3, 320, 64], [128, 1, 64], [2, 0, 1]),
    ]
    static = steps[0]
    slots = DecodeSlots(static.read_slot, static.write_slot)
    plan, first = delta_rule.plan(static, CHUNK), rows(data, 0, 3)
    delta_rule.prefill(*arguments(data), state, plan)  # compiles
    delta_rule.decode(*arguments(first), state, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = delta_rule.prefill(*arguments(data), state, plan)
        z = delta_rule.decode(*arguments(first), state, slots)
    for other in steps[1:]:
        for name in PrefillSegments.__dataclass_fields__:
            values = getattr(static, name)
            if isinstance(values, Tensor) and name != "sequence_of_token":
                values.copy_(getattr(other, name))
        static.cu_chunk_seqlens[CHUNK].copy_(other.cu_chunk_seqlens[CHUNK])
        state.copy_(initial)
        y.fill_(float("nan"))
        graph.replay()
        expected_state = initial.clone()
        used = int(other.cu_seqlens[-1])
        expected = delta_rule.prefill(
            *arguments(data), expected_state, delta_rule.plan(other, CHUNK)
        )
        own = DecodeSlots(other.read_slot, other.write_slot)
        assert torch.equal(z, delta_rule.decode(*arguments(first), expected_state, own))
        assert torch.equal(y[:used], expected[:used])
        assert torch.equal(state.nan_to_num(7.0), expected_state.nan_to_num(7.0))


def fla_inputs(data: list[Tensor]) -> dict:
    q, k, v, a, b, A, bias, _ = data
    repeats = v.shape[1] // q.shape[1]
    return {
        "q": q.repeat_interleave(repeats, 1)[None],
        "k": k.repeat_interleave(repeats, 1)[None],
        "v": v[None].contiguous(),
        "g": (A * F.softplus(a.float() + bias))[None],
        "beta": torch.sigmoid(b.float())[None],
        "use_qk_l2norm_in_kernel": True,
        "output_final_state": True,
    }


@pytest.mark.parametrize("shape", [QWEN, RANK], ids=str)
@pytest.mark.parametrize("lengths", [[4096], [64] * 8, [5, 1000, 129]], ids=str)
def test_prefill_equals_fla(shape: Shape, lengths: list[int]) -> None:
    """Whose states are [k_dim, v_dim]."""
    fla = pytest.importorskip("fla.ops.gated_delta_rule")
    data, count = draw(shape, sum(lengths), torch.bfloat16), len(lengths)
    state = poisoned(count + 1, shape)
    state[1:] = torch.randn(count, *shape.state, device=DEVICE) / 4
    initial, slots = state[1:].transpose(2, 3).contiguous(), list(range(1, count + 1))
    segments = packed(lengths, [0] * count, slots, slots)
    y = delta_rule.prefill(*arguments(data), state, delta_rule.plan(segments, CHUNK))
    expected, last = fla.chunk_gated_delta_rule(
        **fla_inputs(data), initial_state=initial, cu_seqlens=segments.cu_seqlens.long()
    )
    close(y, expected[0], 2e-2)
    close(state[1:], last.transpose(2, 3), 2e-2)


@pytest.mark.parametrize("shape", [QWEN, RANK], ids=str)
def test_decode_equals_fla(shape: Shape) -> None:
    fla = pytest.importorskip("fla.ops.gated_delta_rule")
    data, state = draw(shape, 16, torch.bfloat16), poisoned(17, shape)
    state[1:] = torch.randn(16, *shape.state, device=DEVICE) / 4
    initial, slots = state[1:].transpose(2, 3).contiguous(), int32(list(range(1, 17)))
    y = delta_rule.decode(*arguments(data), state, DecodeSlots(slots, slots))
    expected, last = fla.fused_recurrent_gated_delta_rule(
        **fla_inputs(data),
        initial_state=initial,
        cu_seqlens=torch.arange(17, device=DEVICE),
    )
    close(y, expected[0], 2e-2)
    close(state[1:], last.transpose(2, 3), 1e-4)
