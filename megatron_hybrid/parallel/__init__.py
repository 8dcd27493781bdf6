"""Process groups (with several ranks megatron-core's: nobody else imports it), tensor-parallel
layers, collectives."""

from megatron_hybrid.parallel.context import ExpertRanks, ParallelContext, initialize
from megatron_hybrid.parallel.layers import (
    VocabParallelEmbedding,
)
from megatron_hybrid.parallel.ranks import RankGroup

__all__ = [
    "ExpertRanks",
    "ParallelContext",
    "RankGroup",
    "VocabParallelEmbedding",
    "initialize",
]
