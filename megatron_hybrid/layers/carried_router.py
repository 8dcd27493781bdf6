"""ZAYA's router: a small MLP whose inputs each layer adds to those of the layer before, and a
choice that may fall on no expert at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_hybrid.kernels.linear.reference import plain_rows
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.mixer import LayerContext, parameter
from megatron_hybrid.layers.norm import RMSNorm
from megatron_hybrid.layers.parts import Parts, prefixed, whole


@dataclass(frozen=True)
class CarriedRouterConfig:
    """`size`: of what is carried from layer to layer. `first`: the block whose router is given
    nothing."""

    size: int
    first: int


class CarriedRouter(nn.Module):
    """Which expert a token goes to, with what weight, of `num_experts` and one more that gives
    zeros. Every rank holds its weights whole.

        r = down_proj x + router_states_scale * r of the layer before
        p = softmax(out_proj gelu(fc2 gelu(fc1 norm(r))))
        the expert with the largest p + balancing_biases, with the weight p
    """

    def __init__(
        self, config: CarriedRouterConfig, num_experts: int, context: LayerContext
    ) -> None:
        super().__init__()
        size, dtype = config.size, context.dtype
        self.down_proj = _Product(context.hidden_size, size, dtype)
        self.router_states_scale = None
        if context.layer != config.first:
            self.router_states_scale = parameter((size,), dtype)
        self.norm = RMSNorm(size, context.eps, dtype)
        self.fc1, self.fc2 = _Product(size, size, dtype), _Product(size, size, dtype)
        self.out_proj = parameter((num_experts + 1, size), dtype)
        self.balancing_biases = parameter((num_experts + 1,), torch.float32)

    def weight_parts(self) -> Parts:
        """The weights that it needs."""
        yield from prefixed("router.down_proj", self.down_proj.weight_parts())
        if self.router_states_scale is not None:
            yield whole("router.router_states_scale", self.router_states_scale)
        for name in ("norm", "fc1", "fc2"):
            yield from prefixed(f"router.router_mlp.{name}", getattr(self, name).weight_parts())
        yield whole("router.router_mlp.out_proj.weight", self.out_proj)
        yield whole("router.balancing_biases", self.balancing_biases)

    def plain_weights(self) -> Iterator[Tensor]:
        """What tokens are multiplied with."""
        yield from (self.down_proj.weight, self.fc1.weight, self.fc2.weight, self.out_proj)

    def forward(self, x: Tensor, plans: KernelPlans) -> tuple[Tensor, Tensor]:
        """[tokens, hidden] -> experts and weights, [tokens, 1] each; an expert's number past the
        last one stands for none. Takes and leaves what `plans` carry."""
        kernels, carried = plans.kernels, plans.carried
        assert carried is not None
        states = self.down_proj(x, plans)
        if self.router_states_scale is not None:
            assert carried.states is not None
            states = torch.addcmul(states, carried.states, self.router_states_scale)
        carried.states = states
        inner = self.norm(states, kernels)
        for layer in (self.fc1, self.fc2):
            inner = layer.activated(inner, "gelu", plans)
        logits = kernels.linear.multiply(inner, self.out_proj)
        weights = torch.softmax(logits.float(), dim=-1)
        expert = (weights + self.balancing_biases).argmax(dim=-1, keepdim=True)
        return expert, weights.gather(1, expert)

    def after_norm(self, *_: object) -> None:
        """There is no kernel that does the norm before it, too."""


class _Product(nn.Module):
    """A linear layer that is never quantised."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter((outputs, inputs), dtype)
        self.bias = parameter((outputs,), dtype)

    def weight_parts(self) -> Parts:
        yield whole("weight", self.weight)
        yield whole("bias", self.bias)

    def forward(self, x: Tensor, plans: KernelPlans) -> Tensor:
        return plans.kernels.linear.multiply(x, self.weight, self.bias)

    def activated(self, x: Tensor, activation: str, plans: KernelPlans) -> Tensor:
        """What an activation makes of that."""
        multiply = plans.kernels.linear.multiply_activated
        y = multiply(x, self.weight, self.bias, activation, gated=False)
        if y is None:
            activate = plans.kernels.activation.activate
            y = plain_rows(activate(self(x, plans), activation, gated=False))
        return y
