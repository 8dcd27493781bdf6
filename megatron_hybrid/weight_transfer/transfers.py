"""WeightTransfers: one rank's groups with trainers, and the weights that come through them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_hybrid.errors import WeightsError
from megatron_hybrid.models.checkpoints.sent_tensors import SentTensors
from megatron_hybrid.weight_transfer import broadcasts, handles
from megatron_hybrid.weight_transfer import requests as wire
from megatron_hybrid.weight_transfer.groups import GroupAddress, TorchGroup, TransferGroup
from megatron_hybrid.weight_transfer.packing import Infos, infos_of

DEFAULT_SECONDS = 300.0


@dataclass(slots=True)
class _Known:
    """A group; `infos`: of the last update through it."""

    group: TransferGroup
    chunk_bytes: int | None
    infos: Infos = field(default_factory=dict)


class WeightTransfers:
    """`rank`: this process's among all that have the weights, of every replica."""

    def __init__(
        self, device: torch.device, rank: int = 0, seconds: float = DEFAULT_SECONDS
    ) -> None:
        """`seconds`: how long a trainer may be silent (--weight-transfer-timeout)."""
        self._device, self._rank, self._seconds = device, rank, seconds
        self._groups: dict[str, _Known] = {}

    def open(self, wanted: wire.TransferGroup) -> None:
        """Make a group with a trainer, which does the same meanwhile. One of that name is left
        before. Raises WeightsError."""
        self.close(wanted.name)
        seconds = self._seconds if wanted.seconds is None else wanted.seconds
        rank = wanted.rank_offset + self._rank
        if not 0 < rank < wanted.size:
            raise WeightsError(
                f"Rank {rank} ({wanted.rank_offset} and this one's number, {self._rank}) does not "
                f"fit a group of {wanted.size} in which the trainer is rank 0."
            )
        group: TransferGroup
        address = GroupAddress(wanted.host, wanted.port, rank, wanted.size)
        if wanted.made_by == "torch":
            if wanted.backend == "nccl" and self._device.type != "cuda":
                raise WeightsError("There is no GPU here, which NCCL needs: use backend gloo.")
            group = TorchGroup(address, wanted.name, wanted.backend, seconds)
        else:
            # It looks for NCCL's library, which is not everywhere.
            from megatron_hybrid.weight_transfer.nccl import NcclGroup

            group = NcclGroup(address, self._device, seconds, wanted.nccl_id)
        self._groups[wanted.name] = _Known(group, wanted.chunk_bytes)

    def close(self, name: str) -> bool:
        """Leave a group; whether there was one."""
        known = self._groups.pop(name, None)
        if known is not None:
            known.group.close()
        return known is not None

    def sources(self, wanted: wire.Source) -> Iterator[str | SentTensors]:
        """Where the weights are, or what comes, in pieces of which each is known when the one
        before is in place. Raises WeightsError."""
        match wanted:
            case wire.FromFolder(path):
                yield path
            case wire.FromHandles():
                yield handles.opened(wanted, self._rank, self._device)
            case wire.FromGroup():
                yield self._sent(wanted)
            case wire.FromPrime(name, path, refused):
                if name in self._groups:
                    yield from broadcasts.as_prime_sends(self._groups[name].group, self._device)
                elif refused:
                    raise WeightsError(refused)
                else:
                    yield path

    def all_of(self, wanted: wire.Source) -> dict[str, Tensor]:
        """Copies of all tensors that come. Raises WeightsError."""
        found: dict[str, Tensor] = {}
        for sent in self.sources(wanted):
            if isinstance(sent, str):
                raise WeightsError(f"{sent} is a folder, of which nothing is sent.")
            for name in sent.arrivals():
                found[name] = sent.held[name].clone()
                sent.drop(name)
        return found

    def _sent(self, wanted: wire.FromGroup) -> SentTensors:
        known = self._groups.get(wanted.group)
        if known is None:
            names = ", ".join(sorted(self._groups)) or "none"
            raise WeightsError(f"There is no group {wanted.group!r} with a trainer, but {names}.")
        if wanted.tensors.names:
            known.infos = infos_of(wanted.tensors)
        if not known.infos:
            raise WeightsError("No tensors are described, nor were they in an update before.")
        chunk_bytes = wanted.chunk_bytes or known.chunk_bytes
        if wanted.in_one or chunk_bytes:
            return broadcasts.in_chunks(known.group, known.infos, self._device, chunk_bytes)
        return broadcasts.one_by_one(known.group, known.infos, self._device)
