"""How many of Triton's kernels this process has compiled, and how long that took."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Compiled:
    """Counts from `count` on; the seconds of kernels that are compiled side by side overlap."""

    compiled: int = 0
    read: int = 0  # from Triton's cache of compiled kernels
    seconds: float = 0.0  # of both
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count(self) -> None:
        """From now on; unless somebody else is told of it."""
        from triton import knobs  # of GPUs alone

        if knobs.compilation.listener is None:
            knobs.compilation.listener = self._note

    def _note(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        """Triton has one kernel more; `times` in microseconds."""
        with self._lock:
            self.compiled += not cache_hit
            self.read += cache_hit
            self.seconds += times.total / 1e6

    def describe(self) -> str:
        """For the log."""
        return (
            f"{self.compiled} kernels compiled and {self.read} read from the cache, "
            f"in {self.seconds:.1f} s"
        )


KERNELS = Compiled()  # of this process
