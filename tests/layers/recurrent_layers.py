"""Recurrent layers in bfloat16, what they read and write, and kernels that they run on."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from megatron_hybrid.kernels import kernel_set
from megatron_hybrid.kernels.contract import DecodeRuns, DecodeSlots, PrefillSegments
from megatron_hybrid.kernels.kernel_set import REFERENCE, KernelSet
from megatron_hybrid.layers.inputs import LayerCaches, allocate_caches
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.linear import Formats, allocate_linears
from megatron_hybrid.layers.mixer import LayerContext
from megatron_hybrid.layers.recurrent import RecurrentMixer
from megatron_hybrid.parallel import initialize

WIDTH, LAYER = 32, 3
ARecurrentMixer = TypeVar("ARecurrentMixer", bound=RecurrentMixer)

# Of modules that run Triton's kernels in its interpreter.
interpreted = pytest.mark.skipif(
    torch.cuda.is_available() or importlib.util.find_spec("triton") is None,
    reason="for machines with Triton and without CUDA: tests/gpu runs these kernels compiled",
)


def layer_of(
    kind: Callable[[Any, LayerContext], ARecurrentMixer],
    config: Any,
    formats: Formats = lambda role: None,
) -> ARecurrentMixer:
    """With random weights."""
    parallel = initialize()
    kinds = (torch.bfloat16, torch.float32, torch.bfloat16)
    context = LayerContext(
        WIDTH, 1e-5, LAYER, torch.bfloat16, parallel.tensor, parallel.experts, *kinds
    )
    layer = kind(config, context)
    allocate_linears(layer.weight_parts(), formats)
    generator = torch.Generator().manual_seed(0)
    for part in layer.weight_parts():
        part.put(torch.randn(part.target.shape, generator=generator) * part.shape[-1] ** -0.5)
    layer.after_loading()
    return layer


def triton_kernels(*names: str) -> KernelSet:
    """Of these, the others plain; those of decodes have plans for Triton's."""
    gpu = kernel_set._gpu()
    names = ("plan_decode", "plan_runs", "conv", "norm", *names)
    return replace(REFERENCE, **{name: getattr(gpu, name) for name in names})


class Counted:
    """A kernel, and the names of its functions that were called."""

    def __init__(self, kernel: Any, calls: list[str]) -> None:
        self._kernel, self._calls = kernel, calls

    def __getattr__(self, name: str) -> Any:
        self._calls.append(name)
        return getattr(self._kernel, name)


def caches_of(layer: RecurrentMixer) -> LayerCaches:
    """Slots and rings of an engine, all with something in them."""
    specs = {LAYER: layer.spec}
    caches = allocate_caches({}, specs, 1, 1, 6, torch.device("cpu"), num_rings=2, ring_length=4)
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors_of(caches):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return caches


def tensors_of(caches: LayerCaches) -> list[Tensor]:
    state, rings = caches.state[LAYER], caches.rings[LAYER]
    return [state.conv, state.ssm, rings.conv, *rings.inputs]


def step(
    layer: RecurrentMixer,
    kernels: KernelSet,
    decode: DecodeSlots | DecodeRuns | None,
    decodes: int,
    prompts: PrefillSegments | None = None,
) -> tuple[Tensor, LayerCaches]:
    """The results of so many tokens of decodes, and of prompts, and what is in the caches then."""
    caches = caches_of(layer)
    count = decodes + (0 if prompts is None else len(prompts.sequence_of_token))
    parts = layer.plan(decodes, decode, prompts, kernels, caches.ring_length)
    plans = KernelPlans(caches, kernels, recurrent={layer.kind: parts})
    return layer(inputs(count), plans), caches


def inputs(tokens: int) -> Tensor:
    """Of a step with so many: always the same."""
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(2)).bfloat16()
