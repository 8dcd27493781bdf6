"""Low-rank adapters of linear layers: memory for some of them at once, and a step's use of it.

    slot   of token      1 1 1 0 0 2 2        0: no adapter

A linear layer computes y = x W^T for all tokens and then adds x A^T B^T of each token's own A and
B. They are no weights of the model: no checkpoint, digest or update of weights knows of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_hybrid.kernels.experts.protocol import ExpertAdapters
from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.kernels.linear.reference import plain_rows
from megatron_hybrid.kernels.lora.protocol import AdapterWeights, Lora
from megatron_hybrid.kernels.protocols import Inputs
from megatron_hybrid.layers.inputs import StepInputs
from megatron_hybrid.layers.linear import Linear, LinearPart

_EXPERT = re.compile(r"\bexperts\.\d+\.")


@dataclass(frozen=True, slots=True)
class TokenAdapters:
    """Those of a step, or of the rows that are left of it, as StepAdapters."""

    slots: Tensor  # [rows] of each token; 0: none
    weights: Mapping[Linear, AdapterWeights]
    lora: Lora

    def add(self, layer: Linear, y: Tensor, x: Inputs) -> None:
        """See StepAdapters."""
        if (weights := self.weights.get(layer)) is not None:
            self.lora.add(y, plain_rows(x), weights, self.slots)

    def of_experts(self, up: Linear, down: Linear) -> ExpertAdapters | None:
        """See StepAdapters."""
        if up not in self.weights:
            return None
        return ExpertAdapters(self.slots, self.weights[up], self.weights[down])

    def of_logits(self, inputs: StepInputs) -> TokenAdapters:
        """Of tokens whose logits are wanted."""
        return replace(self, slots=inputs.of_logits(self.slots))

    def of_copy(self, copy: int, copies: int) -> TokenAdapters:
        """Those of one of a layer's copies, by slots that count all copies'."""
        slots = (self.slots - 1) * copies + copy + 1
        return replace(self, slots=slots.masked_fill(self.slots == 0, 0))


class AdaptedPart(NamedTuple):
    """A part of a model's linear layer that may have adapters. `uses`: the layer is used in so many
    places of the model, and adapted in each of them by itself."""

    block: int
    part: LinearPart
    uses: int = 1


class _Layer(NamedTuple):
    weights: AdapterWeights
    roles: list[str]


class AdapterSlots:
    """Room for adapters of a model's linear layers on this rank: `slots` at once, of at most
    `rank`. All are zeros, which add nothing, until `place` is written to.

    What is one layer here may be several of the model's: experts in one weight, a layer that
    several blocks use. Each such copy has adapters of its own: see AdapterWeights.
    """

    def __init__(
        self, parts: Iterable[AdaptedPart], slots: int, rank: int, device: torch.device | str
    ) -> None:
        """`parts`: of the layers that may have adapters, all parts of each."""
        self.num_slots, self.rank = slots, rank
        self.parts = list(parts)
        by_layer: dict[Linear, list[AdaptedPart]] = {}
        for one in self.parts:
            by_layer.setdefault(one.part.layer, []).append(one)
        self._layers = {
            layer: self._allocate(layer, own, torch.device(device))
            for layer, own in by_layer.items()
        }
        self._weights = {layer: own.weights for layer, own in self._layers.items()}
        for layer in by_layer:
            layer.read_plain_rows()

    def _allocate(self, layer: Linear, own: list[AdaptedPart], device: torch.device) -> _Layer:
        parts = [one.part for one in own]
        experts = len({found[0] for part in parts if (found := _EXPERT.search(part.role))}) or 1
        outputs = layer.outputs // experts
        roles = list(dict.fromkeys(_role(part) for part in parts))
        of_row = torch.zeros(outputs, dtype=torch.int32)
        for part in parts:
            first = part.first % outputs
            of_row[first : first + part.size] = roles.index(_role(part))
        copies = experts * own[0].uses
        count = self.num_slots * copies
        a = torch.zeros(
            count, len(roles) * self.rank, layer.inputs, dtype=layer.dtype, device=device
        )
        b = torch.zeros(count, outputs, self.rank, dtype=layer.dtype, device=device)
        return _Layer(AdapterWeights(a, b, of_row.to(device), copies), roles)

    @property
    def nbytes(self) -> int:
        """Of all layers and slots."""
        return sum(weights.nbytes for weights in self._weights.values())

    def place(self, part: LinearPart, slot: int, use: int = 0) -> tuple[Tensor, Tensor]:
        """Where the adapter in a slot, from 1 on, has the A [rank, inputs] and the B [rows, rank]
        of a part of the model, in one of its uses. Parts of one role in one layer have one A."""
        weights, roles = self._layers[part.layer]
        expert, first = divmod(part.first, weights.b.shape[1])
        row = (slot - 1) * weights.copies + expert + use
        start = roles.index(_role(part)) * self.rank
        a = weights.a[row, start : start + self.rank]
        return a, weights.b[row, first : first + part.size]

    def clear(self, slot: int) -> None:
        """What is in a slot adds nothing."""
        for weights in self._weights.values():
            own = slice((slot - 1) * weights.copies, slot * weights.copies)
            weights.a[own].zero_()
            weights.b[own].zero_()

    def kernels(self, kernels: KernelSet, slots: Tensor | None) -> KernelSet:
        """Those of a step whose tokens have these slots [tokens]; None: no token has any."""
        if slots is None:
            return kernels
        return replace(kernels, adapters=TokenAdapters(slots, self._weights, kernels.lora))


def _role(part: LinearPart) -> str:
    """Without the number of an expert."""
    return _EXPERT.sub("experts.", part.role)


def of_copy(kernels: KernelSet, copy: int, copies: int) -> KernelSet:
    """Kernels where one of a layer's copies is used: see AdapterSlots."""
    adapters = kernels.adapters
    if not isinstance(adapters, TokenAdapters) or copies == 1:
        return kernels
    return replace(kernels, adapters=adapters.of_copy(copy, copies))


def of_logits(kernels: KernelSet, inputs: StepInputs) -> KernelSet:
    """Kernels from where only tokens go on whose logits are wanted."""
    adapters = kernels.adapters
    if not isinstance(adapters, TokenAdapters):
        return kernels
    return replace(kernels, adapters=adapters.of_logits(inputs))
