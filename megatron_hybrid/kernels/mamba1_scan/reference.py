"""The Mamba1 selective scan in plain torch (Gu and Dao, "Mamba", 2023, arXiv 2312.00752, section
3.6 and algorithm 2), per channel d and state n:

    dt      = softplus(dt_raw + dt_bias)
    h[d, n] = exp(dt[d] A[d, n]) h[d, n] + dt[d] B[n] x[d]
    y[d]    = (sum over n of C[n] h[d, n] + D[d] x[d]) silu(z[d])

Every state decays at a rate of its own, so there is no matrix form as Mamba2's. Prefill scans all
tiles of tiles.py at once, place by place and each from zeros, carries the states from tile to tile,
and then adds what the state at a tile's start gives at each place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_hybrid.kernels.elementwise import silu, softplus
from megatron_hybrid.kernels.protocols import Mamba1Constants, Mamba1Tokens
from megatron_hybrid.kernels.runs import TorchScan
from megatron_hybrid.kernels.tiles import TilePlan

# Places of a tile, and tiles of a sequence, are loops. A state is kept for every tile.
_LARGEST_TILE = 16


def _over_tiles(
    tokens: Mamba1Tokens, constants: Mamba1Constants, initial: Tensor, plan: TilePlan
) -> tuple[Tensor, Tensor]:
    """initial [S, channels, state] -> y [T, channels], states [S + C, channels, state]."""
    x, z, dt, B, C = tokens
    A, D, dt_bias, _ = constants
    # From here on: c tiles, l places in a tile, d channels, n state.
    dt = plan.tiled(softplus(dt.float() + dt_bias))  # [c, l, d]
    if plan.padding is not None:
        dt = dt.masked_fill(plan.padding, 0)  # no decay and no input
    xs = plan.tiled(x.float())
    dtx = dt * xs
    Bs, Cs = plan.tiled(B.float()), plan.tiled(C.float())  # [c, l, n]
    y = xs * D  # [c, l, d]

    # The scan of each tile from zeros: what the tile adds to the state, and what that gives.
    h = initial.new_zeros(plan.num_tiles, *A.shape)  # [c, d, n]
    for place in range(plan.tile_length):
        h.mul_((dt[:, place, :, None] * A).exp_())
        h.addcmul_(dtx[:, place, :, None], Bs[:, place, None])
        y[:, place] += (h * Cs[:, place, None]).sum(-1)

    # The states at the tiles' ends.
    from_start = torch.cumsum(dt, dim=1)  # [c, l, d]; times A: the log of the decay
    states = torch.cat((initial, h))  # [S + c, d, n]
    plan.carry(states, (from_start[:, -1, :, None] * A).exp_())

    # What the state at a tile's start gives.
    before = plan.before(states)  # [c, d, n]
    for place in range(plan.tile_length):
        h = (from_start[:, place, :, None] * A).exp_().mul_(before)
        y[:, place] += h.mul_(Cs[:, place, None]).sum(-1)
    return plan.tokens(y).mul_(silu(z.float())), states


def _advance(h: Tensor, inputs: tuple[Tensor, ...], constants: Mamba1Constants) -> None:
    """h [N, channels, state]"""
    x, dt, B = inputs
    dt = softplus(dt.float() + constants.dt_bias)
    h.mul_((dt[:, :, None] * constants.A).exp_())
    h.addcmul_((dt * x.float())[:, :, None], B.float()[:, None])


def _read_out(h: Tensor, tokens: Mamba1Tokens, constants: Mamba1Constants) -> Tensor:
    """[N, channels]"""
    y = (h * tokens.C.float()[:, None]).sum(-1)
    return y.addcmul_(tokens.x.float(), constants.D).mul_(silu(tokens.z.float()))


scan = TorchScan(_LARGEST_TILE, _over_tiles, _advance, _read_out)
plan, prefill = scan.plan, scan.prefill
decode, decode_runs = scan.decode, scan.decode_runs
