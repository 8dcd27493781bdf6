"""What becomes of requests while an engine is paused."""

from __future__ import annotations

import enum


class PauseMode(enum.StrEnum):
    """What becomes of requests that have begun when the engine is paused.

    FINISH: they go on to their end. ABORT: they end at once. KEEP: they stop where they stand, and
    go on when the engine does. Those that have not begun wait, in their order.
    """

    FINISH = "finish"
    ABORT = "abort"
    KEEP = "keep"


PAUSE_MODES = tuple(mode.value for mode in PauseMode)
