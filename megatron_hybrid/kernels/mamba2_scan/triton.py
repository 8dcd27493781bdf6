"""The Mamba2 scan in Triton; what it computes and its calls are those of reference.py.

Prefill is one kernel. A program takes some rows of one head's state (all of head_dim, or a part of
it where there are few sequences and heads), keeps them in registers as h [state, rows] and walks
over its sequence tile by tile:

    cs[l]   = log2(e) * sum of dt[i] A for i <= l in the tile                  (decay, base 2)
    W[l, s] = (C[l] . B[s]) exp2(cs[l] - cs[s]) dt[s]  for s <= l, else 0
    y       = W x + exp2(cs) * (C h) + D x
    h       = exp2(cs[last]) h + B^T (exp2(cs[last] - cs) * dt * x)

Tiles lie on the grid of the sequence's absolute positions, as in reference.py; places before the
segment's start or past its end have dt = x = B = C = 0, which leaves the state alone.

No sequence of a call may write a slot that another one reads: each program reads its initial state
when it starts, which may be after another has ended.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeSlots, PrefillSegments

_LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True)
class ScanPlan:
    segments: PrefillSegments
    kernel_chunk: int


def plan(segments: PrefillSegments, kernel_chunk: int) -> ScanPlan:
    """Nothing is read here: the kernel finds its tiles itself."""
    return ScanPlan(segments, kernel_chunk)


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
    """As in reference.py. head_dim and state must be powers of two of at least 16."""
    config = _prefill_config(x.shape[2], B.shape[2], x.dtype)
    return _launch_prefill(x, B, C, dt, A, D, dt_bias, dt_limit, state, plan, out, **config)


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
    plan: DecodeSlots,
    out: Tensor | None = None,
    *,
    block_p: int = 8,
    num_warps: int = 1,
) -> Tensor:
    """As in reference.py; the outputs of padded rows are zeros. A program takes block_p rows of the
    state: many small programs keep most bytes in flight."""
    y = _checked(x, B, C, dt, state, out)
    rows, heads, head_dim = x.shape
    groups, size = B.shape[1:]
    _decode_kernel[(head_dim // block_p, heads, rows)](
        x, B, C, dt, A, D, dt_bias, state, y, plan.read_slot, plan.write_slot,
        x.stride(0), B.stride(0), C.stride(0), dt.stride(0), y.stride(0), state.stride(0),
        heads // groups, *dt_limit,
        HEAD_DIM=head_dim,
        SIZE=size,
        BLOCK_P=block_p,
        num_warps=num_warps,
    )  # fmt: skip
    return y


def _prefill_config(head_dim: int, size: int, dtype: torch.dtype) -> dict[str, int]:
    """The fastest of those tried on an H200 (state 128). It does not depend on the number of
    sequences, so neither do a sequence's bits."""
    if dtype == torch.float32:  # no tensor cores: small tiles
        return {"tile": 32, "block_p": min(head_dim, 32), "num_warps": 4, "num_stages": 1}
    if size <= 128:
        return {"tile": 64, "block_p": min(head_dim, 32), "num_warps": 4, "num_stages": 3}
    # Triton 3.6 compiles some others wrongly for such states; these are checked in tests/gpu.
    if head_dim >= 64:
        return {"tile": 64, "block_p": 64, "num_warps": 8, "num_stages": 2}
    return {"tile": 32, "block_p": head_dim, "num_warps": 4, "num_stages": 2}


