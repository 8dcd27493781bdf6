"""Stochastic rounding in plain torch: a number between two of float16 becomes the upper one the
more often, the nearer it is, so that what a state takes in is right on average, however little.

The chance comes from the seed of a layer, the position (how many tokens are in the state) and the
place in the state: the same prefix gives the same state, whoever computes it beside whom.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 65504.0  # of float16, where larger numbers end
_BITS = 13  # of a fraction, that float32 has and float16 has not
_MASK = 0xFFFFFFFF


def rounded(values: Tensor, seed: int, positions: Tensor) -> Tensor:
    """values [N, ...] float32, positions [N] -> float16 of the same shape."""
    flat = values.flatten(1)
    place = torch.arange(flat.shape[1], device=flat.device)
    bits = random_bits(seed, positions.to(flat.device)[:, None], place)
    exponent = ((flat.view(torch.int32) >> 23) & 255).clamp(min=113)  # below: as far apart
    step = ((exponent - 10) << 23).view(torch.float32)  # between neighbours of float16
    steps = flat.abs() * ((264 - exponent) << 23).view(torch.float32)
    found = (steps + bits * 2.0**-_BITS).floor() * step
    found = torch.where(found > LARGEST, LARGEST, found)
    return torch.where(flat < 0, -found, found).half().view(values.shape)


def layer_seed(seed: int, layer: int, rank: int) -> int:
    """Of one layer's states on one rank: an odd number."""
    mixed = seed * 0x9E3779B1 + layer * 0x85EBCA77 + rank * 0xC2B2AE3D
    return mixed & 0x7FFFFFFF | 1


def random_bits(seed: int, position: Tensor, place: Tensor) -> Tensor:
    """13 of them, as float32; of tensors that can be broadcast."""
    key = (position.long() * 0x85EBCA6B + seed) & _MASK
    key = ((key ^ (key >> 16)) * 0x7FEB352D) & _MASK
    key = ((key ^ (key >> 15)) * 0x846CA68B) & _MASK
    key ^= key >> 16
    bits = (place * 0x9E3779B9 + key) & _MASK
    bits = ((bits ^ (bits >> 15)) * 0x2C1B3C6D) & _MASK
    return (bits >> (32 - _BITS)).float()
