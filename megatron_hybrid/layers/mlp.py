"""Dense MLPs: gated (SiLU, as in Llama) or plain (squared ReLU, as in Nemotron-H)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_hybrid.kernels.protocols import Inputs, Reader
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.mixer import LayerContext, Mixer, parameter
from megatron_hybrid.layers.parts import Parts, Rows, fused, row_parallel, whole


@dataclass(frozen=True)
class MLPConfig:
    """Sizes and constants of one MLP, or of one expert."""

    intermediate_size: int
    gated: bool
    activation: str  # a key of kernels.activation's ACTIVATIONS
    bias: bool = False
    gate_multiplier: float = 1.0  # of the gate, before the activation
    out_multiplier: float = 1.0
    global_scale: bool = False  # what it gives is multiplied by a learned number

    def mixer(self, context: LayerContext) -> MLP:
        """As in LayerConfig."""
        return MLP(self, context)


class MLP(Mixer):
    """down(act(gate x) * up x), or down(act(up x)) without a gate."""

    def __init__(self, config: MLPConfig, context: LayerContext) -> None:
        super().__init__()
        self.config = config
        self.parallel = context.parallel
        size = context.share(config.intermediate_size, "channels inside an MLP")
        self.up_proj = context.to_rows(2 * size if config.gated else size, config.bias)
        self.down_proj = context.to_hidden(size, config.bias)
        self.global_scale = parameter((1,), context.dtype) if config.global_scale else None

    @property
    def reader(self) -> Reader | None:
        return self.up_proj.reader

    def weight_parts(self) -> Parts:
        config, total = self.config, self.config.intermediate_size
        size = total // self.parallel.size
        rows = [Rows("up_proj", size, self.parallel.rank * size, total)]
        if config.gated:
            gate = rows[0]._replace(role="gate_proj", multiplier=config.gate_multiplier)
            rows.insert(0, gate)
        yield from fused(rows, self.up_proj)
        yield from row_parallel("down_proj", self.down_proj, config.out_multiplier)
        if self.global_scale is not None:
            yield whole("global_scale", self.global_scale)

    def forward(self, x: Inputs, plans: KernelPlans) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        config, kernels, down = self.config, plans.kernels, self.down_proj
        hidden = self.up_proj.activated(x, config.activation, config.gated, down.reader, kernels)
        return self._scaled(down(hidden, kernels))

    def activate(self, inner: Tensor, plans: KernelPlans) -> Tensor:
        """What follows the first projection, where that was done elsewhere."""
        config, kernels, down = self.config, plans.kernels, self.down_proj
        hidden = kernels.activation.activate(inner, config.activation, config.gated, down.reader)
        return self._scaled(down(hidden, kernels))

    def _scaled(self, y: Tensor) -> Tensor:
        return y if self.global_scale is None else y * self.global_scale
