"""The causal convolution by causal-conv1d (Dao AI Lab); the meaning is reference.py's, the calls
are in protocols.py. Channels are a multiple of 8, widths are 2 to 4. Gates are torch's."""

from __future__ import annotations

import torch
from causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from torch import Tensor

from megatron_hybrid.kernels.causal_conv1d.reference import gated, multiplied
from megatron_hybrid.kernels.contract import DecodeRuns
from megatron_hybrid.kernels.protocols import ConvConstants, Gates
from megatron_hybrid.kernels.refused_runs import RUNS_ARE_REFUSED
from megatron_hybrid.kernels.whole_segments import UpdatedSlots, WholeSegments

plan = WholeSegments.of


def prefill(
    x: Tensor,
    constants: ConvConstants,
    state: Tensor,
    plan: WholeSegments,
    out: Tensor | None = None,
    gates: Gates | None = None,
) -> Tensor:
    """A call for each segment: with several in one the library takes no initial states."""
    x, after = gated(x, gates)
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    # As the library wants windows: in x's type, channels side by side.
    windows = plan.reads.gather(state).to(x.dtype).mT.contiguous().mT  # [S, channels, W - 1]
    for number, tokens in plan.filled():
        window = windows[number : number + 1]
        y, last = causal_conv1d_fn(
            x[tokens].contiguous().t()[None],  # [1, channels, tokens], on whole vectors
            *_weights(constants),
            initial_states=window,
            return_final_states=True,
            activation=_activation(constants),
        )
        out[tokens] = multiplied(y[0].t(), None if after is None else after[tokens])
        window.copy_(last)
    plan.clear_padding(out)
    plan.store(windows, state)
    return out


def decode(
    x: Tensor,
    constants: ConvConstants,
    state: Tensor,
    plan: UpdatedSlots,
    out: Tensor | None = None,
    gates: Gates | None = None,
) -> Tensor:
    """One token a sequence."""
    x, after = gated(x, gates)
    states, places = plan.states(state, x.dtype)
    y = causal_conv1d_update(
        x, states, *_weights(constants), _activation(constants), conv_state_indices=places
    )
    plan.store(states, state)
    return plan.outputs(multiplied(y, after), out)


def plan_runs(runs: DecodeRuns, width: int, ring_length: int) -> None:
    """The library has no such kernel."""
    raise NotImplementedError(RUNS_ARE_REFUSED)


def decode_runs(
    x: Tensor,
    constants: ConvConstants,
    state: Tensor,
    ring: Tensor,
    plan: None,
    out: Tensor | None = None,
    gates: Gates | None = None,
) -> Tensor:
    """The library has no such kernel."""
    raise NotImplementedError(RUNS_ARE_REFUSED)


def _weights(constants: ConvConstants) -> tuple[Tensor, Tensor | None]:
    return constants.weight.contiguous(), constants.bias


def _activation(constants: ConvConstants) -> str | None:
    return "silu" if constants.silu else None
