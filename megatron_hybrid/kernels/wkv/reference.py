"""RWKV-4's weighted key values in plain torch (Peng et al., "RWKV", 2023, arXiv 2305.13048,
equation 16 and appendix B). Of a channel, with w the decay (negative) and u the bonus:

    weight of token i for token t:  exp((t - 1 - i) w + k[i])  for i < t,   exp(u + k[t])  for t

    y[t] = sum of weight v / sum of weight

A state is [channels, 2]: a, the mean of the values so far by these weights, and L, the log of the
weights' sum: both stay of a usual size however large k is. With another token, a (+) meaning the
log of the sum of two exponentials:

    y[t]  = a exp(L - M) + v exp(u + k - M)        M  = L (+) (u + k)
    a'    = a exp(L + w - L') + v exp(k - L')      L' = (L + w) (+) k

The outputs are of the state before a token. A state of zeros is empty: there L stands for minus
infinity; a log that is 0 is kept as 1e-30.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_hybrid.kernels.channel_scans import WKVConstants, WKVTokens
from megatron_hybrid.kernels.runs import TorchScan
from megatron_hybrid.kernels.tiles import TilePlan

_LARGEST_TILE = 16  # places of a tile, and tiles of a sequence, are loops
_NOT_EMPTY = 1e-30


def _mean(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Of two (mean, log of the weights' sum) the same of both together; one may be empty."""
    # Not logaddexp, whose bits depend on where a number stands.
    largest = torch.maximum(first[1], second[1])
    weights = torch.exp(first[1] - largest), torch.exp(second[1] - largest)
    total = weights[0] + weights[1]
    mean = (first[0] * weights[0] + second[0] * weights[1]) / total
    return mean, largest + torch.log1p(total - 1)


def _opened(states: Tensor) -> tuple[Tensor, Tensor]:
    """states [N, channels, 2] as they are kept -> mean and log [N, channels] each."""
    mean, log = states.unbind(2)
    return mean, log.masked_fill(log == 0, -torch.inf)


def _closed(mean: Tensor, log: Tensor) -> Tensor:
    """The way back."""
    log = log.masked_fill(log == 0, _NOT_EMPTY)
    return torch.stack((mean, log.masked_fill(log == -torch.inf, 0)), dim=2)


def _over_tiles(
    tokens: WKVTokens, constants: WKVConstants, initial: Tensor, plan: TilePlan
) -> tuple[Tensor, Tensor]:
    """initial [S, channels, 2] -> y [T, channels], states [S + C, channels, 2]."""
    # From here on: c tiles, l places in a tile, d channels.
    ks, vs = (plan.tiled(values.float()) for values in tokens)
    tiles, length, channels = ks.shape
    # The scan of each tile from an empty state; what a place's token sees of its tile.
    inside: list[tuple[Tensor, Tensor]] = []
    own = ks.new_zeros(tiles, channels), ks.new_full((tiles, channels), -torch.inf)
    counts = ks.new_zeros(tiles, 1)
    for place in range(length):
        inside.append(own)
        after = _mean((own[0], own[1] + constants.decay), (vs[:, place], ks[:, place]))
        real = ks.new_ones(tiles, 1, dtype=torch.bool)
        if plan.padding is not None:
            real = ~plan.padding[:, place]
        own = torch.where(real, after[0], own[0]), torch.where(real, after[1], own[1])
        counts += real
    # The states at the tiles' ends.
    means, logs = (torch.cat(both) for both in zip(_opened(initial), own, strict=True))
    for now, rows in plan.rounds:
        decayed = logs.index_select(0, rows) + counts.index_select(0, now) * constants.decay
        part = own[0].index_select(0, now), own[1].index_select(0, now)
        mean, log = _mean((means.index_select(0, rows), decayed), part)
        means.index_copy_(0, now + plan.num_sequences, mean)
        logs.index_copy_(0, now + plan.num_sequences, log)
    y = torch.empty_like(vs)
    mean, log = plan.before(means), plan.before(logs)
    for place, (mean_inside, log_inside) in enumerate(inside):
        earlier = mean, log + place * constants.decay
        # The tile's start and what is inside may both be empty, and then have no mean together.
        seen = _mean(earlier, (vs[:, place], ks[:, place] + constants.bonus))
        y[:, place] = _mean((mean_inside, log_inside), seen)[0]
    return plan.tokens(y), _closed(means, logs)


def _advance(states: Tensor, inputs: tuple[Tensor, ...], constants: WKVConstants) -> None:
    """states [N, channels, 2]"""
    k, v = (values.float() for values in inputs)
    mean, log = _opened(states)
    states.copy_(_closed(*_mean((mean, log + constants.decay), (v, k))))


def _read_out(states: Tensor, tokens: WKVTokens, constants: WKVConstants) -> Tensor:
    """[N, channels]"""
    k, v = (values.float() for values in tokens)
    return _mean(_opened(states), (v, k + constants.bonus))[0]


scan = TorchScan(_LARGEST_TILE, _over_tiles, _advance, _read_out, reads_before=True)
plan, prefill = scan.plan, scan.prefill
decode, decode_runs = scan.decode, scan.decode_runs
