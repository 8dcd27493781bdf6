"""Dense MLPs: gated (SiLU, as in Llama) or plain (squared ReLU, as in Nemotron-H)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.layers.parts import Parts, shard, whole
from megatron_hybrid.layers.step import Step
from megatron_hybrid.parallel import ColumnParallelLinear, ParallelContext, RowParallelLinear


def relu2(x: Tensor) -> Tensor:
    return F.relu(x).square_()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "relu2": relu2}


@dataclass(frozen=True)
class MLPConfig:
    intermediate_size: int
    gated: bool
    activation: str  # a key of ACTIVATIONS
    bias: bool = False


class MLP(nn.Module):
    """down(act(gate x) * up x), or down(act(up x)) without a gate."""

    def __init__(
        self, config: MLPConfig, hidden_size: int, dtype: torch.dtype, parallel: ParallelContext
    ) -> None:
        super().__init__()
        size = config.intermediate_size
        if size % parallel.size:
            raise ConfigurationError(
                f"--tensor-model-parallel-size {parallel.size} does not divide the model's "
                f"MLP size {size}."
            )
        self.config = config
        self.parallel = parallel
        self.activation = ACTIVATIONS[config.activation]
        columns = 2 * size if config.gated else size
        self.up_proj = ColumnParallelLinear(
            hidden_size, columns, bias=config.bias, dtype=dtype, parallel=parallel
        )
        self.down_proj = RowParallelLinear(
            size, hidden_size, bias=config.bias, dtype=dtype, parallel=parallel
        )

    def weight_parts(self) -> Parts:
        names = ("gate_proj", "up_proj") if self.config.gated else ("up_proj",)
        rank, total = self.parallel.rank, self.config.intermediate_size
        kinds = [("weight", self.up_proj.weight), ("bias", self.up_proj.bias)]
        for kind, parameter in kinds:
            if parameter is not None:
                for name, rows in zip(names, parameter.chunk(len(names)), strict=True):
                    yield shard(f"{name}.{kind}", rows, 0, rank, total)
        yield shard("down_proj.weight", self.down_proj.weight, 1, rank, total)
        if self.down_proj.bias is not None:
            yield whole("down_proj.bias", self.down_proj.bias)

    def forward(self, x: Tensor, step: Step | None = None) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        inner = self.up_proj(x)
        if self.config.gated:
            gate, up = inner.chunk(2, dim=-1)
            return self.down_proj(self.activation(gate).mul_(up))
        return self.down_proj(self.activation(inner))
