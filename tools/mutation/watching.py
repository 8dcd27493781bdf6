"""Pytest plugins: what each case costs and runs, and the cases that a mutant is shown to."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest


class Costs:
    """Writes each case's CPU seconds, its processes' included, and tells coverage whose turn it is.

    folder: gets a file of JSON lines for each process of pytest's.
    """

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"costs-{os.getpid()}.jsonl").open("a")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        import coverage

        if (current := coverage.Coverage.current()) is not None:
            current.switch_context(item.nodeid)
        begun = _cpu_seconds(), time.monotonic()
        yield
        costs = (_cpu_seconds() - begun[0], time.monotonic() - begun[1])
        self._file.write(json.dumps([item.nodeid, *(round(cost, 3) for cost in costs)]) + "\n")
        self._file.flush()


class Chosen:
    """Runs only these cases, in this order, each for at most so many seconds.

    `killer`: the first that failed, afterwards.
    """

    def __init__(self, cases: dict[str, float]) -> None:
        self.killer: str | None = None
        self._seconds = cases

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        place = {case: number for number, case in enumerate(self._seconds)}
        items[:] = sorted(
            (item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid]
        )

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        def give_up(number: int, frame: FrameType | None) -> None:
            raise TimeoutError("the mutant takes too long")

        signal.signal(signal.SIGALRM, give_up)
        signal.setitimer(signal.ITIMER_REAL, self._seconds[item.nodeid])
        yield
        signal.setitimer(signal.ITIMER_REAL, 0)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and self.killer is None:
            self.killer = report.nodeid


class OnlyCI:
    """Leaves out what CI skips."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [
            item
            for item in items
            if not any(mark.args and mark.args[0] for mark in item.iter_markers("skipif"))
        ]


def pytest_configure(config: pytest.Config) -> None:
    """As a plugin by name (`-p mutation.watching`), in every process of pytest's: measures."""
    if folder := os.environ.get("MUTATION_COSTS"):
        config.pluginmanager.register(Costs(Path(folder)))
    if "MUTATION_LIST_CI" in os.environ:
        config.pluginmanager.register(OnlyCI())


def _cpu_seconds() -> float:
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)
