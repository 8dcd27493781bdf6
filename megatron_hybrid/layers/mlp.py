"""Dense MLPs: gated (SiLU, as in Llama) or plain (squared ReLU, as in Nemotron-H)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.mixer import LayerContext, Mixer
from megatron_hybrid.layers.parts import Parts, scaled, shard, whole
from megatron_hybrid.parallel import ColumnParallelLinear, RowParallelLinear


@dataclass(frozen=True)
class MLPConfig:
    """Sizes and constants of one MLP, or of one expert."""

    intermediate_size: int
    gated: bool
    activation: str  # a key of kernels.activation's ACTIVATIONS
    bias: bool = False
    gate_multiplier: float = 1.0  # of the gate, before the activation
    out_multiplier: float = 1.0


class MLP(Mixer):
    """down(act(gate x) * up x), or down(act(up x)) without a gate."""

    def __init__(self, config: MLPConfig, context: LayerContext) -> None:
        super().__init__()
        hidden_size, dtype, parallel = context.hidden_size, context.dtype, context.parallel
        size = config.intermediate_size
        if size % parallel.size:
            raise ConfigurationError(
                f"--tensor-model-parallel-size {parallel.size} does not divide the model's "
                f"MLP size {size}."
            )
        self.config = config
        self.parallel = parallel
        columns = 2 * size if config.gated else size
        self.up_proj = ColumnParallelLinear(
            hidden_size, columns, bias=config.bias, dtype=dtype, parallel=parallel
        )
        self.down_proj = RowParallelLinear(
            size, hidden_size, bias=config.bias, dtype=dtype, parallel=parallel, sums=False
        )

    def weight_parts(self) -> Parts:
        names = ("gate_proj", "up_proj") if self.config.gated else ("up_proj",)
        rank, total = self.parallel.rank, self.config.intermediate_size
        kinds = [("weight", self.up_proj.weight), ("bias", self.up_proj.bias)]
        for kind, parameter in kinds:
            if parameter is not None:
                for name, rows in zip(names, parameter.chunk(len(names)), strict=True):
                    part = shard(f"{name}.{kind}", rows, 0, rank, total)
                    is_gate = name == "gate_proj"
                    yield replace(part, multiplier=self.config.gate_multiplier if is_gate else 1.0)
        down = [shard("down_proj.weight", self.down_proj.weight, 1, rank, total)]
        if self.down_proj.bias is not None:
            down.append(whole("down_proj.bias", self.down_proj.bias))
        yield from scaled(self.config.out_multiplier, down)

    def forward(self, x: Tensor, plans: KernelPlans) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        return self.activate(self.up_proj(x), plans)

    def activate(self, inner: Tensor, plans: KernelPlans) -> Tensor:
        """What follows the first projection."""
        config = self.config
        return self.down_proj(
            plans.kernels.activation.activate(inner, config.activation, config.gated)
        )
