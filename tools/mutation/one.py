"""Shows one mutant to its cases; prints the first that fails and exits with 1 then."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

import pytest

from mutation.watching import Chosen


def main() -> int:
    task = json.loads(Path(sys.argv[1]).read_text())
    chosen = Chosen(task["seconds"])
    flags = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist"]
    with contextlib.redirect_stdout(io.StringIO()):
        status = pytest.main([*flags, *task["files"]], plugins=[chosen])
    if status != 0:
        print(chosen.killer or "(no case: it cannot be imported)")
    return int(status != 0)


if __name__ == "__main__":
    sys.exit(main())
