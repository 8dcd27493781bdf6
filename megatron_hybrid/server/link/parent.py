"""A process whose parent is gone ends, too."""

from __future__ import annotations

import os
import threading
import time


def end_with_parent(parent: int | None = None) -> None:
    """End this rank when torchrun is gone: killed, it can't tell the ranks, which would wait for
    one another for ever. `parent`: its process, where it may be gone already."""
    if parent is None:
        parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
