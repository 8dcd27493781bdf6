"""Experts with weights in float4_e2m1 for few tokens: each pair of a token and one of its experts
by itself, as products of matrices and a vector, and the MLP that all tokens share beside them; as
few.py, whose weights have 16 bits.

A program is one warp and has few rows of the weights. A thread has words of eight codes, and loads
the inputs that it multiplies, so nothing goes from thread to thread before the sums of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.activation.triton import limited
from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.experts.pairs import FEW_TOKENS, activated
from megatron_hybrid.kernels.experts.protocol import ExpertWeights, SharedExpert
from megatron_hybrid.kernels.experts.sums import gate_of
from megatron_hybrid.kernels.launching import launched, next_power_of_2
from megatron_hybrid.kernels.linear.codes import FP4_FACTOR, Kept, lifted, word_numbers
from megatron_hybrid.kernels.linear.formats import QuantizedWeight, Weight, is_nvfp4

# An expert's inner size up to which a program has two rows of the second product, and beyond which
# two tokens are the most: by what was fast on an H100 (docs/performance.md).
_SMALL = 1024
_UP_ROWS = 2  # of each half, where a gate is beside them
_MOST_WORDS = 128  # of a step: four a thread, which are one load
_DOWN_STEPS = 10  # whose weights are on their way at a time


def can_mix(
    layer: ExpertWeights, tokens: int, dtype: torch.dtype, shared: SharedExpert | None = None
) -> bool:
    """Whether these kernels are for so many tokens of a type and the layer's weights."""
    weights: list[Weight] = [layer.up, layer.down]
    if shared is not None:
        weights += [shared.up, shared.down]
    most = FEW_TOKENS if layer.down.shape[-1] <= _SMALL else 2
    return 0 < tokens <= most and dtype == torch.bfloat16 and all(map(_fits, weights))


def _fits(weight: Weight) -> bool:
    return is_nvfp4(weight) and weight.shape[-2] % 4 == 0 and weight.shape[-1] % 16 == 0


