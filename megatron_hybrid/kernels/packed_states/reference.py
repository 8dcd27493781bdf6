"""Packing states, and unpacking them, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import FP8, FP8_MAX, PackedStates

LARGEST = 127  # of an int8; -128 is not used, so that signs are alike


def pack(states: PackedStates, source: Tensor, destination: Tensor) -> None:
    """As in Packing."""
    full, rows = copy_windows_to_packed(states, source, destination)
    values = states.full_ssm.index_select(1, full)
    if states.scales is not None:
        values, scales = quantise(values, states.over)
        states.scales.index_copy_(1, rows, scales)
    states.values.index_copy_(1, rows, values.to(states.values.dtype))


def unpack(states: PackedStates, source: Tensor, destination: Tensor) -> None:
    """As in Packing."""
    rows, full = copy_windows_to_full(states, source, destination)
    values = states.values.index_select(1, rows)
    if states.scales is not None:
        values = values * states.scales.index_select(1, rows)
    states.full_ssm.index_copy_(1, full, values.to(states.full_ssm.dtype))


def quantise(
    values: Tensor, over: int | tuple[int, ...], dtype: torch.dtype = torch.int8
) -> tuple[Tensor, Tensor]:
    """In any float type -> int8 or FP8, and scales float32, 1 along `over`. What has a NaN or an
    infinity among the entries that share its scale comes back as NaN."""
    largest = FP8_MAX if dtype == FP8 else LARGEST
    values = values.float()
    # By a tensor: GPUs multiply by the inverse of a number on the host, which rounds twice.
    scales = values.abs().amax(over, keepdim=True) / values.new_full((), largest)
    steps = torch.where(scales > 0, values / scales, 0)  # half a step away at most
    if dtype != FP8:
        steps = steps.round()
    return steps.clamp(-largest, largest).to(dtype), scales


def copy_windows_to_packed(
    states: PackedStates, source: Tensor, destination: Tensor
) -> tuple[Tensor, Tensor]:
    """Copy the convolutions' windows, and return which full and packed rows it is about, int64."""
    full, rows = source.long(), destination.long() - states.full_conv.shape[1]
    states.conv.index_copy_(1, rows, states.full_conv.index_select(1, full))
    return full, rows


def copy_windows_to_full(
    states: PackedStates, source: Tensor, destination: Tensor
) -> tuple[Tensor, Tensor]:
    """The other way round: packed and full rows."""
    rows, full = source.long() - states.full_conv.shape[1], destination.long()
    states.full_conv.index_copy_(1, full, states.conv.index_select(1, rows))
    return rows, full
