"""Residual streams in Triton; the calls are protocol.Streams', the meaning reference.py's.

A program has all streams of one token, so that its bits do not depend on what it is batched with:
of some columns, where streams are added up, or of whole rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.launching import cdiv, launched, next_power_of_2
from megatron_hybrid.kernels.streams.protocol import StreamWeights

_COLUMNS = 512  # of a program, in all streams


def gated_mean(gates: Tensor, streams: Tensor) -> Tensor:
    """As in Streams."""
    out = streams.new_empty((len(streams), streams.shape[2]))
    _launch(_gated_mean_kernel, streams, (gates, streams, out))
    return out


def weighted(streams: Tensor, weights: Tensor) -> Tensor:
    """As in Streams."""
    out = streams.new_empty((len(streams), streams.shape[2]))
    _launch(_weighted_kernel, streams, (streams, weights, out), weights.stride(0))
    return out


def injected(streams: Tensor, x: Tensor, gates: Tensor) -> Tensor:
    """As in Streams; in the streams' place."""
    _launch(_injected_kernel, streams, (streams, x, gates), x.stride(0), gates.stride(0))
    return streams


def mixed(streams: Tensor, x: Tensor, weights: StreamWeights) -> Tensor:
    """As in Streams; in the streams' place."""
    _launch(_mixed_kernel, streams, (streams, x, weights.after, weights.mixing), x.stride(0))
    return streams


