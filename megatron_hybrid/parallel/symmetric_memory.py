"""All-reduce in one kernel over memory that the GPUs of a host read from one another.

NCCL takes some 20 us to sum the few hundred kilobytes of a decode step; here each rank puts its
values where the others see them, waits for theirs, and adds them up. Multicast (NVLS) is not used.
"""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger(__name__)

# Every rank reads all ranks' values, so that more ranks pay for less.
_MOST_BYTES = {2: 4 << 20, 3: 1 << 20, 4: 1 << 20}
_MOST_RANKS = 8
_ALIGNMENT = 16  # bytes, of what the kernel loads at once


MOST_SHARED_ROWS = 544  # of the largest captured step; more go through NCCL


@dataclass(frozen=True)
class SharedRows:
    """What kernels.norm.triton's SharedRows asks for."""

    rank: int
    size: int
    rows: int
    data: Tensor
    flags: Tensor
    turns: Tensor
    _memory: tuple[Any, ...]  # which the addresses above point into

    @classmethod
    def make(
        cls, group: dist.ProcessGroup, device: torch.device, width: int, dtype: torch.dtype
    ) -> SharedRows:
        import torch.distributed._symmetric_memory as symmetric_memory

        rows, rank, size = MOST_SHARED_ROWS, dist.get_rank(group), dist.get_world_size(group)
        data = symmetric_memory.empty(2 * rows * width, dtype=dtype, device=device)
        flags = symmetric_memory.empty(rows * size, dtype=torch.int32, device=device)
        handles = [symmetric_memory.rendezvous(memory, group) for memory in (data, flags)]
        flags.zero_()
        torch.cuda.synchronize(device)
        dist.all_reduce(torch.zeros(1), group=group)  # nobody sets a flag that is zeroed later
        addresses = [
            torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device) for handle in handles
        ]
        turns = torch.zeros(rows, dtype=torch.int32, device=device)
        return cls(rank, size, rows, addresses[0], addresses[1], turns, (data, flags, handles))


class SymmetricMemory:
    """Of the ranks of one group, which must all make it at the same time."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        size = dist.get_world_size(group)
        self.most_bytes = _MOST_BYTES.get(size, (1 << 19) if size <= _MOST_RANKS else 0)
        self._group_name = group.group_name
        self._device = device
        self._group = group
        self._buffers: dict[torch.dtype, Tensor] = {}
        self._rows: dict[tuple[int, torch.dtype], SharedRows] = {}

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device) -> SymmetricMemory | None:
        """None, on every rank, where one of them can't have it: on a CPU, over several hosts,
        or without access from GPU to GPU. All ranks of the group call it."""
        size = dist.get_world_size(group)
        if device.type != "cuda" or not 1 < size <= _MOST_RANKS:
            return None
        hosts: list[str | None] = [None] * size
        dist.all_gather_object(hosts, socket.gethostname(), group=group)
        if len(set(hosts)) > 1:
            return None
        made, works = cls(group, device), 1
        try:
            made._make_buffer(torch.bfloat16)
            made._make_buffer(torch.float32)
        except (RuntimeError, ImportError, AttributeError) as error:
            logger.warning("All-reduce goes through NCCL, not symmetric memory: %s", error)
            works = 0
        all_work = torch.tensor([works])
        dist.all_reduce(all_work, op=dist.ReduceOp.MIN, group=group)
        if not all_work.item():
            return None
        result = made.all_reduce(torch.ones(64, device=device))
        return made if result.tolist() == [float(size)] * 64 else None

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor is small enough, of a known type, and without a rest."""
        size = tensor.numel() * tensor.element_size()
        return (
            tensor.is_cuda
            and 0 < size <= self.most_bytes
            and size % _ALIGNMENT == 0
            and tensor.dtype in self._buffers
            and tensor.data_ptr() % _ALIGNMENT == 0
        )

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, in a new tensor of the same shape. `tensor` is contiguous."""
        shared = self._buffers[tensor.dtype][: tensor.numel()].view(tensor.shape)
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(
            shared, tensor, "sum", self._group_name
        )
        return total

    def shared_rows(self, width: int, dtype: torch.dtype) -> SharedRows:
        """Room for rows of this width. All ranks ask for the same, in the same order."""
        key = width, dtype
        if key not in self._rows:
            self._rows[key] = SharedRows.make(self._group, self._device, width, dtype)
        return self._rows[key]

    def _make_buffer(self, dtype: torch.dtype) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        buffer = symmetric_memory.empty(
            self.most_bytes // dtype.itemsize, dtype=dtype, device=self._device
        )
        symmetric_memory.rendezvous(buffer, self._group)
        self._buffers[dtype] = buffer
