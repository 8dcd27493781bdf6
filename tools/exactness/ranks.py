"""What the ranks of a model have to do alike, they decide together."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist


def agreed(value: Any) -> Any:
    """The first rank's value, on every rank; all ranks make this call."""
    box = [value]
    if _are_several():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def gathered(value: Any) -> list[Any]:
    """Every rank's value, in the order of the ranks."""
    if not _are_several():
        return [value]
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, value)
    return everybody


def goes_on(until: float) -> bool:
    """Whether it is before `until`, by time.monotonic, on the first rank."""
    return bool(agreed(time.monotonic() < until))


def _are_several() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1
