"""What the gated delta rule's prefill knows of a tile without the state: R, P and factors.

All tiles are prepared at once, by two kernels (the symbols are those of reference.py; l and s are
places in a tile):

    M[l, s] = beta[l] exp(G[l] - G[s]) (k[l] . k[s])  for s < l, else 0
    P[l, s] = exp(G[l] - G[s]) (q[l] . k[s])          for s <= l, else 0
    R       = (I + M)^-1                              (the UT transform of arXiv 2406.06484)

The first one has two value heads of a key head, which share the products. The second one inverts:
blocks of 16 on the diagonal, then what lies below them, in products so small that tensor cores take
them from registers. R may not be rounded to 16 bits: sums of its rows cancel, and what is left of
them would be the same error in every token. So it is kept as the sum of a large and a small number.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_hybrid.kernels.gated_delta_rule.triton_decode import EPS
from megatron_hybrid.kernels.gated_delta_rule.triton_gates import gates
from megatron_hybrid.kernels.gated_delta_rule.triton_keys import of_keys
from megatron_hybrid.kernels.launching import launched

_kernel = launched(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["cu_chunks_ptr"])


@triton.jit
def tile_at(cu_chunks_ptr, index, TILE: tl.constexpr, CHUNK: tl.constexpr):
    """The first token of a tile, and how many tokens it and those behind it have of its chunk."""
    chunk = index // (CHUNK // TILE)
    begin = tl.load(cu_chunks_ptr + chunk).to(tl.int64) + index % (CHUNK // TILE) * TILE
    return begin, (tl.load(cu_chunks_ptr + chunk + 1) - begin).to(tl.int32)


@_kernel
def prepare_kernel(
    q_ptr, k_ptr, a_ptr, b_ptr, decay_ptr, bias_ptr,
    r_ptr, weights_ptr, factors_ptr, decays_ptr, cu_chunks_ptr, tokens,
    q_row, k_row, a_row, b_row, scale,
    K_DIM: tl.constexpr, KEYS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
    SPLIT: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """M and P of a tile and HEADS value heads of a key head, of which it has GROUP, and the factors
    of the walk: of each token exp(G) for q and for k, exp(G[last] - G) for k, all over the length
    of q or k, and beta; at a tile's first token exp(G[last]). M, in float32, lies where R will."""
    head = tl.program_id(0) * HEADS
    begin, length = tile_at(cu_chunks_ptr, tl.program_id(1), TILE, CHUNK)
    if length <= 0:
        return
    R_ROW: tl.constexpr = TILE * 2 if SPLIT else TILE
    places = tl.arange(0, TILE)
    valid = places < length
    n = tl.arange(0, KEYS)
    at_key = head // GROUP * K_DIM
    q_ptr += begin * q_row + at_key
    k_ptr += begin * k_row + at_key
    has_key = of_keys(valid[:, None], n[None, :], K_DIM, KEYS)
    q = tl.load(q_ptr + places[:, None] * q_row + n[None, :], has_key, 0.0)
    k = tl.load(k_ptr + places[:, None] * k_row + n[None, :], has_key, 0.0)
    qk = tl.dot(q, tl.trans(k), input_precision="ieee")
    kk = tl.dot(k, tl.trans(k), input_precision="ieee")
    q32 = q.to(tl.float32)
    q_factor = tl.rsqrt(tl.sum(q32 * q32, 1) + EPS) * scale
    on_diagonal = places[:, None] == places[None, :]
    k_factor = tl.rsqrt(tl.sum(tl.where(on_diagonal, kk, 0.0), 1) + EPS)
    qk *= q_factor[:, None] * k_factor[None, :]
    qk = tl.where(places[:, None] >= places[None, :], qk, 0.0)
    kk *= k_factor[:, None] * k_factor[None, :]
    kk = tl.where(places[:, None] > places[None, :], kk, 0.0)
    # Of M the blocks of 16 on the diagonal and below it are read.
    is_read = (places[:, None] // 16 >= places[None, :] // 16) & valid[:, None]
    for i in range(HEADS):
        a = tl.load(a_ptr + begin * a_row + head + i + places * a_row, valid, 0.0)
        b = tl.load(b_ptr + begin * b_row + head + i + places * b_row, valid, 0.0)
        rate, bias = tl.load(decay_ptr + head + i), tl.load(bias_ptr + head + i)
        decay, beta = gates(a, b, rate, bias, GATE)
        cs = tl.cumsum(tl.where(valid, decay, 0.0), 0)  # log2(e) * G
        last = tl.sum(tl.where(places == TILE - 1, cs, 0.0), 0)
        row = (head + i) * tl.cast(tokens, tl.int64) + begin
        at = factors_ptr + row * 4 + places * 4
        start = tl.exp2(cs)
        tl.store(at, start * q_factor, valid)
        tl.store(at + 1, start * k_factor, valid)
        tl.store(at + 2, tl.exp2(last - cs) * k_factor, valid)
        tl.store(at + 3, beta, valid)
        tl.store(decays_ptr + row, tl.exp2(last))

        # Above the diagonal, where nothing is, G rises: no overflow.
        between = tl.exp2(tl.minimum(cs[:, None] - cs[None, :], 0.0))
        at = row * TILE + places[:, None] * TILE + places[None, :]
        tl.store(weights_ptr + at, (qk * between).to(q.dtype), valid[:, None])
        m_ptr = (r_ptr + row * R_ROW).to(tl.pointer_type(tl.float32))
        m = kk * between * beta[:, None]
        tl.store(m_ptr + places[:, None] * TILE + places[None, :], m, is_read)


@_kernel
def invert_kernel(
    r_ptr, beta_ptr, cu_chunks_ptr, tokens,
    TILE: tl.constexpr, CHUNK: tl.constexpr, SPLIT: tl.constexpr, BETA_ROW: tl.constexpr,
):  # fmt: skip
    """Puts R beta where M was: the two numbers that it is the sum of, row by row side by side.
    beta: BETA_ROW numbers from one token to the next.

    M of a tile of 64, in blocks of 16:     m0              What is below two blocks of R, which are
                                            m1 m0           inverses of the same size, one after the
                                            m2 m2 m0        other on the diagonal, is
                                            m2 m2 m1 m0     -(second) (M there) (first).
    """
    head = tl.program_id(0)
    begin, length = tile_at(cu_chunks_ptr, tl.program_id(1), TILE, CHUNK)
    if length <= 0:
        return
    R_ROW: tl.constexpr = TILE * 2 if SPLIT else TILE
    BLOCKS: tl.constexpr = TILE // 16
    at_row = head * tl.cast(tokens, tl.int64) + begin
    r_ptr += at_row * R_ROW
    beta_ptr += at_row * BETA_ROW
    m_ptr = r_ptr.to(tl.pointer_type(tl.float32))
    place = tl.arange(0, 16)
    row = (tl.arange(0, BLOCKS) * 16)[:, None, None] + place[None, :, None]
    column = (tl.arange(0, BLOCKS) * 16)[:, None, None] + place[None, None, :]
    m0 = tl.load(m_ptr + row * TILE + column, row < length, 0.0)
    if TILE > 16:
        PAIRS: tl.constexpr = TILE // 32
        row = (tl.arange(0, PAIRS) * 32 + 16)[:, None, None] + place[None, :, None]
        column = (tl.arange(0, PAIRS) * 32)[:, None, None] + place[None, None, :]
        m1 = tl.load(m_ptr + row * TILE + column, row < length, 0.0)
    if TILE > 32:
        places = tl.arange(0, 32)
        m2 = tl.load(
            m_ptr + (places + 32)[:, None] * TILE + places[None, :],
            (places + 32)[:, None] < length, 0.0,
        )  # fmt: skip
    r = inverse(m0, SPLIT)
    SIZE: tl.constexpr = 16 if TILE == 16 else 32  # of r's blocks below
    if TILE > 16:
        first, second = tl.split(tl.permute(tl.reshape(r, [PAIRS, 2, 16, 16]), (0, 2, 3, 1)))
        below = -_product(second, _product(m1, first, SPLIT), SPLIT)
        r = tl.join(tl.join(first, tl.zeros_like(first)), tl.join(below, second))
        # [pair, row, column, half of the columns, half of the rows]
        r = tl.reshape(tl.permute(r, (0, 4, 1, 3, 2)), [PAIRS, 32, 32])
    if TILE > 32:
        first, second = tl.split(tl.permute(r, (1, 2, 0)))
        below = -_product(second, _product(m2, first, SPLIT), SPLIT)
        tl.debug_barrier()  # all of M has been read
        beta = tl.load(beta_ptr + places * BETA_ROW, places < length, 0.0)
        at = r_ptr + (places + 32)[:, None] * R_ROW + places[None, :]
        store_r(at, below * beta[None, :], (places + 32)[:, None] < length, TILE, SPLIT)
        zero = tl.zeros([32, 32], r_ptr.dtype.element_ty)  # right of the first half
        at = r_ptr + places[:, None] * R_ROW + (places + 32)[None, :]
        tl.store(at, zero, places[:, None] < length)
        if SPLIT:
            tl.store(at + TILE, zero, places[:, None] < length)
    else:
        tl.debug_barrier()
    first_row = (tl.arange(0, TILE // SIZE) * SIZE)[:, None, None]
    row = first_row + tl.arange(0, SIZE)[None, :, None]
    column = first_row + tl.arange(0, SIZE)[None, None, :]
    beta = tl.load(beta_ptr + column * BETA_ROW, column < length, 0.0)
    store_r(r_ptr + row * R_ROW + column, r * beta, row < length, TILE, SPLIT)


@triton.jit
def halves(x):
    """A float32 as the sum of a large and a small bfloat16. The large one is rounded in integers:
    conversions there and back would go through a slow unit."""
    bits = x.to(tl.int32, bitcast=True)
    large = ((bits + 0x8000) & -65536).to(tl.float32, bitcast=True)
    return large.to(tl.bfloat16), (x - large).to(tl.bfloat16)


@triton.jit
def _split(x, SPLIT: tl.constexpr):
    if SPLIT:
        large, small = halves(x)
    else:
        large, small = x, x
    return large, small


@triton.jit
def _dot(x_large, x_small, y_large, y_small, SPLIT: tl.constexpr):
    """x y of what _split has made of float32 matrices. SPLIT: on tensor cores; without the product
    of the small ones the result is good to about 2^-16."""
    if not SPLIT:
        return tl.dot(x_large, y_large, input_precision="ieee")
    return tl.dot(x_large, y_large, tl.dot(x_large, y_small, tl.dot(x_small, y_large)))


@triton.jit
def _turned(x):
    return tl.permute(x, (0, 2, 1))


@triton.jit
def inverse(m, SPLIT: tl.constexpr):
    """(I + m)^-1 of m [blocks, 16, 16], strictly lower triangular: of blocks of 2 on the diagonals,
    then of twice the size: two neighbours, and L, what lies below the first.
    (R^-1 + L)^-1 = R - R L R, because L R L = 0. What is the right side of a product is kept
    transposed, too: so tensor cores take all from the registers where products leave it."""
    row = tl.arange(0, 16)[None, :, None]
    column = tl.arange(0, 16)[None, None, :]
    if SPLIT:  # of the products' layout from the beginning
        zeros = tl.zeros(m.shape, tl.bfloat16)
        m = tl.dot(zeros, zeros, m)
    m_large, m_small = _split(m, SPLIT)
    r = tl.where(row == column, 1.0, tl.where(row // 2 == column // 2, -m, 0.0))
    rt = _turned(r)
    for level in tl.static_range(1, 4):
        below = ((row >> level) == (column >> level) + 1) & (((row >> level) & 1) == 1)
        l_large = tl.where(below, m_large, 0.0)
        l_small = tl.where(below, m_small, 0.0)
        r_large, r_small = _split(r, SPLIT)
        rt_large, rt_small = _split(rt, SPLIT)
        lrt = _dot(rt_large, rt_small, _turned(l_large), _turned(l_small), SPLIT)
        t_large, t_small = _split(lrt, SPLIT)
        r -= _dot(r_large, r_small, _turned(t_large), _turned(t_small), SPLIT)
        if level < 3:
            rt -= _dot(t_large, t_small, _turned(r_large), _turned(r_small), SPLIT)
    return r


@triton.jit
def _product(x, y, SPLIT: tl.constexpr):
    x_large, x_small = _split(x, SPLIT)
    y_large, y_small = _split(y, SPLIT)
    return _dot(x_large, x_small, y_large, y_small, SPLIT)


@triton.jit
def store_r(at, r, valid, TILE: tl.constexpr, SPLIT: tl.constexpr):
    """R in float32: both halves, or as it is."""
    if SPLIT:
        large, small = halves(r)
        tl.store(at, large, valid)
        tl.store(at + TILE, small, valid)
    else:
        tl.store(at, r, valid)
