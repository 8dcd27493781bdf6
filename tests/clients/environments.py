"""Environments for other people's programs, one for each requirements-NAME.txt."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import subprocess
from pathlib import Path

from tests.server.running import ROOT

INSTALL_SECONDS = 1800


@functools.cache
def environment(name: str) -> Path:
    """The programs of an environment for clients, made if it is not there."""
    # pytest takes a test of five minutes for one that hangs; a slow network needs more.
    faulthandler.cancel_dump_traceback_later()
    made = run(
        ["bash", "-c", f". tools/environment.sh && ensure_client_environment {name}"],
        dict(os.environ),
        ROOT,
        INSTALL_SECONDS,
    )
    print(made)
    return ROOT / ".venv-clients" / name / "bin"


def run(command: list[str], variables: dict[str, str], folder: Path, seconds: int) -> str:
    """What a command says; nothing that it started is left when it is through."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"not through after {seconds} s: {process.communicate()[0]}") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    return output
