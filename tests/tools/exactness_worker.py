"""One rank of tools/check_exactness.py: saves its exit code and what it counted.

python -m tests.tools.exactness_worker FOLDER FLAG...
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "check_exactness.py"


def main() -> None:
    folder, *flags = sys.argv[1:]
    sys.path.insert(0, str(TOOL.parent))
    report = Path(folder, "report.json")
    sys.argv = [str(TOOL), *flags, "--json", str(report)]
    try:
        runpy.run_path(str(TOOL), run_name="__main__")
    except SystemExit as ended:
        found = {"exit code": ended.code}
        Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
