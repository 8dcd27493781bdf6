"""Low-rank adapters of linear layers: memory for some of them at once, and a step's use of it.

    slot   of token      1 1 1 0 0 2 2        0: no adapter

A linear layer computes y = x W^T for all tokens and then adds x A^T B^T of each token's own A and
B. They are no weights of the model: no checkpoint, digest or update of weights knows of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_hybrid.kernels.experts.protocol import ExpertAdapters
from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.kernels.linear.reference import plain_rows
from megatron_hybrid.kernels.lora.protocol import AdapterWeights, Lora, WideWeights
from megatron_hybrid.kernels.protocols import Inputs
from megatron_hybrid.kernels.protocols import Linear as LinearKernels
from megatron_hybrid.layers.inputs import StepInputs
from megatron_hybrid.layers.linear import Linear, LinearPart

_EXPERT = re.compile(r"\bexperts\.\d+\.")
# Of A behind a layer's weight, or an eighth of its own: all tokens are multiplied with all of them.
_FEW_ROWS = 512


@dataclass(frozen=True, slots=True)
class TokenAdapters:
    """Those of a step, or of the rows that are left of it, as StepAdapters."""

    slots: Tensor  # [rows] of each token; 0: none
    weights: Mapping[Linear, AdapterWeights]
    wide: Mapping[Linear, WideWeights]
    lora: Lora

    def add(self, layer: Linear, y: Tensor, x: Inputs) -> None:
        """See StepAdapters."""
        if (weights := self.weights.get(layer)) is not None:
            self.lora.add(y, plain_rows(x), weights, self.slots)

    def multiply(
        self,
        layer: Linear,
        x: Inputs,
        linear: LinearKernels,
        activation: str = "none",
        gated: bool = False,
    ) -> Tensor:
        """See StepAdapters."""
        return self.lora.multiply(x, self.wide[layer], self.slots, linear, activation, gated)

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
    """Where a layer's adapters are."""

    roles: list[str]
    a: Tensor  # [slots * copies, roles * rank, K]
    weights: AdapterWeights | WideWeights

    def b_of(self, slot: int) -> Tensor:
        """What has all B of a slot, from 1 on, and no other's."""
        if isinstance(self.weights, WideWeights):
            low = self.weights.low
            return self.weights.b[:, (slot - 1) * low : slot * low]
        copies = self.weights.copies
        return self.weights.b[(slot - 1) * copies : slot * copies]


class AdapterSlots:
    """Room for adapters of a model's linear layers on this rank: `slots` at once, of at most
    `rank`. All are zeros, which add nothing, until `place` is written to.

    What is one layer here may be several of the model's: experts in one weight, a layer that
    several blocks use. Each such copy has adapters of its own: see AdapterWeights.

    Steps read the A of wide layers behind their weights. `stays`: it is kept elsewhere, too, since
    the weights' memory comes and goes; then `settle` puts it there.
    """

    def __init__(
        self,
        parts: Iterable[AdaptedPart],
        slots: int,
        rank: int,
        device: torch.device | str,
        stays: bool = False,
    ) -> None:
        """`parts`: of the layers that may have adapters, all parts of each."""
        self.num_slots, self.rank, self._stays = slots, rank, stays
        self.parts = list(parts)
        self._layers: dict[Linear, _Layer] = {}
        self._weights: dict[Linear, AdapterWeights] = {}
        self._wide: dict[Linear, WideWeights] = {}
        for layer, own in _by_layer(self.parts).items():
            made = self._allocate(layer, own, torch.device(device))
            self._layers[layer] = made
            if isinstance(made.weights, WideWeights):
                self._wide[layer] = made.weights
            else:
                self._weights[layer] = made.weights
            layer.read_plain_rows()

    def _allocate(self, layer: Linear, own: list[AdaptedPart], device: torch.device) -> _Layer:
        experts, roles = _experts(own), _roles(own)
        outputs = layer.outputs // experts
        of_row = torch.zeros(outputs, dtype=torch.int32)
        for _, part, _ in own:
            first = part.first % outputs
            of_row[first : first + part.size] = roles.index(_role(part))
        of_row = of_row.to(device)
        copies, low = experts * own[0].uses, len(roles) * self.rank

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=layer.dtype, device=device)

        if layer.wide is None:
            a = zeros(self.num_slots * copies, low, layer.inputs)
            b = zeros(self.num_slots * copies, outputs, self.rank)
            return _Layer(roles, a, AdapterWeights(a, b, of_row, copies))
        slot_of = torch.arange(self.num_slots * low, dtype=torch.int32, device=device) // low + 1
        b = zeros(outputs, len(slot_of))
        wide = WideWeights(layer.wide, b, of_row, slot_of, low, self.rank)
        return _Layer(roles, torch.zeros_like(wide.a) if self._stays else wide.a, wide)

    @property
    def nbytes(self) -> int:
        """Of all layers and slots."""
        return sum(own.weights.nbytes for own in self._layers.values())

    def place(self, part: LinearPart, slot: int, use: int = 0) -> tuple[Tensor, Tensor]:
        """Where the adapter in a slot, from 1 on, has the A [rank, inputs] and the B [rows, rank]
        of a part of the model, in one of its uses. Parts of one role in one layer have one A."""
        own = self._layers[part.layer]
        start = own.roles.index(_role(part)) * self.rank
        role = slice(start, start + self.rank)
        if isinstance(own.weights, WideWeights):
            b = own.b_of(slot)[part.first : part.first + part.size, role]
            return own.a[slot - 1, role], b
        expert, first = divmod(part.first, own.weights.b.shape[1])
        row = (slot - 1) * own.weights.copies + expert + use
        return own.a[row, role], own.weights.b[row, first : first + part.size]

    def clear(self, slot: int) -> None:
        """What is in a slot adds nothing."""
        for own in self._layers.values():
            copies = len(own.a) // self.num_slots
            own.a[(slot - 1) * copies : slot * copies].zero_()
            own.b_of(slot).zero_()

    def settle(self) -> None:
        """What is in the slots is where steps read it: to be called when a slot was written to, and
        when the weights' memory has come back."""
        if self._stays:
            for layer, weights in self._wide.items():
                weights.a.copy_(self._layers[layer].a)

    def kernels(self, kernels: KernelSet, slots: Tensor | None) -> KernelSet:
        """Those of a step whose tokens have these slots [tokens]; None: no token has any."""
        if slots is None:
            return kernels
        adapters = TokenAdapters(slots, self._weights, self._wide, kernels.lora)
        return replace(kernels, adapters=adapters)


def widen(parts: Iterable[AdaptedPart], slots: int, rank: int) -> Iterator[Linear]:
    """Make layers wide whose A may lie behind their weights, one after the other; before there are
    AdapterSlots of these numbers."""
    for layer, own in _by_layer(parts).items():
        rows = slots * len(_roles(own)) * rank
        is_one = _experts(own) == 1 and own[0].uses == 1
        if is_one and layer.is_plain and rows <= max(layer.outputs // 8, _FEW_ROWS):
            layer.widen(rows)
            yield layer


def _by_layer(parts: Iterable[AdaptedPart]) -> dict[Linear, list[AdaptedPart]]:
    found: dict[Linear, list[AdaptedPart]] = {}
    for one in parts:
        found.setdefault(one.part.layer, []).append(one)
    return found


def _experts(own: list[AdaptedPart]) -> int:
    """That are in one layer."""
    return len({found[0] for _, part, _ in own if (found := _EXPERT.search(part.role))}) or 1


def _roles(own: list[AdaptedPart]) -> list[str]:
    return list(dict.fromkeys(_role(part) for _, part, _ in own))


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
