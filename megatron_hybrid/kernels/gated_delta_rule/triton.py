"""The gated delta rule in Triton; what it computes is in reference.py, its calls in
protocols.py.

Prefill prepares all tiles at once, where a tile is a kernel chunk or a part of one: P and R of it,
without the state (triton_prepare.py; the symbols are those of reference.py, l and s are places in a
tile). Then it walks over a sequence tile by tile. A program takes some rows of S [v_dim, k_dim] of
one head:

    d       = (v^T - S (exp(G) k)^T) (R beta)^T
    y^T     = S (exp(G) q)^T + d P^T
    S       = exp(G[last]) S + d (exp(G[last] - G) k)

S, d and what is between them stay in registers: they are products' left sides.

q, k and v go into the products as they come. The lengths of q and k and the decays are factors of
rows and columns: they go into the [tile, tile] matrices, or into products' results. Of Kimi delta
attention (KDA) each channel has another decay, so q and k are scaled before, and rounded once more
(triton_prepare_channels.py).

Kernel chunks lie on the grid of the sequence's positions, and tiles in chunks, so a state on the
grid comes from the same operations however the prefill was cut, and whatever lies beside it.

No sequence of a call may write a slot that another one reads: each program reads its initial state
when it starts, which may be after another has ended.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.contract import PrefillSegments
from megatron_hybrid.kernels.devices import (
    ChunkedSegments,
    aligned,
    checked_output,
    row_strides,
)
from megatron_hybrid.kernels.gated_delta_rule.triton_decode import decode, decode_runs
from megatron_hybrid.kernels.gated_delta_rule.triton_gates import Gate
from megatron_hybrid.kernels.gated_delta_rule.triton_keys import (
    check_dims,
    load_keys,
    of_keys,
    rows_of,
    store_keys,
)
from megatron_hybrid.kernels.gated_delta_rule.triton_prepare import invert_kernel, prepare_kernel
from megatron_hybrid.kernels.gated_delta_rule.triton_prepare_channels import (
    prepare_channels_kernel,
    prepare_left_kernel,
)
from megatron_hybrid.kernels.launching import launched
from megatron_hybrid.kernels.protocols import DeltaRuleConstants, DeltaRuleTokens
from megatron_hybrid.kernels.state_rounding.triton import as_stored

__all__ = ["decode", "decode_runs", "plan", "prefill"]

# These differ from step to step, and so would their alignment: no compilation for each of those.
_INDICES = (
    "cu_seqlens_ptr start_ptr read_ptr write_ptr cu_checkpoints_ptr position_ptr slot_ptr"
).split()
_MOST_PROGRAMS = 1024  # of what there is rarely any of

_kernel = launched(do_not_specialize=["tokens"], do_not_specialize_on_alignment=_INDICES)


class Tiling(NamedTuple):
    """How the kernels cover their work; sizes are powers of two of at least 16."""

    tile: int  # tokens, at most 64; no more than the kernel chunk are taken
    block_v: int  # rows of S
    walk_warps: int
    walk_stages: int


def plan(segments: PrefillSegments, kernel_chunk: int) -> ChunkedSegments:
    """Nothing is read here: the kernels find their tiles themselves. The kernel chunk is a power of
    two of at least 16, and segments.cu_chunk_seqlens has its bounds."""
    if kernel_chunk < 16 or kernel_chunk & (kernel_chunk - 1):
        raise ValueError(
            f"The kernel chunk is {kernel_chunk}; the Triton kernels of the gated delta rule take "
            "powers of two from 16."
        )
    return ChunkedSegments(segments, kernel_chunk)


def prefill(
    tokens: DeltaRuleTokens,
    constants: DeltaRuleConstants,
    state: Tensor,
    plan: ChunkedSegments,
    out: Tensor | None = None,
    *,
    tiling: Tiling | None = None,
) -> Tensor:
    """`tiling`: another than the one that _tiling chooses."""
    y = checked_output(tokens, state, out)
    q, k, v, a, b = tokens
    q, k, v = aligned(q), aligned(k), aligned(v)
    count, heads, v_dim = v.shape
    k_heads, k_dim = k.shape[1:]
    keys = check_dims(k_dim, v_dim)
    gate = Gate.of(tokens, constants)
    s, chunk = plan
    t = tiling or _tiling(v, s.longest, gate.by_channel)
    tile = min(t.tile, chunk)
    split = v.dtype != torch.float32
    chunks = s.cu_chunk_seqlens[chunk]
    shape = {"TILE": tile, "CHUNK": chunk, "SPLIT": split}
    sizes = {"K_DIM": k_dim, "KEYS": keys}
    prepare = _prepare_channels if gate.by_channel else _prepare
    read = prepare(q, k, a, b, constants, chunks, shape, {**sizes, "GATE": gate})
    _walk_kernel[(v_dim // t.block_v, heads, s.start_position.shape[0])](
        *read, v, state, y, count, *s.of_sequences,
        *row_strides(read.q, read.k, v, y, state), heads // k_heads, constants.rounding_seed,
        HEADS=heads, V_DIM=v_dim, **sizes, **shape, BLOCK_V=t.block_v, STAGES=t.walk_stages,
        BY_CHANNEL=gate.by_channel, num_warps=t.walk_warps,
    )  # fmt: skip
    return y


class _Prepared(NamedTuple):
    """What the walk knows of tiles. Of a head r, weights and factors lie token by token: a tile's
    rows lie together."""

    q: Tensor  # [T, k_heads, k_dim], as they came; of KDA [T, heads, k_dim], exp(G) q
    k: Tensor  # the same; of KDA exp(G) k
    added: Tensor  # what is multiplied with d: k; of KDA exp(G[last] - G) k
    r: Tensor  # [heads, T, tile], or both halves of it
    weights: Tensor  # [heads, T, tile]
    factors: Tensor  # [heads, T, 4] of q and k; none of KDA
    decays: Tensor  # [heads, T], of a tile at its first token; of KDA [tiles, heads, k_dim]


def _prepare(
    q: Tensor, k: Tensor, a: Tensor, b: Tensor, constants: DeltaRuleConstants, chunks: Tensor,
    shape: dict[str, int], head: dict[str, Any],
) -> _Prepared:  # fmt: skip
    """`chunks`: the bounds of the kernel chunks; `shape`, `head`: constants of the kernels."""
    count, heads = a.shape
    k_heads, k_dim = k.shape[1:]
    tile, chunk, split = shape["TILE"], shape["CHUNK"], shape["SPLIT"]
    tiles, group = (chunks.shape[0] - 1) * (chunk // tile), heads // k_heads
    r = q.new_empty(heads, count, tile * (1 + split))
    weights = q.new_empty(heads, count, tile)
    factors = q.new_empty(heads, count, 4, dtype=torch.float32)
    decays = q.new_empty(heads, count, dtype=torch.float32)
    if tiles:
        together = 2 if split and group % 2 == 0 else 1  # heads of a program
        prepare_kernel[(heads // together, tiles)](
            q, k, a, b, constants.A, constants.dt_bias, r, weights, factors, decays, chunks,
            count, *row_strides(q, k, a, b), k_dim**-0.5,
            GROUP=group, HEADS=together, **head, **shape, num_warps=4,
        )  # fmt: skip
        invert_kernel[(heads, tiles)](
            r, factors[..., 3], chunks, count, **shape, BETA_ROW=4, num_warps=2 if split else 4
        )  # fmt: skip
    return _Prepared(q, k, k, r, weights, factors, decays)


def _prepare_channels(
    q: Tensor, k: Tensor, a: Tensor, b: Tensor, constants: DeltaRuleConstants, chunks: Tensor,
    shape: dict[str, int], head: dict[str, Any],
) -> _Prepared:  # fmt: skip
    """The same of KDA."""
    count, heads, k_dim = a.shape
    tile, chunk, split = shape["TILE"], shape["CHUNK"], shape["SPLIT"]
    tiles = (chunks.shape[0] - 1) * (chunk // tile)
    r = q.new_empty(heads, count, tile * (1 + split))
    weights = q.new_empty(heads, count, tile)
    beta = q.new_empty(heads, count, dtype=torch.float32)
    decays = q.new_empty(tiles, heads, k_dim, dtype=torch.float32)
    scaled = q.new_empty(3, count, heads, k_dim)
    if tiles:
        left = q.new_zeros(1 + tiles * heads, dtype=torch.int32)
        programs = min(tiles * heads, _MOST_PROGRAMS)
        # Of the first one three programs have room on a processor; two would take 14 % longer.
        for kernel, grid, registers in (
            (prepare_channels_kernel, (heads, tiles), 168),
            (prepare_left_kernel, (programs,), None),
        ):
            kernel[grid](
                q, k, a, b, constants.A, constants.dt_bias, r, weights, beta, decays, scaled,
                left, chunks, count, *row_strides(q, k, a, b), k_dim**-0.5,
                HEADS=heads, **head, **shape, num_warps=4, maxnreg=registers,
            )  # fmt: skip
        invert_kernel[(heads, tiles)](
            r, beta, chunks, count, **shape, BETA_ROW=1, num_warps=2 if split else 4
        )  # fmt: skip
    return _Prepared(scaled[0], scaled[1], scaled[2], r, weights, beta, decays)


def _tiling(v: Tensor, longest: int, by_channel: bool) -> Tiling:
    """The fastest of those tried on an H200; stages and warps change no bits."""
    v_dim = v.shape[2]
    if v.dtype == torch.float32:  # no tensor cores: what fits into registers
        return Tiling(16, 16, walk_warps=8, walk_stages=1)
    # Tiles loaded ahead hide how long that takes. With two stages Triton 3.6 waits for loads as
    # soon as it has issued them. A short sequence has few tiles: there other programs on the same
    # processor hide it, for which memory is left.
    stages = 3 if longest > 128 else 1
    if by_channel:  # a tile of 64 would leave no memory for three stages
        return Tiling(32, rows_of(v_dim, 64), walk_warps=4, walk_stages=stages)
    return Tiling(64, rows_of(v_dim, 64), walk_warps=4, walk_stages=stages)


@triton.jit
def tiles_before(cu_seqlens_ptr, start_ptr, sequence, TILE: tl.constexpr, CHUNK: tl.constexpr):
    """How many tiles the sequences before this one have, with those that chunks have no use for."""
    chunks = 0
    for first in range(0, sequence, 64):
        i = first + tl.arange(0, 64)
        known = i < sequence
        start = tl.load(start_ptr + i, known, 0)
        length = tl.load(cu_seqlens_ptr + i + 1, known, 0) - tl.load(cu_seqlens_ptr + i, known, 0)
        own = tl.cdiv(start + length, CHUNK) - start // CHUNK
        chunks += tl.sum(tl.where(length > 0, own, 0).to(tl.int32), 0)
    return chunks * (CHUNK // TILE)


@_kernel
def _walk_kernel(
    q_ptr, k_ptr, added_ptr, r_ptr, weights_ptr, factors_ptr, decays_ptr, v_ptr, state_ptr, y_ptr,
    tokens,
    cu_seqlens_ptr, start_ptr, read_ptr, write_ptr,
    cu_checkpoints_ptr, position_ptr, slot_ptr,
    q_row, k_row, v_row, y_row, state_slot, heads_per_key, seed,
    HEADS: tl.constexpr, V_DIM: tl.constexpr, K_DIM: tl.constexpr, KEYS: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, SPLIT: tl.constexpr, BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    first_token = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
    length = (tl.load(cu_seqlens_ptr + sequence + 1) - first_token).to(tl.int32)
    start = tl.load(start_ptr + sequence).to(tl.int32)
    # The segment's first tokens, if they complete a chunk, are tiles of their own; the last of
    # these is short of `missing` tokens, by which all later ones begin earlier.
    cut = tl.minimum((CHUNK - start % CHUNK) % CHUNK, length)
    cut_tiles = tl.cdiv(cut, TILE)
    missing = cut_tiles * TILE - cut

    places = tl.arange(0, TILE)
    n = tl.arange(0, KEYS)
    p = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    row = head * tl.cast(tokens, tl.int64) + first_token
    at_key = head // heads_per_key * K_DIM
    q_ptr += first_token * q_row + at_key
    k_ptr += first_token * k_row + at_key
    v_ptr += first_token * v_row + head * V_DIM
    R_ROW: tl.constexpr = TILE * 2 if SPLIT else TILE
    r_ptr += row * R_ROW
    in_r = tl.arange(0, R_ROW)
    weights_ptr += row * TILE
    if BY_CHANNEL:
        added_ptr += first_token * k_row + at_key
        earlier = tiles_before(cu_seqlens_ptr, start_ptr, sequence, TILE, CHUNK)
        decays_ptr += (tl.cast(earlier, tl.int64) * HEADS + head) * K_DIM
        left_out = tl.where(cut > 0, CHUNK // TILE - cut_tiles, 0)  # tiles of the first chunk
    else:
        factors_ptr += row * 4
        decays_ptr += row
    y_ptr += first_token * y_row + head * V_DIM
    in_state = head * (V_DIM * K_DIM) + p[:, None] * K_DIM + n[None, :]

    eye = tl.where(places[:, None] == places[None, :], 1.0, 0.0).to(q_ptr.dtype.element_ty)
    s = tl.zeros([BLOCK_V, KEYS], tl.float32)
    read = tl.load(read_ptr + sequence).to(tl.int64)
    if read > 0:
        s_ptrs = state_ptr + read * state_slot + in_state
        s = load_keys(s_ptrs, n[None, :], K_DIM, KEYS).to(tl.float32)
    first_checkpoint = tl.load(cu_checkpoints_ptr + sequence).to(tl.int32)
    checkpoints = tl.load(cu_checkpoints_ptr + sequence + 1).to(tl.int32) - first_checkpoint
    done = 0  # tiles
    for kept in tl.range(checkpoints + 1):  # the last one is the state after the segment
        length_then = length
        slot_at = write_ptr + sequence
        if kept < checkpoints:
            length_then = tl.load(position_ptr + first_checkpoint + kept).to(tl.int32) - start
            slot_at = slot_ptr + first_checkpoint + kept
        until = tl.cdiv(length_then + missing, TILE)
        # All registers are taken: what could be computed before the loop would lie in memory.
        # (tl.range(done, until) is compiled wrongly: Triton 3.6 takes `done` for unused.)
        for further in tl.range(until - done, num_stages=STAGES, disable_licm=True):
            tile = done + further
            is_cut = tile < cut_tiles
            begin = tile * TILE - tl.where(is_cut, 0, missing)
            end = tl.minimum(begin + TILE, tl.where(is_cut, cut, length))
            valid = places < end - begin
            at = tl.cast(begin, tl.int64)
            rows = (at + places)[:, None]  # so that their offsets, too, are computed here
            has_key = of_keys(valid[:, None], n[None, :], K_DIM, KEYS)
            q = tl.load(q_ptr + rows * q_row + n[None, :], has_key, 0.0)
            k = tl.load(k_ptr + rows * k_row + n[None, :], has_key, 0.0)
            weights = tl.load(weights_ptr + rows * TILE + places[None, :], valid[:, None], 0.0)
            r = tl.load(r_ptr + rows * R_ROW + in_r[None, :], valid[:, None], 0.0)
            v = tl.load(v_ptr + rows * v_row + p[None, :], valid[:, None], 0.0)
            if BY_CHANNEL:
                q_factor, k_factor, add_factor = 1.0, 1.0, 1.0
                added = tl.load(added_ptr + rows * k_row + n[None, :], has_key, 0.0)
                number = tile + tl.where(is_cut, 0, left_out)
                at_decay = decays_ptr + number * (HEADS * K_DIM) + n
                decay = load_keys(at_decay, n, K_DIM, KEYS)[None, :]
            else:
                factors = tl.load(
                    factors_ptr + rows * 4 + tl.arange(0, 4)[None, :], valid[:, None], 0.0
                )
                of_q, of_k = tl.split(tl.reshape(factors, [TILE, 2, 2]))
                q_factor, add_factor = tl.split(of_q)
                k_factor, _ = tl.split(of_k)
                q_factor, k_factor = q_factor[None, :], k_factor[None, :]
                add_factor = add_factor[None, :]
                added = k
                decay = tl.load(decays_ptr + at)

            before = s.to(k.dtype)
            x = tl.dot(before, tl.trans(k), input_precision="ieee")
            # v^T comes from a product with I: it needs no other layout then, and no registers.
            x = tl.dot(tl.trans(v), eye, x * -k_factor, input_precision="ieee").to(k.dtype)
            if SPLIT:  # times both halves, which lie side by side
                x = tl.reshape(tl.permute(tl.join(x, x), (0, 2, 1)), [BLOCK_V, R_ROW])
            d = tl.dot(x, tl.trans(r), input_precision="ieee")
            y = tl.dot(before, tl.trans(q), input_precision="ieee") * q_factor
            y = tl.dot(d.to(k.dtype), tl.trans(weights), y, input_precision="ieee")
            y_ptrs = y_ptr + (at + places)[None, :] * y_row + p[:, None]
            tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), valid[None, :])
            s = tl.dot((d * add_factor).to(k.dtype), added, s * decay, input_precision="ieee")
        done = until
        slot = tl.load(slot_at).to(tl.int64)
        if slot > 0:
            values = as_stored(s, state_ptr.dtype.element_ty, seed, start + length_then, in_state)
            s_ptrs = state_ptr + slot * state_slot + in_state
            store_keys(s_ptrs, values, n[None, :], K_DIM, KEYS)
