"""Process groups and the collectives that inference needs."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.parallel import megatron

T = TypeVar("T")


class ParallelContext:
    """This process's place in the tensor-parallel group, and the group's collectives.

    With one rank every collective returns at once. Collectives on a CUDA tensor run on NCCL,
    those on a CPU tensor on gloo.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self._first_rank = dist.get_global_rank(group, 0)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0 of the tensor-parallel group."""
        return self.rank == 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place where `tensor` is contiguous."""
        if self.size == 1:
            return tensor
        tensor = tensor.contiguous()
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[..., n] of every rank -> [..., ranks * n], in the order of the ranks."""
        if self.size == 1:
            return tensor
        tensor = tensor.contiguous()
        gathered = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        if tensor.numel():
            dist.all_gather_into_tensor(gathered, tensor, group=self.group)
        return gathered.view(self.size, *tensor.shape).movedim(0, -2).flatten(-2)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's values, written into `tensor` on every rank."""
        if self.size > 1:
            dist.broadcast(tensor, src=self._first_rank, group=self.group)
        return tensor

    def broadcast_object(self, value: T | None) -> T:
        """Rank 0's object on every rank; the others' arguments are ignored."""
        box: list[Any] = [value]
        if self.size > 1:
            device = self.device if self.device.type == "cuda" else None
            dist.broadcast_object_list(box, src=self._first_rank, group=self.group, device=device)
        return box[0]

    def minimum(self, value: int) -> int:
        """The smallest of the ranks' values, on every rank."""
        if self.size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self.group)
        return int(tensor.item())

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.group)

    def destroy(self) -> None:
        """Leave all groups; `initialize` may be called again afterwards."""
        if megatron.parallel_state.model_parallel_is_initialized():
            megatron.parallel_state.destroy_model_parallel()
        _leave()


def initialize(
    tensor_model_parallel_size: int = 1,
    *,
    device: torch.device | None = None,
    timeout_minutes: int = 30,
) -> ParallelContext:
    """Join the process groups: torchrun's when it started us, else a group of this process alone.

    `device` is this rank's device (a CUDA device must carry its index). Called again with the same
    size it returns a context of the groups that exist. Raises ConfigurationError when the number
    of processes does not fit the tensor-parallel size.
    """
    device = torch.device("cpu") if device is None else device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        _initialize_torch(device, timeout_minutes)
    world_size = dist.get_world_size()
    if world_size % tensor_model_parallel_size:
        raise ConfigurationError(
            f"--tensor-model-parallel-size is {tensor_model_parallel_size} but {world_size} "
            f"process(es) were started; start a multiple of it with torchrun --nproc-per-node."
        )
    state = megatron.parallel_state
    if not state.model_parallel_is_initialized():
        megatron.initialize_model_parallel(
            tensor_model_parallel_size=tensor_model_parallel_size,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=timeout_minutes,
        )
    context = ParallelContext(state.get_tensor_model_parallel_group(), device)
    if context.size != tensor_model_parallel_size:
        raise ConfigurationError(
            f"The process groups were made for --tensor-model-parallel-size {context.size}; "
            f"destroy them before asking for {tensor_model_parallel_size}."
        )
    return context


def _initialize_torch(device: torch.device, timeout_minutes: int) -> None:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(minutes=timeout_minutes)
    if "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ:  # torchrun
        dist.init_process_group(backend, timeout=timeout)
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
