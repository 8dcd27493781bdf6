"""A rank that dies or hangs brings its lockstep group down, with a message that names it."""

from megatron_hybrid.watchdog.watchdog import Watchdog

__all__ = ["Watchdog"]
