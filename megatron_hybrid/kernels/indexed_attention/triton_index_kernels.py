"""What an index keeps and chooses, in Triton: see triton.py."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_hybrid.kernels.dependent_launch import let_next_start, wait_for_inputs
from megatron_hybrid.kernels.launching import launched
from megatron_hybrid.kernels.norm.triton import inverse_rms, scaled
from megatron_hybrid.kernels.paged_attention.triton_sequences import sequence_of
from megatron_hybrid.kernels.paged_attention.triton_split_kernels import _TABLES


@triton.jit
def seen_by(token, sequence, cu_seqlens, kv_length):
    """Tokens up to its own one."""
    behind = tl.load(cu_seqlens + sequence + 1) - 1 - token
    return (tl.load(kv_length + sequence) - behind).to(tl.int32)


@triton.jit
def _turned(
    source, values, weight, eps, frequencies, position, DIM: tl.constexpr, HALF: tl.constexpr,
    DIMS: tl.constexpr,
):  # fmt: skip
    """values [rows, DIMS] float32 of the type of `source`, normed and rotated by the position. The
    other number of each pair is `source`'s [rows, DIMS]: the same values, pairs swapped."""
    dim = tl.arange(0, DIMS)[None, :]
    inside = dim < DIM
    other = tl.where(dim < HALF, dim + HALF, dim - HALF)
    turns = dim < 2 * HALF
    inverse = inverse_rms(values, DIM, eps)
    weights = tl.load(weight + dim, mask=inside, other=0)
    swapped_weights = tl.load(weight + other, mask=turns & inside, other=0)
    own = scaled(values.to(weights.dtype), inverse, weights)
    pair = scaled(source.to(weights.dtype), inverse, swapped_weights)
    pair = tl.where(dim < HALF, -pair, pair)
    angle = position.to(tl.float32) * tl.load(
        frequencies + tl.where(dim < HALF, dim, dim - HALF), mask=turns, other=0.0
    )
    return tl.where(turns, own * tl.cos(angle) + pair * tl.sin(angle), own)


