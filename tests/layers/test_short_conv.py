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
from megatron_hybrid.layers.inputs import LayerCaches, allocate_caches
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.linear import LinearPart, allocate_linears
from megatron_hybrid.layers.mixer import LayerContext
from megatron_hybrid.layers.short_conv import ShortConv, ShortConvConfig
from megatron_hybrid.parallel import initialize
from tests.kernels.segments import Segment, int64, prefill_segments

WIDTH, LAYER = 32, 2
DTYPE = torch.bfloat16


def layer_of(format: WeightFormat | None = None) -> ShortConv:
    """With random weights; `format`: of the output projection's."""
    parallel = initialize()
    context = LayerContext(
        WIDTH, 1e-5, LAYER, DTYPE, parallel.tensor, parallel.experts, DTYPE, torch.float32, DTYPE
    )
    layer = ShortConv(ShortConvConfig(conv_width=3), context)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    formats = {"out_proj.weight": format}
    allocate_linears(layer.weight_parts(), formats.get)
    layer.conv_weight.copy_(draw(*layer.conv_weight.shape))
    for part in layer.weight_parts():
        if isinstance(part, LinearPart):
            part.put(draw(part.size, WIDTH).to(DTYPE))
    return layer


class CountedGates:
    """The plain activations; `readers` of the gates that were computed alone."""

    def __init__(self) -> None:
        self.readers: list[Reader | None] = []

    def gate(self, x: Tensor, gate: Tensor, name: str, into: Reader | None = None) -> Inputs:
        self.readers.append(into)
        return activation.gate(x, gate, name, into)


def caches() -> LayerCaches:
    """Slots of an engine, all with something in them."""
    spec = {LAYER: layer_of().spec}
    found = allocate_caches({}, spec, 1, 1, 6, torch.device("cpu"), num_rings=2, ring_length=4)
    generator = torch.Generator().manual_seed(1)
    for tensor in (found.state[LAYER].conv, found.rings[LAYER].conv):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return found


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
    layer, gates = layer_of(format), CountedGates()
    kernels, ours, theirs = replace(REFERENCE, activation=gates), caches(), caches()
    count = decodes + (0 if prompts is None else 7)
    x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(2)).to(DTYPE)
    parts = layer.plan(decodes, decode, prompts, kernels, ours.ring_length)
    y = layer(x, KernelPlans(ours, kernels, recurrent={layer.kind: parts}))
    assert gates.readers == ([] if format is None else [layer.out_proj.reader])
    assert isinstance(layer.out_proj.weight, QuantizedWeight) == (format is not None)
    assert torch.equal(y, apart(layer, x, decodes, decode, prompts, theirs))
    assert torch.equal(ours.state[LAYER].conv, theirs.state[LAYER].conv)
    assert torch.equal(ours.rings[LAYER].conv, theirs.rings[LAYER].conv)
