"""The keys of a split, and how splits are joined, outside of batch-invariant mode: where bits may
depend on how keys are cut. The kernels around this are in triton_split_kernels.py.

All keys go through one loop, those that not every row sees and what lies past the end as well: a
second loop would begin with nothing on its way, and a split is a few tiles. (Of few sequences, that
leave processors idle, two loops of more warps are done sooner, but of FP8 latents.)

FP8 latents are read two dims at a time, as numbers of 16 bits, and taken apart in the registers of
the products, as paged_attention/triton_decode.py does it with values, which see for why. So one
tile in shared memory, of 8 bits a number, serves both products:

    scores      even dims of queries x even dims of keys + odd ones x odd ones
    latents     weights x even dims, weights x odd dims

Both are products in float16, which has each number of E4M3 exactly. Queries are divided by a power
of two, so that they are in range; weights are as large as float16 allows, so that those which are
small beside the largest one lose nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_hybrid.kernels.dependent_launch import ENABLED
from megatron_hybrid.kernels.paged_attention.triton_decode import _taken_apart
from megatron_hybrid.kernels.paged_attention.triton_kv_tiles import block_of
from megatron_hybrid.kernels.paged_attention.triton_split_kernels import (
    _LEAST,
    _as_numbers,
    _finished,
)

# Weights in float16 are times 2^15: down to 2^-39 of the largest one none of them is nothing.
_RAISED = tl.constexpr(15.0)


@triton.jit
def _in_half(q, t):
    """Queries [ROWS, DIMS], [ROWS, TURNED_DIMS] in float16, and by what each row was divided for it
    [ROWS]: the power of two below its largest number, which is an exponent alone. (Of the largest
    power the inverse would be no normal number.)"""
    q, t = q.to(tl.float32), t.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(q), 1), tl.max(tl.abs(t), 1))
    power = tl.minimum(largest.to(tl.int32, bitcast=True) & 0x7F800000, 0x7E800000)
    power = tl.where(power == 0, 1.0, power.to(tl.float32, bitcast=True))
    inverse = (1.0 / power)[:, None]
    return (q * inverse).to(tl.float16), (t * inverse).to(tl.float16), power


@triton.jit
def _even_and_odd(x, ROWS: tl.constexpr, DIMS: tl.constexpr):
    """[ROWS, DIMS] -> two of [ROWS, DIMS / 2]"""
    return tl.split(tl.reshape(x, (ROWS, DIMS // 2, 2)))


@triton.jit
def _loaded(where, readable, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """WIDTH numbers from `where` [KEYS, 1] on, and zeros up to PADDED."""
    dim = tl.arange(0, PADDED)
    if PADDED > WIDTH:
        return tl.load(
            where + dim[None, :], mask=readable[:, None] & (dim < WIDTH)[None, :], other=0.0
        )
    else:
        return tl.load(where + dim[None, :], mask=readable[:, None], other=0.0)


@triton.jit
def latents_at(
    latents, block, first, tile, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    FIRST: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Where the latents of the keys first + tile [KEYS] begin [KEYS, 1]; block: block_of them."""
    if WHOLE:  # one address, and distances that stay the same
        row = block.to(tl.int64) * BLOCK_SIZE + (FIRST + first) % BLOCK_SIZE
        return latents + row * WIDTH + (tile * WIDTH)[:, None]
    else:
        row = block.to(tl.int64) * BLOCK_SIZE + (FIRST + first + tile) % BLOCK_SIZE
        return latents + (row * WIDTH)[:, None]


