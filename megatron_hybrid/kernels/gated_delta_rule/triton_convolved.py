"""The short convolution, the gated delta rule and the norm of its heads, of decodes, in one kernel.

A program has a key head, and the states of all its value heads: every channel of the convolution,
every state and every head of the norm is one program's alone, so nobody waits for anybody.

Roundings are those of the three kernels one after the other: the convolution's outputs and those of
the rule have the model's type before the next one takes them.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.causal_conv1d.triton_decode import (
    bias_of,
    columns_of,
    convolved,
    store_window,
)
from megatron_hybrid.kernels.contract import DecodeSlots, RecurrentState
from megatron_hybrid.kernels.convolved import HeadsNorm
from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.gated_delta_rule.triton_decode import EPS
from megatron_hybrid.kernels.launching import launched
from megatron_hybrid.kernels.mamba2_scan.triton_decode import LOG2_E, softplus
from megatron_hybrid.kernels.norm.triton import inverse_rms, scaled
from megatron_hybrid.kernels.protocols import ConvConstants, DeltaRuleConstants

# A program takes a multiprocessor's registers: with more sequences, loads of one would have to wait
# for stores of another.
MOST_SEQUENCES = 8
# Numbers of the states that a program may have.
MOST_NUMBERS = 256 * 128


def takes(plan: Any, state: RecurrentState) -> bool:
    """Of few sequences, if states are written."""
    if not isinstance(plan, DecodeSlots) or plan.read_slot.shape[0] > MOST_SEQUENCES:
        return False
    heads, v_dim, k_dim = state.ssm.shape[1:]
    keys = (state.conv.shape[1] - heads * v_dim) // 2
    rows = heads * k_dim // keys * v_dim
    return rows & (rows - 1) == 0 and k_dim & (k_dim - 1) == 0 and rows * k_dim <= MOST_NUMBERS


def decode(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    conv: ConvConstants,
    constants: DeltaRuleConstants,
    state: RecurrentState,
    plan: DecodeSlots,
    norm: HeadsNorm | None,
) -> Tensor:
    """As in ConvolvedDeltaRule."""
    count, channels = x.shape
    heads, v_dim, k_dim = state.ssm.shape[1:]
    k_heads = (channels - heads * v_dim) // (2 * k_dim)
    each = heads // k_heads
    y = x.new_empty((count, heads * v_dim))
    gate, norm_weight, eps = (None, None, 0.0) if norm is None else norm
    _kernel[(k_heads, count)](
        x, conv.weight, conv.bias, state.conv, a, b, *constants[:2], state.ssm, gate, norm_weight,
        y, plan.read_slot, plan.write_slot,
        x.stride(0), *conv.weight.stride(), *state.conv.stride(), a.stride(0), b.stride(0),
        0 if gate is None else gate.stride(0), y.stride(0), state.ssm.stride(0), k_dim**-0.5, eps,
        WIDTH=conv.weight.shape[1], SILU=conv.silu, K_HEADS=k_heads, EACH=each,
        K_DIM=k_dim, V_DIM=v_dim, LANES=min(32, k_dim),
        num_warps=min(max(each * v_dim * k_dim // 4096, 1), 8), **OPTIONS,
    )  # fmt: skip
    return y


@launched
def _kernel(
    input_ptr, weight_ptr, conv_bias_ptr, conv_state_ptr, a_ptr, b_ptr, decay_ptr, bias_ptr,
    state_ptr, gate_ptr, norm_ptr, y_ptr, read_ptr, write_ptr,
    input_row, weight_channel, weight_tap, conv_slot, conv_channel, conv_column, a_row, b_row,
    gate_row, y_row, state_slot, scale, eps,
    WIDTH: tl.constexpr, SILU: tl.constexpr, K_HEADS: tl.constexpr, EACH: tl.constexpr,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    key_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    read = tl.load(read_ptr + row).to(tl.int64)
    write = tl.load(write_ptr + row).to(tl.int64)
    rows: tl.constexpr = EACH * V_DIM
    p = tl.arange(0, rows)
    in_v = key_head * rows + p
    if (read <= 0) & (write <= 0):
        wait_for_inputs()
        tl.store(y_ptr + row * y_row + in_v, tl.zeros([rows], y_ptr.dtype.element_ty))
        return

    # [K_DIM / LANES, rows, LANES], so that sums over columns are mostly sums in a lane
    column = tl.arange(0, K_DIM)
    n = tl.arange(0, K_DIM // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    of_row = p[None, :, None]
    in_slot = key_head * (rows * K_DIM) + of_row * K_DIM + n[:, None, :]
    s = tl.load(
        state_ptr + read * state_slot + in_slot,
        mask=of_row < tl.where(read > 0, rows, 0),
        other=0.0,
    ).to(tl.float32)
    # q and k together: of fewer numbers than threads Triton would have every thread load and
    # convolve all that it multiplies with.
    pair = tl.arange(0, 2)[:, None]
    of_qk = (pair * K_HEADS + key_head) * K_DIM + column[None, :]
    of_v = 2 * K_HEADS * K_DIM + in_v
    channels: tl.constexpr = 2 * K_HEADS * K_DIM + K_HEADS * EACH * V_DIM
    window = conv_state_ptr + read * conv_slot
    qk_known = _known(
        weight_ptr, conv_bias_ptr, window, of_qk, read, weight_channel, weight_tap, conv_channel,
        conv_column, channels, WIDTH,
    )  # fmt: skip
    v_known = _known(
        weight_ptr, conv_bias_ptr, window, of_v, read, weight_channel, weight_tap, conv_channel,
        conv_column, channels, WIDTH,
    )  # fmt: skip
    head = key_head * EACH + p // V_DIM
    rate = tl.load(decay_ptr + head)
    bias = tl.load(bias_ptr + head)
    if norm_ptr is not None:
        norm_weights = tl.load(norm_ptr + in_v)

    wait_for_inputs()  # all that was there before
    inputs = input_ptr + row * input_row
    new_qk = tl.load(inputs + of_qk)
    new_v = tl.load(inputs + of_v)
    a = tl.load(a_ptr + row * a_row + head).to(tl.float32)
    b = tl.load(b_ptr + row * b_row + head).to(tl.float32)
    if gate_ptr is not None:
        gates = tl.load(gate_ptr + row * gate_row + in_v).to(tl.float32)
    v = _output(v_known, new_v, SILU, WIDTH)
    qk = _output(qk_known, new_qk, SILU, WIDTH)
    factor = tl.where(pair == 0, scale, 1.0)
    qk *= tl.rsqrt(tl.sum(qk * qk, 1, keep_dims=True) + EPS) * factor
    lanes: tl.constexpr = (K_DIM // LANES, LANES)
    q = tl.reshape(tl.sum(tl.where(pair == 0, qk, 0.0), 0), lanes)[:, None, :]
    k = tl.reshape(tl.sum(tl.where(pair == 1, qk, 0.0), 0), lanes)[:, None, :]

    s *= tl.exp2(softplus(a + bias) * rate * LOG2_E)[None, :, None]
    d = tl.sigmoid(b) * (v - tl.sum(tl.sum(s * k, 0), 1))
    s += d[None, :, None] * k
    y = tl.sum(tl.sum(s * q, 0), 1).to(y_ptr.dtype.element_ty)
    if gate_ptr is not None:
        of_heads: tl.constexpr = (EACH, V_DIM)
        heads = tl.reshape(y, of_heads)
        weights = tl.reshape(norm_weights, of_heads)
        normed = scaled(heads, inverse_rms(heads, V_DIM, eps), weights)
        gates *= tl.sigmoid(gates)
        normed = normed.to(weights.dtype).to(tl.float32) * tl.reshape(gates, of_heads)
        y = tl.reshape(normed, (rows,)).to(y_ptr.dtype.element_ty)
    let_next_start()
    tl.store(y_ptr + row * y_row + in_v, y)
    tl.store(
        state_ptr + write * state_slot + in_slot,
        s.to(state_ptr.dtype.element_ty),
        mask=of_row < tl.where(write > 0, rows, 0),
    )
    if write > 0:
        window = conv_state_ptr + write * conv_slot
        _shift(qk_known, new_qk, window + of_qk * conv_channel, conv_column, of_qk >= 0, WIDTH)
        _shift(v_known, new_v, window + of_v * conv_channel, conv_column, of_v >= 0, WIDTH)


@triton.jit
def _shift(known, newest, window, conv_column, mask, WIDTH: tl.constexpr):
    """The window behind the token."""
    store_window(window, conv_column, known[0][1:] + (newest,), mask, WIDTH)


@triton.jit
def _known(
    weight, bias, window, channel, read, weight_channel, weight_tap, conv_channel, conv_column,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Of these channels, before the token is there: the window, taps, bias."""
    every = channel < CHANNELS
    kind: tl.constexpr = window.dtype.element_ty
    has_window = channel < tl.where(read > 0, CHANNELS, 0)
    before = columns_of(window + channel * conv_channel, conv_column, has_window, kind, WIDTH - 1)
    kept: tl.constexpr = weight.dtype.element_ty
    taps = columns_of(weight + channel * weight_channel, weight_tap, every, kept, WIDTH)
    return before, taps, bias_of(bias, channel, every)


@triton.jit
def _output(known, newest, SILU: tl.constexpr, WIDTH: tl.constexpr):
    """The convolution's, rounded as it is stored, float32."""
    inputs = ()
    for column in tl.static_range(WIDTH - 1):
        inputs = inputs + (known[0][column].to(newest.dtype),)
    y = convolved(known[2], inputs + (newest,), known[1], WIDTH, SILU)
    return y.to(newest.dtype).to(tl.float32)
