"""Random numbers that depend on nothing but a request's seed and how far it has come.

So the same seed gives the same tokens whatever else is in the batch, and a request that is resumed
goes on with its own stream.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def uniform(seed: npt.NDArray[np.uint64], index: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each (seed, index).

    The finaliser of SplitMix64 (Steele, Lea and Flood, 2014) applied to both in turn.
    """
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(seed) + index.astype(np.uint64))
    return (mixed >> np.uint64(11)) / float(2**53)


def uniform_on_device(seed: Tensor, index: Tensor) -> Tensor:
    """The same numbers where the device alone knows how far a request has come: seed [n] int64, the
    bits of the unsigned one, and index [n] int64 -> [n] float64."""
    mixed = _mix_on_device(_mix_on_device(seed) + index)
    return _shifted(mixed, 11).double() / 2**53


def stream_seed(seed: int, stream: int) -> int:
    """The seed of one of many streams that come from one seed."""
    both = np.asarray([seed % 2**64, stream], dtype=np.uint64)
    with np.errstate(over="ignore"):
        return int(_mix(_mix(both[:1]) + both[1:])[0])


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        value = value + np.uint64(_GOLDEN)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(_FIRST)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(_SECOND)
    return value ^ (value >> np.uint64(31))


def _mix_on_device(value: Tensor) -> Tensor:
    """`_mix` in int64, whose sums and products have the same bits."""
    value = value + _signed(_GOLDEN)
    value = (value ^ _shifted(value, 30)) * _signed(_FIRST)
    value = (value ^ _shifted(value, 27)) * _signed(_SECOND)
    return value ^ _shifted(value, 31)


def _shifted(value: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left, which int64 does not do for negative numbers."""
    return torch.bitwise_right_shift(value, bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
