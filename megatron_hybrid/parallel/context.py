"""The process groups of one lockstep group of ranks; see rank_layout for the words."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.parallel.fresh_store import fresh_prefix
from megatron_hybrid.parallel.ranks import RankGroup
from megatron_hybrid.rank_layout import ParallelSizes, RankLayout, is_started_as_rank

TIMEOUT_MINUTES = 30  # of a collective, and for all ranks to come


@dataclass(frozen=True, slots=True)
class ExpertRanks:
    """Who has which part of a layer's experts."""

    owners: RankGroup  # the experts are shared out to these: this rank has part `owners.rank`
    tensor: RankGroup  # each expert is split over these
    everyone: RankGroup  # owners x tensor: together they hold every expert once
    replicas: RankGroup  # one rank of each replica whose tokens `everyone` computes


class Captures(Protocol):
    """CUDA graphs, which may hold collectives."""

    def clear(self) -> None:
        """Let go of them, once the device is done with them."""


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """This process's place in each kind of group."""

    layout: RankLayout
    device: torch.device
    tensor: RankGroup  # split each layer between them
    pipeline: RankGroup  # stages, in the order of the layers
    replica: RankGroup  # tensor x pipeline: share one scheduler and its caches
    lockstep: RankGroup  # run every forward together
    experts: ExpertRanks
    _captures: WeakSet[Captures] = field(default_factory=WeakSet, repr=False, compare=False)

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for its replica: takes its requests, writes its log."""
        return self.layout.is_first_of_replica

    def sum_in_order(self, wanted: bool) -> None:
        """Whether sums over ranks have one order: see RankGroup."""
        experts = self.experts
        groups = (self.tensor, experts.owners, experts.tensor, experts.everyone, experts.replicas)
        for group in groups:
            group.sums_in_order = wanted

    def clear_first(self, captures: Captures) -> None:
        """To be cleared before the groups are left, if they still exist: NCCL waits, for ever, for
        the graphs that its groups are used in."""
        self._captures.add(captures)

    def destroy(self) -> None:
        """Leave all groups; `initialize` may be called again afterwards. Engines that were made
        before are of no more use."""
        global _context
        _context = None
        for captures in list(self._captures):
            captures.clear()
        if self.lockstep.size > 1:
            from megatron_hybrid.parallel import megatron

            if megatron.parallel_state.model_parallel_is_initialized():
                megatron.parallel_state.destroy_model_parallel()
        _leave()


_context: ParallelContext | None = None  # what `initialize` made last


def initialize(
    sizes: ParallelSizes | int = 1,
    *,
    device: torch.device | None = None,
    symmetric_memory: bool = True,
) -> ParallelContext:
    """Join the process groups: torchrun's when it started us, else groups of this process alone.

    `sizes`: a number stands for as many tensor-parallel ranks. `device` is this rank's device (a
    CUDA device must carry its index). `symmetric_memory`: small all-reduces of tensor-parallel
    ranks use it where it is to be had. Called again with the same sizes it returns the context
    that exists. Raises ConfigurationError when the number of processes does not fit.
    """
    global _context
    if isinstance(sizes, int):
        sizes = ParallelSizes(tensor=sizes)
    device = torch.device("cpu") if device is None else device
    wanted = device, sizes.numbers
    if _context is not None and (_context.device, _context.layout.sizes.numbers) == wanted:
        return _context
    layout = RankLayout.from_environment(sizes)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        _initialize_torch(layout, device)
    if sizes.lockstep_group == 1:
        context = _alone(layout, device)
    else:
        context = _with_others(layout, device)
    groups = (context.tensor, context.pipeline, context.experts.owners, context.experts.tensor)
    found = tuple(group.size for group in groups)
    if found != sizes.numbers:
        raise ConfigurationError(
            "The process groups were made for tensor, pipeline, expert and expert tensor parallel "
            f"sizes {found}; destroy them before asking for {sizes}."
        )
    if symmetric_memory:
        context.tensor.use_symmetric_memory()
    _context = context
    return context


def _alone(layout: RankLayout, device: torch.device) -> ParallelContext:
    """Every group is this one rank."""
    itself = RankGroup(_world(), device)
    experts = ExpertRanks(owners=itself, tensor=itself, everyone=itself, replicas=itself)
    return ParallelContext(layout, device, itself, itself, itself, itself, experts)


def _with_others(layout: RankLayout, device: torch.device) -> ParallelContext:
    """megatron-core's groups."""
    from megatron_hybrid.parallel import megatron

    state, sizes = megatron.parallel_state, layout.sizes
    if not state.model_parallel_is_initialized():
        megatron.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tensor,
            pipeline_model_parallel_size=sizes.pipeline,
            expert_model_parallel_size=sizes.expert,
            expert_tensor_parallel_size=sizes.tensor_of_experts,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=TIMEOUT_MINUTES,
        )

    def ranks(group: dist.ProcessGroup | None) -> RankGroup:
        assert group is not None
        return RankGroup(group, device)

    tensor = ranks(state.get_tensor_model_parallel_group())
    everyone = ranks(state.get_expert_tensor_and_model_parallel_group())
    return ParallelContext(
        layout=layout,
        device=device,
        tensor=tensor,
        pipeline=ranks(state.get_pipeline_model_parallel_group()),
        replica=ranks(state.get_model_parallel_group()),
        lockstep=ranks(_world()),
        experts=ExpertRanks(
            owners=ranks(state.get_expert_model_parallel_group()),
            tensor=ranks(state.get_expert_tensor_parallel_group()),
            everyone=tensor if everyone.size == tensor.size else everyone,
            replicas=ranks(state.get_data_parallel_group()),
        ),
    )


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _initialize_torch(layout: RankLayout, device: torch.device) -> None:
    """Make torch's world of this rank's lockstep group alone: what happens in another one (a rank
    that dies, say) does not reach it."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(minutes=TIMEOUT_MINUTES)
    if is_started_as_rank():
        store, prefix = fresh_prefix(layout, "lockstep_group", timeout)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(prefix, store),
            rank=layout.lockstep_rank,
            world_size=layout.sizes.lockstep_group,
            timeout=timeout,
        )
        return
    with _loopback():
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
    atexit.register(_leave)  # NCCL warns of groups that a process still has when it ends


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _loopback() -> Iterator[None]:
    """gloo looks up the host's own name, which need not resolve; one process needs only `lo`."""
    name = "GLOO_SOCKET_IFNAME"
    if name in os.environ or not os.path.isdir("/sys/class/net/lo"):
        yield
        return
    os.environ[name] = "lo"
    try:
        yield
    finally:
        del os.environ[name]
