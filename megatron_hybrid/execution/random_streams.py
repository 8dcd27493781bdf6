"""Random numbers that depend on nothing but a request's seed and how far it has come.

So the same seed gives the same tokens whatever else is in the batch, and a request that is resumed
goes on with its own stream.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def uniform(seed: npt.NDArray[np.uint64], index: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each (seed, index).

    The finaliser of SplitMix64 (Steele, Lea and Flood, 2014) applied to both in turn.
    """
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(seed) + index.astype(np.uint64))
    return (mixed >> np.uint64(11)) / float(2**53)


def stream_seed(seed: int, stream: int) -> int:
    """The seed of one of many streams that come from one seed."""
    both = np.asarray([seed % 2**64, stream], dtype=np.uint64)
    with np.errstate(over="ignore"):
        return int(_mix(_mix(both[:1]) + both[1:])[0])


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        value = value + np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
