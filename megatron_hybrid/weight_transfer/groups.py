"""Groups of a trainer's processes and an engine's ranks, apart from the engine's own groups: the
trainer is rank 0 and broadcasts."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from megatron_hybrid.errors import WeightsError

POLL_SECONDS = 100e-6
BACKENDS = ("nccl", "gloo")


class GroupAddress(NamedTuple):
    """Where the members of a group meet. rank: this process's, of `size`."""

    host: str
    port: int
    rank: int
    size: int


class TransferBroken(RuntimeError):
    """The trainer did not go on with a transfer."""


class TransferGroup(Protocol):
    """A group in which rank 0 broadcasts."""

    def broadcast(self, buffer: Tensor) -> None:
        """Fill it with rank 0's bytes, or send them on rank 0; they are there when this returns.
        Raises TransferBroken."""

    def close(self) -> None:
        """Leave it."""


def meet(address: GroupAddress, seconds: float, **options: Any) -> dist.TCPStore:
    """The store through which the members of a group find each other, once all are there. Raises
    WeightsError if they don't come. (Not by torch's rendezvous: under torchrun that would put a
    prefix before our keys alone.)"""
    try:
        return dist.TCPStore(
            address.host,
            address.port,
            address.size,
            is_master=address.rank == 0,
            timeout=timedelta(seconds=seconds),
            **options,
        )
    except (RuntimeError, ValueError) as error:  # dist.DistError is a RuntimeError
        raise WeightsError(
            f"The trainer at {address.host}:{address.port} and the {address.size} ranks of its "
            f"group did not meet within {seconds:g} seconds (--weight-transfer-timeout): {error}"
        ) from error


class TorchGroup:
    """A process group of torch.distributed that is made as SGLang's trainers make theirs: the same
    prefixes of the store's keys."""

    def __init__(
        self,
        address: GroupAddress,
        name: str,
        backend: str,
        seconds: float,
        store: dist.Store | None = None,
    ) -> None:
        """`seconds`: how long to wait, for the others and for what they send. `store`: in which
        they meet; None: the one at that address. Raises WeightsError if no group comes about."""
        self._seconds, self._backend = seconds, backend
        self._name = c10d.GroupName(name)
        # A rank 0's store has to live as long as the group.
        self._store = meet(address, seconds, multi_tenant=True) if store is None else store
        try:
            self._group, _ = c10d._new_process_group_helper(
                address.size,
                address.rank,
                [],
                c10d.Backend(backend),
                c10d.PrefixStore(name, self._store),
                group_name=self._name,
                # Past it a group's own watchdog ends the process: we look at the time ourselves.
                timeout=timedelta(seconds=4 * seconds),
            )
        except (RuntimeError, ValueError) as error:
            raise WeightsError(
                f"No {backend} group {name!r} came about with the trainer at "
                f"{address.host}:{address.port} (rank {address.rank} of {address.size}): {error}"
            ) from error

    def broadcast(self, buffer: Tensor) -> None:
        """As TransferGroup."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        try:
            work = self._group.broadcast([buffer], options)
            wait_until(work.is_completed, self._seconds)
            work.wait()
        except RuntimeError as error:
            raise TransferBroken(f"A broadcast failed: {error}") from error
        if buffer.is_cuda:
            torch.cuda.current_stream(buffer.device).synchronize()

    def close(self) -> None:
        """As TransferGroup."""
        if self._backend == "nccl":
            self._group.abort()  # `shutdown` waits for the others, who may be gone
        else:
            self._group.shutdown()
        c10d._world.pg_names.pop(self._group, None)
        c10d._world.pg_map.pop(self._group, None)
        c10d._unregister_process_group(self._name)  # which another group may have then


def wait_until(is_done: Callable[[], bool], seconds: float) -> None:
    """Raise TransferBroken if it isn't after that time."""
    end = time.monotonic() + seconds
    while not is_done():
        if time.monotonic() > end:
            raise TransferBroken(
                f"Nothing came for {seconds:g} seconds (--weight-transfer-timeout)."
            )
        time.sleep(POLL_SECONDS)