@triton.jit
def attended(
    q, t, latents, blocks, position, begin, end, scale, PAIRS: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, LATENT: tl.constexpr, DIMS: tl.constexpr, TURNED: tl.constexpr,
    TURNED_DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, FIRST: tl.constexpr, WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Of the keys from `begin`, where a tile begins, to `end`, counted from FIRST: the largest
    score [ROWS], the sum of weights [ROWS], weighted latents [ROWS, DIMS]. position [ROWS]: the
    last key that each row sees. PAIRS: `latents` are two FP8 numbers each."""
    STEP: tl.constexpr = 2 if PAIRS else 1
    WIDTH: tl.constexpr = (LATENT + TURNED) // STEP
    factor = tl.full((ROWS,), scale, tl.float32)
    raised = 0.0
    if PAIRS:
        q, t, power = _in_half(q, t)
        factor *= power
        raised = _RAISED
    kind: tl.constexpr = q.dtype
    if PAIRS:
        q_0, q_1 = _even_and_odd(q, ROWS, DIMS)
        t_0, t_1 = _even_and_odd(t, ROWS, TURNED_DIMS)
    tile = tl.arange(0, KEYS)
    most = tl.full((ROWS,), _LEAST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    part_0 = tl.zeros((ROWS, DIMS // STEP), tl.float32)
    part_1 = tl.zeros((ROWS, DIMS // STEP), tl.float32)
    block = block_of(blocks, begin, end, FIRST, BLOCK_SIZE, KEYS, WHOLE)
    for first in tl.range(begin, end, KEYS, num_stages=STAGES):
        at = first + tile
        where = latents_at(latents, block, first, tile, WIDTH, BLOCK_SIZE, FIRST, WHOLE)
        # what lies past the end was never written: it is not read
        k = _loaded(where, at < end, LATENT // STEP, DIMS // STEP)
        r = _loaded(where + LATENT // STEP, at < end, TURNED // STEP, TURNED_DIMS // STEP)
        # the next tile's, so that its keys need not wait for it
        block = block_of(blocks, first + KEYS, end, FIRST, BLOCK_SIZE, KEYS, WHOLE)
        # full float32 products for float32; other types have no effect from input_precision
        if PAIRS:
            k_0, k_1 = _taken_apart(tl.trans(k), kind, ENABLED)
            r_0, r_1 = _taken_apart(tl.trans(r), kind, ENABLED)
            scores = tl.dot(q_1, k_1, tl.dot(q_0, k_0))
            scores = tl.dot(t_1, r_1, tl.dot(t_0, r_0, scores))
        else:
            k, r = _as_numbers(k, kind), _as_numbers(r, kind)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            scores = tl.dot(t, tl.trans(r), scores, input_precision="ieee")
        scores = scores * factor[:, None]
        scores = tl.where(at[None, :] <= position[:, None], scores, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp2(scores - (larger - raised)[:, None])
        shrink = tl.exp2(most - larger)
        total = total * shrink + tl.sum(weights, 1)
        weights = weights.to(kind)
        if PAIRS:
            v_0, v_1 = _taken_apart(k, kind, ENABLED)
            part_0 = tl.dot(weights, v_0, part_0 * shrink[:, None])
            part_1 = tl.dot(weights, v_1, part_1 * shrink[:, None])
        else:
            part_0 = tl.dot(weights, k, part_0 * shrink[:, None], input_precision="ieee")
        most = larger
    if PAIRS:
        part_0 = tl.interleave(part_0, part_1)
    return most, total, part_0


@triton.jit
def join_splits(
    output, parts, sums, item, splits, places, row, place, inside, v_scale, LATENT: tl.constexpr,
    SPLITS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The results that decode_kernel left of one row of so many splits, SPLITS at a time, and PART
    of their numbers, into `output`, from `place` on."""
    several = tl.arange(0, 8 * SPLITS)
    most = tl.full((8 * SPLITS,), _LEAST, tl.float32)
    total = tl.zeros((8 * SPLITS,), tl.float32)
    for first in range(0, splits, 8 * SPLITS):
        at = (item + first + several).to(tl.int64) * places + row
        here = inside & (first + several < splits)
        own = tl.load(sums + 2 * at, mask=here, other=_LEAST)
        weight = tl.load(sums + 2 * at + 1, mask=here, other=0.0)
        larger = tl.maximum(most, own)
        total = total * tl.exp2(most - larger) + weight * tl.exp2(own - larger)
        most = larger
    largest = tl.max(most, 0)
    total = tl.sum(total * tl.exp2(most - largest), 0)
    split = tl.arange(0, SPLITS)
    dim = tl.program_id(2) * PART + tl.arange(0, PART)
    result = tl.zeros((PART,), tl.float32)
    for first in range(0, splits, SPLITS):
        at = (item + first + split).to(tl.int64) * places + row
        here = inside & (first + split < splits)
        factor = tl.exp2(tl.load(sums + 2 * at, mask=here, other=_LEAST) - largest)
        part = tl.load(
            parts + (at * LATENT)[:, None] + dim[None, :],
            mask=here[:, None] & (dim < LATENT)[None, :],
            other=0.0,
        )
        result += tl.sum(part * factor[:, None], 0)
    result = _finished(total[None], result[None, :], v_scale, output.dtype.element_ty)
    tl.store(output + place + dim[None, :], result, mask=inside & (dim < LATENT)[None, :])
