"""The one place that imports megatron.core: process groups, tensor-parallel layers, collectives."""

from megatron_hybrid.parallel.context import ParallelContext, initialize
from megatron_hybrid.parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)

__all__ = [
    "ColumnParallelLinear",
    "ParallelContext",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "initialize",
]
