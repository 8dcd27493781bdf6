"""The Triton gated delta rule in Triton's interpreter, on a CPU, in float32."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, fields, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeSlots
from megatron_hybrid.kernels.gated_delta_rule import reference
from megatron_hybrid.kernels.protocols import DeltaRuleConstants, DeltaRuleTokens
from megatron_hybrid.kernels.slots import plan_decode
from tests.kernels.segments import Segment, int64, prefill_segments
from tests.thorough import A_THIRD, usually

if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    pytest.skip("for machines with triton and without CUDA", allow_module_level=True)
from megatron_hybrid.kernels.gated_delta_rule import triton as delta_rule  # noqa: E402

# above the diagonals, where nothing is taken
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

K_HEADS, HEADS, K_DIM, V_DIM = 1, 2, 16, 32
SHAPE = (HEADS, V_DIM, K_DIM)
CHUNK = 32
VARYING = ("q", "k", "v", "a", "b")
# (kernel chunk, tile): tiles that are chunks, with and without blocks to merge, and parts of them
TILES = [(16, 16), (32, 32), (32, 16), (64, 64)]


@dataclass
class Data:
    q: Tensor  # [T, k_heads, k_dim]
    k: Tensor
    v: Tensor  # [T, v_heads, v_dim]
    a: Tensor  # [T, v_heads]
    b: Tensor
    A: Tensor
    dt_bias: Tensor
    beta_scale: float = 1.0

    @classmethod
    def draw(
        cls,
        tokens: int,
        k_heads: int = K_HEADS,
        seed: int = 0,
        beta_scale: float = 1.0,
        k_dim: int = K_DIM,
        v_dim: int = V_DIM,
    ) -> Data:
        """q, k, v, a and b are columns of one wider tensor, as in the model; keys are alike, one
        head hardly decays."""
        g = torch.Generator().manual_seed(seed)
        widths = [k_heads * k_dim, k_heads * k_dim, HEADS * v_dim, HEADS, HEADS, 4]
        q, k, v, a, b, _ = torch.randn(tokens, sum(widths), generator=g).split(widths, dim=1)
        k += 0.5
        b *= 2
        return cls(
            q=q.unflatten(1, (k_heads, k_dim)),
            k=k.unflatten(1, (k_heads, k_dim)),
            v=v.unflatten(1, (HEADS, v_dim)),
            a=a,
            b=b,
            A=torch.tensor([-0.01, -6.0]),
            dt_bias=torch.tensor([0.5, -1.0]),
            beta_scale=beta_scale,
        )

    def rows(self, begin: int, end: int) -> Data:
        return replace(self, **{name: getattr(self, name)[begin:end] for name in VARYING})

    def arguments(self) -> tuple[DeltaRuleTokens, DeltaRuleConstants]:
        values = [getattr(self, f.name) for f in fields(self)]
        constants = DeltaRuleConstants(*values[5:7], beta_scale=self.beta_scale)
        return DeltaRuleTokens(*values[:5]), constants


def token_loop(data: Data, state: Tensor) -> tuple[Tensor, list[Tensor]]:
    """In float64: outputs [T, v_heads, v_dim], and the states after 0, 1, ... T tokens."""
    states, outputs = [state.double()], []
    repeats = HEADS // data.q.shape[1]
    for t in range(data.q.shape[0]):
        q, k = (
            (x[t].double() / (x[t].double().square().sum(-1, keepdim=True) + 1e-6).sqrt())
            for x in (data.q, data.k)
        )
        q, k = q.repeat_interleave(repeats, 0), k.repeat_interleave(repeats, 0)
        decay = torch.exp(data.A * F.softplus(data.a[t].double() + data.dt_bias))
        before = decay[:, None, None] * states[-1]
        error = data.v[t].double() - (before * k[:, None]).sum(-1)
        added = data.beta_scale * torch.sigmoid(data.b[t].double())[:, None] * error
        states.append(before + added[:, :, None] * k[:, None])
        outputs.append((states[-1] * q[:, None]).sum(-1) / q.shape[1] ** 0.5)
    return torch.stack(outputs), states


def poisoned(
    slots: int, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = SHAPE
) -> Tensor:
    """[slots, ...] of NaN, with a slot stride larger than a state."""
    return torch.full((slots, 2, *shape), float("nan"), dtype=dtype)[:, 1]


def run(
    data: Data,
    segments: list[Segment],
    state: Tensor,
    chunk: int = CHUNK,
    tile: int = CHUNK,
    padding: int = 1,
) -> Tensor:
    packed = prefill_segments(segments, padding, chunks=(chunk,))
    # two chunks of padding, as in a captured step
    bounds = packed.cu_chunk_seqlens[chunk]
    packed.cu_chunk_seqlens[chunk] = torch.cat((bounds, bounds[-1:], bounds[-1:]))
    out = torch.full_like(data.v, float("nan"))
    tiling = delta_rule.Tiling(tile, 16, walk_warps=4, walk_stages=1)
    plan = delta_rule.plan(packed, chunk)
    assert delta_rule.prefill(*data.arguments(), state, plan, out, tiling=tiling) is out
    return out


def close(actual: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(
        actual.double(), expected.double(), atol=tolerance, rtol=tolerance, equal_nan=False
    )


@A_THIRD
@pytest.mark.parametrize(("chunk", "tile"), TILES)
@pytest.mark.parametrize("length", usually([17, 70], [1, 17, 64, 70]))
def test_one_sequence_equals_the_token_loop(length: int, chunk: int, tile: int) -> None:
    data, state = Data.draw(length), poisoned(3)
    y = run(data, [Segment(0, length, 0, 2)], state, chunk, tile)
    expected, states = token_loop(data, torch.zeros(SHAPE))
    close(y, expected)
    close(state[2], states[length])
    assert state[:2].isnan().all()


@pytest.mark.parametrize("k_dim", [24, 40])
def test_keys_and_values_may_have_dimensions_that_are_no_powers_of_two(k_dim: int) -> None:
    """As in Olmo-Hybrid-7B, which has 96 and 192: a prompt, then a decode."""
    dims: dict[str, int] = {"k_dim": k_dim, "v_dim": 48}
    data, shape = Data.draw(41, **dims), (HEADS, 48, k_dim)
    state = poisoned(5, shape=shape)
    state[1] = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    y = run(data.rows(0, 40), [Segment(7, 40, 1, 2, [(32, 3)])], state)
    expected, states = token_loop(data, state[1])
    close(y, expected[:40])
    close(state[2], states[40])
    close(state[3], states[25])
    last = data.rows(40, 41)
    y = delta_rule.decode(*last.arguments(), state, DecodeSlots(int64([2]), int64([4])))
    close(y, expected[40:])
    close(state[4], states[41])
    assert state[0].isnan().all()


@pytest.mark.parametrize(("k_dim", "v_dim"), [(12, 32), (136, 32), (16, 24)])
def test_dimensions_that_the_kernels_do_not_take_are_refused(k_dim: int, v_dim: int) -> None:
    data = Data.draw(1, k_dim=k_dim, v_dim=v_dim)
    state, slots = torch.zeros(2, HEADS, v_dim, k_dim), DecodeSlots(int64([1]), int64([1]))
    with pytest.raises(ValueError, match=f"{k_dim} key and {v_dim} value dimensions"):
        delta_rule.decode(*data.arguments(), state, slots)


@A_THIRD
@pytest.mark.parametrize(("chunk", "tile"), TILES[:3])
@pytest.mark.parametrize(("k_heads", "beta_scale"), usually([(2, 2.0)], [(1, 1.0), (2, 2.0)]))
def test_packed_sequences_with_checkpoints_equal_the_token_loop(
    k_heads: int, beta_scale: float, chunk: int, tile: int
) -> None:
    """Starts and ends on and off the grid, checkpoints on the grid, at an end, and two at one
    place, an empty segment, padding, writes to slot 0, rows after the last sequence."""
    segments = [
        Segment(0, 70, 0, 6, [(32, 7), (64, 8), (64, 15)]),
        Segment(21, 45, 1, 1, [(32, 9), (64, 0), (66, 10)]),
        Segment(32, 33, 2, 11, [(64, 12)]),
        Segment(37, 3, 3, 0, [(40, 13)]),
        Segment(40, 0, 4, 14),
        Segment(95, 1, 5, 5, [(96, 16)]),
        Segment(0, 0, 0, 0),
    ]
    tokens = sum(s.length for s in segments) + 5
    data, state = Data.draw(tokens, k_heads, beta_scale=beta_scale), poisoned(18)
    state[1:6] = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(3))
    before = state.clone()
    y = run(data, segments, state, chunk, tile)
    begin, written = 0, {14}
    for s in segments:
        if s.length:
            initial = before[s.read] if s.read else torch.zeros(SHAPE)
            expected, states = token_loop(data.rows(begin, begin + s.length), initial)
            close(y[begin : begin + s.length], expected)
            for position, slot in (*s.checkpoints, (s.start + s.length, s.write)):
                if slot > 0:
                    close(state[slot], states[position - s.start])
                    written.add(slot)
        begin += s.length
    assert torch.equal(state[14], before[4])
    kept = [slot for slot in range(18) if slot not in written]
    assert torch.equal(state[kept].nan_to_num(7.0), before[kept].nan_to_num(7.0))


@A_THIRD
@pytest.mark.parametrize("tile", [32, 16])
@pytest.mark.parametrize("start", [5, 31, 32, 33, 60])
def test_a_segment_may_start_anywhere_and_equals_the_reference(start: int, tile: int) -> None:
    data, state = Data.draw(50), poisoned(6)
    state[1] = torch.randn(SHAPE, generator=torch.Generator().manual_seed(4))
    grid = [p for p in (32, 64, 96) if start < p <= start + 50]
    segments = [Segment(start, 50, 1, 2, [(p, 3 + i) for i, p in enumerate(grid)])]
    other = state.clone()
    plan = reference.plan(prefill_segments(segments), CHUNK)
    expected = reference.prefill(*data.arguments(), other, plan)
    close(run(data, segments, state, CHUNK, tile), expected)
    close(state[2 : 3 + len(grid)], other[2 : 3 + len(grid)])


@pytest.mark.parametrize("tile", [32, 16])
def test_segments_cut_on_the_grid_give_the_very_same_bits(tile: int) -> None:
    """Beside other sequences, too."""
    data, whole, cut = Data.draw(80), poisoned(4), poisoned(4)
    y = run(data, [Segment(0, 80, 0, 1, [(32, 2)])], whole, CHUNK, tile)
    first = run(data.rows(0, 32), [Segment(0, 32, 0, 2)], cut, CHUNK, tile)
    both = replace(data, **{n: getattr(data, n).roll(7, 0) for n in VARYING}).rows(0, 7)
    rest = replace(
        data, **{n: torch.cat((getattr(both, n), getattr(data, n)[32:])) for n in VARYING}
    )
    rest = run(rest, [Segment(9, 7, 0, 3), Segment(32, 48, 2, 1)], cut, CHUNK, tile)[7:]
    assert torch.equal(torch.cat((first, rest)), y)
    assert torch.equal(whole[1:3], cut[1:3])


def test_equal_keys_without_decay_equal_the_token_loop() -> None:
    """Powers of the matrix that is inverted would overflow the precision of float32."""
    data, state = Data.draw(64), poisoned(2)
    data.k[:] = data.k[0]
    data.A[:] = 0
    data.b[:] = 9
    y = run(data, [Segment(0, 64, 0, 1)], state, 64, 64)
    expected, states = token_loop(data, torch.zeros(SHAPE))
    close(y, expected)
    close(state[1], states[64])


def test_keys_and_queries_of_zeros_add_nothing() -> None:
    data, state = Data.draw(20), poisoned(3)
    data.k[:], data.q[:10] = 0, 0
    assert run(data, [Segment(0, 20, 0, 1)], state).eq(0).all() and state[1].eq(0).all()
    slots = DecodeSlots(int64([0, 1]), int64([2, 1]))
    assert delta_rule.decode(*data.rows(9, 11).arguments(), state, slots).eq(0).all()
    assert state[1:].eq(0).all()


@pytest.mark.parametrize("bad", [0, 1])
def test_nan_in_one_sequence_stays_there(bad: int) -> None:
    data, state = Data.draw(40), poisoned(3)
    halves = [slice(0, 13), slice(13, 40)]
    for name in VARYING:
        getattr(data, name)[halves[bad]] = float("nan")
    y = run(data, [Segment(0, 13, 0, 1), Segment(0, 27, 0, 2)], state)
    good = halves[1 - bad]
    expected, states = token_loop(data.rows(good.start, good.stop), torch.zeros(SHAPE))
    close(y[good], expected)
    close(state[2 - bad], states[-1])


def test_no_tokens_at_all_copy_states() -> None:
    data, state = Data.draw(4), poisoned(4)
    state[1] = 3
    run(data.rows(0, 0), [Segment(3, 0, 1, 2), Segment(0, 0, 0, 3)], state)
    assert state[2].eq(3).all() and state[3].eq(0).all()


def test_bfloat16_states_are_read_and_written() -> None:
    data, state = Data.draw(20), poisoned(4, torch.bfloat16)
    state[1] = torch.randn(SHAPE, generator=torch.Generator().manual_seed(5)).bfloat16()
    expected, states = token_loop(data, state[1])
    close(run(data, [Segment(30, 20, 1, 2, [(32, 3)])], state), expected)
    close(state[3], states[2], 1e-2)
    close(state[2], states[20], 1e-2)


@pytest.mark.parametrize("block_v", [8, 32])
@pytest.mark.parametrize(("k_heads", "beta_scale"), [(1, 1.0), (2, 2.0)])
def test_decode_equals_the_token_loop(k_heads: int, beta_scale: float, block_v: int) -> None:
    """In place, from one slot to another, from zeros, to nowhere, and a padded row."""
    read, write = [1, 2, 0, 3, 0], [1, 4, 5, 0, 0]
    data, state = Data.draw(5, k_heads, beta_scale=beta_scale), poisoned(7)
    state[1:4] = torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(5))
    before = state.clone()
    slots = DecodeSlots(int64(read), int64(write))
    out = torch.full_like(data.v, float("nan"))
    launch = {"block_v": block_v, "num_warps": 4}
    y = delta_rule.decode(*data.arguments(), state, slots, out, **launch)
    for row in range(4):
        initial = before[read[row]] if read[row] else torch.zeros(SHAPE)
        expected, states = token_loop(data.rows(row, row + 1), initial)
        close(y[row : row + 1], expected)
        if write[row]:
            close(state[write[row]], states[1])
    assert y is out and y[4].eq(0).all()
    assert torch.equal(state[2:4], before[2:4])
    assert state[[0, 6]].isnan().all()


def test_decode_equals_the_reference() -> None:
    data, state = Data.draw(3), poisoned(8)
    state[1:4] = torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(6))
    other = state.clone()
    slots = DecodeSlots(int64([1, 2, 0]), int64([5, 2, 6]))
    expected = reference.decode(*data.arguments(), other, plan_decode(slots))
    close(delta_rule.decode(*data.arguments(), state, slots), expected)
    close(state[[2, 5, 6]], other[[2, 5, 6]])


def test_strides_that_the_kernels_do_not_take_are_refused() -> None:
    data, state = Data.draw(4), poisoned(3)
    data.v = data.v.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="v has strides"):
        run(data, [Segment(0, 4, 0, 1)], state)


@pytest.mark.parametrize("chunk", [8, 24, 0])
def test_a_kernel_chunk_that_the_kernels_do_not_take_is_refused(chunk: int) -> None:
    with pytest.raises(ValueError, match=f"kernel chunk is {chunk}"):
        delta_rule.plan(prefill_segments([Segment(0, 4, 0, 1)]), chunk)