def _launch_prefill(
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
    *,
    tile: int,
    block_p: int,
    num_warps: int,
    num_stages: int,
) -> Tensor:
    """`tile` tokens at most (the largest divisor of the kernel chunk up to that is taken), block_p
    rows of the state a program; both at least 16."""
    y = _checked(x, B, C, dt, state, out)
    x, B, C = _aligned(x), _aligned(B), _aligned(C)
    _, heads, head_dim = x.shape
    groups, size = B.shape[1:]
    chunk = plan.kernel_chunk
    tile = max(d for d in range(1, min(chunk, tile) + 1) if chunk % d == 0)
    s = plan.segments
    grid = (head_dim // block_p, heads, s.start_position.shape[0])
    _prefill_kernel[grid](
        x, B, C, dt, A, D, dt_bias, state, y,
        s.cu_seqlens, s.start_position, s.read_slot, s.write_slot,
        s.cu_checkpoints, s.checkpoint_position, s.checkpoint_slot,
        x.stride(0), B.stride(0), C.stride(0), dt.stride(0), y.stride(0), state.stride(0),
        heads // groups, *dt_limit,
        HEAD_DIM=head_dim,
        SIZE=size,
        TILE=tile,
        BLOCK_L=max(16, triton.next_power_of_2(tile)),
        BLOCK_P=block_p,
        STAGES=num_stages,
        num_warps=num_warps,
    )  # fmt: skip
    return y


def _checked(
    x: Tensor, B: Tensor, C: Tensor, dt: Tensor, state: Tensor, out: Tensor | None
) -> Tensor:
    """The output tensor. The kernels take only the stride of the rows."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    for name, tensor in (("x", x), ("B", B), ("C", C), ("dt", dt), ("state", state), ("out", y)):
        # A single row tells nothing about its strides; then only the inner ones are looked at.
        if not tensor[:1].is_contiguous():
            raise ValueError(
                f"{name} has strides {tuple(tensor.stride())} for the shape {tuple(tensor.shape)}; "
                "all but the first dimension must be contiguous."
            )
    return y


def _aligned(rows: Tensor) -> Tensor:
    """Rows that begin at multiples of 16 bytes, as a model's do. For others Triton 3.6 compiles
    pipelined loads that leave shared memory."""
    if rows.data_ptr() % 16 or rows.stride(0) * rows.element_size() % 16:
        return rows.contiguous()
    return rows


@triton.jit
def _softplus(z):
    """log(1 + e^z), accurate where e^z is tiny: the rounding of 1 + e is divided out."""
    e = tl.exp(tl.minimum(z, 20.0))
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / (u - 1.0)))
    return tl.where(z > 20.0, z, log1p)


@triton.jit
def _prefill_kernel(
    x_ptr, b_ptr, c_ptr, dt_ptr, a_ptr, d_ptr, bias_ptr,
    state_ptr, y_ptr,
    cu_seqlens_ptr, start_ptr, read_ptr, write_ptr,
    cu_checkpoints_ptr, position_ptr, slot_ptr,
    x_row, b_row, c_row, dt_row, y_row, state_slot,
    heads_per_group, dt_min, dt_max,
    HEAD_DIM: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    first_token = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
    length = (tl.load(cu_seqlens_ptr + sequence + 1) - first_token).to(tl.int32)
    start = tl.load(start_ptr + sequence).to(tl.int32)
    end = start + length
    read = tl.load(read_ptr + sequence).to(tl.int64)
    write = tl.load(write_ptr + sequence).to(tl.int64)
    a = tl.load(a_ptr + head) * _LOG2_E
    d = tl.load(d_ptr + head)
    bias = tl.load(bias_ptr + head)

    places = tl.arange(0, BLOCK_L)
    p = part * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, SIZE)
    causal = places[:, None] >= places[None, :]
    # Pointers to position 0 of the sequence, which need not lie in the tensors: positions before
    # the segment's start are masked.
    origin = first_token - start
    group = head // heads_per_group
    x_ptr += origin * x_row + head * HEAD_DIM
    b_ptr += origin * b_row + group * SIZE
    c_ptr += origin * c_row + group * SIZE
    dt_ptr += origin * dt_row + head
    y_ptr += origin * y_row + head * HEAD_DIM
    state_ptr += head * (HEAD_DIM * SIZE)
    in_state = n[:, None] + p[None, :] * SIZE
    state_type = state_ptr.dtype.element_ty

    h = tl.zeros([SIZE, BLOCK_P], tl.float32)
    if read > 0:
        h = tl.load(state_ptr + read * state_slot + in_state).to(tl.float32)

    # Step sizes are loaded one tile ahead: they lie a row apart, which no asynchronous copy does.
    position = (start // TILE) * TILE + places
    raw = tl.load(
        dt_ptr + position.to(tl.int64) * dt_row,
        mask=(position >= start) & (position < end),
        other=0.0,
    )
    first_checkpoint = tl.load(cu_checkpoints_ptr + sequence).to(tl.int32)
    last_checkpoint = tl.load(cu_checkpoints_ptr + sequence + 1).to(tl.int32)
    # From checkpoint to checkpoint, and from the last one to the end. A condition inside the loop
    # over tiles would keep the compiler from overlapping their loads with their products.
    for checkpoint in range(first_checkpoint, last_checkpoint + 1):
        # Not carried from one round to the next: Triton 3.6 starts the loop from its first value.
        first_tile = start // TILE
        if checkpoint > first_checkpoint:
            first_tile = tl.cdiv(tl.load(position_ptr + checkpoint - 1).to(tl.int32), TILE)
        stop = end
        slot = write
        if checkpoint < last_checkpoint:
            stop = tl.load(position_ptr + checkpoint).to(tl.int32)
            slot = tl.load(slot_ptr + checkpoint).to(tl.int64)
        for t in tl.range(first_tile, tl.cdiv(stop, TILE), num_stages=STAGES):
            tile_start = t * TILE
            position = tile_start + places
            valid = (position >= start) & (position < tl.minimum(end, tile_start + TILE))
            offset = tl.cast(tile_start, tl.int64)
            x = tl.load(
                x_ptr + offset * x_row + places[:, None] * x_row + p[None, :],
                mask=valid[:, None],
                other=0.0,
            )
            bt = tl.load(
                b_ptr + offset * b_row + places[None, :] * b_row + n[:, None],
                mask=valid[None, :],
                other=0.0,
            )
            c = tl.load(
                c_ptr + offset * c_row + places[:, None] * c_row + n[None, :],
                mask=valid[:, None],
                other=0.0,
            )
            dt = _softplus(raw.to(tl.float32) + bias)
            dt = tl.where(valid, tl.minimum(tl.maximum(dt, dt_min), dt_max), 0.0)
            ahead = position + TILE
            raw = tl.load(
                dt_ptr + (offset + TILE) * dt_row + places * dt_row,
                mask=(ahead >= start) & (ahead < end),
                other=0.0,
            )

            decay = dt * a
            cs = tl.cumsum(decay, 0)
            last = tl.sum(decay, 0)
            # dt goes into the exponent: exp2(cs[l] - cs[s]) dt[s] = exp2(cs[l] - cs_dt[s]).
            cs_dt = cs - tl.log2(dt)

            scores = tl.dot(c, bt, input_precision="ieee")
            # Above the diagonal exp2 may overflow; the selection drops it.
            w = tl.where(causal, scores * tl.exp2(cs[:, None] - cs_dt[None, :]), 0.0)
            carried = tl.dot(c, h.to(c.dtype), input_precision="ieee")
            y = carried * tl.exp2(cs)[:, None]
            y = tl.dot(w.to(x.dtype), x, y, input_precision="ieee")
            y += d * x.to(tl.float32)
            tl.store(
                y_ptr + offset * y_row + places[:, None] * y_row + p[None, :],
                y.to(x.dtype),
                mask=valid[:, None],
            )
            added = (x * tl.exp2(last - cs_dt)[:, None]).to(x.dtype)
            h = tl.dot(bt, added, h * tl.exp2(last), input_precision="ieee")
        if slot > 0:
            tl.store(state_ptr + slot * state_slot + in_state, h.to(state_type))


@triton.jit
def _decode_kernel(
    x_ptr, b_ptr, c_ptr, dt_ptr, a_ptr, d_ptr, bias_ptr,
    state_ptr, y_ptr, read_ptr, write_ptr,
    x_row, b_row, c_row, dt_row, y_row, state_slot,
    heads_per_group, dt_min, dt_max,
    HEAD_DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    read = tl.load(read_ptr + row).to(tl.int64)
    write = tl.load(write_ptr + row).to(tl.int64)
    p = part * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, SIZE)
    y_ptrs = y_ptr + row * y_row + head * HEAD_DIM + p
    if (read <= 0) & (write <= 0):
        tl.store(y_ptrs, tl.zeros([BLOCK_P], tl.float32))
        return

    in_slot = head * (HEAD_DIM * SIZE) + p[:, None] * SIZE + n[None, :]
    h = tl.load(
        state_ptr + read * state_slot + in_slot,
        mask=(p < tl.where(read > 0, HEAD_DIM, 0))[:, None],
        other=0.0,
    ).to(tl.float32)
    group = head // heads_per_group
    x = tl.load(x_ptr + row * x_row + head * HEAD_DIM + p).to(tl.float32)
    b = tl.load(b_ptr + row * b_row + group * SIZE + n).to(tl.float32)
    c = tl.load(c_ptr + row * c_row + group * SIZE + n).to(tl.float32)
    dt = tl.load(dt_ptr + row * dt_row + head).to(tl.float32) + tl.load(bias_ptr + head)
    dt = tl.minimum(tl.maximum(_softplus(dt), dt_min), dt_max)

    h = h * tl.exp2(dt * (tl.load(a_ptr + head) * _LOG2_E)) + (dt * x)[:, None] * b[None, :]
    tl.store(
        state_ptr + write * state_slot + in_slot,
        h.to(state_ptr.dtype.element_ty),
        mask=(p < tl.where(write > 0, HEAD_DIM, 0))[:, None],
    )
    y = tl.sum(h * c[None, :], 1) + tl.load(d_ptr + head) * x
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty))
