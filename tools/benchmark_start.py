#!/usr/bin/env python
"""CPU seconds of a start: importing the package and building an engine of the reference model for
one rank, each time in a fresh process; medians.

    python tools/benchmark_start.py [--runs 5] [--package DIR]

`--package` names the checkout whose package is started, to compare two. The seconds are user and
system time of all threads; `import torch` alone is shown beside them. A busy machine makes all of
them longer: compare runs that were made one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

START = """
import json, time
begin = time.process_time()
import torch
torch_alone = time.process_time()
from megatron_hybrid import EngineConfig
from megatron_hybrid.engine.build import build_engine
imported = time.process_time()
build_engine(EngineConfig(device="cpu"))
built = time.process_time()
print(json.dumps({
    "import torch": torch_alone - begin,
    "import the package": imported - torch_alone,
    "build": built - imported,
    "process": built,
}))
"""


def start(package: Path) -> dict[str, float]:
    """One start in a process of its own: CPU seconds by what they went to."""
    environment = os.environ | {"PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    environment.setdefault("TORCHDYNAMO_DISABLE", "1")  # as `megatron-hybrid serve` has it
    done = subprocess.run(
        [sys.executable, "-c", START],
        cwd=package,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Print the medians of some starts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5, help="fresh processes (default: 5)")
    parser.add_argument(
        "--package", type=Path, default=Path(__file__).parents[1], help="a checkout; ours"
    )
    args = parser.parse_args()
    runs = [start(args.package.resolve()) for _ in range(args.runs)]
    for name in runs[0]:
        print(f"{name:20} {statistics.median(run[name] for run in runs):6.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
