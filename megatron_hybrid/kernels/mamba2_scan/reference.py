"""The Mamba2 scan in plain torch.

    h[t] = exp(dt[t] A) h[t-1] + dt[t] x[t] B[t]^T          h: [head_dim, state]
    y[t] = h[t] C[t] + D x[t]

Prefill uses the chunked matrix form (SSD: Dao and Gu, "Transformers are SSMs", 2024, section 6).
Sequences are cut at multiples of a tile that divides the kernel chunk, counted from position 0 of
the SEQUENCE, so the arithmetic of a tile does not depend on how the prefill was segmented:

    positions     0        64       128       192
    one piece     |--------|---------|---------|----
    two pieces    |--------|---##    |
                                 ####|---------|----   starts in the middle: a short first tile
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.kernels.contract import PrefillSegments
from megatron_hybrid.kernels.slots import DecodePlan, SlotReads, SlotWrites

# The work inside a tile grows with its square; across tiles it is a loop. 64 balances them.
_LARGEST_TILE = 64


@dataclass(frozen=True, slots=True)
class ScanPlan:
    """The tiles of a step, the same for every layer. C tiles of at most L tokens."""

    reads: SlotReads
    writes: SlotWrites
    write_rows: Tensor  # [writes]: rows of cat(initial states, states after each tile)
    before_rows: Tensor | None  # [C]: the row each tile starts from; None for one sequence
    rounds: list[tuple[Tensor, Tensor]]  # (tiles, rows they start from), the r-th of each sequence
    token_index: Tensor | None  # [C * L]: token of each place; None when tiles are all of L tokens
    padding: Tensor | None  # [C, L, 1] bool: places past a tile's end
    places: Tensor | None  # [T]: place of each token
    num_sequences: int
    num_tiles: int
    tile_length: int


def tile_size(kernel_chunk: int) -> int:
    """The largest divisor of the kernel chunk up to 64: a state on the chunk grid is then always
    the state at a tile's end."""
    return max(d for d in range(1, min(kernel_chunk, _LARGEST_TILE) + 1) if kernel_chunk % d == 0)


