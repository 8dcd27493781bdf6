"""What packing states has to do, for every implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import PackedStates
from megatron_hybrid.kernels.packed_states import reference
from megatron_hybrid.kernels.protocols import Packing
from megatron_hybrid.layers.inputs import StateSpec, allocate_caches

FULL, PACKED, LAYERS = 5, 4, 3  # slots, the null slot among the full ones


class Kind(NamedTuple):
    """A recurrence's state, and the dimension along which entries share a scale."""

    shape: tuple[int, ...]
    over: int


KINDS = {
    "mamba2": Kind((3, 8, 16), -2),  # heads, head_dim, state: a scale a head and column
    "odd": Kind((2, 5, 12), -2),
    "wide": Kind((1, 64, 128), -2),
    "delta": Kind((2, 16, 8), -2),  # heads, v_dim, k_dim: a scale a head and key channel
    "mamba1": Kind((70, 16), -1),  # channels, state: a scale a channel
    "convolution": Kind((0,), -2),  # no recurrence at all
}


def make_states(
    kind: str, dtype: torch.dtype, state_dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> PackedStates:
    """Zeros, as an engine has them."""
    shape, over = KINDS[kind]
    spec = StateSpec((6, 3), torch.bfloat16, shape, state_dtype, 16, scaled_over=over)
    caches = allocate_caches(
        {}, dict.fromkeys(range(LAYERS), spec), 0, 16, FULL, torch.device(device),
        num_packed=PACKED, packed_dtype=dtype,
    )  # fmt: skip
    (states,) = caches.packed
    for layer, own in caches.state.items():  # what kernels write is what is packed
        assert own.ssm.data_ptr() == states.full_ssm[layer].data_ptr()
        assert own.conv.data_ptr() == states.full_conv[layer].data_ptr()
    return states


def fill(states: PackedStates) -> None:
    """Random states whose columns are of very different sizes."""
    generator = torch.Generator().manual_seed(1)
    for full in (states.full_ssm, states.full_conv):
        values = torch.randn(full.shape, generator=generator)
        full.copy_(values * 10 ** (3 * torch.randn(full.shape[-1:], generator=generator)))


def slots(*numbers: int, device: str = "cpu") -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def rounded(state: Tensor, over: int) -> Tensor:
    """By the formula, a column at a time: amax / 127 a step, each entry a whole number of them."""
    found = torch.zeros_like(state)
    columns, places = state.movedim(over, -1), found.movedim(over, -1)
    for index in torch.cartesian_prod(*(torch.arange(size) for size in columns.shape[:-1])):
        place = tuple(index.reshape(-1).tolist())
        column = columns[place].float()
        step = column.abs().max() / 127  # float32, as what it divides
        if step > 0:
            places[place] = torch.tensor([round(x) for x in (column / step).tolist()]) * step
    return found


def check_round_trip(packing: Packing, kind: str, state_dtype: torch.dtype) -> None:
    """Full slots 1 and 4 go to the packed slots FULL + 2 and FULL, and from there to 2 and 3."""
    states, over = make_states(kind, torch.int8, state_dtype), KINDS[kind].over
    fill(states)
    before = states.full_ssm.clone(), states.full_conv.clone()
    packing.pack(states, slots(1, 4), slots(FULL + 2, FULL))
    for now, then in zip((states.full_ssm, states.full_conv), before, strict=True):
        assert torch.equal(now, then), "what is packed stays"
    assert torch.count_nonzero(states.values[:, [1, 3]]) == 0, "other packed slots change"
    packing.unpack(states, slots(FULL + 2, FULL), slots(2, 3))
    assert torch.equal(states.full_conv[:, [2, 3]], before[1][:, [1, 4]]), "windows are exact"
    assert torch.equal(states.full_ssm[:, [0, 1, 4]], before[0][:, [0, 1, 4]])
    if not states.full_ssm.numel():
        return
    exact, found = before[0][:, [1, 4]].float(), states.full_ssm[:, [2, 3]].float()
    step = exact.abs().amax(over, keepdim=True) / 127
    # a state in bfloat16 is rounded once more when it is stored; the interpreter cuts off instead
    slack, rtol = (1e-5, 1e-6) if state_dtype == torch.float32 else (2**-7 * 127, 2**-7)
    assert ((found - exact).abs() <= step * (0.5 + slack)).all(), "half a step at most"
    expected = torch.stack([torch.stack([rounded(s, over) for s in layer]) for layer in exact])
    torch.testing.assert_close(found, expected, rtol=rtol, atol=0)
    assert not torch.equal(found, exact)


def check_casts(packing: Packing, kind: str, dtype: torch.dtype) -> None:
    states = make_states(kind, dtype)
    states.full_ssm.normal_(generator=torch.Generator().manual_seed(2))
    packing.pack(states, slots(3), slots(FULL + 1))
    packing.unpack(states, slots(FULL + 1), slots(2))
    assert states.scales is None
    # Triton's interpreter cuts bfloat16 off
    rtol = 2**-7 if dtype == torch.bfloat16 and packing is not reference else 0
    found, expected = states.full_ssm[:, 2], states.full_ssm[:, 3].to(dtype).float()
    torch.testing.assert_close(found, expected, rtol=rtol, atol=0)
    if dtype != torch.float32 and found.numel():
        assert not torch.equal(found, states.full_ssm[:, 3])


def check_extremes(packing: Packing) -> None:
    """Columns of zeros stay zeros; what is not finite is never taken for a number."""
    states = make_states("mamba2", torch.int8)
    state = states.full_ssm[1, 1, 0]  # [8, 16] of a head
    state.normal_(generator=torch.Generator().manual_seed(3))
    state[:, 0] = 0
    state[3, 1], state[2, 2], state[:, 3] = float("nan"), float("inf"), 3e38
    state[:, 4], state[:, 5] = 1e-40, torch.tensor([127.0, 2.5, -2.5, 3.5, 0.5, -0.5, 1.5, -127])
    packing.pack(states, slots(1), slots(FULL))
    packing.unpack(states, slots(FULL), slots(2))
    found = states.full_ssm[1, 2, 0]
    assert (found[:, 0] == 0).all()
    assert found[:, 1].isnan().all() and found[:, 2].isnan().all()
    assert torch.allclose(found[:, 3], torch.tensor(3e38)) and found[:, 4].abs().max() < 2e-40
    halves_to_even = [127.0, 2.0, -2.0, 4.0, 0.0, -0.0, 2.0, -127.0]
    assert found[:, 5].tolist() == halves_to_even
    assert found[:, 6:].isfinite().all()


def check_nothing_to_move(packing: Packing) -> None:
    states = make_states("mamba2", torch.int8)
    fill(states)
    packing.pack(states, slots(), slots())
    packing.unpack(states, slots(), slots())
    assert torch.count_nonzero(states.values) == 0
