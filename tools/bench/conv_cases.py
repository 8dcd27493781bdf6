"""The causal convolution of recurrent layers, for tools/benchmark_kernels.py. A row of "conv tiles"
has a decode in the tile that is chosen and in others: channels.warps of a program.

    python tools/benchmark_kernels.py --model nemotron-h-8b --only "conv tiles"
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from bench.cases import Bench, Calls, Case, num_written
from bench.recurrent_kinds import RecurrentKind, library
from megatron_hybrid.engine.sizing import WRITE_INTERVALS
from megatron_hybrid.kernels.protocols import ConvConstants, Gates
from megatron_hybrid.models.config import MAMBA, SHORT_CONV

TILES = "128.1 256.1 256.2 512.2 512.4 1024.4 1024.8 2048.8".split()


def conv_cases(bench: Bench, kind: RecurrentKind) -> Iterator[Case]:
    for batch in bench.batches():
        yield _conv_decode(bench, kind, batch)
    if bench.kernels.name == "gpu":  # others have no tiles
        for batch in bench.batches():
            yield _conv_tiles(bench, kind, batch)
    for tokens in bench.prefills():
        for checkpoints in (0, 4):
            yield _conv_prefill(bench, kind, [tokens], checkpoints)
    longest = bench.prefills()[:2][-1]
    for requests in (2, 3) if bench.tiny else (8, 64):
        yield _conv_prefill(bench, kind, [longest // requests] * requests, 0)


def _conv_decode(bench: Bench, kind: RecurrentKind, batch: int) -> Case:
    conv, slots = bench.kernels.conv, bench.slots(batch)
    plan = bench.kernels.plan_decode(slots)
    constants = bench.conv_constants(kind)

    def make() -> Calls:
        x, state = bench.projected(kind, batch), bench.states(kind, batch, bench.dtype).conv
        calls: Calls = {"ours": lambda: conv.decode(x, constants, state, plan)}
        if kind.letter == SHORT_CONV:
            convolve = partial(conv.decode, constants=constants, state=state, plan=plan)
            calls |= _gated(bench, kind, batch, convolve)
        if fast := library("causal_conv1d"):
            activation, weights = "silu" if kind.silu else None, _library_weights(constants)
            calls["causal_conv1d"] = lambda: fast.causal_conv1d_update(
                x, state, *weights, activation, conv_state_indices=slots.read_slot
            )
        return calls

    moved = batch * kind.channels * (2 + 2 * (kind.width - 1)) * bench.item
    return Case("conv decode", f"B={batch}", moved, make)


def _conv_tiles(bench: Bench, kind: RecurrentKind, batch: int) -> Case:
    """With the plan and the gates that a layer's decodes have."""
    from megatron_hybrid.kernels.causal_conv1d.triton_decode import Tile, decode_tile  # of GPUs

    chosen = decode_tile(batch, kind.channels)
    tiles = {name: Tile(*map(int, name.split("."))) for name in TILES}
    others = {name: tile for name, tile in tiles.items() if tile != chosen}
    kernels, conv, runs = bench.kernels, bench.kernels.conv, None
    interval = WRITE_INTERVALS[MAMBA]
    if kind.letter == MAMBA:
        runs = bench.usual_runs(batch, interval)
        plan, written = conv.plan_runs(runs, kind.width, interval), num_written(runs)
    else:
        plan, written = kernels.plan_decode(bench.slots(batch)), batch

    def make() -> Calls:
        x, state = bench.projected(kind, batch), bench.states(kind, batch, bench.dtype).conv
        layer, gates = (bench.conv_constants(kind), state), None
        if kind.letter == SHORT_CONV:
            gates = Gates(*bench.normal(batch, 2 * kind.channels).chunk(2, dim=1))
        call = partial(conv.decode, x, *layer, plan, gates=gates)
        if runs is not None:
            ring = bench.normal(batch, interval, kind.channels)
            call = partial(conv.decode_runs, x, *layer, ring, plan, gates=gates)
        calls: Calls = {"ours": call}
        return calls | {name: partial(call, tile=others[name]) for name in others}

    moved = kind.channels * (2 * batch + (batch + written) * (kind.width - 1)) * bench.item
    name = ".".join(map(str, chosen))
    return Case("conv tiles", f"B={batch}, ours {name}", moved, make)


def _conv_prefill(bench: Bench, kind: RecurrentKind, lengths: list[int], checkpoints: int) -> Case:
    conv, constants = bench.kernels.conv, bench.conv_constants(kind)
    segments = bench.segments(lengths, checkpoints, kind.kernel_chunk)
    plan = conv.plan(segments, kind.width)
    tokens, stored = sum(lengths), len(lengths) + len(segments.checkpoint_slot)

    def make() -> Calls:
        x, state = bench.projected(kind, tokens), bench.states(kind, stored, bench.dtype).conv
        calls: Calls = {"ours": lambda: conv.prefill(x, constants, state, plan)}
        if kind.letter == SHORT_CONV:
            convolve = partial(conv.prefill, constants=constants, state=state, plan=plan)
            calls |= _gated(bench, kind, tokens, convolve)
        if (fast := library("causal_conv1d")) and not checkpoints:
            activation, weights = "silu" if kind.silu else None, _library_weights(constants)
            # The library's call for several requests, which leaves no state.
            of_token = segments.sequence_of_token[None].int() if len(lengths) > 1 else None
            calls["causal_conv1d"] = lambda: fast.causal_conv1d_fn(
                x.t()[None], *weights, seq_idx=of_token, activation=activation
            )
        return calls

    moved = 2 * tokens * kind.channels * bench.item
    size = f"{tokens} tokens, {checkpoints} checkpoints"
    if len(lengths) > 1:
        size = f"{len(lengths)} x {lengths[0]} tokens"
    return Case("conv prefill", size, moved, make)


def _library_weights(constants: ConvConstants) -> tuple[Tensor, Tensor | None]:
    """As causal-conv1d has them, a channel's taps side by side."""
    return constants.weight.contiguous(), constants.bias


def _gated(
    bench: Bench, kind: RecurrentKind, tokens: int, convolve: Callable[..., Tensor]
) -> Calls:
    """A short convolution between its gates, in its kernels and in kernels of their own."""
    wide = bench.normal(tokens, 3 * kind.channels)
    before, after, x = wide.split(kind.channels, dim=1)
    gates, gate = Gates(before, after), bench.kernels.activation.gate

    def apart() -> None:
        inputs = gate(x, before, "none")
        gate(convolve(inputs), after, "none")

    return {"with gates": lambda: convolve(x, gates=gates), "gates apart": apart}
