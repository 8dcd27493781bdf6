"""The Mamba2 scan by mamba-ssm (state-spaces); the meaning is reference.py's, the calls are in
protocols.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from mamba_ssm.ops.triton.selective_state_update import selective_state_update
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
from torch import Tensor

from megatron_hybrid.kernels.protocols import Mamba2Constants, Mamba2Tokens, Rings
from megatron_hybrid.kernels.refused_runs import RUNS_ARE_REFUSED
from megatron_hybrid.kernels.whole_segments import UpdatedSlots, WholeSegments

plan = WholeSegments.of


def prefill(
    tokens: Mamba2Tokens,
    constants: Mamba2Constants,
    state: Tensor,
    plan: WholeSegments,
    out: Tensor | None = None,
) -> Tensor:
    """A call for each segment: the library takes initial states of rows of a batch, not of the
    sequences that are packed in one."""
    out = tokens.x.new_empty(tokens.x.shape) if out is None else out
    states = plan.reads.gather(state).float()  # [S, heads, head_dim, state]
    for number, rows in plan.filled():
        # Copied, because Triton's kernels compile for strides, and some loads want whole vectors.
        x, B, C, dt = (values[rows].contiguous()[None] for values in tokens)
        y, last = mamba_chunk_scan_combined(
            x,
            dt,
            constants.A,
            B,
            C,
            plan.size,
            D=constants.D,
            dt_bias=constants.dt_bias,
            initial_states=states[number : number + 1],
            dt_softplus=True,
            dt_limit=constants.dt_limit,
            return_final_states=True,
        )
        out[rows] = y[0]
        states[number].copy_(last[0])
    plan.clear_padding(out)
    plan.store(states, state)
    return out


def decode(
    tokens: Mamba2Tokens,
    constants: Mamba2Constants,
    state: Tensor,
    plan: UpdatedSlots,
    out: Tensor | None = None,
) -> Tensor:
    """One token a sequence."""
    x, B, C, dt = (values.contiguous() for values in tokens)
    A, D, dt_bias, dt_limit, _ = constants
    has_limit = dt_limit != (0.0, float("inf"))
    if has_limit:  # which the library's update does not know
        dt = F.softplus(dt.float() + dt_bias).clamp(*dt_limit)
        dt_bias = torch.zeros_like(dt_bias)
    states, places = plan.states(state, state.dtype)
    head_dim, size = state.shape[2:]
    # One number a head, which the library wants to see repeated.
    y = selective_state_update(
        states,
        x,
        dt[:, :, None].expand(-1, -1, head_dim),
        A[:, None, None].expand(-1, head_dim, size),
        B,
        C,
        D=D[:, None].expand(-1, head_dim),
        dt_bias=dt_bias[:, None].expand(-1, head_dim),
        dt_softplus=not has_limit,
        state_batch_indices=places,
    )
    plan.store(states, state)
    return plan.outputs(y, out)


def decode_runs(
    tokens: Mamba2Tokens,
    constants: Mamba2Constants,
    state: Tensor,
    ring: Rings,
    plan: None,
    out: Tensor | None = None,
) -> Tensor:
    """The library has no such kernel."""
    raise NotImplementedError(RUNS_ARE_REFUSED)
