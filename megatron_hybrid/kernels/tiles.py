"""Cutting a step's sequences into tiles, for the scans in plain torch.

Sequences are cut at multiples of the tile length, counted from position 0 of the SEQUENCE, so the
arithmetic of a tile does not depend on how the prefill was segmented:

    positions     0        64       128       192
    one piece     |--------|---------|---------|----
    two pieces    |--------|---##    |
                                 ####|---------|----   starts in the middle: a short first tile

A scan works inside all tiles at once, then carries the state from tile to tile. A tile length that
divides the kernel chunk makes a state on the chunk grid the state at some tile's end.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import PrefillSegments
from megatron_hybrid.kernels.slots import SlotReads, SlotWrites, indices


@dataclass(frozen=True, slots=True)
class TilePlan:
    """The tiles of a step, the same for every layer: C tiles of at most L tokens, S sequences.

    States are numbered as the rows of cat(initial states [S], states after each tile [C]).
    """

    reads: SlotReads  # of the initial states
    writes: SlotWrites
    write_rows: Tensor  # [writes]: which states are written
    write_positions: Tensor  # [writes]: how many tokens of their sequences are in them
    before_rows: Tensor | None  # [C]: the state each tile starts from; None for one sequence
    rounds: list[tuple[Tensor, Tensor]]  # (tiles, states they start from), the r-th of each
    token_index: Tensor | None  # [C * L]: token of each place; None when tiles are all of L tokens
    padding: Tensor | None  # [C, L, 1] bool: places past a tile's end
    places: Tensor | None  # [T]: place of each token
    num_sequences: int
    num_tiles: int
    tile_length: int

    def tiled(self, values: Tensor) -> Tensor:
        """[T, ...] -> [C, L, ...]; a place past a tile's end repeats the tile's last token."""
        if self.token_index is not None:
            values = values.index_select(0, self.token_index)
        return values.reshape(self.num_tiles, self.tile_length, *values.shape[1:])

    def tokens(self, values: Tensor) -> Tensor:
        """[C, L, ...] -> [T, ...]."""
        flat = values.reshape(-1, *values.shape[2:])
        return flat if self.places is None else flat.index_select(0, self.places)

    def before(self, states: Tensor) -> Tensor:
        """states [S + C, ...] -> [C, ...]: those that the tiles start from."""
        if self.before_rows is None:
            return states[: self.num_tiles]
        return states.index_select(0, self.before_rows)

    def carry(self, states: Tensor, factor: Tensor) -> None:
        """states [S + C, ...] = initial states, then what each tile adds -> the states after each
        tile, in place; factor [C, ...], broadcast: what a state decays by in a tile."""
        if self.num_sequences == 1:
            for tile in range(self.num_tiles):
                # not addcmul_, which rounds once: several sequences are rounded twice, too
                states[tile + 1] += states[tile] * factor[tile]
            return
        for tiles, rows in self.rounds:
            carried = states.index_select(0, rows).mul_(factor.index_select(0, tiles))
            states.index_add_(0, tiles + self.num_sequences, carried)


def largest_tile(kernel_chunk: int, limit: int) -> int:
    """The largest divisor of the kernel chunk up to `limit`."""
    return max(d for d in range(1, min(kernel_chunk, limit) + 1) if kernel_chunk % d == 0)


def plan_tiles(segments: PrefillSegments, tile: int, *, whole: bool = False) -> TilePlan:
    """`tile`: tokens of a tile; checkpoints lie on multiples of it, or at a sequence's start.
    `whole`: every tile has as many places, filled up where it ends before."""
    device = segments.cu_seqlens.device
    bounds: list[int] = segments.cu_seqlens.tolist()
    starts: list[int] = segments.start_position.tolist()
    num_sequences = len(starts)

    first_token: list[int] = []
    length: list[int] = []
    before: list[int] = []
    rounds: list[tuple[list[int], list[int]]] = []
    row_at: dict[tuple[int, int], int] = {}  # (sequence, position) at a tile's end -> state
    written: list[tuple[int, int]] = []  # state, slot
    positions: list[int] = []
    for sequence, (start, slot) in enumerate(
        zip(starts, segments.write_slot.tolist(), strict=True)
    ):
        end = start + bounds[sequence + 1] - bounds[sequence]
        position, row, turn = start, sequence, 0
        row_at[sequence, start] = sequence
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
        written.append((row, slot))
        positions.append(end)
    checkpoints = list(segments.checkpoints())
    written += [(row_at[s, position], slot) for s, position, slot in checkpoints]
    positions += [position for _, position, _ in checkpoints]
    write_rows, writes = SlotWrites.some(written, device)
    is_written = [slot > 0 for _, slot in written]

    longest = tile if whole else max(length, default=0)
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
    return TilePlan(
        reads=SlotReads.of(segments.read_slot.tolist(), device),
        writes=writes,
        write_rows=write_rows,
        write_positions=indices(list(compress(positions, is_written)), device),
        before_rows=None if num_sequences == 1 else indices(before, device),
        rounds=[(indices(tiles, device), indices(rows, device)) for tiles, rows in rounds],
        token_index=token_index,
        padding=padding,
        places=places,
        num_sequences=num_sequences,
        num_tiles=len(length),
        tile_length=longest,
    )
