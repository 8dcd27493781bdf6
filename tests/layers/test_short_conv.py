"""LFM2's short convolution: the layer, by plain kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_hybrid.kernels.activation import reference as activation
from megatron_hybrid.kernels.contract import DecodeRuns, DecodeSlots, PrefillSegments
from megatron_hybrid.kernels.kernel_set import REFERENCE
from megatron_hybrid.kernels.linear.formats import QuantizedWeight, WeightFormat
from megatron_hybrid.kernels.protocols import Inputs, Reader
from megatron_hybrid.layers.inputs import LayerCaches
from megatron_hybrid.layers.short_conv import ShortConv, ShortConvConfig
from tests.kernels.segments import Segment, int64, prefill_segments
from tests.layers.recurrent_layers import LAYER, WIDTH, caches_of, inputs, layer_of, step


class CountedGates:
    """The plain activations; `readers` of the gates that were computed alone."""

    def __init__(self) -> None:
        self.readers: list[Reader | None] = []

    def gate(self, x: Tensor, gate: Tensor, name: str, into: Reader | None = None) -> Inputs:
        self.readers.append(into)
        return activation.gate(x, gate, name, into)


SLOTS = DecodeSlots(int64([1, 2]), int64([1, 3]))
RUNS = DecodeRuns(
    int64([0, 2, 4]), int64([9, 12]), int64([1, 0]), int64([1, 2]), int64([3, 0]), int64([1, 0]),
    int64([0, 0]), int64([0, 0]),
)  # fmt: skip
PROMPTS = prefill_segments([Segment(0, 5, 0, 4), Segment(7, 2, 5, 5)])


def apart(
    layer: ShortConv, x: Tensor, decodes: int, decode: Any, prompts: PrefillSegments | None,
    state: LayerCaches,
) -> Tensor:  # fmt: skip
    """By the layer's formula, a step's decodes and prompts each by themselves."""
    b, c, inner = layer.in_proj(x, REFERENCE).split(WIDTH, dim=1)
    outputs, conv = [], REFERENCE.conv
    constants, inner = layer.conv_constants(silu=False), inner * b
    pool, ring = state.state[LAYER].conv, state.rings[LAYER].conv
    if isinstance(decode, DecodeRuns):
        plan = conv.plan_runs(decode, 3, state.ring_length)
        outputs.append(conv.decode_runs(inner[:decodes], constants, pool, ring, plan))
    elif decode is not None:
        plan = REFERENCE.plan_decode(decode)
        outputs.append(conv.decode(inner[:decodes], constants, pool, plan))
    if prompts is not None:
        plan = conv.plan(prompts, 3)
        outputs.append(conv.prefill(inner[decodes:], constants, pool, plan))
    return layer.out_proj(c * torch.cat(outputs), REFERENCE)


@pytest.mark.parametrize(
    ("decodes", "decode", "prompts"),
    [
        (2, SLOTS, None),
        (4, RUNS, None),
        (0, None, PROMPTS),
        (2, SLOTS, PROMPTS),
        (4, RUNS, PROMPTS),
    ],
    ids=["decodes", "drafts", "prompts", "decodes and prompts", "drafts and prompts"],
)
@pytest.mark.parametrize(
    "format", [None, WeightFormat("int8", activations="token")], ids=["plain", "int8"]
)
def test_gates_are_computed_with_the_convolution_but_for_a_reader_of_rounded_rows(
    format: WeightFormat | None, decodes: int, decode: Any, prompts: PrefillSegments | None
) -> None:
    config, formats = ShortConvConfig(conv_width=3), {"out_proj.weight": format}
    layer, gates = layer_of(ShortConv, config, formats.get), CountedGates()
    kernels, theirs = replace(REFERENCE, activation=gates), caches_of(layer)
    y, ours = step(layer, kernels, decode, decodes, prompts)
    assert gates.readers == ([] if format is None else [layer.out_proj.reader])
    assert isinstance(layer.out_proj.weight, QuantizedWeight) == (format is not None)
    assert torch.equal(y, apart(layer, inputs(len(y)), decodes, decode, prompts, theirs))
    assert torch.equal(ours.state[LAYER].conv, theirs.state[LAYER].conv)
    assert torch.equal(ours.rings[LAYER].conv, theirs.rings[LAYER].conv)
