"""A group of ranks and the collectives that inference needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hybrid.parallel.symmetric_memory import (
    MOST_SHARED_ROWS,
    SharedRows,
    SymmetricMemory,
)

T = TypeVar("T")


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """Of tensors of one shape and type: in float32, one after the other, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


class RankGroup:
    """Some processes, of which this one is number `rank`.

    With one rank every collective returns at once. Collectives on a CUDA tensor run on NCCL,
    those on a CPU tensor on gloo.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self._symmetric: SymmetricMemory | None = None
        # Sums have one order, that of the ranks, whatever their sizes are, and are rounded once.
        self.sums_in_order = False

    @property
    def is_first(self) -> bool:
        """Whether this rank is number 0."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether nobody comes after this rank."""
        return self.rank == self.size - 1

    def use_symmetric_memory(self) -> None:
        """For all-reduces of small tensors, where the ranks' GPUs can. All ranks call it."""
        if self._symmetric is None:
            self._symmetric = SymmetricMemory.of(self)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, which may be in place."""
        if self.size == 1:
            return tensor
        if self.sums_in_order and tensor.numel():
            rows = tensor.reshape(-1, tensor.shape[-1])
            parts = self.all_gather(rows).view(len(rows), self.size, -1)
            return sum_in_order(parts.unbind(1)).view(tensor.shape)
        tensor = tensor.contiguous()
        if self._symmetric is not None and self._symmetric.takes(tensor):
            return self._symmetric.all_reduce(tensor)
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def shared_rows(self, rows: int, width: int, dtype: torch.dtype) -> SharedRows | None:
        """Memory through which kernels exchange the ranks' [rows, width]; None where there is none,
        or for too many rows."""
        if self._symmetric is None or rows > MOST_SHARED_ROWS or self.sums_in_order:
            return None
        return self._symmetric.shared_rows(width, dtype)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[rows, n] of every rank -> [rows, ranks * n], in the order of the ranks."""
        if self.size == 1:
            return tensor
        if self._symmetric is not None:
            gathered = self._symmetric.all_gather(tensor)
            if gathered is not None:
                return gathered
        gathered = self.all_gather_rows(tensor).view(self.size, *tensor.shape)
        return gathered.movedim(0, 1).flatten(1)

    def all_gather_rows(self, tensor: Tensor) -> Tensor:
        """[n, ...] of every rank -> [ranks * n, ...], in the order of the ranks."""
        if self.size == 1:
            return tensor
        tensor = tensor.contiguous()
        gathered = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        if tensor.numel():
            dist.all_gather_into_tensor(gathered, tensor, group=self.group)
        return gathered

    def reduce_scatter_rows(self, tensor: Tensor) -> Tensor:
        """[ranks * n, ...] -> [n, ...]: the sum over the ranks of the rows that are this one's."""
        if self.size == 1:
            return tensor
        share = tensor.shape[0] // self.size
        if self.sums_in_order:
            parts = self.exchange_rows(tensor, [share] * self.size, [share] * self.size)
            return sum_in_order(parts.view(self.size, share, *tensor.shape[1:]).unbind(0))
        part = tensor.new_empty((share, *tensor.shape[1:]))
        dist.reduce_scatter_tensor(part, tensor.contiguous(), group=self.group)
        return part

    def exchange_rows(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """`sent[i]` rows go to rank i, `received[i]` come from it -> [sum of received, ...]."""
        result = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(
            result, rows.contiguous(), list(received), list(sent), group=self.group
        )
        return result

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """[ranks] for each rank -> [ranks] from each rank."""
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        return received

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """The values of rank `source`, written into `tensor` on every rank."""
        if self.size > 1:
            dist.broadcast(tensor, src=self._global(source), group=self.group)
        return tensor

    def broadcast_object(self, value: T | None, source: int = 0) -> T:
        """The object of rank `source` on every rank; the others' arguments are ignored."""
        box: list[Any] = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=self._global(source), group=self.group)
        return box[0]

    def gather_objects(self, value: T) -> list[T]:
        """Every rank's object, in the order of the ranks."""
        if self.size == 1:
            return [value]
        everybody: list[Any] = [None] * self.size
        dist.all_gather_object(everybody, value, group=self.group)
        return everybody

    def send(self, tensor: Tensor, destination: int) -> None:
        """To rank `destination`, which receives one of the same shape and dtype."""
        dist.send(tensor.contiguous(), self._global(destination), group=self.group)

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        """Into `tensor`, which must be contiguous."""
        dist.recv(tensor, self._global(source), group=self.group)
        return tensor

    def minimum(self, value: int) -> int:
        """The smallest of the ranks' values, on every rank."""
        return -self.maxima([-value])[0]

    def maxima(self, values: Sequence[int]) -> list[int]:
        """The largest of the ranks' first values, of their second ones, and so on. On the host:
        nothing waits for a device."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        found: list[int] = tensor.tolist()
        return found

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.maxima([0])

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)
