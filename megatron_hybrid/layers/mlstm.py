"""xLSTM's layer: projections to q, k, v and gates, the mLSTM, a layer norm of each head, a gate of
the output, projection (Beck et al., "xLSTM 7B", 2025, arXiv 2503.13427)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.kernels.channel_scans import MLSTMConstants, MLSTMTokens
from megatron_hybrid.kernels.elementwise import soft_capped
from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.kernels.linear.reference import plain_rows
from megatron_hybrid.kernels.protocols import Inputs, Reader
from megatron_hybrid.kernels.replay_protocol import Replays
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.mixer import LayerContext, parameter
from megatron_hybrid.layers.parts import Parts, Rows, fused, row_parallel, shard
from megatron_hybrid.layers.recurrent import RecurrentMixer


@dataclass(frozen=True)
class MLSTMConfig:
    """Sizes and constants of one layer. `gate_cap`: of the gates before their functions."""

    heads: int
    key_dim: int  # of a head
    value_dim: int
    gate_cap: float
    eps: float  # in the denominator of outputs
    chunk: int = 64

    def mixer(self, context: LayerContext) -> MLSTM:
        """As in LayerConfig."""
        return MLSTM(self, context)


class MLSTM(RecurrentMixer):
    """Heads are split over the ranks. A rank's rows of the projections: | q | k | v | output gate |
    and | input gate | forget gate |."""

    kind = "mlstm"

    def __init__(self, config: MLSTMConfig, context: LayerContext) -> None:
        heads = context.share(config.heads, "heads of the mLSTM")
        keys, values = config.key_dim, config.value_dim
        super().__init__(
            context,
            [],
            1,
            False,
            state=(heads, values + 2, keys),
            inputs=((heads, keys), (heads, values), (heads,), (heads,)),  # k, v, i, f
            kernel_chunk=config.chunk,
        )
        self.config, self.heads = config, heads
        self.eps = context.eps
        self.sections = [heads * keys] * 2 + [heads * values] * 2
        self.in_proj = context.to_rows(sum(self.sections), bias=False)
        self.gates = context.to_rows(2 * heads, bias=True)
        self.multihead_norm = parameter((heads * values,), context.dtype)
        self.out_proj = context.to_hidden(heads * values, bias=False)

    def kernel(self, kernels: KernelSet | Replays) -> Any:
        return kernels.mlstm

    @property
    def reader(self) -> Reader | None:
        reader = self.in_proj.reader  # the gates' projection is in the model's type
        return None if reader is None else reader._replace(plain=True)

    def weight_parts(self) -> Parts:
        rank, ranks = self.parallel.rank, self.parallel.size
        names = zip(("q", "k", "v", "ogate_preact"), self.sections, strict=True)
        rows = [Rows(name, size, rank * size, ranks * size) for name, size in names]
        yield from fused(rows, self.in_proj)
        gates = [
            Rows(name, self.heads, rank * self.heads, self.config.heads)
            for name in ("igate_preact", "fgate_preact")
        ]
        yield from fused(gates, self.gates)
        total = ranks * len(self.multihead_norm)
        yield shard("multihead_norm.weight", self.multihead_norm, 0, rank, total)
        yield from row_parallel("out_proj", self.out_proj)

    def forward(self, x: Inputs, plans: KernelPlans) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; reads and writes the sequences' states."""
        kernels, config = plans.kernels, self.config
        q, k, v, output_gate = self.in_proj.split(x, self.sections, kernels)
        q, k, v = (values.unflatten(1, (self.heads, -1)) for values in (q, k, v))
        i, f = soft_capped(self.gates(plain_rows(x), kernels), config.gate_cap).chunk(2, dim=1)
        constants = MLSTMConstants(config.eps, self.rounding_seed(plans))
        y = self.scan(MLSTMTokens(q, k, v, i, f), constants, plans)
        normed = F.layer_norm(y.float(), y.shape[-1:], eps=self.eps).to(y.dtype).flatten(1)
        normed = normed * self.multihead_norm
        gated = kernels.activation.gate(normed, output_gate, "sigmoid", self.out_proj.reader)
        return self.out_proj(gated, kernels)
