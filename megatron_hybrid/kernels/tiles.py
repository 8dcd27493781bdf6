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

import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import PrefillSegments
from megatron_hybrid.kernels.slots import SlotReads, SlotWrites


@dataclass(frozen=True, slots=True)
class TilePlan:
    """The tiles of a step, the same for every layer: C tiles of at most L tokens, S sequences.

    States are numbered as the rows of cat(initial states [S], states after each tile [C]).
    """

    reads: SlotReads  # of the initial states
    writes: SlotWrites
    write_rows: Tensor  # [writes]: which states are written
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


def largest_tile(kernel_chunk: int, limit: int) -> int:
    """The largest divisor of the kernel chunk up to `limit`."""
    return max(d for d in range(1, min(kernel_chunk, limit) + 1) if kernel_chunk % d == 0)


def plan_tiles(segments: PrefillSegments, tile: int) -> TilePlan:
    """`tile`: tokens of a tile; checkpoints lie on multiples of it."""
    device = segments.cu_seqlens.device
    bounds: list[int] = segments.cu_seqlens.tolist()
    starts: list[int] = segments.start_position.tolist()
    write_slots: list[int] = segments.write_slot.tolist()
    num_sequences = len(starts)

    first_token: list[int] = []
    length: list[int] = []
    before: list[int] = []
    rounds: list[tuple[list[int], list[int]]] = []
    row_at: dict[tuple[int, int], int] = {}  # (sequence, position) at a tile's end -> state
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

    return TilePlan(
        reads=SlotReads.of(segments.read_slot.tolist(), device),
        writes=SlotWrites.of([slot for _, slot in kept], device),
        write_rows=index([row for row, _ in kept]),
        before_rows=None if num_sequences == 1 else index(before),
        rounds=[(index(tiles), index(rows)) for tiles, rows in rounds],
        token_index=token_index,
        padding=padding,
        places=places,
        num_sequences=num_sequences,
        num_tiles=len(length),
        tile_length=longest,
    )
