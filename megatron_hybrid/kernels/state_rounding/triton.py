"""Stochastic rounding in Triton kernels that store states: see reference.py for what it means."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def as_stored(values, kind: tl.constexpr, seed, position, place):
    """A state's numbers, float32, in the type `kind`: to the nearest where `seed` is None. place:
    theirs in the state, of the same shape; position: how many tokens are in the state."""
    if seed is None:
        return values.to(kind)
    else:
        return _rounded(values, seed, position, place).to(kind)


@triton.jit
def _rounded(values, seed, position, place):
    key = tl.cast(position, tl.uint32) * 0x85EBCA6B + tl.cast(seed, tl.uint32)
    key = (key ^ (key >> 16)) * 0x7FEB352D
    key = (key ^ (key >> 15)) * 0x846CA68B
    key ^= key >> 16
    bits = place.to(tl.uint32) * 0x9E3779B9 + key
    bits = (bits ^ (bits >> 15)) * 0x2C1B3C6D
    # from 1 to 2, the random bits its fraction
    part = ((bits & 0x007FFC00) | 0x3F800000).to(tl.float32, bitcast=True)
    x = tl.maximum(values, -65504.0, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    as_bits = x.to(tl.uint32, bitcast=True)
    sign = as_bits & 0x80000000
    small = tl.abs(x) < 0.00006103515625  # SMALLEST, and its bits:
    power = tl.where(small, sign | 0x38800000, as_bits & 0xFF800000)
    power = power.to(tl.float32, bitcast=True)
    moved = tl.where(small, power, 0.0)
    found = (x + moved) + (part - 1.0) * (power * 0.0009765625)
    found = (found.to(tl.uint32, bitcast=True) & 0xFFFFE000).to(tl.float32, bitcast=True)
    return found - moved
