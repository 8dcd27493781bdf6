"""mamba-ssm and causal-conv1d in plain torch, for machines without a GPU: the functions that we
call, with what their C++ and Triton refuse, as loops over tokens in float64.

Checked: the libraries' own sources, causal-conv1d 1.6.2 (csrc/causal_conv1d.cpp) and mamba-ssm
2.3.2 (csrc/selective_scan/selective_scan.cpp, ops/triton)."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

_OURS = ("causal_conv1d.library", "mamba1_scan.mamba_ssm", "mamba2_scan.mamba_ssm")
_TRITON = "mamba_ssm.ops.triton"


def install(patch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Puts them where they are imported from; gives our modules on top of them."""
    modules: dict[str, dict[str, Any]] = {
        "causal_conv1d": {
            "causal_conv1d_fn": causal_conv1d_fn,
            "causal_conv1d_update": causal_conv1d_update,
        },
        "mamba_ssm": {},
        "mamba_ssm.ops": {},
        "mamba_ssm.ops.selective_scan_interface": {"selective_scan_fn": selective_scan_fn},
        _TRITON: {},
        f"{_TRITON}.selective_state_update": {"selective_state_update": selective_state_update},
        f"{_TRITON}.ssd_combined": {"mamba_chunk_scan_combined": mamba_chunk_scan_combined},
    }
    for name, values in modules.items():
        module = ModuleType(name)
        module.__dict__.update(values)
        patch.setitem(sys.modules, name, module)
    found = {}
    for name in _OURS:  # not where others would find them, who want the libraries themselves
        spec = importlib.util.find_spec(f"megatron_hybrid.kernels.{name}")
        assert spec is not None and spec.loader is not None
        module = found[name.split(".")[0]] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return SimpleNamespace(**found)


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: None = None,
    initial_states: Tensor | None = None, return_final_states: bool = False,
    final_states_out: None = None, activation: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Of one sequence a row."""
    batch, channels, length = x.shape
    width = weight.shape[1]
    assert x.stride(1) == 1 and x.stride(2) > 1 and length > 0
    assert channels % 8 == x.stride(2) % 8 == x.stride(0) % 8 == x.data_ptr() % 16 == 0
    assert 2 <= width <= 4 and (bias is None or bias.dtype == weight.dtype)
    assert initial_states is not None and return_final_states
    assert initial_states.shape == (batch, channels, width - 1)
    assert initial_states.dtype == x.dtype and initial_states.stride(1) == 1
    return _convolve(torch.cat((initial_states, x), dim=2), weight, bias, activation, x.dtype)


def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None, cache_seqlens: None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One token a row; the states lie in the rows of conv_state, or at conv_state_indices."""
    assert conv_state.dtype == x.dtype
    assert conv_state_indices is None or conv_state_indices.dtype == torch.int32
    rows = torch.arange(len(x)) if conv_state_indices is None else conv_state_indices.long()
    inputs = torch.cat((conv_state[rows], x[:, :, None]), dim=2)
    y, conv_state[rows] = _convolve(inputs, weight, bias, activation, x.dtype)
    return y[:, :, 0]


def _convolve(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    assert activation in (None, "silu")
    bias = None if bias is None else bias.double()
    y = F.conv1d(inputs.double(), weight.double()[:, None], bias, groups=len(weight))
    last = inputs[:, :, inputs.shape[2] - weight.shape[1] + 1 :]
    return (F.silu(y) if activation else y).to(dtype), last.clone()


def mamba_chunk_scan_combined(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor,
    dt_bias: Tensor, initial_states: Tensor, dt_softplus: bool, dt_limit: tuple[float, float],
    return_final_states: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x [batch, length, heads, head_dim]"""
    batch, length, heads, head_dim = x.shape
    assert dt.shape == (batch, length, heads) and A.shape == D.shape == dt_bias.shape == (heads,)
    assert initial_states.shape == (batch, heads, head_dim, B.shape[3])
    assert dt_softplus and return_final_states and chunk_size > 0
    dt = F.softplus(dt.double() + dt_bias).clamp(*dt_limit)
    state, y = initial_states.double(), torch.empty(x.shape, dtype=torch.float64)
    groups = heads // B.shape[2]
    for t in range(length):
        b, c = (v[:, t].double().repeat_interleave(groups, 1)[:, :, None] for v in (B, C))
        step, inputs = dt[:, t, :, None, None], x[:, t].double()
        state = torch.exp(step * A[:, None, None]) * state + step * inputs[..., None] * b
        y[:, t] = (state * c).sum(-1) + D[:, None] * inputs
    return y.to(x.dtype), state.float()


def selective_scan_fn(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor,
    delta_bias: None = None, delta_softplus: bool = False, return_last_state: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """u [batch, channels, length], B [batch, state, length]; in float32, as the kernel, because
    what is rounded there is what is to be tested."""
    assert u.dtype == delta.dtype == B.dtype == C.dtype == z.dtype == torch.float32
    assert u.shape == delta.shape == z.shape and A.dtype == D.dtype == torch.float32
    assert B.shape == C.shape == (len(u), A.shape[1], u.shape[2]) and return_last_state
    state, y = u.new_zeros(*u.shape[:2], A.shape[1]), torch.empty_like(u)
    for t in range(u.shape[2]):
        step = delta[:, :, t, None]
        state = torch.exp(step * A) * state + step * u[:, :, t, None] * B[:, None, :, t]
        y[:, :, t] = (state * C[:, None, :, t]).sum(-1) + D * u[:, :, t]
    return y * F.silu(z), state


def selective_state_update(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor,
    z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Of states [rows, channels, state] or, by heads, [rows, heads, head_dim, state]."""
    assert dt_bias is not None and dt.shape == x.shape == (len(x), *state.shape[1:-1])
    assert A.shape == state.shape[1:] and D.shape == dt_bias.shape == A.shape[:-1]
    by_heads = state.dim() == 4
    if by_heads:
        B, C = (v.repeat_interleave(len(A) // v.shape[1], 1)[:, :, None] for v in (B, C))
    else:
        B, C = B[:, None], C[:, None]
    rows = torch.arange(len(x)) if state_batch_indices is None else state_batch_indices.long()
    step = dt.double() + dt_bias
    step = (F.softplus(step) if dt_softplus else step)[..., None]
    new = torch.exp(step * A) * state[rows].double() + step * x.double()[..., None] * B
    y = (new * C).sum(-1) + D * x
    state[rows] = new.to(state.dtype)
    return (y if z is None else y * F.silu(z.double())).to(x.dtype)
