"""Processes and their parents: how one is started, and that it ends when its parent is gone."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any


def start_process(
    arguments: tuple[str, ...], settings: bytes, **options: Any
) -> subprocess.Popen[bytes]:
    """A Python process with these arguments for the interpreter, and `settings` on its standard
    input; `options`: of Popen. Whether it lives is for the caller to see."""
    process = subprocess.Popen([sys.executable, *arguments], stdin=subprocess.PIPE, **options)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(settings)
        process.stdin.close()
    return process


def end_with_parent(parent: int | None = None, clean_up: Callable[[], None] = lambda: None) -> None:
    """End this rank when torchrun is gone: killed, it can't tell the ranks, which would wait for
    one another for ever. `parent`: its process, where it may be gone already. `clean_up`: called
    before."""
    if parent is None:
        parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        clean_up()
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
