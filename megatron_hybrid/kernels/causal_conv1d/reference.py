"""Causal depthwise convolution in plain torch.

    y[t] = silu(bias + sum over k of weight[:, k] * x[t - (W - 1) + k]), or without silu

With gates x is multiplied by one of them before that, y by the other after it.

The state of a sequence is its last W - 1 inputs, oldest first. Before the convolution each
segment is laid out behind the window that it reads, so a segment shorter than the window keeps
the older columns without a special case:

    rows   | w0 w1 w2  a0 a1 a2 a3 | w0 w1 w2  b0 |         (W = 4)
             \\_read_slot of a_/       \\_of b__/
    new window of b:                        w1 w2 b0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeRuns, PrefillSegments
from megatron_hybrid.kernels.elementwise import silu
from megatron_hybrid.kernels.protocols import ConvConstants, Gates
from megatron_hybrid.kernels.runs import HostRuns, Turn, into
from megatron_hybrid.kernels.slots import DecodePlan, SlotReads, SlotWrites, indices

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
    """The layout of the step's prompts."""
    device = segments.cu_seqlens.device
    bounds: list[int] = segments.cu_seqlens.tolist()
    starts: list[int] = segments.start_position.tolist()
    old = width - 1
    # Sequence s begins in row bounds[s] + s * old; after p of its tokens the window begins p later.
    windows = [
        (bounds[s + 1] + s * old, slot) for s, slot in enumerate(segments.write_slot.tolist())
    ]
    windows += [
        (bounds[s] + s * old + position - starts[s], slot)
        for s, position, slot in segments.checkpoints()
    ]
    first, writes = SlotWrites.some(windows, device)
    columns = torch.arange(old, device=device)
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
        writes=writes,
        window_rows=(first[:, None] + columns).flatten(),
        token_rows=token_rows,
        old_rows=old_rows,
    )


def prefill(
    x: Tensor,
    constants: ConvConstants,
    state: Tensor,
    plan: ConvPlan,
    out: Tensor | None = None,
    gates: Gates | None = None,
) -> Tensor:
    """state [slots, channels, W - 1], of any strides -> [T, channels]."""
    channels, width = constants.weight.shape
    x, after = gated(x, gates)
    old = plan.reads.gather(state).transpose(1, 2).to(x.dtype)  # [S, W - 1, channels]
    if plan.token_rows is None or plan.old_rows is None:
        rows = torch.cat((old[0], x))
    else:
        rows = x.new_empty((x.shape[0] + plan.old_rows.shape[0], channels))
        rows.index_copy_(0, plan.old_rows, old.reshape(-1, channels))
        rows.index_copy_(0, plan.token_rows, x)
    windows = rows.index_select(0, plan.window_rows).view(-1, width - 1, channels)
    plan.writes.scatter(state, windows.transpose(1, 2))

    taps = _taps(constants)
    outputs = rows.shape[0] - (width - 1)
    y = torch.empty((outputs, channels), dtype=torch.float32, device=x.device)
    for begin in range(0, outputs, _TILE):
        end = min(begin + _TILE, outputs)
        inputs = [rows[begin + k : end + k] for k in range(width)]
        y[begin:end] = _outputs(inputs, taps, constants)
    if plan.token_rows is not None:
        y = y.index_select(0, plan.token_rows - (width - 1))
    return into(out, multiplied(y.to(x.dtype), after), x)


def decode(
    x: Tensor,
    constants: ConvConstants,
    state: Tensor,
    plan: DecodePlan,
    out: Tensor | None = None,
    gates: Gates | None = None,
) -> Tensor:
    """One token a sequence: as above with T = N sequences."""
    x, after = gated(x, gates)
    old = plan.reads.gather(state).to(x.dtype)  # [N, channels, W - 1]
    rows = torch.cat((old, x[:, :, None]), dim=2)  # [N, channels, W]
    plan.writes.scatter(state, rows[:, :, 1:])
    y = _outputs(rows.unbind(2), _taps(constants), constants)
    return into(out, multiplied(y.to(x.dtype), after), x)


def gated(x: Tensor, gates: Gates | None) -> tuple[Tensor, Tensor | None]:
    """The convolution's inputs, and the gate of its outputs."""
    before, after = Gates() if gates is None else gates
    return multiplied(x, before), after


def multiplied(x: Tensor, gate: Tensor | None) -> Tensor:
    """x [T, channels], if there is a gate times that, rounded to its dtype."""
    return x if gate is None else (x * gate).to(x.dtype)


