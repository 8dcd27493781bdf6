"""Random numbers that depend on nothing but a request's seed and how far it has come.

So the same seed gives the same tokens whatever else is in the batch, and a request that is resumed
goes on with its own stream.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

Int64s = TypeVar("Int64s", npt.NDArray[np.int64], Tensor)
# as signed numbers
_GOLDEN, _FIRST, _SECOND = (
    value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def uniform(seed: npt.NDArray[np.uint64], index: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each (seed, index).

    The finaliser of SplitMix64 (Steele, Lea and Flood, 2014) applied to both in turn.
    """
    return _shifted(_mix(_mix(seed.view(np.int64)) + index), 11) / float(2**53)


def uniform_on_device(seed: Tensor, index: Tensor) -> Tensor:
    """The same numbers where the device alone knows how far a request has come: seed [n] int64, the
    bits of the unsigned one, and index [n] int64 -> [n] float64."""
    return _shifted(_mix(_mix(seed) + index), 11).double() / 2**53


def stream_seed(seed: int, stream: int) -> int:
    """The seed of one of many streams that come from one seed."""
    both = np.asarray([seed % 2**64, stream], dtype=np.uint64).view(np.int64)
    return int(_mix(_mix(both[:1]) + both[1:]).view(np.uint64)[0])


def _mix(value: Int64s) -> Int64s:
    """In int64, whose sums and products have the bits of the unsigned ones."""
    value = value + _GOLDEN
    value = (value ^ _shifted(value, 30)) * _FIRST
    value = (value ^ _shifted(value, 27)) * _SECOND
    return value ^ _shifted(value, 31)


def _shifted(value: Int64s, bits: int) -> Int64s:
    """To the right, with zeros from the left, which int64 does not do for negative numbers."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
