"""Decodes of Mamba2 layers by the kernel that convolves for itself, in Triton's interpreter, beside
the same by a kernel a piece."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_hybrid.kernels import kernel_set
from megatron_hybrid.kernels.contract import DecodeRuns, DecodeSlots
from megatron_hybrid.kernels.kernel_set import KernelSet
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
ONE = DecodeRuns(
    int64([0, 1]), int64([9]), int64([3]), int64([1]), int64([3]), int64([1]), int64([0]),
    int64([0]), most_unfolded=3,
)  # fmt: skip
TWO = DecodeRuns(
    int64([0, 1, 2]), int64([9, 12]), int64([3, 1]), int64([1, 2]), int64([3, 0]), int64([1, 0]),
    int64([0, 0]), int64([0, 0]), most_unfolded=3,
)  # fmt: skip


def kernels_of(calls: list[str] | None) -> KernelSet:
    """`calls`: those of the kernel that convolves for itself; None: without it."""
    found = triton_kernels("mamba2_scan")
    if calls is None:
        return found
    return replace(found, convolved_mamba2=Counted(kernel_set._gpu().convolved_mamba2, calls))


@pytest.mark.parametrize("write", [3, 0], ids=["written", "recorded"])
def test_a_kernel_that_convolves_does_what_several_do(write: int) -> None:
    layer, calls = layer_of(Mamba2, MAMBA2), list[str]()
    runs = replace(ONE, unfolded=int64([3 if write else 1]), write_slot=int64([write]))
    y, caches = step(layer, kernels_of(calls), runs, 1)
    assert calls == ["takes", "decode_runs"]
    expected, others = step(layer, kernels_of(None), runs, 1)
    torch.testing.assert_close(y, expected, atol=2e-2, rtol=2e-2)
    for ours, theirs in zip(tensors_of(caches), tensors_of(others), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("decode", "tokens"),
    [
        (TWO, 2),
        (DecodeSlots(int64([1]), int64([1])), 1),
        (replace(ONE, most_unfolded=None), 1),
    ],
    ids=["of several", "written every token", "with drafts"],
)
def test_other_decodes_take_a_kernel_a_piece(decode: DecodeRuns | DecodeSlots, tokens: int) -> None:
    layer, calls = layer_of(Mamba2, MAMBA2), list[str]()
    y, _ = step(layer, kernels_of(calls), decode, tokens)
    assert torch.equal(y, step(layer, kernels_of(None), decode, tokens)[0])
    assert not set(calls) - {"takes"}
