"""What kernels of low-rank adapters are called with (Hu et al., "LoRA", arXiv 2106.09685)."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from megatron_hybrid.kernels.protocols import Inputs


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


class Lora(Protocol):
    """The products of adapters."""

    def add(self, y: Tensor, x: Tensor, weights: AdapterWeights, slots: Tensor) -> None:
        """y[t, n] += sum over r of B[n, r] * (sum over k of A[roles[n], r, k] * x[t, k]), with A
        and B in slot slots[t], in place, for tokens with a slot above 0.

        y [tokens, N] and x [tokens, K] in the weights' type, rows may be strided; slots [tokens]
        integers. Sums are in float32; those over k are rounded to that type, and y once more.
        """


class StepAdapters(Protocol):
    """Which adapter each token of a step has."""

    def add(self, layer: Any, y: Tensor, x: Inputs) -> None:
        """To what a linear layer made of x what its adapters do, in place."""

    def of_experts(self, up: Any, down: Any) -> Any:
        """Those of experts' linear layers, as ExpertAdapters; None where these have none."""
