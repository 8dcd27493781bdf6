"""Put first on PYTHONPATH: measures coverage, or imports one module with a change made, in this
process and in all that it starts."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from types import CodeType


def import_mutant(mutant: str) -> None:
    """Whoever imports the file gets the mutant; `mutant` is the file, a colon and a number."""
    from mutation.mutants import mutated

    file, _, number = mutant.rpartition(":")
    original = importlib.machinery.SourceFileLoader.get_code

    def get_code(self: importlib.machinery.SourceFileLoader, fullname: str) -> CodeType | None:
        if self.path != file:
            return original(self, fullname)
        source = self.get_data(file).decode()
        return compile(mutated(source, int(number)), file, "exec")

    setattr(importlib.machinery.SourceFileLoader, "get_code", get_code)  # noqa: B010


if "MUTANT" in os.environ:
    import_mutant(os.environ["MUTANT"])
elif "COVERAGE_PROCESS_START" in os.environ and "coverage" not in sys.modules:
    import coverage

    coverage.process_startup()
    if (_current := coverage.Coverage.current()) is not None:
        # A process that a test starts: what it runs counts as run by that test.
        _case = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        _current.switch_context(f"process:{_case}" if _case else "")
