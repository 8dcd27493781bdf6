"""The gated delta rule in plain torch (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024),
and Kimi delta attention, KDA ("Kimi Linear", arXiv 2510.26692).

Of a value head, with S [v_dim, k_dim], and q and k, of its key head, divided by their lengths, q
besides by sqrt(k_dim):

    g[t] = A softplus(a[t] + dt_bias)           beta[t] = beta_scale sigmoid(b[t])
    d[t] = beta[t] (v[t] - exp(g[t]) S[t-1] k[t])
    S[t] = exp(g[t]) S[t-1] + d[t] k[t]^T
    y[t] = S[t] q[t]

KDA has a g of its own for each channel of the keys: exp(g[t]) is a diagonal matrix then, on the
right of S[t-1]. Where it has a lower bound, g[t] = lower_bound sigmoid(-A (a[t] + dt_bias)).

Prefill uses the chunked form (section 3.3 there, and Yang et al., "Parallelizing Linear
Transformers with the Delta Rule over Sequence Length", 2024, section 3) on the tiles of tiles.py.
With S0 the state at a tile's start and G[t] the sum of g from there to t:

    d[l] + beta[l] sum over s < l of exp(G[l] - G[s]) (k[l] . k[s]) d[s]
         = beta[l] v[l] - beta[l] exp(G[l]) S0 k[l]

(of KDA k[l]^T diag(exp(G[l] - G[s])) k[s], and S0 diag(exp(G[l])) k[l]).
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

    # From here on: c tiles, l and s places in a tile, h value heads, g key heads, r heads of each,
    # n is 1, or k_dim where each channel has a decay.
    decay, beta = (plan.tiled(values) for values in _gates(a, b, constants))  # float64
    if plan.padding is not None:
        padding = plan.padding[..., None]
        decay, beta = (values.masked_fill(padding, 0) for values in (decay, beta))
    # Log of the decay from the tile's start, of which differences count.
    decay = torch.cumsum(decay, dim=1).transpose(1, 2)  # [c, h, l, n]
    to_end = (decay[:, :, -1:] - decay).exp_().float()
    from_start = decay.exp().float()
    beta = beta.float().transpose(1, 2)  # [c, h, l, 1]
    qs = plan.tiled(_normalised(q) * k_dim**-0.5).transpose(1, 2)  # [c, g, l, k_dim]
    ks = plan.tiled(_normalised(k)).transpose(1, 2)
    vs = plan.tiled(v.float()).transpose(1, 2)  # [c, h, l, v_dim]

    if decay.shape[3] == 1:
        between = (decay - decay.transpose(2, 3)).float()  # [c, h, l, s]
        between.exp_().tril_()  # above the diagonal exp may overflow; tril_ drops it
        between = between.view(tiles, k_heads, -1, length, length)  # [c, g, r, l, s]
        inside, weights = (
            (between * torch.matmul(rows, ks.transpose(2, 3))[:, :, None]).flatten(1, 2)
            for rows in (ks, qs)
        )
    qs, ks = (values.repeat_interleave(heads // k_heads, dim=1) for values in (qs, ks))
    if decay.shape[3] > 1:
        inside, weights = _decayed_products((ks, qs), ks, decay)

    # unitriangular: the system's diagonal is not read but taken to be 1.
    u, w = torch.linalg.solve_triangular(
        inside * beta,
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


def _decayed_products(
    all_rows: tuple[Tensor, ...], ks: Tensor, decay: Tensor
) -> tuple[Tensor, ...]:
    """Sums over channels n of rows[l, n] ks[s, n] exp(decay[l, n] - decay[s, n]), for s <= l, else
    0, of each of the rows: [c, h, l, n] -> [c, h, l, s].

    A pair lies in the two halves of one block of 2, 4, 8, ... places: with the decay at the end of
    the first half between them, both factors are at most 1.
    """
    length = decay.shape[2]
    place = torch.arange(length, device=decay.device)
    products = tuple(torch.diag_embed((rows * ks).sum(dim=-1)) for rows in all_rows)
    half = 1
    while half < length:
        block = place // (2 * half)
        in_second = (place % (2 * half) >= half)[:, None]
        middle = decay.index_select(2, (block * 2 * half + half - 1).clamp(max=length - 1))
        from_middle = (decay - middle).clamp_(max=0).exp_().float() * in_second
        to_middle = (middle - decay).clamp_(max=0).exp_().float() * ~in_second
        pairs = block[:, None] == block
        for product, rows in zip(products, all_rows, strict=True):
            product += torch.matmul(rows * from_middle, (ks * to_middle).transpose(2, 3)) * pairs
        half *= 2
    return products


def _advance(states: Tensor, inputs: tuple[Tensor, ...], constants: DeltaRuleConstants) -> None:
    """states [N, heads, v_dim, k_dim]"""
    k, v, a, b = inputs
    rows, k_heads, k_dim = k.shape
    by_group = states.view(rows, k_heads, -1, k_dim)  # [N, g, r v_dim, k_dim]
    ks = _normalised(k)[:, :, None]  # [N, g, 1, k_dim]
    decay, beta = _gates(a, b, constants)
    states.mul_(decay.exp_().float()[:, :, None])
    # A row times a matrix: the other way round, bmm is seven times slower on a CPU.
    known = torch.matmul(ks, by_group.transpose(2, 3)).view(v.shape)
    d = (v.float() - known) * beta.float()
    by_group.addcmul_(d.view(rows, k_heads, -1, 1), ks)


def _read_out(states: Tensor, tokens: DeltaRuleTokens, constants: DeltaRuleConstants) -> Tensor:
    """[N, heads, v_dim]"""
    rows, k_heads, k_dim = tokens.q.shape
    qs = _normalised(tokens.q)[:, :, None] * k_dim**-0.5
    y = torch.matmul(qs, states.view(rows, k_heads, -1, k_dim).transpose(2, 3))
    return y.view(states.shape[:3])


def _gates(a: Tensor, b: Tensor, constants: DeltaRuleConstants) -> tuple[Tensor, Tensor]:
    """g [T, heads, 1 or k_dim] and beta [T, heads, 1], float64."""
    rate, bias = constants.A[:, None], constants.dt_bias
    if a.ndim == 2:
        a, bias = a[..., None], bias[:, None]
    moved, beta = a.double() + bias, sigmoid(b.double()).mul_(constants.beta_scale)[..., None]
    if constants.lower_bound is None:
        return rate * softplus(moved), beta
    return constants.lower_bound * sigmoid(-rate * moved), beta


def _normalised(rows: Tensor) -> Tensor:
    """[..., k_dim] float32: divided by their lengths."""
    rows = rows.float()
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + _EPS)


scan = TorchScan(_LARGEST_TILE, _over_tiles, _advance, _read_out)
plan, prefill = scan.plan, scan.prefill
decode, decode_runs = scan.decode, scan.decode_runs
