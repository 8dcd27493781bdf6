"""What kernels of low-rank adapters are called with (Hu et al., "LoRA", arXiv 2106.09685)."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from megatron_hybrid.kernels.protocols import Inputs, Linear


class AdapterWeights(NamedTuple):
    """What adapters add to one linear layer on this rank.

    Slot s, from 1 on, is row s - 1; slot 0 is no adapter. Of several `copies` of a layer, such as
    experts, each has adapters of its own: those of copy c are row (s - 1) * copies + c. A layer's
    outputs may come from several of a checkpoint's weights, its roles: a role has an A of its own,
    an output belongs to one role. Adapters of a smaller rank are filled up with zeros; what they
    are scaled by is part of B.
    """

    a: Tensor  # [slots * copies, roles * rank, K]
    b: Tensor  # [slots * copies, N, rank]
    roles: Tensor  # [N] int32: the role of each output
    copies: int = 1

    @property
    def rank(self) -> int:
        """The largest one that there is room for."""
        return self.b.shape[2]

    @property
    def nbytes(self) -> int:
        """Of all slots."""
        return self.a.nbytes + self.b.nbytes + self.roles.nbytes


class WideWeights(NamedTuple):
    """A linear layer's weight on this rank, and behind it the A of its adapters: C rows, of each
    slot roles * rank. Of one copy. Otherwise as AdapterWeights."""

    wide: Tensor  # [N + C, K]
    b: Tensor  # [N, C]; zero where a column is not of the output's role
    roles: Tensor  # [N] int32: the role of each output
    slot_of: Tensor  # [C] int32: the slot of each column, from 1 on
    low: int  # columns of a slot
    rank: int

    @property
    def a(self) -> Tensor:
        """[slots, roles * rank, K]"""
        return self.wide[len(self.b) :].unflatten(0, (-1, self.low))

    @property
    def nbytes(self) -> int:
        """Of all slots."""
        return self.a.nbytes + self.b.nbytes + self.roles.nbytes + self.slot_of.nbytes


class Lora(Protocol):
    """The products of adapters."""

    def add(self, y: Tensor, x: Tensor, weights: AdapterWeights, slots: Tensor) -> None:
        """y[t, n] += sum over r of B[n, r] * (sum over k of A[roles[n], r, k] * x[t, k]), with A
        and B in slot slots[t], in place, for tokens with a slot above 0.

        y [tokens, N] and x [tokens, K] in the weights' type, rows may be strided; slots [tokens]
        integers. Sums are in float32; those over k are rounded to that type, and y once more.
        """

    def multiply(
        self,
        x: Inputs,
        weights: WideWeights,
        slots: Tensor,
        linear: Linear,
        activation: str = "none",
        gated: bool = False,
    ) -> Tensor:
        """What a wide layer makes of x [tokens, K], with the same sums and roundings, and what
        Activation.activate makes of that: -> [tokens, N or N / 2]. `linear`: its products."""


class StepAdapters(Protocol):
    """Which adapter each token of a step has."""

    def add(self, layer: Any, y: Tensor, x: Inputs) -> None:
        """To what a linear layer made of x what its adapters do, in place."""

    def multiply(
        self, layer: Any, x: Inputs, linear: Linear, activation: str = "none", gated: bool = False
    ) -> Tensor:
        """What a wide layer makes of x, with what its adapters add, and Activation.activate of
        that."""

    def of_experts(self, up: Any, down: Any) -> Any:
        """Those of experts' linear layers, as ExpertAdapters; None where these have none."""