def attended(
    streams: Tensor, queries: Tensor, weights: Tensor, source_eps: float, eps: float
) -> Tensor:
    """As in Streams."""
    tokens, count, size = streams.shape
    out = weights.new_empty((tokens, len(queries), size))
    block = next_power_of_2(size)
    if tokens:
        _attended_kernel[(tokens * len(queries),)](
            streams, queries, weights, out, count, len(queries), size, streams.stride(0),
            source_eps, eps, size**-0.5,
            BLOCK=block, num_warps=min(max(block // 512, 1), 16), **OPTIONS,
        )  # fmt: skip
    return out


def keyed(key: Tensor, query: Tensor, value: Tensor) -> Tensor:
    """As in Streams."""
    tokens, count, size = key.shape
    out = key.new_empty(key.shape)
    block = next_power_of_2(size)
    if tokens:
        _keyed_kernel[(tokens * count,)](
            key, query, value, out, count, size, value.stride(0), size**-0.5,
            BLOCK=block, num_warps=min(max(block // 512, 1), 16), **OPTIONS,
        )  # fmt: skip
    return out


def balanced(logits: Tensor, streams: int, iterations: int, eps: float) -> StreamWeights:
    """As in Streams."""
    tokens = len(logits)
    before, after, mixing = (
        torch.empty(shape, dtype=torch.float32, device=logits.device)
        for shape in ((tokens, streams), (tokens, streams), (tokens, streams, streams))
    )
    if tokens:
        _balanced_kernel[(tokens,)](
            logits, before, after, mixing, logits.stride(0), eps, iterations,
            COUNT=streams, STREAMS=next_power_of_2(streams), num_warps=1, **OPTIONS,
        )  # fmt: skip
    return StreamWeights(before, after, mixing)


def _launch(kernel: Any, streams: Tensor, tensors: tuple[Tensor, ...], *rows: int) -> None:
    """A program for each token of the streams and some of their columns. `rows`: how far apart
    those of the tensors are that may be strided."""
    tokens, count, size = streams.shape
    block = min(_COLUMNS, next_power_of_2(size))
    if tokens:
        kernel[(tokens * cdiv(size, block),)](
            *tensors, count, size, *rows,
            STREAMS=next_power_of_2(count), BLOCK=block, num_warps=4, **OPTIONS,
        )  # fmt: skip


@triton.jit
def _part_of_token(size, BLOCK: tl.constexpr):
    """This program's token, its columns, and which of them there are."""
    blocks = tl.cdiv(size, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    return token, column, column < size


@launched
def _gated_mean_kernel(
    gates, streams, out, count, size, STREAMS: tl.constexpr, BLOCK: tl.constexpr
):
    wait_for_inputs()
    let_next_start()
    token, column, there = _part_of_token(size, BLOCK)
    stream = tl.arange(0, STREAMS)[:, None]
    mask = (stream < count) & there[None, :]
    places = (token * count + stream) * size + column[None, :]
    weights = tl.sigmoid(tl.load(gates + places, mask=mask, other=0).to(tl.float32))
    values = weights * tl.load(streams + places, mask=mask, other=0).to(tl.float32)
    tl.store(out + token * size + column, tl.sum(values, axis=0) / count, mask=there)


@launched
def _weighted_kernel(
    streams, weights, out, count, size, weights_row, STREAMS: tl.constexpr, BLOCK: tl.constexpr
):
    wait_for_inputs()
    let_next_start()
    token, column, there = _part_of_token(size, BLOCK)
    stream = tl.arange(0, STREAMS)
    own = tl.load(weights + token * weights_row + stream, mask=stream < count, other=0)
    mask = (stream < count)[:, None] & there[None, :]
    places = (token * count + stream[:, None]) * size + column[None, :]
    values = own[:, None] * tl.load(streams + places, mask=mask, other=0).to(tl.float32)
    tl.store(out + token * size + column, tl.sum(values, axis=0), mask=there)


@launched
def _injected_kernel(
    streams, x, gates, count, size, x_row, gates_row, STREAMS: tl.constexpr, BLOCK: tl.constexpr
):
    wait_for_inputs()
    let_next_start()
    token, column, there = _part_of_token(size, BLOCK)
    stream = tl.arange(0, STREAMS)
    own = tl.load(gates + token * gates_row + stream, mask=stream < count, other=0)
    weights = 2 * tl.sigmoid(own.to(tl.float32))
    values = tl.load(x + token * x_row + column, mask=there, other=0).to(tl.float32)
    mask = (stream < count)[:, None] & there[None, :]
    places = (token * count + stream[:, None]) * size + column[None, :]
    before = tl.load(streams + places, mask=mask, other=0).to(tl.float32)
    tl.store(streams + places, before + weights[:, None] * values[None, :], mask=mask)


@launched
def _mixed_kernel(
    streams, x, after, mixing, count: tl.constexpr, size, x_row,
    STREAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    wait_for_inputs()
    let_next_start()
    token, column, there = _part_of_token(size, BLOCK)
    stream = tl.arange(0, STREAMS)
    is_one = stream < count
    weights = tl.load(after + token * count + stream, mask=is_one, other=0)
    values = tl.load(x + token * x_row + column, mask=there, other=0).to(tl.float32)
    total = weights[:, None] * values[None, :]
    first = streams + token * count * size + column
    for i in tl.static_range(count):  # all are read before any is written
        row = tl.load(mixing + (token * count + i) * count + stream, mask=is_one, other=0)
        values = tl.load(first + i * size, mask=there, other=0).to(tl.float32)
        total += row[:, None] * values[None, :]
    tl.debug_barrier()
    mask = is_one[:, None] & there[None, :]
    tl.store(first[None, :] + stream[:, None] * size, total, mask=mask)


@launched
def _attended_kernel(
    streams, queries, weights, out, count, inputs, size, token_stride, source_eps, eps, scale,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One query of one token."""
    row = tl.program_id(0).to(tl.int64)
    token, which = row // inputs, row % inputs
    column = tl.arange(0, BLOCK)
    mask = column < size
    query = tl.load(queries + which * size + column, mask=mask, other=0)
    weight = tl.load(weights + which * size + column, mask=mask, other=0)
    wait_for_inputs()
    let_next_start()
    largest, share = -float("inf"), 0.0
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(count):
        source = streams + token * token_stride + i * size + column
        values = tl.load(source, mask=mask, other=0).to(tl.float32)
        values *= tl.rsqrt(tl.sum(values * values, axis=0) / size + source_eps)
        logit = tl.sum(values * query, axis=0) * scale
        larger = tl.maximum(largest, logit)
        shrink, own = tl.exp(largest - larger), tl.exp(logit - larger)
        share = share * shrink + own
        total = total * shrink + own * values
        largest = larger
    total /= share
    total *= tl.rsqrt(tl.sum(total * total, axis=0) / size + eps)
    tl.store(out + row * size + column, total * weight.to(tl.float32), mask=mask)


@launched
def _keyed_kernel(
    key, query, value, out, count, size, value_row, scale, BLOCK: tl.constexpr
):  # fmt: skip
    wait_for_inputs()
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < size
    keys = tl.load(key + row * size + column, mask=mask, other=0).to(tl.float32)
    queries = tl.load(query + row * size + column, mask=mask, other=0).to(tl.float32)
    alike = tl.sum(keys * queries, axis=0) * scale
    size_of = tl.abs(alike)
    root = tl.sqrt(tl.where(size_of < 1e-6, 1e-6, size_of))
    sign = tl.where(alike > 0, 1.0, tl.where(alike < 0, -1.0, 0.0))
    values = tl.load(value + row // count * value_row + column, mask=mask, other=0).to(tl.float32)
    tl.store(out + row * size + column, tl.sigmoid(root * sign) * values, mask=mask)


@launched
def _balanced_kernel(
    logits, before, after, mixing, logits_row, eps, iterations,
    COUNT: tl.constexpr, STREAMS: tl.constexpr,
):  # fmt: skip
    wait_for_inputs()
    let_next_start()
    token = tl.program_id(0).to(tl.int64)
    own = logits + token * logits_row
    stream = tl.arange(0, STREAMS)
    is_one = stream < COUNT
    enters = tl.sigmoid(tl.load(own + stream, mask=is_one, other=0)) + eps
    leaves = 2 * tl.sigmoid(tl.load(own + COUNT + stream, mask=is_one, other=0))
    tl.store(before + token * COUNT + stream, enters, mask=is_one)
    tl.store(after + token * COUNT + stream, leaves, mask=is_one)
    places = stream[:, None] * COUNT + stream[None, :]
    mask = is_one[:, None] & is_one[None, :]
    rows = tl.load(own + 2 * COUNT + places, mask=mask, other=float("-inf"))
    rows = tl.exp(rows - tl.where(is_one, tl.max(rows, axis=1), 0)[:, None])
    rows = rows / tl.where(is_one, tl.sum(rows, axis=1), 1)[:, None]
    rows = tl.where(mask, rows + eps, 0)
    rows = rows / (tl.sum(rows, axis=0) + eps)[None, :]
    for _ in range(iterations - 1):
        rows = rows / (tl.sum(rows, axis=1) + eps)[:, None]
        rows = rows / (tl.sum(rows, axis=0) + eps)[None, :]
    tl.store(mixing + token * COUNT * COUNT + places, rows, mask=mask)
