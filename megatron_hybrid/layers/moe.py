"""Mixtures of experts: a router, experts without or with a gate, a shared MLP.

A rank holds some of the experts (expert parallel), and of those its part of the inner size (expert
tensor parallel); expert_dispatch brings tokens and experts together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.kernels.experts.protocol import (
    ExpertWeights,
    NormedRoutes,
    Router,
    Shared,
    SharedExpert,
    SharedResult,
)
from megatron_hybrid.kernels.linear.formats import format_of
from megatron_hybrid.kernels.linear.reference import plain_rows
from megatron_hybrid.kernels.protocols import Inputs, Reader
from megatron_hybrid.layers.carried_router import CarriedRouter, CarriedRouterConfig
from megatron_hybrid.layers.expert_dispatch import ExpertDispatch
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.linear import Linear
from megatron_hybrid.layers.mixer import LayerContext, Mixed, Mixer, parameter
from megatron_hybrid.layers.mlp import MLP, MLPConfig
from megatron_hybrid.layers.norm import RMSNorm
from megatron_hybrid.layers.parts import Parts, Rows, columns, fused, prefixed, whole
from megatron_hybrid.layers.sinks import Sinks


@dataclass(frozen=True)
class MoEConfig:
    """`scoring` is "softmax" (Granite, Jamba, Qwen) or "sigmoid" (DeepSeek-V3, Nemotron-H; where
    `router_bias`, with a learned bias): see kernels.protocols.Router. `shared_gate`: the shared
    MLP's result is multiplied by a learned sigmoid of each token. `sinks`: so many more experts
    that every token goes to, by weights of the router. `router_in_fp32`: its weight is kept so.
    `router`: what chooses instead, and may choose none."""

    num_experts: int
    experts_per_token: int
    expert: MLPConfig
    shared: MLPConfig | None
    scoring: str = "softmax"
    num_groups: int = 1
    chosen_groups: int = 1
    normalize_weights: bool = True
    weights_eps: float = 1e-20  # added to the sum that sigmoid weights are divided by
    router_bias: bool = True
    router_in_fp32: bool = False
    shared_gate: bool = False
    scaling_factor: float = 1.0
    global_scale: bool = False  # weights are multiplied by a learned number, too
    sinks: int = 0
    latent_size: int | None = None  # experts work in this size, between two projections
    router: CarriedRouterConfig | None = None

    @property
    def num_choices(self) -> int:
        """Experts, and one number more where a token may have none."""
        return self.num_experts + (self.router is not None)

    def check(self) -> None:
        """Raise ConfigurationError unless there are experts for each choice."""
        available = self.num_experts
        if self.num_groups > 1:
            each, rest = divmod(self.num_experts, self.num_groups)
            available = each * self.chosen_groups
            if rest or each < 2 or not 1 <= self.chosen_groups <= self.num_groups:
                raise ConfigurationError(
                    f"The model's {self.num_experts} experts are in {self.num_groups} groups, and "
                    f"a token chooses {self.chosen_groups}; groups must have two experts at least, "
                    "equally many, and be as many as that."
                )
        if not 1 <= self.experts_per_token <= available:
            raise ConfigurationError(
                f"A token goes to {self.experts_per_token} of the model's experts; it must be one "
                f"at least, and {available} at most."
            )

    def mixer(self, context: LayerContext) -> MoE:
        """As in LayerConfig."""
        return MoE(self, context)


class TopKRouter(nn.Module):
    """Which experts a token goes to, and with what weights."""

    def __init__(self, config: MoEConfig, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        dtype = torch.float32 if config.router_in_fp32 else dtype
        self.weight = parameter((config.num_experts + config.sinks, hidden_size), dtype)
        self.bias = None
        self.scale = parameter((1,), torch.float32) if config.global_scale else None
        if config.scoring == "sigmoid" and config.router_bias:
            self.bias = parameter((config.num_experts,), torch.float32)

    def weight_parts(self) -> Parts:
        """The weights that it needs: every rank holds them whole."""
        yield whole("router.weight", self.weight)
        if self.bias is not None:
            yield whole("router.bias", self.bias)
        if self.scale is not None:
            yield whole("router.scale", self.scale)

    def plain_weights(self) -> Iterator[Tensor]:
        """What tokens are multiplied with."""
        yield self.weight

    def forward(self, x: Tensor, plans: KernelPlans) -> tuple[Tensor, Tensor]:
        """[tokens, hidden] -> experts and weights, [tokens, chosen] each, and behind the weights
        those of sinks."""
        return plans.kernels.experts.route(x, self._router)

    def after_norm(
        self, norm: RMSNorm, x: Tensor, residual: Tensor, multiplier: float, plans: KernelPlans
    ) -> NormedRoutes | None:
        """`norm.after_adding`, on one rank, and the same of its result, in one kernel; None where
        there is none."""
        return plans.kernels.experts.add_norm_route(
            x, residual, multiplier, norm.weight, norm.eps, norm.dtype, self._router
        )

    @property
    def _router(self) -> Router:
        config = self.config
        return Router(
            self.weight,
            config.experts_per_token,
            config.scoring,
            config.normalize_weights,
            self.bias,
            config.num_groups,
            config.chosen_groups,
            config.weights_eps,
            config.scaling_factor,
            config.sinks,
            self.scale,
        )


class MoE(Mixer):
    """Routed experts plus an optional MLP that sees every token."""

    def __init__(self, config: MoEConfig, context: LayerContext) -> None:
        super().__init__()
        hidden_size, dtype, ranks = context.hidden_size, context.dtype, context.experts
        config.check()
        size = config.expert.intermediate_size
        if size % ranks.tensor.size:
            raise ConfigurationError(
                f"--expert-tensor-parallel-size {ranks.tensor.size} (if not given, "
                f"--tensor-model-parallel-size) does not divide the model's expert size {size}."
            )
        if config.num_experts % ranks.owners.size:
            raise ConfigurationError(
                f"--expert-model-parallel-size {ranks.owners.size} does not divide the model's "
                f"{config.num_experts} experts."
            )
        self.config = config
        self.dispatch = ExpertDispatch(ranks, context.parallel, config.num_experts)
        self.slices = ranks.tensor
        self.parallel = context.parallel
        self.router: TopKRouter | CarriedRouter
        if config.router is None:
            self.router = TopKRouter(config, hidden_size, dtype)
        else:
            self.router = CarriedRouter(config.router, config.num_experts, context)
        width = config.latent_size or hidden_size
        local, num_local = size // ranks.tensor.size, self.dispatch.num_local
        rows = 2 * local if config.expert.gated else local
        # Those of all experts, one below the other.
        self.up_proj = Linear(width, num_local * rows, bias=False, dtype=dtype)
        self.down_proj = Linear(local, num_local * width, bias=False, dtype=dtype)
        self.shared = None
        if config.shared is not None:
            self.shared = MLP(config.shared, context)
        assert config.shared is None or not config.sinks
        self.sinks = Sinks(config.sinks, config.expert, context) if config.sinks else None
        self.shared_gate = None
        if config.shared_gate:
            self.shared_gate = parameter((1, hidden_size), dtype)
        self.to_latent = self.from_latent = None
        if config.latent_size is not None:
            bias = config.expert.bias
            self.to_latent = _linear(hidden_size, width, bias, dtype)
            self.from_latent = _linear(width, hidden_size, bias, dtype)

    def weight_parts(self) -> Parts:
        yield from self.router.weight_parts()
        names = ("gate_proj", "up_proj") if self.config.expert.gated else ("up_proj",)
        rank, total, inner = self.slices.rank, self.config.expert.intermediate_size, self.down_proj
        experts = [f"experts.{self.dispatch.first + i}" for i in range(self.dispatch.num_local)]
        rows = [
            Rows(f"{expert}.{name}", inner.inputs, rank * inner.inputs, total)
            for expert in experts
            for name in names
        ]
        yield from fused(rows, self.up_proj)
        width = inner.outputs // len(experts)
        for i, expert in enumerate(experts):
            yield columns(f"{expert}.down_proj", inner, rank, total, i * width, width)
        if self.shared is not None:
            yield from prefixed("shared", self.shared.weight_parts())
        if self.sinks is not None:
            yield from prefixed("sinks", self.sinks.weight_parts())
        if self.shared_gate is not None:
            yield whole("shared_gate.weight", self.shared_gate)
        for name in ("to_latent", "from_latent"):
            projection = getattr(self, name)
            if projection is not None:
                yield whole(f"{name}.weight", projection.weight)
                if projection.bias is not None:
                    yield whole(f"{name}.bias", projection.bias)

    def plain_weights(self) -> Iterator[Tensor]:
        """What tokens are multiplied with, of experts one's, if it is not quantised."""
        yield from self.router.plain_weights()
        local = self.dispatch.num_local
        stacks = [(self.up_proj, local), (self.down_proj, local)]
        if self.sinks is not None:
            sinks = self.sinks
            stacks += [(sinks.up_proj, sinks.count), (sinks.down_proj, sinks.count)]
        for layer, count in stacks:
            weight = layer.stacked(count)
            if isinstance(weight, Tensor):
                yield weight[0]
        for projection in (self.to_latent, self.from_latent):
            if projection is not None:
                yield projection.weight

    def after_loading(self) -> None:
        """Raises ConfigurationError for experts in several formats."""
        for layer in (self.up_proj, self.down_proj):
            layer.stacked(self.dispatch.num_local)

    @property
    def reader(self) -> Reader | None:
        reader = None if self.shared is None else self.shared.reader
        return None if reader is None else reader._replace(plain=True)

    def forward(
        self, x: Inputs, plans: KernelPlans, routes: tuple[Tensor, Tensor] | None = None
    ) -> Mixed:
        """[tokens, hidden] -> [tokens, hidden]. `routes`: what the router makes of x, if that is
        known."""
        given, x = x, plain_rows(x)
        experts, weights = self.router(x, plans) if routes is None else routes
        to_sinks = None
        if self.sinks is not None:
            to_sinks = weights[:, self.config.experts_per_token :].contiguous()
            weights = weights[:, : self.config.experts_per_token].contiguous()
        if plans.chosen is not None:
            plans.chosen.append(experts)
        multiply, inner = plans.kernels.linear.multiply, given
        if self.to_latent is not None:
            inner = multiply(x, self.to_latent.weight, self.to_latent.bias)
        expert, num_local = self.config.expert, self.dispatch.num_local
        elsewhere = self.config.num_choices - num_local
        up, down = self.up_proj.stacked(num_local), self.down_proj.stacked(num_local)
        layer = ExpertWeights(up, down, expert.activation, expert.gated, elsewhere)
        adapters, beside = plans.kernels.adapters, None
        adapted = None
        if adapters is not None:
            adapted = adapters.of_experts(self.up_proj, self.down_proj)
        if adapted is None and self.dispatch.is_here and self.to_latent is None:
            beside = self._beside(given, to_sinks, layer, plans)
            if self.parallel.size == 1:  # nothing has to be done before the next norm
                mix_parts = plans.kernels.experts.mix_parts
                return mix_parts(inner, experts, weights, layer=layer, shared=beside)
        mix = partial(plans.kernels.experts.mix, layer=layer, shared=beside)
        if adapted is not None:
            mix = partial(plans.kernels.experts.mix_adapted, layer=layer, adapters=adapted)
        routed = self.dispatch.run(inner, experts, weights, mix, plans)
        if self.from_latent is not None:
            bias = self.from_latent.bias if self.parallel.is_first else None
            routed = multiply(routed, self.from_latent.weight, bias)
        result = self._result_beside(given, to_sinks, plans) if beside is None else None
        if result is None:
            return routed
        return plans.kernels.experts.add_shared(routed, result, x)

    def _beside(
        self, x: Inputs, to_sinks: Tensor | None, layer: ExpertWeights, plans: KernelPlans
    ) -> Shared | None:
        """The shared MLP for the experts' kernels, or what it, or sinks, give for them to add."""
        shared = None
        if plans.kernels.adapters is None:  # which are added between its two products
            shared = self._shared_expert(layer)
        if shared is not None and plans.kernels.experts.takes_shared(x, layer, shared):
            return shared
        return self._result_beside(x, to_sinks, plans)

    def _result_beside(
        self, x: Inputs, to_sinks: Tensor | None, plans: KernelPlans
    ) -> SharedResult | None:
        """What the shared MLP, or sinks, give."""
        if self.sinks is not None:
            return SharedResult(self.sinks(x, to_sinks, plans), None)
        if self.shared is None:
            return None
        return SharedResult(self.shared(x, plans), self.shared_gate)

    def _shared_expert(self, layer: ExpertWeights) -> SharedExpert | None:
        """The shared MLP, if it can be computed with the experts: it is of their kind, and its
        weights are kept as theirs."""
        shared = self.shared
        if shared is None:
            return None
        config, expert = shared.config, self.config.expert
        if (config.gated, config.activation) != (expert.gated, expert.activation):
            return None
        up, down = shared.up_proj, shared.down_proj
        if not up.is_one_weight or not down.is_one_weight:
            return None
        for own, theirs in ((up.weight, layer.up), (down.weight, layer.down)):
            if format_of(own) != format_of(theirs):
                return None
        return SharedExpert(up.weight, down.weight, self.shared_gate)


def _linear(inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(False)
