"""What the kernels of mixtures of experts are called with."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_hybrid.kernels.linear.formats import Weight
from megatron_hybrid.kernels.lora.protocol import AdapterWeights
from megatron_hybrid.kernels.protocols import Inputs, Reader


class ExpertWeights(NamedTuple):
    """A layer's experts on this rank, and what they compute."""

    up: Weight  # [experts, inner (twice that where gated: gate, then up), width]
    down: Weight  # [experts, width, inner]
    activation: str  # see Activation
    gated: bool
    # More experts that other ranks hold: an id past the last one here stands for any of them, and
    # adds nothing.
    elsewhere: int = 0


class SharedExpert(NamedTuple):
    """An MLP that all tokens go through besides, of the experts' kind, with weights kept as
    theirs."""

    up: Weight  # [inner (twice that where gated: gate, then up), width]
    down: Weight  # [width, inner]
    # [1, width]: what it gives is multiplied by the sigmoid of each token's product with this.
    gate: Tensor | None


class SharedResult(NamedTuple):
    """What an MLP that all tokens go through besides has given already."""

    values: Tensor  # [tokens, width]
    gate: Tensor | None  # as in SharedExpert


Shared = SharedExpert | SharedResult


class ExpertAdapters(NamedTuple):
    """What adapters add to a layer's experts, each of which is a copy: see AdapterWeights."""

    slots: Tensor  # [tokens]
    up: AdapterWeights
    down: AdapterWeights

    def of_expert(self, tokens: Tensor, expert: int) -> Tensor:
        """Of these tokens [n] the slots [n] of an expert's adapters."""
        slots = self.slots.index_select(0, tokens).long()
        return ((slots - 1) * self.up.copies + expert + 1).masked_fill(slots == 0, 0)


class Router(NamedTuple):
    """How tokens choose experts, by x weight^T.

    "softmax": the largest logits, in x's dtype; weights are the softmax over those of the chosen
    experts, or unless `normalize` of all. "sigmoid": the largest sigmoids of logits in float32,
    which are the weights, divided by their sum + eps if `normalize`; `bias` is added for the choice
    alone, and with several groups of experts, which follow one another, only those of the
    `chosen_groups` best are chosen from: a group is as good as its two best experts. Weights are
    multiplied by `factor`, and by `scale`, at last.

    With `sinks` the last so many rows of the weight are of experts that are not chosen from, since
    every token goes to them; weights, normalised over both, are [tokens, chosen + sinks] then.
    """

    weight: Tensor  # [experts + sinks, width]
    chosen: int
    scoring: str = "softmax"
    normalize: bool = True
    bias: Tensor | None = None  # [experts] float32
    num_groups: int = 1
    chosen_groups: int = 1
    eps: float = 0.0
    factor: float = 1.0
    sinks: int = 0  # of a sigmoid router that normalises
    scale: Tensor | None = None  # [1] float32


class NormedRoutes(NamedTuple):
    """A router's inputs, which are a norm's results, and what it makes of them."""

    x: Tensor  # [tokens, width]
    residual: Tensor  # [tokens, width]: what x is the norm of
    routes: tuple[Tensor, Tensor]  # as of `route`


class Unsummed(Protocol):
    """What experts made of some tokens, still to be added up [tokens, width]."""

    def sum(self) -> Tensor:
        """[tokens, width]"""

    def add_rms_norm(
        self,
        residual: Tensor,
        multiplier: float,
        weight: Tensor,
        eps: float,
        dtype: torch.dtype | None = None,
        into: Reader | None = None,
    ) -> tuple[Inputs, Tensor]:
        """Norm.add_rms_norm of the sum, in one kernel: the same as of two."""


class Experts(Protocol):
    """Mixtures of experts."""

    def route(self, x: Tensor, router: Router) -> tuple[Tensor, Tensor]:
        """x [tokens, width] -> experts (integers) and weights float32, [tokens, chosen] each, the
        best first; of equal ones the lower expert on a GPU. Behind the weights those of sinks."""

    def add_norm_route(
        self,
        x: Tensor,
        residual: Tensor,
        multiplier: float,
        weight: Tensor,
        eps: float,
        dtype: torch.dtype,
        router: Router,
    ) -> NormedRoutes | None:
        """`route` of Norm.add_rms_norm's result, in one kernel: the same as of two, arguments as
        there; None where there is none for such inputs, which are as they were then."""

    def takes_shared(self, x: Inputs, layer: ExpertWeights, shared: SharedExpert) -> bool:
        """Whether `mix` of x may be given this MLP, or else what it gave."""

    def mix(
        self,
        x: Inputs,
        experts: Tensor,
        weights: Tensor,
        layer: ExpertWeights,
        shared: Shared | None = None,
    ) -> Tensor:
        """y[t] = sum over j of weights[t, j] * down[e] act(up[e] x[t]), with e = experts[t, j], and
        what a shared MLP gives, whose gate is multiplied with x. Inputs of quantised weights are
        rounded as their format says; x may be it already, with what it was before.

        x [tokens, width], experts and weights [tokens, chosen] (weights float32) ->
        [tokens, width] in x's dtype.
        """

    def mix_parts(
        self,
        x: Inputs,
        experts: Tensor,
        weights: Tensor,
        layer: ExpertWeights,
        shared: Shared | None = None,
    ) -> Tensor | Unsummed:
        """`mix`, or what it is the sum of, for a norm that adds it up."""

    def mix_adapted(
        self,
        x: Inputs,
        experts: Tensor,
        weights: Tensor,
        layer: ExpertWeights,
        adapters: ExpertAdapters,
    ) -> Tensor:
        """`mix` without a shared MLP; to the products with up[e] and down[e] what an adapter adds
        to expert e."""

    def add_shared(self, routed: Tensor, shared: SharedResult, x: Tensor) -> Tensor:
        """routed + sigmoid(x gate^T) * values, all [tokens, width], x contiguous; without a gate
        the sum."""
