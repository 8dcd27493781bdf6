"""Decodes of Mamba1 layers by the kernel that begins with x_proj's result, in Triton's interpreter,
beside the same by a kernel a piece."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_hybrid.kernels import kernel_set
from megatron_hybrid.kernels.contract import DecodeSlots
from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.kernels.linear.formats import WeightFormat
from megatron_hybrid.layers.linear import Formats
from megatron_hybrid.layers.mamba1 import Mamba1, Mamba1Config
from tests.kernels.segments import Segment, int64, prefill_segments
from tests.layers.recurrent_layers import (
    Counted,
    interpreted,
    layer_of,
    step,
    tensors_of,
    triton_kernels,
)

pytestmark = interpreted
CONFIG = Mamba1Config(inner_size=64, state_size=8, dt_rank=24, conv_width=4)
# In place, moved, new, and a padded row.
SLOTS = DecodeSlots(int64([1, 2, 0, 0]), int64([1, 3, 4, 0]))


def kernels_of(calls: list[str] | None) -> KernelSet:
    """`calls`: those of the kernel that is several; None: without it."""
    found = triton_kernels("mamba1_scan")
    if calls is None:
        return found
    return replace(found, projected_mamba1=Counted(kernel_set._gpu().projected_mamba1, calls))


@pytest.mark.parametrize("norms", ["learned", "plain", "none"])
def test_one_kernel_does_what_three_do(norms: str) -> None:
    layer, calls = layer_of(Mamba1, replace(CONFIG, norms=norms)), list[str]()
    y, caches = step(layer, kernels_of(calls), SLOTS, 4)
    assert calls == ["takes", "decode"]
    expected, others = step(layer, kernels_of(None), SLOTS, 4)
    (conv, ssm, *_), (other_conv, other_ssm, *_) = tensors_of(caches), tensors_of(others)
    assert torch.equal(conv, other_conv)
    # In the interpreter a step size that is rounded otherwise is off by 2^-7.
    torch.testing.assert_close(y, expected, atol=3e-2, rtol=3e-2)
    torch.testing.assert_close(ssm, other_ssm, atol=2e-2, rtol=2e-2)
    assert torch.equal(ssm[[0, 2, 5]], other_ssm[[0, 2, 5]])


def in_8_bits(role: str) -> WeightFormat | None:
    return WeightFormat("int8") if role == "dt_proj.weight" else None


MORE = DecodeSlots(*[int64([1, 2, 3, 4, 5])] * 2)


@pytest.mark.parametrize(
    ("formats", "decode", "prompt", "asked"),
    [
        (in_8_bits, SLOTS, False, False),
        (lambda role: None, SLOTS, True, False),
        (lambda role: None, MORE, False, True),
    ],
    ids=["quantised", "beside a prompt", "many sequences"],
)
def test_other_steps_take_a_kernel_a_piece(
    formats: Formats, decode: DecodeSlots, prompt: bool, asked: bool
) -> None:
    layer, calls = layer_of(Mamba1, replace(CONFIG, norms="learned"), formats), list[str]()
    decodes, prompts = len(decode.read_slot), None
    if prompt:
        prompts = prefill_segments([Segment(0, 5, 0, 5)])
    y, caches = step(layer, kernels_of(calls), decode, decodes, prompts)
    assert calls == ["takes"] * asked
    expected, others = step(layer, kernels_of(None), decode, decodes, prompts)
    for ours, theirs in zip([y, *tensors_of(caches)], [expected, *tensors_of(others)], strict=True):
        assert torch.equal(ours, theirs)
