"""The product of a few rows of inputs with a weight in 16 bits: decodes of small batches, and of
one sequence with drafts. What counts is how fast the weight arrives, as for one_row, but here the
multiplications are tensor cores'.

Weights and inputs come by TMA, several steps ahead, and tensor cores read both where they arrive;
the weight is the left side of the products, so that 16 inputs fill a tile. Each program loads all
inputs for its rows, which is why it has many rows. A weight of many rows has a program for each
tile of them. Of one with few rows there are as many programs as fit on the device at once, each
with an equal run of the weight's steps, row of tiles by row of tiles:

                columns, a step at a time
    tile 0  | program 0                |
    tile 1  | program 0 | program 1    |     a tile that is cut is what two programs have of it
    tile 2  | program 1       | prog. 2|

The last program of a tile that is done adds up what all of them have. Sums are in float32 and in an
order that only the weight's shape decides: a token has the same bits beside any others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_hybrid.kernels.activation.triton import activated_product
from megatron_hybrid.kernels.dependent_launch import (
    ENABLED,
    OPTIONS,
    let_next_start,
    wait_for_inputs,
)
from megatron_hybrid.kernels.launching import cdiv, launched, next_power_of_2
from megatron_hybrid.kernels.linear.products import counters

# Up to so many rows of inputs products are this kernel's; it can do LARGEST.
MOST_ROWS = 32
LARGEST = 64
FEWEST = 1024  # rows of a weight; of fewer cuBLAS is faster
_WARPS = 4
# Of an H200, for any device: where tiles are cut decides bits.
_PROCESSORS = 132
_SHARED_BYTES = 227 * 1024  # of a processor
_RESERVED_BYTES = 1024 + 512  # of it, a program: by CUDA, and for the barriers of steps
_MOST_PARTS = 16  # of a tile, if all have the same number: more would move more sums than weights


class Tile(NamedTuple):
    """How programs cover a weight."""

    rows: int
    depth: int  # columns, a step
    stages: int  # one more than the steps on their way; fewer where there is no memory for them
    programs: int = 1  # that a processor has memory for
    # As many programs as fit, which have equal runs of steps and may share tiles; otherwise as many
    # as tiles.
    is_cut: bool = True
    # The first steps' weights are asked for, into the L2 cache, before the inputs are there.
    weights_first: bool = True
    # Of a tile that is cut, the second program goes on with the first one's sums, so that these are
    # added up as if it were whole.
    is_chained: bool = False

    def __str__(self) -> str:
        share = "chained" if self.is_chained else "cut" if self.is_cut else "whole"
        ahead = "weights first" if self.weights_first else "wait first"
        return f"{self.rows}x{self.depth}, {self.stages}, {self.programs}, {share}, {ahead}"


def can_multiply(x: Tensor, weight: Tensor) -> bool:
    """Whether this kernel is for such inputs, and not slower than cuBLAS."""
    rows = weight.shape[0]
    return 2 <= x.shape[0] <= min(MOST_ROWS, LARGEST) and rows >= FEWEST and fits(x, weight)


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether inputs and weight have types and places that this kernel can load."""
    in_16_bits = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)
    return in_16_bits and _in_pieces(x) and _in_pieces(weight)


def choose_tile(rows: int, columns: int) -> Tile:
    """Of a weight. By its shape alone: a token's bits are the same among any number of others. See
    docs/performance.md for what others take."""
    if rows > 32768:  # programs stay
        return Tile(128, 128, 5)
    if rows >= 6144 or columns <= 2048:
        return Tile(64, 128, 4, programs=2, is_cut=False)
    return Tile(64, 256, 4)


