"""What the seconds of a start go to."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


class StartTimes:
    """Seconds of a start by its parts, which follow one another and so add up to all of it."""

    def __init__(
        self, begun: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """begun: when it was, by the clock; None: now."""
        self.parts: dict[str, float] = {}
        self._clock = clock
        self._begun = self._last = clock() if begun is None else begun

    @classmethod
    def of_process(cls) -> StartTimes:
        """Of a process that is there for the engine alone: begun when that was launched."""
        return cls(time.monotonic() - process_age())

    def end_part(self, name: str) -> None:
        """What has passed since the last part's end is this one's, or is added to it."""
        now = self._clock()
        self.parts[name] = self.parts.get(name, 0.0) + now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """Seconds from the beginning to the end of the last part."""
        return self._last - self._begun

    def describe(self) -> str:
        """For the log, and without parts that took no time."""
        shown = [f"{name} {took:.1f}" for name, took in self.parts.items() if took >= 0.05]
        return f"started in {self.total:.1f} s" + (f": {', '.join(shown)}" if shown else "")


def process_age() -> float:
    """Seconds since this process was launched; where the system does not say, its CPU time."""
    try:
        # behind the name, which may hold anything: field 22 of the line
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        launched = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - launched)
    except (OSError, AttributeError, ValueError, IndexError):
        return time.process_time()