@launched
def turn_kernel(
    query, weight, frequencies, positions, output, stride, head_stride, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    DIMS: tl.constexpr,
):  # fmt: skip
    """All heads of one token."""
    wait_for_inputs()
    let_next_start()
    token = tl.program_id(0).to(tl.int64)
    head, dim = tl.arange(0, ROWS)[:, None], tl.arange(0, DIMS)[None, :]
    inside = (head < HEADS) & (dim < DIM)
    place = query + token * stride + head * head_stride
    other = tl.where(dim < HALF, dim + HALF, dim - HALF)
    values = tl.load(place + dim, mask=inside, other=0)
    pairs = tl.load(place + other, mask=inside & (dim < 2 * HALF), other=0)
    turned = _turned(
        pairs, values, weight, eps, frequencies, tl.load(positions + token), DIM, HALF, DIMS
    )
    there = output + (token * HEADS + head) * DIM + dim
    tl.store(there, turned.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _members(
    entries, index, slots, token, slot, member, dim, first_number, stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """[members, dims] of a group's entries, from `first_number` of each on: those of the step's own
    tokens, which nobody stores perhaps, are not read from the cache."""
    behind = GROUP - 1 - member
    inside = (member < GROUP) & (behind <= token)
    own = inside & (tl.load(slots + token - behind, mask=inside, other=-1) == slot - behind)
    readable = dim < DIM
    here = entries + (token - behind) * stride + first_number + dim
    there = index + (slot - behind) * WIDTH + first_number + dim
    new = tl.load(here, mask=own & readable, other=0)
    old = tl.load(there, mask=(member < GROUP) & ~own & readable, other=0)
    return tl.where(own, new, old)


@launched
def store_kernel(
    entries, index, slots, weight, eps, frequencies, bias, positions, stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    MEMBERS: tl.constexpr, DIMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token's entry, or of a group's last token the group's key: a gated sum where there is a
    `bias`, else a mean."""
    wait_for_inputs()
    let_next_start()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot % GROUP != GROUP - 1:
        at = tl.arange(0, BLOCK)
        entry = tl.load(entries + token * stride + at, mask=at < WIDTH)
        tl.store(index + slot * WIDTH + at, entry, mask=at < WIDTH)
        return
    member, dim = tl.arange(0, MEMBERS)[:, None], tl.arange(0, DIMS)[None, :]
    keys = _members(entries, index, slots, token, slot, member, dim, 0, stride, GROUP, DIM, WIDTH)
    kind: tl.constexpr = index.dtype.element_ty
    if bias is not None:
        gates = _members(
            entries, index, slots, token, slot, member, dim, DIM, stride, GROUP, DIM, WIDTH
        )
        inside = (member < GROUP) & (dim < DIM)
        added = tl.load(bias + member * DIM + dim, mask=inside, other=0)
        logits = gates.to(tl.float32) + added.to(tl.float32)
        logits = tl.where(member < GROUP, logits, float("-inf"))
        weights = tl.exp(logits - tl.max(logits, 0)[None, :])
        weights = tl.div_rn(weights, tl.sum(weights, 0)[None, :] + tl.zeros_like(weights))
        products = (weights.to(kind).to(tl.float32) * keys.to(tl.float32)).to(kind)
        key = tl.sum(products.to(tl.float32), 0)[None, :]
    else:
        mean = (tl.sum(keys.to(tl.float32), 0) / GROUP).to(kind)[None, :]
        other = tl.where(dim < HALF, dim + HALF, dim - HALF)
        turns = dim < 2 * HALF
        swapped = _members(
            entries, index, slots, token, slot, member, tl.where(turns, other, dim), 0, stride,
            GROUP, DIM, WIDTH,
        )  # fmt: skip
        pair = (tl.sum(swapped.to(tl.float32), 0) / GROUP).to(kind)[None, :]
        position = tl.load(positions + token) - (GROUP - 1)
        key = _turned(pair, mean, weight, eps, frequencies, position, DIM, HALF, DIMS)
    tl.store(index + slot * WIDTH + dim, key.to(kind), mask=dim < DIM)


@launched(
    do_not_specialize=["first_token", "sequences", "room"], do_not_specialize_on_alignment=_TABLES
)
def score_kernel(
    query, weights, index, scores, cu_seqlens, kv_length, kv_indptr, kv_indices,
    first_token, sequences, room, weight_stride, stride,
    GROUP: tl.constexpr, CHOSEN: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr,
    GROUPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some tiles of the groups that one token has; a tile's scores do not depend on who computes
    it."""
    row = tl.program_id(0).to(tl.int64)
    token = first_token + row
    wait_for_inputs()
    let_next_start()
    if token >= tl.load(cu_seqlens + sequences):
        return
    sequence = sequence_of(token, cu_seqlens, sequences)
    whole = seen_by(token, sequence, cu_seqlens, kv_length) // GROUP
    if whole <= CHOSEN:
        return
    blocks = kv_indices + tl.load(kv_indptr + sequence)
    head, dim = tl.arange(0, ROWS), tl.arange(0, DIMS)
    written = (head < HEADS)[:, None] & (dim < DIM)[None, :]
    place = query + token * stride + head[:, None] * DIM + dim[None, :]
    q = tl.load(place, mask=written, other=0.0)
    factor = tl.where(head < HEADS, 1.0, 0.0)
    if weights is not None:
        factor = tl.load(weights + token * weight_stride + head, mask=head < HEADS, other=0.0)
    step = tl.num_programs(1) * GROUPS
    for first in tl.range(tl.program_id(1) * GROUPS, whole, step, num_stages=STAGES):
        group = first + tl.arange(0, GROUPS)
        inside = group < whole
        last = group * GROUP + (GROUP - 1)
        block = tl.load(blocks + last // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        where = (block * BLOCK_SIZE + last % BLOCK_SIZE) * WIDTH
        readable = inside[:, None] & (dim < DIM)[None, :]
        k = tl.load(index + where[:, None] + dim[None, :], mask=readable, other=0.0)
        products = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        score = tl.sum(tl.maximum(products, 0.0) * factor[:, None], 0)
        tl.store(scores + row * room + group, score, mask=inside)


@triton.jit
def _ordered(scores, first, count, BLOCK: tl.constexpr):
    """Of the scores from `first` on: integers in their order, 0 for those that are not there; and
    whether they are."""
    at = first + tl.arange(0, BLOCK)
    inside = at < count
    score = tl.load(scores + at, mask=inside, other=0.0) + 0.0  # -0 becomes 0
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(inside, bits ^ ((bits >> 31) | -2147483648), 0)
    return bits.to(tl.uint32, bitcast=True), inside, at


@triton.jit
def _narrowed(low, high, count, middle, CHOSEN: tl.constexpr):
    """The bounds of the score that is looked for, after `count` were found to be no less than the
    middle. None is left between them where these are just the ones to choose."""
    low = tl.where(count >= CHOSEN, middle, low)
    high = tl.where(count > CHOSEN, high, tl.where(count == CHOSEN, middle, middle - 1))
    return low, high


@triton.jit
def _middle(low, high):
    """Above `low`."""
    return low + ((high - low) - ((high - low) >> 1))


@triton.jit
def _write(
    values, inside, at, first, least, need, taken, chosen, bits, whole, BLOCK: tl.constexpr
):  # fmt: skip
    """Of these groups those with a higher score than `least`, and the first `need` of those that
    have it, behind the `taken` ones before. Gives both numbers behind them."""
    equal = values == least
    number = tl.sum(equal.to(tl.int32), 0)
    take = inside & (values >= least)
    if number > need:
        take = take & ((values > least) | (tl.cumsum(equal.to(tl.int32), 0) <= need))
    ones = take.to(tl.int32)
    tl.store(chosen + taken + tl.cumsum(ones, 0) - 1, at, mask=take)
    if bits is not None:
        word = tl.sum(tl.reshape(ones, (BLOCK // 32, 32)) << tl.arange(0, 32)[None, :], 1)
        number_of = first // 32 + tl.arange(0, BLOCK // 32)
        tl.store(bits + number_of, word.to(tl.int32), mask=number_of * 32 < whole)
    return need - tl.minimum(need, number), taken + tl.sum(ones, 0)


@triton.jit
def _choose(scores, chosen, bits, whole, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    """Of up to BLOCK groups, whose scores stay in registers."""
    values, inside, at = _ordered(scores, 0, whole, BLOCK)
    low, high = tl.min(tl.where(inside, values, 4294967295), 0), tl.max(values, 0)
    while low < high:
        middle = _middle(low, high)
        count = tl.sum((values >= middle).to(tl.int32), 0)
        low, high = _narrowed(low, high, count, middle, CHOSEN)
    need = CHOSEN - tl.sum((values > low).to(tl.int32), 0)
    _write(values, inside, at, 0, low, need, 0, chosen, bits, whole, BLOCK)


@triton.jit
def _choose_of_many(scores, chosen, bits, whole, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    """Of any number of groups, BLOCK at a time."""
    low, high = tl.full((), 4294967295, tl.uint32), tl.full((), 0, tl.uint32)
    for first in range(0, whole, BLOCK):
        values, inside, _ = _ordered(scores, first, whole, BLOCK)
        low = tl.minimum(low, tl.min(tl.where(inside, values, 4294967295), 0))
        high = tl.maximum(high, tl.max(values, 0))
    while low < high:
        middle = _middle(low, high)
        count = tl.zeros((BLOCK,), tl.int32)
        for first in range(0, whole, BLOCK):
            values, _, _ = _ordered(scores, first, whole, BLOCK)
            count += (values >= middle).to(tl.int32)
        low, high = _narrowed(low, high, tl.sum(count, 0), middle, CHOSEN)
    above = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, whole, BLOCK):
        values, _, _ = _ordered(scores, first, whole, BLOCK)
        above += (values > low).to(tl.int32)
    need, taken = CHOSEN - tl.sum(above, 0), tl.zeros((), tl.int32)
    for first in range(0, whole, BLOCK):
        values, inside, at = _ordered(scores, first, whole, BLOCK)
        need, taken = _write(
            values, inside, at, first, low, need, taken, chosen, bits, whole, BLOCK
        )


@launched(
    do_not_specialize=["first_token", "sequences", "room", "words"],
    do_not_specialize_on_alignment=_TABLES,
)
def choose_kernel(
    scores, chosen, bits, cu_seqlens, kv_length, first_token, sequences, room, words,
    GROUP: tl.constexpr, CHOSEN: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """The groups that one token sees, in their order, and a bit of `bits` [rows, words] for each
    group, 1 if it is seen, and anything behind the last one.

    The least score that is chosen is found by halves: how many are no less than what is in the
    middle is counted until only one is left, or until they are as many as are chosen. Of up to FEW
    or BLOCK groups scores stay in registers."""
    row = tl.program_id(0).to(tl.int64)
    token = first_token + row
    wait_for_inputs()
    let_next_start()
    chosen += token * CHOSEN
    if token >= tl.load(cu_seqlens + sequences):
        return
    sequence = sequence_of(token, cu_seqlens, sequences)
    whole = seen_by(token, sequence, cu_seqlens, kv_length) // GROUP
    scores += tl.multiple_of(row * room, 4)  # whole vectors
    if bits is not None:
        bits += row * words
    if whole <= CHOSEN:
        for first in range(0, CHOSEN, FEW):
            at = first + tl.arange(0, FEW)
            tl.store(chosen + at, tl.where(at < whole, at, -1), mask=at < CHOSEN)
            if bits is not None:
                number = first // 32 + tl.arange(0, FEW // 32)
                tl.store(bits + number, tl.full((FEW // 32,), -1, tl.int32), mask=number < words)
    elif whole <= FEW:
        _choose(scores, chosen, bits, whole, CHOSEN, FEW)
    elif whole <= BLOCK:
        _choose(scores, chosen, bits, whole, CHOSEN, BLOCK)
    else:
        _choose_of_many(scores, chosen, bits, whole, CHOSEN, BLOCK)
