"""What becomes of requests that have begun when the engine is paused."""

from __future__ import annotations

from enum import StrEnum


class PauseMode(StrEnum):
    """FINISH: they go on to their end. ABORT: they end at once. KEEP: they stop where they stand,
    and go on when the engine does. Those that have not begun wait, in their order."""

    FINISH = "finish"
    ABORT = "abort"
    KEEP = "keep"


PAUSE_MODES = tuple(mode.value for mode in PauseMode)
