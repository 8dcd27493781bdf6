"""The Mamba2 scan in plain torch.

    h[t] = exp(dt[t] A) h[t-1] + dt[t] x[t] B[t]^T          h: [head_dim, state]
    y[t] = h[t] C[t] + D x[t]

Prefill uses the chunked matrix form (SSD: Dao and Gu, "Transformers are SSMs", 2024, section 6) on
the tiles of tiles.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_hybrid.kernels.elementwise import softplus
from megatron_hybrid.kernels.protocols import Mamba2Constants, Mamba2Tokens
from megatron_hybrid.kernels.runs import TorchScan
from megatron_hybrid.kernels.tiles import TilePlan

# The work inside a tile grows with its square; across tiles it is a loop. 64 balances them.
_LARGEST_TILE = 64


def _over_tiles(
    tokens: Mamba2Tokens, constants: Mamba2Constants, initial: Tensor, plan: TilePlan
) -> tuple[Tensor, Tensor]:
    """initial [S, heads, head_dim, state] -> y [T, heads, head_dim], states [S + C, ...]."""
    x, B, C, dt = tokens
    A, D = constants.A, constants.D
    heads, head_dim = x.shape[1:]
    groups, size = B.shape[1:]
    shape = (plan.num_tiles, plan.tile_length)
    # From here on: c tiles, l and s places in a tile, h heads, g groups, p head_dim, n state.
    dt = plan.tiled(_step_sizes(dt, constants))  # [c, l, h]
    if plan.padding is not None:
        dt = dt.masked_fill(plan.padding, 0)  # no decay and no input
    xs = plan.tiled(x.float())
    Bs = plan.tiled(B.float()).transpose(1, 2)  # [c, g, l, n]
    Cs = plan.tiled(C.float()).transpose(1, 2)
    # Log of the decay from the tile's start. In float64, because what counts are differences.
    decay = torch.cumsum(dt * A, dim=1, dtype=torch.float64)  # [c, l, h]
    decay_h = decay.transpose(1, 2).contiguous()  # [c, h, l]
    dtx = xs * dt[..., None]  # [c, l, h, p]

    # Inside a tile: y[l] = sum over s <= l of (C[l] . B[s]) exp(decay[l] - decay[s]) dt[s] x[s].
    weights = xs.new_empty((*decay_h.shape, shape[1]))  # [c, h, l, s]
    torch.sub(decay_h[..., :, None], decay_h[..., None, :], out=weights)
    weights.exp_().tril_()  # above the diagonal exp may overflow; tril_ drops it
    scores = torch.matmul(Cs, Bs.transpose(2, 3))  # [c, g, l, s]
    weights.view(shape[0], groups, heads // groups, shape[1], shape[1]).mul_(scores[:, :, None])
    inside = torch.matmul(weights, dtx.transpose(1, 2))  # [c, h, l, p]

    # What each tile adds to the state, then the states at the tiles' ends.
    to_end = (decay[:, -1:] - decay).float().exp_()  # [c, l, h]
    added = (dtx * to_end[..., None]).view(*shape, groups, -1).permute(0, 2, 3, 1)
    after = torch.matmul(added, Bs).view(shape[0], heads, head_dim, size)
    states = torch.cat((initial, after))  # [S + c, h, p, n]
    plan.carry(states, decay[:, -1].float().exp_()[:, :, None, None])

    # What the state at a tile's start gives: y[l] += exp(decay[l]) C[l] h.
    before = plan.before(states)
    before = before.view(shape[0], groups, -1, size).transpose(2, 3)  # [c, g, n, h p / g]
    carried = torch.matmul(Cs, before).transpose(1, 2).reshape(*shape, heads, head_dim)
    y = (
        carried.mul_(decay.float().exp_()[..., None])
        .add_(inside.transpose(1, 2))
        .addcmul_(xs, D[:, None])
    )
    return plan.tokens(y), states


def _advance(states: Tensor, inputs: tuple[Tensor, ...], constants: Mamba2Constants) -> None:
    """states [N, heads, head_dim, state]"""
    x, B, dt = inputs
    rows, groups, size = B.shape
    dt = _step_sizes(dt, constants)
    states.mul_((dt * constants.A).exp_()[:, :, None, None])
    dtx = (x.float() * dt[..., None]).view(rows, groups, -1, 1)
    states.view(rows, groups, -1, size).addcmul_(dtx, B.float()[:, :, None])


def _read_out(states: Tensor, tokens: Mamba2Tokens, constants: Mamba2Constants) -> Tensor:
    """[N, heads, head_dim]"""
    rows, groups, size = tokens.C.shape
    by_group = states.view(rows * groups, -1, size)
    # A row times a matrix: the other way round, bmm is seven times slower on a CPU.
    y = torch.bmm(tokens.C.float().reshape(-1, 1, size), by_group.transpose(1, 2))
    return y.view(tokens.x.shape).addcmul_(tokens.x.float(), constants.D[:, None])


def _step_sizes(dt: Tensor, constants: Mamba2Constants) -> Tensor:
    """[T, heads] float32: softplus(dt + bias), clamped."""
    steps = softplus(dt.double() + constants.dt_bias).float()
    if constants.dt_limit != (0.0, float("inf")):  # softplus is positive
        steps.clamp_(*constants.dt_limit)
    return steps


scan = TorchScan(_LARGEST_TILE, _over_tiles, _advance, _read_out)
plan, prefill = scan.plan, scan.prefill
decode, decode_runs = scan.decode, scan.decode_runs
