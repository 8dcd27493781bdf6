"""Mixtures of experts under autograd: see kernels.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.kernels.experts.protocol import (
    ExpertWeights,
    Router,
    Shared,
    SharedExpert,
    SharedResult,
)
from megatron_hybrid.training import formulas
from megatron_hybrid.training.nodes import Over, recomputed


@dataclass(frozen=True)
class ExpertsUnderAutograd(Over):
    """Which experts are chosen has no gradient, with what weights has one."""

    def route(self, x: Tensor, router: Router) -> tuple[Tensor, Tensor]:
        """As in Experts."""
        with torch.no_grad():
            experts, weights = self.inner.route(x, router)

        def formula(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
            found = formulas.expert_weights(x, weight, experts.long(), router)
            return found if scale is None else found * scale

        return experts, recomputed(lambda *_: weights, formula, x, router.weight, router.scale)

    def add_norm_route(self, *_: object) -> None:
        """One after the other, which gives the same."""

    def mix(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        layer: ExpertWeights,
        shared: Shared | None = None,
    ) -> Tensor:
        """As in Experts."""
        beside: tuple[Any, ...] = () if shared is None else tuple(shared)

        def kernel(x: Tensor, weights: Tensor, up: Tensor, down: Tensor, *own: Any) -> Any:
            other = None if shared is None else type(shared)(*own)
            return self.inner.mix(x, experts, weights, layer._replace(up=up, down=down), other)

        def formula(x: Tensor, weights: Tensor, up: Tensor, down: Tensor, *own: Any) -> Any:
            routed = formulas.mixture(x, experts, weights, layer._replace(up=up, down=down))
            if isinstance(shared, SharedExpert):
                up, down, gate = own
                return _with_shared(routed, formulas.mlp(x, up, down, layer), gate, x)
            if isinstance(shared, SharedResult):
                values, gate = own
                return _with_shared(routed, values, gate, x)
            return routed

        inputs: tuple[Any, ...] = (x, weights, layer.up, layer.down, *beside)
        y: Tensor = recomputed(kernel, formula, *inputs)
        return y

    mix_parts = mix  # added up, which gives the same

    def add_shared(self, routed: Tensor, shared: SharedResult, x: Tensor) -> Tensor:
        """As in Experts."""

        def kernel(routed: Tensor, values: Tensor, gate: Tensor | None, x: Tensor) -> Any:
            return self.inner.add_shared(routed, SharedResult(values, gate), x)

        y: Tensor = recomputed(kernel, _with_shared, routed, *shared, x)
        return y


def _with_shared(routed: Tensor, values: Tensor, gate: Tensor | None, x: Tensor) -> Tensor:
    return routed + (values if gate is None else values * torch.sigmoid(F.linear(x, gate)))