def mix(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    layer: ExpertWeights,
    shared: SharedExpert | None = None,
) -> Tensor:
    """As in Experts, of contiguous tensors, x bfloat16."""
    up, down = layer.up, layer.down
    assert isinstance(up, QuantizedWeight) and isinstance(down, QuantizedWeight)
    (tokens, chosen), (num_experts, width, inner) = experts.shape, down.shape
    limit = num_experts if layer.elsewhere else 0
    hidden, y = x.new_empty(tokens, chosen, inner), x.new_empty(tokens, width)
    kept = Kept.of(up.flat(), x)
    programs, beside, gate, share = chosen * inner // _UP_ROWS, 0, None, None
    shared_up = shared_down = (None, None, None)
    shared_hidden = hidden
    if shared is not None:
        beside, gate = shared.down.shape[1], shared.gate
        shared_hidden = x.new_empty(tokens, beside)
        shared_up, shared_down = _tensors(shared.up), _tensors(shared.down)
        programs += beside // _UP_ROWS
        if gate is not None:
            share = torch.empty(tokens, dtype=torch.float32, device=x.device)
            programs += 1
    _up_kernel[(programs, tokens)](
        x, _fours(x), experts, *_tensors(up), hidden, *shared_up, shared_hidden, gate, share,
        width, inner, beside, chosen, layer.activation, layer.gated, limit, kept, _UP_ROWS,
        _words(width), num_warps=1, **OPTIONS,
    )  # fmt: skip
    rows = 2 if inner <= _SMALL else 1
    _down_kernel[(width // rows, tokens)](
        _fours(hidden), experts, weights, *_tensors(down), *shared_down, _fours(shared_hidden),
        share, y, width, inner, beside, chosen, limit, kept, rows, _words(inner),
        _DOWN_STEPS, num_warps=1, **OPTIONS,
    )  # fmt: skip
    return y


def _tensors(weight: Weight) -> tuple[Tensor, Tensor, Tensor]:
    """Words of eight codes, scales of 16 columns as bytes, scales of rows."""
    assert isinstance(weight, QuantizedWeight) and weight.row_scale is not None
    return weight.words(), weight.scale.view(torch.uint8), weight.row_scale


def _fours(x: Tensor) -> Tensor:
    """bfloat16, four at a time."""
    return x.view(torch.int64)


def _words(columns: int) -> int:
    """Of a step."""
    return min(_MOST_WORDS, next_power_of_2(columns // 8))


@launched
def _up_kernel(
    x, fours, experts, words, scale, row_scale, hidden, shared_words, shared_scale,
    shared_row_scale, shared_hidden, gate, share,
    WIDTH: tl.constexpr, INNER: tl.constexpr, BESIDE: tl.constexpr, CHOSEN: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, EXPERTS: tl.constexpr, KEPT: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """A token's programs: those of its experts, of the shared MLP, and one for the share of that.
    EXPERTS: 0, or how many there are: pairs with other ids are left out. WORDS: of a step."""
    wait_for_inputs()
    let_next_start()
    program = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    blocks: tl.constexpr = INNER // ROWS
    size = INNER
    target = hidden + token * CHOSEN * INNER
    row = tl.cast(0, tl.int64)
    if program < CHOSEN * blocks:
        pair = program // blocks
        expert = tl.load(experts + token * CHOSEN + pair).to(tl.int64)
        if EXPERTS:  # noqa: SIM102 (decided when the kernel is compiled)
            if expert >= EXPERTS:
                return
        n = (program - pair * blocks) * ROWS
        row = expert * (INNER * (2 if GATED else 1)) + n
        target += pair * INNER + n
    else:
        if gate is not None:  # noqa: SIM102
            if program == tl.num_programs(0) - 1:
                tl.store(share + token, gate_of(x + token * WIDTH, gate, WIDTH, 1024))
                return
        if BESIDE:
            n = (program - CHOSEN * blocks) * ROWS
            row += n
            size = BESIDE
            words, scale, row_scale = shared_words, shared_scale, shared_row_scale
            target = shared_hidden + token * BESIDE + n

    parts: tl.constexpr = 2 if GATED else 1
    length: tl.constexpr = WIDTH // 8
    steps: tl.constexpr = (length + WORDS - 1) // WORDS
    # The rows of one half, then those of the other.
    loaded = ()
    for i in tl.static_range(parts * ROWS):
        at = row + i % ROWS + i // ROWS * size
        for step in tl.static_range(steps):
            loaded = loaded + (_load(words, scale, at, step * WORDS, length, WORDS, 1),)
    sums = ()
    for _ in tl.static_range(parts * ROWS):
        sums = sums + (tl.zeros((WORDS,), tl.float32),)
    for step in tl.static_range(steps):
        inputs = _inputs(fours + token * (WIDTH // 4), step * WORDS, length, WORDS, 1)
        following = ()
        for i in tl.static_range(parts * ROWS):
            products = _products(loaded[i * steps + step], inputs, KEPT)
            following = following + (sums[i] + products,)
        sums = following
    for i in tl.static_range(ROWS):
        value = tl.sum(sums[i], axis=0) * _row_factor(row_scale, row + i, KEPT)
        value = activated(value, ACTIVATION)
        if GATED:
            other = row + i + size
            factor = tl.sum(sums[ROWS + i], axis=0) * _row_factor(row_scale, other, KEPT)
            value *= limited(factor, ACTIVATION)
        tl.store(target + i, value.to(hidden.dtype.element_ty))


@launched
def _down_kernel(
    fours, experts, shares, words, scale, row_scale, shared_words, shared_scale, shared_row_scale,
    shared_fours, share, y,
    WIDTH: tl.constexpr, INNER: tl.constexpr, BESIDE: tl.constexpr, CHOSEN: tl.constexpr,
    EXPERTS: tl.constexpr, KEPT: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """A token's columns n of all its experts and the shared MLP, so that nothing is left to sum."""
    n = tl.program_id(0) * ROWS
    token = tl.program_id(1).to(tl.int64)
    # Known before the kernel that this one waits for, and so are the weights: see few.py.
    numbers = ()
    for pair in tl.static_range(CHOSEN):
        number = tl.load(experts + token * CHOSEN + pair, cache_modifier=".cg").to(tl.int64)
        numbers = numbers + (number,)
    each: tl.constexpr = (INNER // 8 + WORDS - 1) // WORDS
    routed: tl.constexpr = CHOSEN * each
    steps: tl.constexpr = routed + (BESIDE // 8 + WORDS - 1) // WORDS
    loaded = _load_steps(
        words, scale, shared_words, shared_scale, numbers, n, 0, steps, routed, each, WIDTH, INNER,
        BESIDE, EXPERTS, ROWS, WORDS, STEPS,
    )  # fmt: skip
    wait_for_inputs()
    let_next_start()
    sums = ()
    for _ in tl.static_range(ROWS):
        sums = sums + (tl.zeros((WORDS,), tl.float32),)
    for begin in tl.static_range(0, steps, STEPS):
        following = _load_steps(
            words, scale, shared_words, shared_scale, numbers, n, begin + STEPS, steps, routed,
            each, WIDTH, INNER, BESIDE, EXPERTS, ROWS, WORDS, STEPS,
        )  # fmt: skip
        for i in tl.static_range(STEPS):
            if begin + i < steps:
                if begin + i < routed:
                    number = numbers[(begin + i) // each]
                    pair = token * CHOSEN + (begin + i) // each
                    here = _is_here(number, EXPERTS)
                    inputs = _inputs(
                        fours + pair * (INNER // 4), (begin + i) % each * WORDS, INNER // 8, WORDS,
                        here,
                    )  # fmt: skip
                    factor = tl.load(shares + pair)
                    factors, at = row_scale, tl.where(here > 0, number, 0) * WIDTH + n
                else:
                    beside = shared_fours + token * (BESIDE // 4)
                    inputs = _inputs(beside, (begin + i - routed) * WORDS, BESIDE // 8, WORDS, 1)
                    factor = 1.0
                    if share is not None:
                        factor = tl.load(share + token)
                    factors, at = shared_row_scale, n.to(tl.int64)
                added = ()
                for r in tl.static_range(ROWS):
                    products = _products(loaded[i * ROWS + r], inputs, KEPT)
                    products *= factor * _row_factor(factors, at + r, KEPT)
                    added = added + (sums[r] + products,)
                sums = added
        loaded = following
    for r in tl.static_range(ROWS):
        value = tl.sum(sums[r], axis=0)
        tl.store(y + token * WIDTH + n + r, value.to(y.dtype.element_ty))


@triton.jit
def _load_steps(
    words, scale, shared_words, shared_scale, numbers, n, begin: tl.constexpr, steps: tl.constexpr,
    routed: tl.constexpr, each: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr,
    BESIDE: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """_load of rows n and following, of so many steps from `begin` on: ROWS of each step."""
    loaded = ()
    for i in tl.static_range(STEPS):
        for r in tl.static_range(ROWS):
            if begin + i < routed:
                number = numbers[(begin + i) // each]
                here = _is_here(number, EXPERTS)
                row = tl.where(here > 0, number, 0) * WIDTH + n + r
                found = _load(
                    words, scale, row, (begin + i) % each * WORDS, INNER // 8, WORDS, here
                )
                loaded = loaded + (found,)
            elif begin + i < steps:
                row = n.to(tl.int64) + r
                found = _load(
                    shared_words, shared_scale, row, (begin + i - routed) * WORDS, BESIDE // 8,
                    WORDS, 1,
                )  # fmt: skip
                loaded = loaded + (found,)
    return loaded


@triton.jit
def _is_here(number, EXPERTS: tl.constexpr):
    """1 for an expert that this rank has, else 0."""
    if EXPERTS:
        return (number < EXPERTS).to(tl.int32)
    else:
        return 1


@triton.jit
def _load(
    words, scale, row, begin: tl.constexpr, LENGTH: tl.constexpr, WORDS: tl.constexpr, here
):  # fmt: skip
    """Words [WORDS] of a row of LENGTH, and their scales' bytes; zeros behind the row's end, or
    where `here` is 0."""
    word = begin + tl.arange(0, WORDS)
    inside = word < LENGTH * here
    codes = tl.load(words + row * LENGTH + word, mask=inside, other=0)
    return codes, tl.load(scale + row * (LENGTH // 2) + word // 2, mask=inside, other=0)


@triton.jit
def _inputs(fours, begin: tl.constexpr, LENGTH: tl.constexpr, WORDS: tl.constexpr, here):
    """Those of words [WORDS], in the order of word_numbers, float32. A word's columns are four of a
    chunk of 16 and the four that are eight columns further."""
    word = begin + tl.arange(0, WORDS)
    inside = word < LENGTH * here
    place = fours + word // 2 * 4 + word % 2
    x0, x1, x4, x5 = _numbers(tl.load(place, mask=inside, other=0))
    x2, x3, x6, x7 = _numbers(tl.load(place + 2, mask=inside, other=0))
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _numbers(four):
    """Four bfloat16 in an int64 -> float32."""
    low, high = four.to(tl.int32), (four >> 32).to(tl.int32)
    return _upper(low << 16), _upper(low), _upper(high << 16), _upper(high)


@triton.jit
def _upper(bits):
    """A bfloat16 in the upper half of an int32."""
    return (bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _products(loaded, x, KEPT: tl.constexpr):
    """The sum of a word's products with its inputs, without what a row has in common. loaded: of
    _load; x: of _inputs."""
    words, scales = loaded
    if KEPT.in_assembler:
        n = word_numbers(words, None, lifted(scales), KEPT, tl.float32)
    else:
        scales = scales.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        n = word_numbers(words, None, scales, KEPT, tl.float32)
    total = n[0].to(tl.float32) * x[0] + n[1].to(tl.float32) * x[1]
    total += n[2].to(tl.float32) * x[2] + n[3].to(tl.float32) * x[3]
    total += n[4].to(tl.float32) * x[4] + n[5].to(tl.float32) * x[5]
    return total + n[6].to(tl.float32) * x[6] + n[7].to(tl.float32) * x[7]


@triton.jit
def _row_factor(row_scale, row, KEPT: tl.constexpr):
    """What a row's products have in common."""
    factor = tl.load(row_scale + row)
    if KEPT.in_assembler:
        factor *= FACTOR
    return factor


FACTOR: tl.constexpr = tl.constexpr(FP4_FACTOR)
