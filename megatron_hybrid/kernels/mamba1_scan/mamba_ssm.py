"""The Mamba1 scan by mamba-ssm (state-spaces); the meaning is reference.py's, the calls are in
protocols.py.

selective_scan_fn begins at zeros. A state h [channels, N] to begin at comes in through N tokens in
front of the segment's own, the n-th of which adds its column n: B is 1 for n and 0 for the others,
and x = h[:, n] / dt. With a dt of 2**-60 nothing decays meanwhile, and in float32 all of it is
exact: exp(dt A) is 1, and powers of two only move exponents.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
from mamba_ssm.ops.triton.selective_state_update import selective_state_update
from torch import Tensor

from megatron_hybrid.kernels.protocols import Mamba1Constants, Mamba1Tokens, Rings
from megatron_hybrid.kernels.refused_runs import RUNS_ARE_REFUSED
from megatron_hybrid.kernels.whole_segments import UpdatedSlots, WholeSegments

_STEP = 2.0**-60

plan = WholeSegments.of


def prefill(
    tokens: Mamba1Tokens,
    constants: Mamba1Constants,
    state: Tensor,
    plan: WholeSegments,
    out: Tensor | None = None,
) -> Tensor:
    """A call for each segment."""
    out = tokens.x.new_empty(tokens.x.shape) if out is None else out
    states = plan.reads.gather(state).float()  # [S, channels, N]
    size = states.shape[2]
    for number, rows in plan.filled():
        x, z, dt, B, C = (values[rows].float().t() for values in tokens)  # [..., tokens]
        dt = F.softplus(dt + constants.dt_bias[:, None])
        before = states[number]  # a new sequence's zeros stay zeros
        columns = torch.eye(size, device=before.device)
        y, last = selective_scan_fn(
            torch.cat((before / _STEP, x), dim=1)[None],
            torch.cat((torch.full_like(before, _STEP), dt), dim=1)[None],
            constants.A.contiguous(),
            torch.cat((columns, B), dim=1)[None],
            F.pad(C, (size, 0))[None],
            D=constants.D,
            z=F.pad(z, (size, 0))[None],
            return_last_state=True,
        )
        out[rows] = y[0, :, size:].t().to(out.dtype)
        states[number].copy_(last[0])
    plan.clear_padding(out)
    plan.store(states, state)
    return out


def decode(
    tokens: Mamba1Tokens,
    constants: Mamba1Constants,
    state: Tensor,
    plan: UpdatedSlots,
    out: Tensor | None = None,
) -> Tensor:
    """One token a sequence."""
    x, z, dt, B, C = (values.contiguous() for values in tokens)
    states, places = plan.states(state, state.dtype)
    y = selective_state_update(
        states,
        x,
        dt,
        constants.A,
        B,
        C,
        D=constants.D,
        z=z,
        dt_bias=constants.dt_bias,
        dt_softplus=True,
        state_batch_indices=places,
    )
    plan.store(states, state)
    return plan.outputs(y, out)


def decode_runs(
    tokens: Mamba1Tokens,
    constants: Mamba1Constants,
    state: Tensor,
    ring: Rings,
    plan: None,
    out: Tensor | None = None,
) -> Tensor:
    """The library has no such kernel."""
    raise NotImplementedError(RUNS_ARE_REFUSED)
