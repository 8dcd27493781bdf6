"""Decodes of recurrent layers by kernels that convolve for themselves, in Triton's interpreter,
beside the same by a kernel a piece."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_hybrid.kernels import kernel_set
from megatron_hybrid.kernels.contract import DecodeRuns, DecodeSlots
from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.layers.gated_delta_net import GatedDeltaNet, GatedDeltaNetConfig
from megatron_hybrid.layers.mamba2 import Mamba2, Mamba2Config
from tests.kernels.segments import int64
from tests.layers.recurrent_layers import (
    Counted,
    interpreted,
    layer_of,
    step,
    tensors_of,
    triton_kernels,
)

pytestmark = interpreted
MAMBA2 = Mamba2Config(4, 16, 8, 2, 4, 16)
DELTA_NET = GatedDeltaNetConfig(2, 4, 8, 16, 4)
RUNS = DecodeRuns(
    int64([0, 1, 2]), int64([9, 12]), int64([3, 1]), int64([1, 2]), int64([3, 0]), int64([1, 0]),
    int64([0, 0]), int64([0, 0]), most_unfolded=3,
)  # fmt: skip
SLOTS = DecodeSlots(int64([1, 2]), int64([1, 3]))


def kernels_of(calls: list[str] | None) -> KernelSet:
    """`calls`: those of the kernels that convolve for themselves; None: without these."""
    found = triton_kernels("mamba2_scan", "gated_delta_rule")
    if calls is None:
        return found
    gpu = kernel_set._gpu()
    return replace(
        found,
        convolved_mamba2=Counted(gpu.convolved_mamba2, calls),
        convolved_delta_rule=Counted(gpu.convolved_delta_rule, calls),
    )


@pytest.mark.parametrize(
    ("kind", "config", "decode", "call"),
    [
        (Mamba2, MAMBA2, RUNS, "decode_runs"),
        (GatedDeltaNet, DELTA_NET, SLOTS, "decode"),
    ],
)
def test_a_kernel_that_convolves_does_what_several_do(
    kind: Any, config: Any, decode: Any, call: str
) -> None:
    layer, calls = layer_of(kind, config), list[str]()
    y, caches = step(layer, kernels_of(calls), decode, 2)
    assert calls == ["takes", call]
    expected, others = step(layer, kernels_of(None), decode, 2)
    torch.testing.assert_close(y, expected, atol=2e-2, rtol=2e-2)
    for ours, theirs in zip(tensors_of(caches), tensors_of(others), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "config", "decode"),
    [
        (Mamba2, MAMBA2, SLOTS),
        (Mamba2, MAMBA2, replace(RUNS, most_unfolded=None)),
        (GatedDeltaNet, DELTA_NET, RUNS),
    ],
)
def test_other_decodes_take_a_kernel_a_piece(kind: Any, config: Any, decode: Any) -> None:
    layer, calls = layer_of(kind, config), list[str]()
    y, _ = step(layer, kernels_of(calls), decode, 2)
    assert torch.equal(y, step(layer, kernels_of(None), decode, 2)[0])
    assert not set(calls) - {"takes"}