def plan(segments: PrefillSegments, kernel_chunk: int) -> ScanPlan:
    device = segments.cu_seqlens.device
    bounds: list[int] = segments.cu_seqlens.tolist()
    starts: list[int] = segments.start_position.tolist()
    write_slots: list[int] = segments.write_slot.tolist()
    num_sequences = len(starts)
    tile = tile_size(kernel_chunk)

    first_token: list[int] = []
    length: list[int] = []
    before: list[int] = []  # rows of cat(initial [S], after [C])
    rounds: list[tuple[list[int], list[int]]] = []
    row_at: dict[tuple[int, int], int] = {}  # (sequence, position) at a tile's end -> row
    final_row: list[int] = []
    for sequence, start in enumerate(starts):
        end = start + bounds[sequence + 1] - bounds[sequence]
        position, row, turn = start, sequence, 0
        while position < end:
            tile_end = min(position - position % tile + tile, end)
            if turn == len(rounds):
                rounds.append(([], []))
            rounds[turn][0].append(len(length))
            rounds[turn][1].append(row)
            before.append(row)
            row = num_sequences + len(length)
            row_at[sequence, tile_end] = row
            first_token.append(bounds[sequence] + position - start)
            length.append(tile_end - position)
            position, turn = tile_end, turn + 1
        final_row.append(row)

    write_rows = list(final_row)
    for sequence, position, slot in segments.checkpoints():
        write_rows.append(row_at[sequence, position])
        write_slots.append(slot)
    kept = [(row, slot) for row, slot in zip(write_rows, write_slots, strict=True) if slot > 0]

    longest = max(length, default=0)
    token_index = padding = places = None
    if any(n != longest for n in length):
        lengths = torch.tensor(length, device=device)[:, None]
        columns = torch.arange(longest, device=device)
        padding = columns >= lengths
        # A padded place repeats its own tile's last token, never a neighbour's.
        first = torch.tensor(first_token, device=device)[:, None]
        token_index = (first + torch.minimum(columns, lengths - 1)).flatten()
        places = (~padding).flatten().nonzero().squeeze(1)
        padding = padding[:, :, None]

    def index(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return ScanPlan(
        reads=SlotReads.of(segments.read_slot.tolist(), device),
        writes=SlotWrites.of([slot for _, slot in kept], device),
        write_rows=index([row for row, _ in kept]),
        before_rows=None if num_sequences == 1 else index(before),
        rounds=[(index(tiles), index(rows)) for tiles, rows in rounds] if num_sequences > 1 else [],
        token_index=token_index,
        padding=padding,
        places=places,
        num_sequences=num_sequences,
        num_tiles=len(length),
        tile_length=longest,
    )


def prefill(
    x: Tensor,
    B: Tensor,
    C: Tensor,
    dt: Tensor,
    A: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    state: Tensor,
    plan: ScanPlan,
    out: Tensor | None = None,
) -> Tensor:
    """x [T, heads, head_dim], B and C [T, groups, state], dt [T, heads] before bias and softplus,
    A (negative), D and dt_bias [heads] float32, state [slots, heads, head_dim, state] (read and
    written) -> y [T, heads, head_dim] in x's dtype, in `out` if that is given. Rows of x, B, C and
    dt may be strided."""
    tokens, heads, head_dim = x.shape
    groups, size = B.shape[1:]
    shape = (plan.num_tiles, plan.tile_length)
    initial = plan.reads.gather(state).float()  # [S, heads, head_dim, state]
    if plan.num_tiles == 0:
        plan.writes.scatter(state, initial.index_select(0, plan.write_rows))
        return _into(out, torch.empty_like(x))

    # From here on: c tiles, l and s places in a tile, h heads, g groups, p head_dim, n state.
    dt = _step_sizes(dt, dt_bias, dt_limit)
    xs, Bs, Cs = x.float(), B.float(), C.float()
    if plan.token_index is not None and plan.padding is not None:
        xs, Bs, Cs, dt = (v.index_select(0, plan.token_index) for v in (xs, Bs, Cs, dt))
        dt = dt.view(*shape, heads).masked_fill(plan.padding, 0)  # no decay and no input
    else:
        dt = dt.view(*shape, heads)
    xs = xs.reshape(*shape, heads, head_dim)
    Bs = Bs.reshape(*shape, groups, size).transpose(1, 2)  # [c, g, l, n]
    Cs = Cs.reshape(*shape, groups, size).transpose(1, 2)
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
    _carry(states, decay[:, -1].float().exp_(), plan)
    if plan.before_rows is None:
        before = states[: plan.num_tiles]
    else:
        before = states.index_select(0, plan.before_rows)
    plan.writes.scatter(state, states.index_select(0, plan.write_rows))

    # What the state at a tile's start gives: y[l] += exp(decay[l]) C[l] h.
    before = before.view(shape[0], groups, -1, size).transpose(2, 3)  # [c, g, n, h p / g]
    carried = torch.matmul(Cs, before).transpose(1, 2).reshape(*shape, heads, head_dim)
    y = (
        carried.mul_(decay.float().exp_()[..., None])
        .add_(inside.transpose(1, 2))
        .addcmul_(xs, D[:, None])
    )
    y = y.reshape(-1, heads, head_dim)
    if plan.places is not None:
        y = y.index_select(0, plan.places)
    return _into(out, y.to(x.dtype))


def _carry(states: Tensor, decay: Tensor, plan: ScanPlan) -> None:
    """states [S + c, h, p, n] = initial states, then what each tile adds -> the states after each
    tile, in place; decay [c, h]."""
    factor = decay[:, :, None, None]
    if plan.num_sequences == 1:
        for tile in range(plan.num_tiles):
            states[tile + 1].addcmul_(states[tile], factor[tile])
        return
    for tiles, rows in plan.rounds:
        carried = states.index_select(0, rows).mul_(factor.index_select(0, tiles))
        states.index_add_(0, tiles + plan.num_sequences, carried)


def decode(
    x: Tensor,
    B: Tensor,
    C: Tensor,
    dt: Tensor,
    A: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    state: Tensor,
    plan: DecodePlan,
    out: Tensor | None = None,
) -> Tensor:
    """One token a sequence: as above with T = N sequences."""
    rows, heads, head_dim = x.shape
    groups, size = B.shape[1:]
    dt = _step_sizes(dt, dt_bias, dt_limit)
    xs = x.float()
    in_place = plan.in_place is not None and state.dtype == torch.float32
    if in_place and plan.in_place is not None:
        states = state.narrow(0, *plan.in_place)
    else:
        states = plan.reads.gather(state).float()
    by_group = states.view(rows, groups, -1, size)  # [N, g, h p / g, n]
    states.mul_((dt * A).exp_()[:, :, None, None])
    by_group.addcmul_((xs * dt[..., None]).view(rows, groups, -1, 1), B.float()[:, :, None])
    # A row times a matrix: the other way round, bmm is seven times slower on a CPU.
    y = torch.bmm(C.float().reshape(-1, 1, size), by_group.flatten(0, 1).transpose(1, 2))
    y = y.view(rows, heads, head_dim)
    if not in_place:
        plan.writes.scatter(state, states)
    return _into(out, y.addcmul_(xs, D[:, None]).to(x.dtype))


def _step_sizes(dt: Tensor, bias: Tensor, limit: tuple[float, float]) -> Tensor:
    """[T, heads] float32: softplus(dt + bias), clamped."""
    steps = F.softplus(dt.float() + bias)
    if limit != (0.0, float("inf")):  # softplus is positive
        steps.clamp_(*limit)
    return steps


def _into(out: Tensor | None, values: Tensor) -> Tensor:
    return values if out is None else out.copy_(values)
