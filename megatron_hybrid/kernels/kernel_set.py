"""Which implementation of each operation a model runs on.

reference   plain torch: the meaning, and what a CPU runs
gpu         Triton kernels of ours, and flashinfer where it is installed
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_hybrid.kernels.activation import reference as activation
from megatron_hybrid.kernels.causal_conv1d import reference as conv
from megatron_hybrid.kernels.contract import DecodeRuns, DecodeSlots
from megatron_hybrid.kernels.experts import reference as experts
from megatron_hybrid.kernels.gated_delta_rule import reference as gated_delta_rule
from megatron_hybrid.kernels.mamba1_scan import reference as mamba1_scan
from megatron_hybrid.kernels.mamba2_scan import reference as mamba2_scan
from megatron_hybrid.kernels.norm import reference as norm
from megatron_hybrid.kernels.paged_attention import reference as attention
from megatron_hybrid.kernels.protocols import (
    Activation,
    Attention,
    Constants,
    Convolution,
    DeltaRuleConstants,
    DeltaRuleTokens,
    Experts,
    Mamba1Constants,
    Mamba1Tokens,
    Mamba2Constants,
    Mamba2Tokens,
    Norm,
    Plan,
    Recurrence,
    Rings,
    Rope,
    Sampling,
    Tokens,
)
from megatron_hybrid.kernels.rope import reference as rope
from megatron_hybrid.kernels.runs import plan_runs
from megatron_hybrid.kernels.sampling import reference as sampling
from megatron_hybrid.kernels.slots import plan_decode

Scan = Recurrence[Tokens, Constants, Rings]


@dataclass(frozen=True, slots=True)
class KernelSet:
    """One implementation of each kind of kernel: a module, or an object that keeps workspaces."""

    name: str
    attention: Attention
    plan_decode: Callable[[DecodeSlots], Plan]  # of all recurrent kernels' `decode`
    plan_runs: Callable[[DecodeRuns, int], Plan]  # (runs, ring length): of scans' `decode_runs`
    conv: Convolution
    mamba1_scan: Scan[Mamba1Tokens, Mamba1Constants]
    mamba2_scan: Scan[Mamba2Tokens, Mamba2Constants]
    gated_delta_rule: Scan[DeltaRuleTokens, DeltaRuleConstants]
    norm: Norm
    activation: Activation
    experts: Experts
    rope: Rope
    sampling: Sampling
    captures: bool  # its kernels may be captured in a CUDA graph: none waits for the host


REFERENCE = KernelSet(
    name="reference",
    attention=attention,
    plan_decode=plan_decode,
    plan_runs=plan_runs,
    conv=conv,
    mamba1_scan=mamba1_scan,
    mamba2_scan=mamba2_scan,
    gated_delta_rule=gated_delta_rule,
    norm=norm,
    activation=activation,
    experts=experts,
    rope=rope,
    sampling=sampling,
    captures=False,
)


def select(name: str, device: torch.device) -> KernelSet:
    """`name`: "reference", or "auto": the fastest for the device."""
    if name == "reference" or device.type == "cpu":
        return REFERENCE
    return _gpu()


def _gpu() -> KernelSet:
    # Triton is not installed on every machine.
    from megatron_hybrid.kernels.activation import triton as activation
    from megatron_hybrid.kernels.causal_conv1d import triton as conv
    from megatron_hybrid.kernels.experts import triton as experts
    from megatron_hybrid.kernels.gated_delta_rule import triton as gated_delta_rule
    from megatron_hybrid.kernels.mamba1_scan import triton as mamba1_scan
    from megatron_hybrid.kernels.mamba2_scan import triton as mamba2_scan
    from megatron_hybrid.kernels.norm import triton as norm

    attention: Attention
    rotary: Rope
    drawing: Sampling
    if importlib.util.find_spec("flashinfer") is not None:
        from megatron_hybrid.kernels.paged_attention.flashinfer import FlashInferAttention
        from megatron_hybrid.kernels.rope import flashinfer as fast_rope
        from megatron_hybrid.kernels.sampling import flashinfer as fast_sampling

        attention, rotary, drawing = FlashInferAttention(), fast_rope, fast_sampling
    else:
        from megatron_hybrid.kernels.paged_attention.triton import TritonAttention

        attention, rotary, drawing = TritonAttention(), rope, sampling
    return KernelSet(
        name="gpu",
        attention=attention,
        plan_decode=lambda slots: slots,  # the kernels read the slots themselves
        plan_runs=lambda runs, _: runs,
        conv=conv,
        mamba1_scan=mamba1_scan,
        mamba2_scan=mamba2_scan,
        gated_delta_rule=gated_delta_rule,
        norm=norm,
        activation=activation,
        experts=experts,
        rope=rotary,
        sampling=drawing,
        captures=True,
    )