def number_of_programs(tile: Tile, tiles: int, steps: int) -> int:
    """For so many tiles of so many steps: as many as fit at once with two steps each, or up to a
    tenth fewer, if each then has whole tiles or all tiles have as many parts."""
    fitting = _PROCESSORS * tile.programs
    if not tile.is_cut:
        return tiles
    if tile.is_chained:  # a program has a tile's steps or more, so that two have what is cut
        return min(fitting, tiles)
    if tiles >= fitting:
        even = tiles // cdiv(tiles, fitting) if tiles % cdiv(tiles, fitting) == 0 else 0
    else:
        most = min(max(1, steps // 2), _MOST_PARTS)
        even = tiles * min(fitting // tiles, most)
        fitting = min(fitting, tiles * most)
    return even if 10 * even >= 9 * fitting else fitting


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    tile: Tile | None = None,
    *,
    activation: str = "none",
    gated: bool = False,
) -> Tensor:
    """x W^T + bias: x [tokens, columns], up to LARGEST tokens; weight [rows, columns]; rows of both
    may be strided, as `fits` says -> [tokens, rows]. `activation`: of the result; `gated`: of its
    first half, which the other half is multiplied by: -> [tokens, rows / 2]. Either is what
    Activation.activate makes of the product."""
    tokens, parts = x.shape[0], 2 if gated else 1
    rows, columns = weight.shape[0] // parts, weight.shape[1]
    if tokens > LARGEST:
        raise ValueError(f"x has {tokens} rows; it must have at most {LARGEST}.")
    y = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    if not tokens:
        return y
    tile = choose_tile(*weight.shape) if tile is None else tile
    depth = min(tile.depth, max(16, next_power_of_2(columns)))
    height = max(16, next_power_of_2(tokens))
    tiles = cdiv(rows, tile.rows)
    programs = number_of_programs(tile, tiles, parts * cdiv(columns, depth))
    is_cut = tiles % programs > 0
    partial = y
    if is_cut:
        partial = torch.empty(programs, 2, parts, tile.rows * height, device=x.device)
    _few_rows_kernel[(programs,)](
        TensorDescriptor(x, [tokens, columns], [x.stride(0), 1], [height, depth]),
        TensorDescriptor(weight, [*weight.shape], [weight.stride(0), 1], [tile.rows, depth]),
        weight, bias, y, partial, counters(x.device), tokens, rows, columns, weight.stride(0),
        activation, parts, height, tile.rows, depth, _stages(tile, depth, height), is_cut,
        tile.is_chained and is_cut, tile.weights_first, num_warps=_WARPS, **OPTIONS,
    )  # fmt: skip
    return y


def _in_pieces(values: Tensor) -> bool:
    """Whether rows begin at multiples of 16 bytes, as tensor descriptors have it."""
    return values.stride(1) == 1 and values.stride(0) % 8 == 0 and values.data_ptr() % 16 == 0


def _stages(tile: Tile, depth: int, tokens: int) -> int:
    """For inputs that are padded to so many tokens."""
    step = 2 * depth * (tile.rows + tokens)
    sums = 4 * tile.rows * tokens  # which go from thread to thread through shared memory, too
    memory = _SHARED_BYTES // tile.programs - _RESERVED_BYTES
    return max(2, min(tile.stages, (memory - sums) // step))


@launched(do_not_specialize=["tokens"])
def _few_rows_kernel(
    x, weight, asked_for, bias, y, partial, counter, tokens, rows, columns, weight_row,
    ACTIVATION: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr, IS_CUT: tl.constexpr, CHAINED: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
):  # fmt: skip
    """x, weight: tensor descriptors; asked_for: the weight. It has PARTS parts of so many rows; a
    tile has ROWS of each, one after the other. partial [programs, 2, PARTS, ROWS * TOKENS]: of a
    program the sums of the tile that it does not begin, and of the one that it does not end."""
    across = tl.cdiv(columns, DEPTH)
    steps = PARTS * across  # of a tile
    all_steps = tl.cdiv(rows, ROWS) * steps
    begin = _begin(tl.program_id(0), all_steps)
    end = _begin(tl.program_id(0) + 1, all_steps)
    head = end % steps if CHAINED else 0
    tail = (steps - begin % steps) % steps if CHAINED else 0
    if WEIGHTS_FIRST:
        first = end - head if head > 0 else begin + tail
        n = tl.minimum(first // steps * ROWS + tl.arange(0, ROWS), rows - 1)
        n += first % steps // across * rows
        k = first % across * DEPTH
        row = asked_for + n.to(tl.int64) * weight_row
        ask_for(row + k, tl.minimum(columns - k, (STAGES - 1) * DEPTH))
    wait_for_inputs()
    let_next_start()
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    before = tl.zeros((ROWS, TOKENS), tl.float32)  # of PARTS == 2: the first part's
    for place in tl.range(begin, end, num_stages=STAGES):
        now = place
        if CHAINED:
            now = _in_chain(place, begin, end, head, tail)
        tile = now // steps
        step = now - tile * steps
        part = step // across if PARTS == 2 else 0
        k = (step - part * across) * DEPTH
        # Next to each other, so that both are waited for together.
        loaded = weight.load([part * rows + tile * ROWS, k])
        values = x.load([0, k])
        total = tl.dot(loaded, values.T, total)
        is_done = (step == steps - 1) | (now == end - 1)
        if PARTS == 2:
            # At every step, so that the product is waited for here.
            ends_part = step == across - 1
            is_first = (part == 0) & (ends_part if CHAINED else is_done | ends_part)
            before = tl.where(is_first, total, before)
            total = tl.where(is_first, 0.0, total)
        # In here, so that the next tile's steps are on their way meanwhile.
        if is_done:
            if IS_CUT and not CHAINED:
                _finish_segment(
                    total, before, bias, y, partial, counter, begin, tile, step, steps, all_steps,
                    tokens, rows, ACTIVATION, PARTS, TOKENS, ROWS,
                )  # fmt: skip
            elif step == steps - 1:
                _finish(total, before, bias, y, tile, tokens, rows, ACTIVATION, PARTS, TOKENS, ROWS)
            elif CHAINED:
                _hand_on(total, before, partial, counter, PARTS, TOKENS, ROWS)
            total = tl.zeros((ROWS, TOKENS), tl.float32)
            before = tl.zeros((ROWS, TOKENS), tl.float32)  # which frees its registers
            if CHAINED:  # noqa: SIM102
                if (tail > 0) & (place == end - tail - 1):
                    total, before = _taken_over(before, partial, counter, PARTS, TOKENS, ROWS)


@triton.jit
def _in_chain(place, begin, end, head, tail):
    """The step that is a program's at this place. First come those of the tile that it begins and
    another ends, at last those of the tile that another began: so nobody waits for long."""
    first_whole = place - head + tail
    now = tl.where(place < begin + head, place - begin + end - head, first_whole)
    return tl.where(place >= end - tail, place - end + tail + begin, now)


@triton.jit
def _hand_on(
    total, before, partial, counter, PARTS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr
):
    """What this program has of a tile that the next one ends."""
    size: tl.constexpr = ROWS * TOKENS
    program = tl.program_id(0).to(tl.int64)
    place = partial + program * (PARTS * size)
    place += tl.arange(0, ROWS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
    tl.store(place, total)
    if PARTS == 2:
        tl.store(place + size, before)
    together()
    tl.atomic_xchg(counter + program, 1, sem="release")


@triton.jit
def _taken_over(
    before, partial, counter, PARTS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr
):
    """What the program before this one has handed on: a lower one, which is there or done."""
    size: tl.constexpr = ROWS * TOKENS
    program = tl.program_id(0).to(tl.int64) - 1
    while tl.atomic_add(counter + program, 0, sem="acquire") == 0:
        pass
    place = partial + program * (PARTS * size)
    place += tl.arange(0, ROWS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
    total = tl.load(place, cache_modifier=".cg")
    if PARTS == 2:
        before = tl.load(place + size, cache_modifier=".cg")
    tl.store(counter + program, 0)
    return total, before


@triton.jit
def together():
    """All threads of a program are here."""
    if ENABLED:
        # tl.debug_barrier, with which loops have one step after the other.
        tl.inline_asm_elementwise(
            "bar.sync 0; mov.u32 $0, 0;", "=r,r", [0], tl.int32, is_pure=False, pack=1
        )
    else:
        tl.debug_barrier()


@triton.jit
def _finish_segment(
    total, before, bias, y, partial, counter, begin, tile, step, steps, all_steps, tokens, rows,
    ACTIVATION: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What a program, whose steps begin so, made of a tile up to some step. total: of its last
    part."""
    if (begin <= tile * steps) & (step == steps - 1):
        _finish(total, before, bias, y, tile, tokens, rows, ACTIVATION, PARTS, TOKENS, ROWS)
    else:
        _finish_together(
            total, before, bias, y, partial, counter, begin, tile, steps, all_steps, tokens, rows,
            ACTIVATION, PARTS, TOKENS, ROWS,
        )  # fmt: skip


@triton.jit
def _begin(program, all_steps):
    """The first step of a program, or the one behind the last program's."""
    return program * all_steps // tl.num_programs(0)


@triton.jit
def _owner(step, all_steps):
    """The program that has a step."""
    return ((step + 1) * tl.num_programs(0) - 1) // all_steps


@triton.jit
def ask_for(rows, columns):
    """So many columns of weights that begin at `rows` [ROWS], into the L2 cache."""
    if ENABLED:
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
            [rows.to(tl.int64), tl.cdiv(columns, 8) * 16], tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _finish_together(
    total, before, bias, y, partial, counter, begin, tile, steps, all_steps, tokens, rows,
    ACTIVATION: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The same of a tile that it shares with others."""
    size: tl.constexpr = ROWS * TOKENS
    at_once: tl.constexpr = max(1, min(8, 16384 // (PARTS * size)))
    place = partial + tl.arange(0, ROWS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
    first = tile * steps
    mine = place + _slot(tl.program_id(0), begin, first) * (PARTS * size)
    tl.store(mine, total)
    if PARTS == 2:
        tl.store(mine + size, before)
    together()
    beginning = _owner(first, all_steps)
    ending = _owner(first + steps - 1, all_steps)
    if tl.atomic_add(counter + tile, 1, sem="acq_rel") == ending - beginning:
        total = tl.zeros((ROWS, TOKENS), tl.float32)
        before = tl.zeros((ROWS, TOKENS), tl.float32)
        for some in tl.range(beginning, ending + 1, at_once, num_stages=1):
            for i in tl.static_range(at_once):
                program = some + i
                slot = _slot(program, _begin(program, all_steps), first)
                theirs = place + slot * (PARTS * size)
                is_there = program + tl.zeros((ROWS, TOKENS), tl.int32) <= ending
                total += tl.load(theirs, mask=is_there, other=0.0, cache_modifier=".cg")
                if PARTS == 2:
                    theirs += size
                    before += tl.load(theirs, mask=is_there, other=0.0, cache_modifier=".cg")
        tl.store(counter + tile, 0)
        _finish(total, before, bias, y, tile, tokens, rows, ACTIVATION, PARTS, TOKENS, ROWS)


@triton.jit
def _slot(program, begin, first):
    """Of a program whose steps begin so, for its sums of the tile whose steps begin at `first`."""
    return 2 * program.to(tl.int64) + (begin <= first).to(tl.int64)


@triton.jit
def _finish(
    total, before, bias, y, tile, tokens, rows, ACTIVATION: tl.constexpr, PARTS: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    n = tile * ROWS + tl.arange(0, ROWS)
    m = tl.arange(0, TOKENS)
    inside = n < rows
    if bias is not None:
        of_last = bias + (PARTS - 1) * rows
        total += tl.load(of_last + n, mask=inside, other=0.0).to(tl.float32)[:, None]
        if PARTS == 2:
            before += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    kind: tl.constexpr = y.dtype.element_ty
    result = activated_product(before, total, kind, ACTIVATION, PARTS == 2)
    mask = inside[:, None] & (m < tokens)[None, :]
    tl.store(y + m[None, :].to(tl.int64) * rows + n[:, None], result, mask=mask)