def _taps(constants: ConvConstants) -> Tensor:
    """[W, channels] float32"""
    return constants.weight.float().t().contiguous()


def _outputs(inputs: Sequence[Tensor], taps: Tensor, constants: ConvConstants) -> Tensor:
    """[T, channels] float32 of the tokens' inputs and those before them, the oldest first: W of
    [T, channels]."""
    y = inputs[0] * taps[0]
    for k in range(1, len(inputs)):
        y.addcmul_(inputs[k], taps[k])
    if constants.bias is not None:
        y.add_(constants.bias)
    return silu(y) if constants.silu else y


@dataclass(frozen=True, slots=True)
class ConvRunsPlan:
    """Rows of a layout in which each sequence has the window that it reads, then its unfolded
    tokens, then its own."""

    reads: SlotReads
    writes: SlotWrites
    window_rows: Tensor  # [writes * (W - 1)]: rows of the windows that are written
    old_rows: Tensor  # [S * (W - 1)]: rows of the windows that are read
    unfolded: Turn  # all unfolded tokens
    unfolded_rows: Tensor  # [unfolded]
    token_rows: Tensor  # [tokens, W]: each token's and those of the W - 1 before it
    kept: Turn


def plan_runs(runs: DecodeRuns, width: int, ring_length: int) -> ConvRunsPlan:
    """The layout of the step's decodes."""
    host, old = HostRuns(runs, ring_length), width - 1
    first: list[int] = []
    unfolded: list[tuple[int, int]] = []  # sequence, and how far ahead of its next token
    unfolded_rows: list[int] = []
    token_rows: list[int] = []
    windows: list[tuple[int, int]] = []  # first row, slot
    begin = 0
    for s, (length, count) in enumerate(zip(host.lengths, host.unfolded, strict=True)):
        first.append(begin)
        unfolded += [(s, ahead - count) for ahead in range(count)]
        unfolded_rows += range(begin + old, begin + old + count)
        token_rows += range(begin + old + count, begin + old + count + length)
        # After a tokens of the layout the window begins a rows later.
        folded = count + min(length, 1)
        windows.append((begin + folded, host.write_slot[s]))
        position, slot = host.checkpoints[s]
        taken = position - host.position[s] + count
        if 0 < taken <= folded:
            windows.append((begin + taken, slot))
        begin += old + count + length
    device = host.device
    columns, taps = torch.arange(old, device=device), torch.arange(-old, 1, device=device)
    window_rows, writes = SlotWrites.some(windows, device)
    return ConvRunsPlan(
        reads=SlotReads.of(runs.read_slot.tolist(), device),
        writes=writes,
        window_rows=(window_rows[:, None] + columns).flatten(),
        old_rows=(indices(first, device)[:, None] + columns).flatten(),
        unfolded=host.turn(unfolded),
        unfolded_rows=indices(unfolded_rows, device),
        token_rows=indices(token_rows, device)[:, None] + taps,
        kept=host.kept(),
    )


def decode_runs(
    x: Tensor,
    constants: ConvConstants,
    state: Tensor,
    ring: Tensor,
    plan: ConvRunsPlan,
    out: Tensor | None = None,
    gates: Gates | None = None,
) -> Tensor:
    """DecodeRuns: as above with tokens T. ring [rows, R, channels]: earlier inputs, as x's."""
    channels, width = constants.weight.shape
    x, after = gated(x, gates)
    tokens = plan.token_rows.shape[0]
    old = plan.reads.gather(state).transpose(1, 2).to(x.dtype)  # [S, W - 1, channels]
    rows = x.new_empty((old.numel() // channels + len(plan.unfolded_rows) + tokens, channels))
    rows.index_copy_(0, plan.old_rows, old.reshape(-1, channels))
    rows.index_copy_(0, plan.unfolded_rows, ring[plan.unfolded.rings, plan.unfolded.places])
    rows.index_copy_(0, plan.token_rows[:, -1], x[:tokens])
    windows = rows.index_select(0, plan.window_rows).view(-1, width - 1, channels)
    plan.writes.scatter(state, windows.transpose(1, 2))
    assert plan.kept.tokens is not None
    ring[plan.kept.rings, plan.kept.places] = x.index_select(0, plan.kept.tokens)

    inputs = [rows.index_select(0, before) for before in plan.token_rows.unbind(1)]
    y = _outputs(inputs, _taps(constants), constants)
    out = torch.empty_like(x) if out is None else out
    out[tokens:] = 0
    out[:tokens] = multiplied(y.to(x.dtype), None if after is None else after[:tokens])
    return out
