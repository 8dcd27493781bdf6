"""Kimi delta attention in Triton on a GPU at the shapes of real models, against the reference in
float32 and against fla's kernels; channels that hardly decay and that forget at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeSlots, PrefillSegments, chunk_bounds
from megatron_hybrid.kernels.gated_delta_rule import reference
from megatron_hybrid.kernels.protocols import DeltaRuleConstants, DeltaRuleTokens
from megatron_hybrid.kernels.slots import plan_decode

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
from megatron_hybrid.kernels.gated_delta_rule import triton as delta_rule  # noqa: E402

pytestmark = pytest.mark.gpu
CHUNK = 64
HEADS, DIM = 8, 128
# (what is added to decays before the gate, its lower bound)
GATES = pytest.mark.parametrize(("bias", "bound"), [(-4.5, None), (2.0, None), (-1.0, -5.0)])


def int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def draw(
    tokens: int, bias: float, bound: float | None
) -> tuple[DeltaRuleTokens, DeltaRuleConstants]:
    """In bfloat16."""
    torch.manual_seed(0)
    width = HEADS * DIM
    wide = torch.randn(tokens, 4 * width + HEADS, device="cuda").bfloat16()
    q, k, v, a, b = wide.split([width, width, width, width, HEADS], dim=1)
    q, k, v, a = (values.unflatten(1, (HEADS, DIM)) for values in (q, k, v, a))
    rate = torch.linspace(0.01, 8, HEADS, device="cuda")
    constants = DeltaRuleConstants(
        -rate, torch.full((HEADS, DIM), bias, device="cuda"), lower_bound=bound
    )
    return DeltaRuleTokens(q, k, v, a, b), constants


def segments(
    lengths: list[int],
    starts: list[int],
    read: list[int],
    write: list[int],
    checkpoints: list[tuple[int, int, int]],
) -> PrefillSegments:
    sequence, position, slot = zip(*checkpoints, strict=True) if checkpoints else ([], [], [])
    bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
    return PrefillSegments(
        cu_seqlens=int32(bounds),
        start_position=int32(starts),
        read_slot=int32(read),
        write_slot=int32(write),
        cu_checkpoints=int32([sum(s < i for s in sequence) for i in range(len(lengths) + 1)]),
        checkpoint_sequence=int32(sequence),
        checkpoint_position=int32(position),
        checkpoint_slot=int32(slot),
        sequence_of_token=int32([i for i, n in enumerate(lengths) for _ in range(n)]),
        longest=max(lengths),
        cu_chunk_seqlens={CHUNK: int32(chunk_bounds(starts, lengths, CHUNK))},  # type: ignore[arg-type]
    )


def wide(tokens: DeltaRuleTokens) -> DeltaRuleTokens:
    return DeltaRuleTokens(*(values.float() for values in tokens))


def close(actual: Tensor, expected: Tensor, part: float) -> None:
    """The root of the mean square of the errors is at most this part of the values'."""
    error = (actual.float() - expected).square().mean().sqrt()
    assert error < part * expected.square().mean().sqrt()


@GATES
def test_prefill(bias: float, bound: float | None) -> None:
    tokens, constants = draw(1000, bias, bound)
    where = segments(
        [600, 63, 337], [0, 130, 37], [0, 1, 2], [3, 4, 2], [(0, 128, 5), (0, 576, 6), (2, 128, 7)]
    )
    state = torch.randn(8, HEADS, DIM, DIM, device="cuda")
    other = state.clone()
    y = delta_rule.prefill(tokens, constants, state, delta_rule.plan(where, CHUNK))
    expected = reference.prefill(wide(tokens), constants, other, reference.plan(where, CHUNK))
    close(y, expected, 6e-3)
    for slot in range(2, 8):
        close(state[slot], other[slot], 6e-3)


@GATES
def test_prefills_cut_on_the_grid_give_the_very_same_bits(bias: float, bound: float | None) -> None:
    tokens, constants = draw(700, bias, bound)
    state = torch.zeros(3, HEADS, DIM, DIM, device="cuda")
    plan = delta_rule.plan(segments([700], [0], [0], [1], []), CHUNK)
    whole = delta_rule.prefill(tokens, constants, state, plan)
    parts = []
    for begin, end in ((0, 256), (256, 320), (320, 700)):
        own = DeltaRuleTokens(*(values[begin:end] for values in tokens))
        where = segments([end - begin], [begin], [2 if begin else 0], [2], [])
        parts.append(delta_rule.prefill(own, constants, state, delta_rule.plan(where, CHUNK)))
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(state[1], state[2])


@GATES
def test_decode(bias: float, bound: float | None) -> None:
    tokens, constants = draw(4, bias, bound)
    state = torch.randn(6, HEADS, DIM, DIM, device="cuda")
    other = state.clone()
    slots = DecodeSlots(int32([1, 2, 0, 3]), int32([1, 4, 5, 0]))
    y = delta_rule.decode(tokens, constants, state, slots)
    plan = plan_decode(DecodeSlots(slots.read_slot.long(), slots.write_slot.long()))
    expected = reference.decode(wide(tokens), constants, other, plan)
    close(y, expected, 4e-3)
    torch.testing.assert_close(state[1:], other[1:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("bias", "bound"), [(-4.5, None), (-4.5, -5.0)])
def test_prefill_equals_flas(bias: float, bound: float | None) -> None:
    fla = pytest.importorskip("fla.ops.kda")
    tokens, constants = draw(512, bias, bound)
    state = torch.zeros(2, HEADS, DIM, DIM, device="cuda")
    plan = delta_rule.plan(segments([512], [0], [0], [1], []), CHUNK)
    y = delta_rule.prefill(tokens, constants, state, plan)
    q, k, v, a, b = (values[None] for values in tokens)
    with torch.inference_mode():
        expected, last = fla.chunk_kda(
            q, k, v, a, b.float(), A_log=(-constants.A).log(), dt_bias=constants.dt_bias.flatten(),
            output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, safe_gate=bound is not None, lower_bound=bound,
        )  # fmt: skip
    close(y, expected[0].float(), 1e-2)
    close(state[1], last[0].transpose(1, 2), 1e-2)
