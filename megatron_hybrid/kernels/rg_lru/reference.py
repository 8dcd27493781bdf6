"""The real-gated linear recurrent unit in plain torch (De et al., "Griffin", 2024, arXiv
2402.19427, section 2.4). Of a channel, with r the recurrence gate and decay = -8 softplus(Lambda):

    log a[t] = decay sigmoid(r[t])
    h[t]     = a[t] h[t-1] + x[t]                 y[t] = h[t]

x is what the layer has gated and multiplied by sqrt(1 - a^2). Prefill scans all tiles of tiles.py
at once, place by place and each from zeros, carries the states from tile to tile, and then adds
what the state at a tile's start gives at each place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_hybrid.kernels.channel_scans import RGLRUConstants, RGLRUTokens
from megatron_hybrid.kernels.elementwise import sigmoid
from megatron_hybrid.kernels.runs import TorchScan
from megatron_hybrid.kernels.tiles import TilePlan

_LARGEST_TILE = 16  # places of a tile, and tiles of a sequence, are loops


def log_decays(gate: Tensor, constants: RGLRUConstants) -> Tensor:
    """gate [T, channels] -> log a, float32."""
    return constants.decay * sigmoid(gate.float())


def _over_tiles(
    tokens: RGLRUTokens, constants: RGLRUConstants, initial: Tensor, plan: TilePlan
) -> tuple[Tensor, Tensor]:
    """initial [S, channels] -> y [T, channels], states [S + C, channels]."""
    # From here on: c tiles, l places in a tile, d channels.
    decays, xs = (plan.tiled(v) for v in (log_decays(tokens.gate, constants), tokens.x.float()))
    if plan.padding is not None:
        decays, xs = (values.masked_fill(plan.padding, 0) for values in (decays, xs))
    y = torch.empty_like(decays)
    h = initial.new_zeros(plan.num_tiles, initial.shape[1])  # [c, d]
    for place in range(plan.tile_length):
        h = h * decays[:, place].exp() + xs[:, place]
        y[:, place] = h
    from_start = torch.cumsum(decays, dim=1).exp_()  # [c, l, d]
    states = torch.cat((initial, h))  # [S + c, d]
    plan.carry(states, from_start[:, -1])
    y.addcmul_(from_start, plan.before(states)[:, None])
    return plan.tokens(y), states


def _advance(h: Tensor, inputs: tuple[Tensor, ...], constants: RGLRUConstants) -> None:
    """h [N, channels]"""
    x, gate = inputs
    h.mul_(log_decays(gate, constants).exp_()).add_(x.float())


def _read_out(h: Tensor, tokens: RGLRUTokens, constants: RGLRUConstants) -> Tensor:
    """[N, channels]"""
    return h


scan = TorchScan(_LARGEST_TILE, _over_tiles, _advance, _read_out)
plan, prefill = scan.plan, scan.prefill
decode, decode_runs = scan.decode, scan.decode_runs
