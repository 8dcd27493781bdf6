"""Sums and gathers in one kernel over memory that the GPUs of a host read from one another.

NCCL takes some 20 us to sum the few hundred kilobytes of a decode step; here each rank puts its
values where the others see them, waits for theirs, and reads them. Multicast (NVLS) is not used.
"""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_hybrid.parallel.ranks import RankGroup

logger = logging.getLogger(__name__)

# Every rank reads all ranks' values, so that more ranks pay for less.
_MOST_BYTES = {2: 4 << 20, 3: 1 << 20, 4: 1 << 20}
_MOST_RANKS = 8
_ALIGNMENT = 16  # bytes, of what the kernel loads at once

MOST_SHARED_ROWS = 544  # of the largest captured step; more go through NCCL


@dataclass(frozen=True)
class SharedRows:
    """What kernels.over_ranks.SharedRows asks for."""

    rank: int
    size: int
    rows: int
    data: Tensor
    flags: Tensor
    turns: Tensor
    _memory: tuple[Any, ...]  # which the addresses above point into

    @classmethod
    def make(cls, ranks: RankGroup, width: int, dtype: torch.dtype) -> SharedRows:
        """Room for rows of this width; all ranks call it at the same time."""
        rows, device = MOST_SHARED_ROWS, ranks.device
        data, data_handle = _shared(ranks, 2 * rows * width, dtype)
        flags, flags_handle = _shared(ranks, rows * ranks.size, torch.int32)
        handles = [data_handle, flags_handle]
        flags.zero_()
        torch.cuda.synchronize(device)
        ranks.barrier()  # nobody sets a flag that is zeroed later
        addresses = [
            torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device) for handle in handles
        ]
        turns = torch.zeros(rows, dtype=torch.int32, device=device)
        memory = data, flags, handles
        return cls(ranks.rank, ranks.size, rows, addresses[0], addresses[1], turns, memory)


class SymmetricMemory:
    """Of the ranks of one group, which must all make it at the same time."""

    def __init__(self, ranks: RankGroup) -> None:
        self.most_bytes = _MOST_BYTES.get(ranks.size, 1 << 19)
        self._ranks = ranks
        self._buffers: dict[torch.dtype, Tensor] = {}
        self._rows: dict[tuple[int, torch.dtype], SharedRows] = {}

    @classmethod
    def of(cls, ranks: RankGroup) -> SymmetricMemory | None:
        """None, on every rank, where one of them can't have it: on a CPU, over several hosts,
        or without access from GPU to GPU. All ranks of the group call it."""
        if ranks.device.type != "cuda" or not 1 < ranks.size <= _MOST_RANKS:
            return None
        if len(set(ranks.gather_objects(socket.gethostname()))) > 1:
            return None
        made, works = cls(ranks), 1
        try:
            for dtype in (torch.bfloat16, torch.float32):
                buffer, _ = _shared(ranks, made.most_bytes // dtype.itemsize, dtype)
                made._buffers[dtype] = buffer
        except (RuntimeError, ImportError, AttributeError) as error:
            logger.warning("All-reduce goes through NCCL, not symmetric memory: %s", error)
            works = 0
        if not ranks.minimum(works):
            return None
        result = made.all_reduce(torch.ones(64, device=ranks.device))
        return made if result.tolist() == [float(ranks.size)] * 64 else None

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
            shared, tensor, "sum", self._ranks.group.group_name
        )
        return total

    def all_gather(self, tensor: Tensor) -> Tensor | None:
        """[rows, n] of every rank -> [rows, ranks * n]; None if there are too many rows."""
        from megatron_hybrid.kernels.over_ranks import PIECE, gather_columns, num_pieces

        if num_pieces(tensor) > MOST_SHARED_ROWS:
            return None
        return gather_columns(tensor, self.shared_rows(PIECE, tensor.dtype))

    def shared_rows(self, width: int, dtype: torch.dtype) -> SharedRows:
        """Room for rows of this width. All ranks ask for the same, in the same order."""
        key = width, dtype
        if key not in self._rows:
            self._rows[key] = SharedRows.make(self._ranks, width, dtype)
        return self._rows[key]


def _shared(ranks: RankGroup, count: int, dtype: torch.dtype) -> tuple[Tensor, Any]:
    """[count] that the other ranks' GPUs can use, and torch's handle of all ranks' ones."""
    import torch.distributed._symmetric_memory as symmetric_memory

    memory: Tensor = symmetric_memory.empty(count, dtype=dtype, device=ranks.device)
    return memory, symmetric_memory.rendezvous(memory, ranks.group)
