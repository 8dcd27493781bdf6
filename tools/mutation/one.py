"""Shows one mutant to its cases."""

from __future__ import annotations

import os
import traceback
from multiprocessing.connection import Connection

import pytest

from mutation.sitecustomize import import_mutant
from mutation.watching import Chosen

FLAGS = ("-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist")


def show(mutant: str, cases: dict[str, float], tests: str, answer: Connection) -> None:
    """In a process of its own: sends the first case that fails with TESTS=`tests`, or None.

    mutant: its file, a colon and its number. cases: what each may take, in seconds, in order.
    """
    with open(os.devnull, "w") as nothing:
        for stream in (1, 2):
            os.dup2(nothing.fileno(), stream)
    os.environ.update(MUTANT=mutant, TESTS=tests)  # for the processes that tests start
    import_mutant(mutant)
    chosen = Chosen(cases)
    try:
        files = dict.fromkeys(name.partition("::")[0] for name in cases)
        status = pytest.main([*FLAGS, *files], plugins=[chosen])
    except BaseException:
        status = 1
        traceback.print_exc()
    answer.send(None if status == 0 else chosen.killer or "(no case: it cannot be imported)")
    os._exit(0)
