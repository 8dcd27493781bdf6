"""Kernels that compute a recurrent layer's decodes from the convolution's inputs on: a Protocol a
kind of layer. A kernel set may have none."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from megatron_hybrid.kernels.contract import RecurrentState
from megatron_hybrid.kernels.protocols import (
    ConvConstants,
    DeltaRuleConstants,
    Mamba2Constants,
    Plan,
    Rings,
)


class ConvolvedMamba2(Protocol):
    """Mamba2's convolution and scan in one kernel, for decodes: as one after the other."""

    def takes(self, plan: Plan, state: RecurrentState) -> bool:
        """Whether it computes such decodes, and sooner than two kernels do. plan: the scan's, of
        DecodeRuns or DecodeSlots."""

    def decode_runs(
        self,
        x: Tensor,
        dt: Tensor,
        conv: ConvConstants,
        constants: Mamba2Constants,
        state: RecurrentState,
        rings: tuple[Tensor, Rings],
        plan: Plan,
    ) -> Tensor:
        """x [T, channels], what is convolved to | x | B | C |, and dt [T, heads] (rows of both may
        be strided) -> [T, heads, head_dim]. rings: the convolution's and the scan's."""


class HeadsNorm(NamedTuple):
    """A gated norm of each head, the norm first: see Norm.gated_rms_norm."""

    gate: Tensor  # [T, v_heads * v_dim], rows may be strided
    weight: Tensor  # [v_heads * v_dim]
    eps: float


class ConvolvedDeltaRule(Protocol):
    """The convolution, the gated delta rule and the norm of its heads in one kernel, for decodes:
    as one after the other."""

    def takes(self, plan: Plan, state: RecurrentState) -> bool:
        """As in ConvolvedMamba2."""

    def decode(
        self,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        conv: ConvConstants,
        constants: DeltaRuleConstants,
        state: RecurrentState,
        plan: Plan,
        norm: HeadsNorm | None,
    ) -> Tensor:
        """x [T, channels], what is convolved to | q | k | v |; a, b [T, v_heads] (rows of all may
        be strided) -> [T, v_heads * v_dim], normed unless `norm` is None."""
