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
    exponent = tl.maximum((values.to(tl.int32, bitcast=True) >> 23) & 255, 113)
    step = ((exponent - 10) << 23).to(tl.float32, bitcast=True)
    steps = tl.abs(values) * ((264 - exponent) << 23).to(tl.float32, bitcast=True)
    found = tl.floor(steps + (bits >> 19).to(tl.float32) * 0.0001220703125) * step
    found = tl.where(found > 65504.0, 65504.0, found)
    return tl.where(values < 0, -found, found)
