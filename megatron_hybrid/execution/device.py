"""The way between host and device, without waiting for the device; and what says that it failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_hybrid.errors import DeviceLostError


def upload(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """A copy on the device."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cuda":  # from pageable memory the copy would wait for the device
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def download(values: Tensor) -> Tensor:
    """On the host once the step is done."""
    if values.device.type == "cpu":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


@contextmanager
def device_errors() -> Iterator[None]:
    """Around, or decorating, what may find that the device failed: raises DeviceLostError."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise DeviceLostError(f"The device failed: {error}") from error
