"""Without a GPU Triton's kernels run in its interpreter, which is chosen when triton is imported:
before any test module does that."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest.register_assert_rewrite("tests.engine.oracle_tests", "tests.kernels.recurrence_contract")

# Their files take longest. They begin first and by turns: so that at the end no process is left
# with one of them, and tests that compute run beside tests that wait for other processes.
LONG = ("engine", "parallel", "server", "tools")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    turns: dict[str, dict[Path, int]] = {folder: {} for folder in LONG}

    def order(item: pytest.Item) -> tuple[bool, int]:
        files = turns.get(item.path.parent.name)
        if files is None:
            return True, 0
        return False, files.setdefault(item.path, len(files))

    items.sort(key=order)
