"""Scans of recurrent layers for tools/benchmark_kernels.py: updates of a token, runs of several,
prompts; and their states packed into int8."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch

from bench.cases import BLOCK, Bench, Calls, Case, num_written
from bench.recurrent_kinds import RecurrentKind
from megatron_hybrid.kernels.contract import DecodeRuns
from megatron_hybrid.layers.inputs import StateSpec, allocate_caches

# Tokens unfolded, drafts, whether the state is written.
RUNS = [(0, 0, True), (4, 4, True), (0, 4, True), (1, 0, False), (3, 0, False), (4, 4, False)]


def recurrent_cases(bench: Bench, kind: RecurrentKind) -> Iterator[Case]:
    if kind.kernel is None:
        return
    for dtype in (torch.float32, torch.bfloat16):
        for batch in bench.batches():
            yield _state_update(bench, kind, batch, dtype)
    for batch in bench.batches():
        for unfolded, drafts, writes in RUNS:
            yield _state_runs(bench, kind, batch, unfolded, drafts, writes)
        for interval in (2, 4, 8):
            yield _spared_writes(bench, kind, batch, interval)
    several = [48, 48] if bench.tiny else [4096, 4096]
    for lengths in (*([n] for n in bench.prefills()), several):
        for checkpoints in (0, 4):
            yield _scan(bench, kind, lengths, checkpoints)
    for moves in (1, 4):
        yield _packing(bench, kind, moves)


def _state_update(bench: Bench, kind: RecurrentKind, batch: int, dtype: torch.dtype) -> Case:
    slots = bench.slots(batch)
    plan = bench.kernels.plan_decode(slots)

    def make() -> Calls:
        inputs, state = kind.inputs(batch), bench.states(kind, batch, dtype).ssm
        return {
            "ours": lambda: kind.kernel.decode(inputs, kind.constants, state, plan),
            **kind.update_libraries(inputs, state, slots),
        }

    state_bytes = math.prod(kind.state) * dtype.itemsize
    moved = batch * (2 * state_bytes + kind.values_per_token * bench.item)
    return Case("state update", f"B={batch} {_short(dtype)} state", moved, make)


def _state_runs(
    bench: Bench, kind: RecurrentKind, batch: int, unfolded: int, drafts: int, writes: bool
) -> Case:
    """Decodes with so many drafts and tokens unfolded, beside plain ones of one token."""
    length = 1 + drafts
    ring_length = unfolded + length
    every = np.full(batch, unfolded), drafts, np.full(batch, writes)
    make = _runs(bench, kind, bench.decode_runs(*every, ring_length), length, ring_length)
    state_bytes = (1 + writes) * math.prod(kind.state) * 4
    moved = batch * (state_bytes + (length + unfolded) * kind.values_per_token * bench.item)
    written = "" if writes else ", not written"
    shape = f"B={batch} {unfolded} unfolded, {drafts} drafts{written}"
    return Case("runs", shape, moved, make)


def _spared_writes(bench: Bench, kind: RecurrentKind, batch: int, interval: int) -> Case:
    """Decodes of which each writes its state every so many tokens, beside plain ones."""
    runs = bench.usual_runs(batch, interval)
    make, moved = _runs(bench, kind, runs, 1, interval), _runs_bytes(bench, kind, runs)
    return Case("spared writes", f"B={batch} every {interval} tokens", moved, make)


def _runs_bytes(bench: Bench, kind: RecurrentKind, runs: DecodeRuns) -> int:
    """What a scan moves of one token a sequence."""
    batch = len(runs.unfolded)
    states, tokens = batch + num_written(runs), batch + int(runs.unfolded.sum())
    return states * math.prod(kind.state) * 4 + tokens * kind.values_per_token * bench.item


def _runs(
    bench: Bench, kind: RecurrentKind, runs: DecodeRuns, length: int, ring_length: int
) -> Callable[[], Calls]:
    """`length`: tokens of each sequence."""
    batch = len(runs.unfolded)
    plan = bench.kernels.plan_runs(runs, ring_length)
    plain = bench.kernels.plan_decode(bench.slots(batch))

    def make() -> Calls:
        inputs, single = kind.inputs(batch * length), kind.inputs(batch)
        ring = bench.ring(kind, batch, ring_length)
        layer = (kind.constants, bench.states(kind, batch, torch.float32).ssm)
        return {
            "ours": lambda: kind.kernel.decode_runs(inputs, *layer, ring, plan),
            "one token": lambda: kind.kernel.decode(single, *layer, plain),
        }

    return make


def _scan(bench: Bench, kind: RecurrentKind, lengths: list[int], checkpoints: int) -> Case:
    tokens, count = sum(lengths), len(lengths)
    segments = bench.segments(lengths, checkpoints, kind.kernel_chunk)
    plan = kind.kernel.plan(segments, kind.kernel_chunk)
    stored = count + len(segments.checkpoint_slot)

    def make() -> Calls:
        inputs = kind.inputs(tokens)
        state = bench.states(kind, stored, torch.float32).ssm
        calls: Calls = {"ours": lambda: kind.kernel.prefill(inputs, kind.constants, state, plan)}
        if not checkpoints and len(set(lengths)) == 1:
            calls |= kind.prefill_libraries(inputs, count)
        return calls

    moved = tokens * kind.values_per_token * bench.item + stored * math.prod(kind.state) * 4
    shape = f"{count} x {lengths[0]} tokens, {checkpoints} checkpoints"
    return Case("scan", shape, moved, make, tokens * kind.flops_per_token)


def _packing(bench: Bench, kind: RecurrentKind, moves: int) -> Case:
    """So many states of all layers into int8, and back."""
    layers = 2 if bench.tiny else kind.layers(bench.model.pattern)
    over = -1 if len(kind.state) == 2 else -2
    spec = StateSpec(
        (kind.channels, kind.width - 1), bench.dtype, kind.state, torch.float32,
        kind.kernel_chunk, scaled_over=over,
    )  # fmt: skip
    full = bench.integers(range(1, moves + 1))
    packed = full + moves

    def make() -> Calls:
        (states,) = allocate_caches(
            {}, dict.fromkeys(range(layers), spec), 1, BLOCK, moves + 1, bench.device,
            num_packed=moves, packed_dtype=torch.int8,
        ).packed  # fmt: skip
        states.full_ssm.normal_()
        kernel = bench.kernels.packing
        return {
            "ours": lambda: kernel.pack(states, full, packed),
            "back": lambda: kernel.unpack(states, packed, full),
        }

    each = spec.bytes_per_slot() + spec.bytes_per_packed_slot(torch.int8)
    return Case("packing", f"{layers} layers, {moves} states", layers * moves * each, make)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
