"""Tensors that rank 0 of a group broadcasts, in the layouts that trainers use."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_hybrid.errors import WeightsError
from megatron_hybrid.models.checkpoints.sent_tensors import SentTensors, TensorInfo
from megatron_hybrid.weight_transfer.groups import TransferGroup
from megatron_hybrid.weight_transfer.packing import Infos, chunks, total_bytes, unpack, view
from megatron_hybrid.weight_transfer.pickles import read_prime_infos

MOST_BYTES = 2**34  # of prime-rl's description of one layer's tensors: it is a few thousand


def one_by_one(group: TransferGroup, infos: Infos, device: torch.device) -> SentTensors:
    """Each tensor by a broadcast of its own, in its own type."""
    return _received(group, [{name: info} for name, info in infos.items()], device)


def in_chunks(
    group: TransferGroup, infos: Infos, device: torch.device, limit: int | None
) -> SentTensors:
    """Packed tensors, in buffers as `chunks` cuts them; None: in one."""
    return _received(group, [dict(infos)] if limit is None else list(chunks(infos, limit)), device)


def _received(
    group: TransferGroup, cut: list[dict[str, TensorInfo]], device: torch.device
) -> SentTensors:
    size = max(map(total_bytes, cut), default=0)
    buffer = _empty(size, device)  # before anything is overwritten

    def receive() -> Iterator[tuple[str, Tensor]]:
        for part in cut:
            used = buffer[: total_bytes(part)]
            group.broadcast(used)
            yield from unpack(used, part)

    return SentTensors({name: info for part in cut for name, info in part.items()}, receive)


def _empty(size: int, device: torch.device) -> Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise WeightsError(
            f"There is no room on {device} for the {size / 2**20:.0f} MiB that are sent at once: "
            "send less, or start with a lower --gpu-memory-utilization."
        ) from error


def as_prime_sends(group: TransferGroup, device: torch.device) -> Iterator[SentTensors]:
    """What prime-rl's trainer broadcasts: the number of state dicts; then of each its tensors'
    description, and for each of their types one flat tensor of all of them."""
    for _ in range(_number(group, device)):
        length = _number(group, device)
        if not 0 <= length <= MOST_BYTES:
            raise WeightsError(f"A description of {length} bytes was announced.")
        described = _empty(length, device)
        group.broadcast(described)
        infos = read_prime_infos(bytes(described.cpu().numpy()))
        cut: dict[torch.dtype, dict[str, TensorInfo]] = {}
        for name, info in infos.items():
            cut.setdefault(info.dtype, {})[name] = info
        yield _received(group, list(cut.values()), device)


def _number(group: TransferGroup, device: torch.device) -> int:
    number = torch.zeros(8, dtype=torch.uint8, device=device)
    group.broadcast(number)
    return int(view(number, TensorInfo(torch.int64, (1,))))
