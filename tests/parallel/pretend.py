"""A place in groups that nobody else is in: for shapes and refusals, not for collectives."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

from megatron_hybrid.parallel import ParallelContext, RankGroup


def first_of(parallel: ParallelContext, ranks: int) -> ParallelContext:
    """As the first of so many tensor-parallel ranks, which split experts too."""
    tensor = _of_size(parallel.tensor, ranks)
    experts = replace(parallel.experts, tensor=tensor, everyone=tensor)
    return replace(parallel, tensor=tensor, experts=experts)


def _of_size(group: RankGroup, ranks: int) -> RankGroup:
    larger = copy(group)
    larger.size = ranks
    return larger
