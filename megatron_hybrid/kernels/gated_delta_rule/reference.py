"""The gated delta rule in plain torch (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024).

Of a value head, with S [v_dim, k_dim], and q and k, of its key head, divided by their lengths, q
besides by sqrt(k_dim):

    g[t] = A softplus(a[t] + dt_bias)           beta[t] = beta_scale sigmoid(b[t])
    d[t] = beta[t] (v[t] - exp(g[t]) S[t-1] k[t])
    S[t] = exp(g[t]) S[t-1] + d[t] k[t]^T
    y[t] = S[t] q[t]

Prefill uses the chunked form (section 3.3 there, and Yang et al., "Parallelizing Linear
Transformers with the Delta Rule over Sequence Length", 2024, section 3) on the tiles of tiles.py.
With S0 the state at a tile's start and G[t] the sum of g from there to t:

    d[l] + beta[l] sum over s < l of exp(G[l] - G[s]) (k[l] . k[s]) d[s]
         = beta[l] v[l] - beta[l] exp(G[l]) S0 k[l]

The solution of this triangular system is d = u - w S0^T, where neither u nor w needs S0: all tiles
are solved at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_hybrid.kernels.elementwise import sigmoid, softplus
from megatron_hybrid.kernels.protocols import DeltaRuleConstants, DeltaRuleTokens
from megatron_hybrid.kernels.runs import TorchScan
from megatron_hybrid.kernels.tiles import TilePlan

# The work inside a tile grows with its square; across tiles it is a loop. 64 balances them.
_LARGEST_TILE = 64
_EPS = 1e-6  # in the lengths of q and k


def _over_tiles(
    tokens: DeltaRuleTokens, constants: DeltaRuleConstants, initial: Tensor, plan: TilePlan
) -> tuple[Tensor, Tensor]:
    """initial [S, v_heads, v_dim, k_dim] -> y [T, v_heads, v_dim], states [S + C, ...]."""
    q, k, v, a, b = tokens
    heads, v_dim = v.shape[1:]
    k_heads, k_dim = k.shape[1:]
    tiles, length = plan.num_tiles, plan.tile_length

    # From here on: c tiles, l and s places in a tile, h value heads, g key heads, r heads of each.
    decay, beta = (plan.tiled(values) for values in _gates(a, b, constants))  # [c, l, h] float64
    if plan.padding is not None:
        decay, beta = (values.masked_fill(plan.padding, 0) for values in (decay, beta))
    # Log of the decay from the tile's start, of which differences count.
    decay = torch.cumsum(decay, dim=1).transpose(1, 2)  # [c, h, l]
    to_end = (decay[..., -1:] - decay).exp_().float()[..., None]  # [c, h, l, 1]
    from_start = decay.exp().float()[..., None]
    beta = beta.float().transpose(1, 2)[..., None]
    qs = plan.tiled(_normalised(q) * k_dim**-0.5).transpose(1, 2)  # [c, g, l, k_dim]
    ks = plan.tiled(_normalised(k)).transpose(1, 2)
    vs = plan.tiled(v.float()).transpose(1, 2)  # [c, h, l, v_dim]

    between = (decay[..., :, None] - decay[..., None, :]).float()  # [c, h, l, s]
    between.exp_().tril_()  # above the diagonal exp may overflow; tril_ drops it
    between = between.view(tiles, k_heads, -1, length, length)  # [c, g, r, l, s]
    inside = between * torch.matmul(ks, ks.transpose(2, 3))[:, :, None]
    weights = (between * torch.matmul(qs, ks.transpose(2, 3))[:, :, None]).flatten(1, 2)
    qs, ks = (values.repeat_interleave(heads // k_heads, dim=1) for values in (qs, ks))

    # unitriangular: the system's diagonal is not read but taken to be 1.
    u, w = torch.linalg.solve_triangular(
        inside.flatten(1, 2) * beta,
        torch.cat((vs * beta, ks * (beta * from_start)), dim=3),
        upper=False,
        unitriangular=True,
    ).split([v_dim, k_dim], dim=3)

    # From tile to tile: what the tokens add, and the states at the tiles' ends.
    states = initial.new_empty(plan.num_sequences + tiles, heads, v_dim, k_dim)
    states[: plan.num_sequences] = initial
    added = torch.empty_like(vs, memory_format=torch.contiguous_format)  # d
    ks = ks * to_end
    for now, rows in plan.rounds:
        before = states.index_select(0, rows)
        d = u.index_select(0, now) - w.index_select(0, now) @ before.transpose(2, 3)
        added.index_copy_(0, now, d)
        after = before.mul_(from_start.index_select(0, now)[:, :, -1:])
        after += d.transpose(2, 3) @ ks.index_select(0, now)
        states.index_copy_(0, now + plan.num_sequences, after)

    y = torch.matmul(qs * from_start, plan.before(states).transpose(2, 3))
    y += torch.matmul(weights, added)
    return plan.tokens(y.transpose(1, 2)), states


def _advance(states: Tensor, inputs: tuple[Tensor, ...], constants: DeltaRuleConstants) -> None:
    """states [N, heads, v_dim, k_dim]"""
    k, v, a, b = inputs
    rows, k_heads, k_dim = k.shape
    by_group = states.view(rows, k_heads, -1, k_dim)  # [N, g, r v_dim, k_dim]
    ks = _normalised(k)[:, :, None]  # [N, g, 1, k_dim]
    decay, beta = _gates(a, b, constants)
    states.mul_(decay.exp_().float()[:, :, None, None])
    # A row times a matrix: the other way round, bmm is seven times slower on a CPU.
    known = torch.matmul(ks, by_group.transpose(2, 3)).view(v.shape)
    d = (v.float() - known) * beta.float()[:, :, None]
    by_group.addcmul_(d.view(rows, k_heads, -1, 1), ks)


def _read_out(states: Tensor, tokens: DeltaRuleTokens, constants: DeltaRuleConstants) -> Tensor:
    """[N, heads, v_dim]"""
    rows, k_heads, k_dim = tokens.q.shape
    qs = _normalised(tokens.q)[:, :, None] * k_dim**-0.5
    y = torch.matmul(qs, states.view(rows, k_heads, -1, k_dim).transpose(2, 3))
    return y.view(states.shape[:3])


def _gates(a: Tensor, b: Tensor, constants: DeltaRuleConstants) -> tuple[Tensor, Tensor]:
    """g and beta, [T, heads] float64."""
    decay = constants.A * softplus(a.double() + constants.dt_bias)
    return decay, sigmoid(b.double()).mul_(constants.beta_scale)


def _normalised(rows: Tensor) -> Tensor:
    """[..., k_dim] float32: divided by their lengths."""
    rows = rows.float()
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + _EPS)


scan = TorchScan(_LARGEST_TILE, _over_tiles, _advance, _read_out)
plan, prefill = scan.plan, scan.prefill
decode, decode_runs = scan.decode, scan.decode_runs
