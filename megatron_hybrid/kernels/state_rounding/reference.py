"""Stochastic rounding in plain torch: a number between two of float16 becomes the upper one the
more often, the nearer it is, so that what a state takes in is right on average, however little.

The chance comes from the seed of a layer, the position (how many tokens are in the state) and the
place in the state: the same prefix gives the same state, whoever computes it beside whom.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 65504.0  # of float16, where larger numbers end
SMALLEST = 2.0**-14  # of float16's numbers whose steps grow with them
_BITS = 13  # of a fraction, that float32 has and float16 has not
_MASK = 0xFFFFFFFF


def rounded(values: Tensor, seed: int, positions: Tensor) -> Tensor:
    """values [N, ...] float32, positions [N] -> float16 of the same shape.

    A random part of a step of float16 is added, and the bits that float16 has not are cut off.
    Below SMALLEST, where its steps are equal, SMALLEST is added first and subtracted in the end.
    """
    flat = values.flatten(1).clamp(-LARGEST, LARGEST)
    place = torch.arange(flat.shape[1], device=flat.device)
    bits = random_bits(seed, positions.to(flat.device)[:, None], place)
    power = (flat.view(torch.int32) >> 23 << 23).view(torch.float32)  # of two, signed
    small = flat.abs() < SMALLEST
    power = torch.where(small, torch.full_like(flat, SMALLEST).copysign(flat), power)
    moved = torch.where(small, power, 0)
    found = (flat + moved) + bits * 2.0**-_BITS * (power * 2.0**-10)
    found = (found.view(torch.int32) >> _BITS << _BITS).view(torch.float32) - moved
    return found.half().view(values.shape)


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
    return (bits >> 10 & 0x1FFF).float()
