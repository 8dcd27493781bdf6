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


def first_replica_of(parallel: ParallelContext, replicas: int) -> ParallelContext:
    """As a replica of so many that share experts."""
    owners = _of_size(parallel.experts.owners, replicas)
    together = _of_size(parallel.experts.replicas, replicas)
    experts = replace(parallel.experts, owners=owners, replicas=together)
    return replace(parallel, experts=experts)


def _of_size(group: RankGroup, ranks: int) -> RankGroup:
    larger = copy(group)
    larger.size = ranks
    return larger
