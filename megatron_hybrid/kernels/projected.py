"""Mamba1's decodes from x_proj's result on in one kernel. A kernel set may have none."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from megatron_hybrid.kernels.protocols import Mamba1Constants, Plan


class LowRank(NamedTuple):
    """What Mamba1's step sizes, B and C are made of, and how."""

    projected: Tensor  # | step sizes' rank | B | C | [T, rank + 2 * state], rows may be strided
    weight: Tensor  # [channels, rank], from the rank to the step sizes before their bias
    norm_weight: Tensor | None  # [rank + 2 * state], each part normalised by itself; None: none is
    eps: float


class ProjectedMamba1(Protocol):
    """Mamba1's inner norms, the step sizes' product and the scan in one kernel, for decodes: as one
    after the other."""

    def takes(self, plan: Plan, low: LowRank, state: Tensor) -> bool:
        """Whether it computes such decodes, and sooner than three kernels do. plan: the scan's, of
        DecodeRuns or DecodeSlots."""

    def decode(
        self,
        x: Tensor,
        z: Tensor,
        low: LowRank,
        constants: Mamba1Constants,
        state: Tensor,
        plan: Plan,
    ) -> Tensor:
        """x, convolved, and the gate z [T, channels] (rows may be strided) -> [T, channels]."""
