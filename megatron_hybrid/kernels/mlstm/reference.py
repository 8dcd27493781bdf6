"""The mLSTM in plain torch (Beck et al., "xLSTM", 2024, arXiv 2405.04517, section 2.3; as "xLSTM
7B", arXiv 2503.13427, has it). Of a head, with C [v_dim, k_dim], n [k_dim], i and f the gates and q
divided by sqrt(k_dim):

    C[t] = sigmoid(f[t]) C[t-1] + exp(i[t]) v[t] k[t]^T
    n[t] = sigmoid(f[t]) n[t-1] + exp(i[t]) k[t]
    y[t] = C[t] q[t] / max(|n[t] . q[t]|, 1)

C and n are kept divided by exp(m), m[t] = max(log sigmoid(f[t]) + m[t-1], i[t]), m = 0 before the
first token, so that no exponential overflows; then 1 is exp(-m), and to that eps is added. A head's
state is [v_dim + 2, k_dim]: the rows of C, n, and m in the first column of the last row.

Prefill uses the chunked form on the tiles of tiles.py. With F[l] the sum of log sigmoid(f) from a
tile's start to l, token s has the log weight F[l] - F[s] + i[s] for l, and the state at the tile's
start F[l] + m; all tiles are computed at once, each from its own largest weight on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_hybrid.kernels.channel_scans import MLSTMConstants, MLSTMTokens
from megatron_hybrid.kernels.elementwise import softplus
from megatron_hybrid.kernels.runs import TorchScan
from megatron_hybrid.kernels.tiles import TilePlan

_LARGEST_TILE = 64  # as of the gated delta rule


def _over_tiles(
    tokens: MLSTMTokens, constants: MLSTMConstants, initial: Tensor, plan: TilePlan
) -> tuple[Tensor, Tensor]:
    """initial [S, heads, v_dim + 2, k_dim] -> y [T, heads, v_dim], states [S + C, ...]."""
    # From here on: c tiles, l and s places in a tile, h heads.
    q, k, v = (plan.tiled(x.float()).transpose(1, 2) for x in tokens[:3])  # [c, h, l, dim]
    q = q * k.shape[-1] ** -0.5
    i, forget = plan.tiled(tokens.i.double()), -softplus(-plan.tiled(tokens.f.double()))
    if plan.padding is not None:
        i, forget = i.masked_fill(plan.padding, -torch.inf), forget.masked_fill(plan.padding, 0)
    decay = torch.cumsum(forget, dim=1).transpose(1, 2)  # F [c, h, l]
    own = i.transpose(1, 2) - decay  # [c, h, s]
    logs = decay[..., :, None] + own[..., None, :]  # [c, h, l, s]
    later = torch.ones(logs.shape[-2:], dtype=torch.bool, device=logs.device).triu_(1)
    logs = logs.masked_fill_(later, -torch.inf)
    inside = logs.amax(-1)  # [c, h, l]
    weights = torch.exp(logs - inside[..., None]).float() * (q @ k.mT)  # [c, h, l, s]

    # From tile to tile: what the tokens add, and the states at the tiles' ends.
    to_end = torch.exp(logs[..., -1, :] - inside[..., -1:]).float()[..., None]  # [c, h, s, 1]
    with_ones = torch.cat((v, torch.ones_like(v[..., :1])), dim=-1)  # and what n takes in
    added = (with_ones * to_end).mT @ k  # [c, h, v_dim + 1, k_dim]
    states = torch.cat((initial, initial.new_empty(plan.num_tiles, *initial.shape[1:])))
    for now, rows in plan.rounds:
        before = states.index_select(0, rows)
        start = before[:, :, -1, 0] + decay.index_select(0, now)[..., -1]  # [n, h] float64
        end = inside.index_select(0, now)[..., -1]
        largest = torch.maximum(start, end)
        kept, new = (torch.exp(x - largest).float()[..., None, None] for x in (start, end))
        before[:, :, :-1] = before[:, :, :-1] * kept + added.index_select(0, now) * new
        before[:, :, -1, 0] = largest
        states.index_copy_(0, now + plan.num_sequences, before)

    before = plan.before(states)
    start = before[:, :, -1:, 0] + decay  # [c, h, l] float64
    largest = torch.maximum(start, inside)
    earlier, here = (torch.exp(x - largest).float()[..., None] for x in (start, inside))
    y = q @ before[:, :, :-1].mT * earlier + weights @ with_ones * here  # [c, h, l, v_dim + 1]
    y = _quotient(y, largest.float()[..., None], constants)
    return plan.tokens(y.transpose(1, 2)), states


def _quotient(both: Tensor, m: Tensor, constants: MLSTMConstants) -> Tensor:
    """C q and n . q, [..., v_dim + 1], and m [..., 1] -> [..., v_dim]."""
    values, total = both[..., :-1], both[..., -1:]
    return values / (torch.maximum(total.abs(), torch.exp(-m)) + constants.eps)


def _advance(states: Tensor, inputs: tuple[Tensor, ...], constants: MLSTMConstants) -> None:
    """states [N, heads, v_dim + 2, k_dim]"""
    k, v, i, f = (values.float() for values in inputs)
    start = states[:, :, -1, 0] - softplus(-f)
    largest = torch.maximum(start, i)
    kept, new = (torch.exp(x - largest)[..., None] for x in (start, i))
    with_ones = torch.cat((v, torch.ones_like(v[..., :1])), dim=-1) * new
    sums = states[:, :, :-1]
    sums.mul_(kept[..., None]).addcmul_(with_ones[..., None], k[..., None, :])
    states[:, :, -1, 0] = largest


def _read_out(states: Tensor, tokens: MLSTMTokens, constants: MLSTMConstants) -> Tensor:
    """[N, heads, v_dim]"""
    q = tokens.q.float() * tokens.k.shape[-1] ** -0.5
    both = (states[:, :, :-1] @ q[..., None])[..., 0]
    return _quotient(both, states[:, :, -1, :1], constants)


scan = TorchScan(_LARGEST_TILE, _over_tiles, _advance, _read_out)
plan, prefill = scan.plan, scan.prefill
decode, decode_runs = scan.decode, scan.decode_runs
