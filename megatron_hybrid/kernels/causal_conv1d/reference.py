"""Causal depthwise convolution in plain torch.

    y[t] = silu(bias + sum over k of weight[:, k] * x[t - (W - 1) + k]), or without silu

The state of a sequence is its last W - 1 inputs, oldest first. Before the convolution each
segment is laid out behind the window that it reads, so a segment shorter than the window keeps
the older columns without a special case:

    rows   | w0 w1 w2  a0 a1 a2 a3 | w0 w1 w2  b0 |         (W = 4)
             \\_read_slot of a_/       \\_of b__/
    new window of b:                        w1 w2 b0
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.kernels.contract import PrefillSegments
from megatron_hybrid.kernels.slots import DecodePlan, SlotReads, SlotWrites

# Rows that are convolved at a time: few enough to stay in a core's cache.
_TILE = 256


@dataclass(frozen=True, slots=True)
class ConvPlan:
    """Where each row of the layout above comes from; the same for every layer of a step."""

    reads: SlotReads
    writes: SlotWrites
    window_rows: Tensor  # [writes * (W - 1)]: rows of the windows that are written
    token_rows: Tensor | None  # [T]: row of each token; None for a single segment
    old_rows: Tensor | None  # [S * (W - 1)]: rows of the windows that are read


def plan(segments: PrefillSegments, width: int) -> ConvPlan:
    device = segments.cu_seqlens.device
    bounds: list[int] = segments.cu_seqlens.tolist()
    starts: list[int] = segments.start_position.tolist()
    write_slots: list[int] = segments.write_slot.tolist()
    old = width - 1
    # Sequence s begins in row bounds[s] + s * old; after p of its tokens the window begins p later.
    windows = [bounds[s + 1] + s * old for s in range(len(starts))]
    for sequence, position, slot in segments.checkpoints():
        windows.append(bounds[sequence] + sequence * old + position - starts[sequence])
        write_slots.append(slot)
    kept = [(window, slot) for window, slot in zip(windows, write_slots, strict=True) if slot > 0]
    columns = torch.arange(old, device=device)
    first = torch.tensor([window for window, _ in kept], dtype=torch.int64, device=device)
    token_rows = old_rows = None
    if len(starts) > 1:
        lengths = segments.cu_seqlens.diff()
        sequence_of_token = torch.repeat_interleave(
            torch.arange(len(starts), device=device), lengths, output_size=bounds[-1]
        )
        token_rows = torch.arange(bounds[-1], device=device) + (sequence_of_token + 1) * old
        begin = segments.cu_seqlens[:-1] + torch.arange(len(starts), device=device) * old
        old_rows = (begin[:, None] + columns).flatten()
    return ConvPlan(
        reads=SlotReads.of(segments.read_slot.tolist(), device),
        writes=SlotWrites.of([slot for _, slot in kept], device),
        window_rows=(first[:, None] + columns).flatten(),
        token_rows=token_rows,
        old_rows=old_rows,
    )


def prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    plan: ConvPlan,
    out: Tensor | None = None,
    *,
    silu: bool = True,
) -> Tensor:
    """x [T, channels] (rows may be strided), weight [channels, W], bias [channels], state
    [slots, channels, W - 1] (read and written; any strides) -> [T, channels], after SiLU where
    `silu`, in `out` if that is given."""
    channels, width = weight.shape
    old = plan.reads.gather(state).transpose(1, 2).to(x.dtype)  # [S, W - 1, channels]
    if plan.token_rows is None or plan.old_rows is None:
        rows = torch.cat((old[0], x))
    else:
        rows = x.new_empty((x.shape[0] + plan.old_rows.shape[0], channels))
        rows.index_copy_(0, plan.old_rows, old.reshape(-1, channels))
        rows.index_copy_(0, plan.token_rows, x)
    windows = rows.index_select(0, plan.window_rows).view(-1, width - 1, channels)
    plan.writes.scatter(state, windows.transpose(1, 2))

    taps = weight.float().t().contiguous()  # [W, channels]
    outputs = rows.shape[0] - (width - 1)
    y = torch.empty((outputs, channels), dtype=torch.float32, device=x.device)
    for begin in range(0, outputs, _TILE):
        end = min(begin + _TILE, outputs)
        part = y[begin:end]
        torch.mul(rows[begin:end], taps[0], out=part)
        for k in range(1, width):
            part.addcmul_(rows[begin + k : end + k], taps[k])
        if bias is not None:
            part.add_(bias)
        if silu:
            F.silu(part, inplace=True)
    if plan.token_rows is not None:
        y = y.index_select(0, plan.token_rows - (width - 1))
    return y.to(x.dtype) if out is None else out.copy_(y)


def decode(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    plan: DecodePlan,
    out: Tensor | None = None,
    *,
    silu: bool = True,
) -> Tensor:
    """One token a sequence: as above with T = N sequences."""
    old = plan.reads.gather(state).to(x.dtype)  # [N, channels, W - 1]
    rows = torch.cat((old, x[:, :, None]), dim=2)  # [N, channels, W]
    plan.writes.scatter(state, rows[:, :, 1:])
    y = (rows.float() * weight.float()).sum(dim=2)
    if bias is not None:
        y = y + bias
    if silu:
        F.silu(y, inplace=True)
    return y.to(x.dtype) if out is None else out.copy_(y)
