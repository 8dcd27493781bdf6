"""Lets a test hang a rank inside its next step: SIGUSR1 to it. On PYTHONPATH, Python imports this
at its start."""

import os
import signal
import sys
import time
from types import FrameType

HANGS = "MEGATRON_HYBRID_TEST_HANGS"


def _hang_in_next_step(signum: int, frame: FrameType | None) -> None:
    def schedule(self: object) -> None:
        while True:
            time.sleep(0.01)

    sys.modules["megatron_hybrid.engine.scheduler"].Scheduler.schedule = schedule  # type: ignore[attr-defined]


if HANGS in os.environ:
    signal.signal(signal.SIGUSR1, _hang_in_next_step)
