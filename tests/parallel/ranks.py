"""Runs a worker module under torchrun and hands back what its ranks found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 500


def run_on_two_ranks(module: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """`run_on_ranks` with two."""
    return run_on_ranks(2, module, folder, *arguments)


def run_on_ranks(count: int, module: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """What each of so many ranks wrote to `folder/rank<number>.json`; they must agree.

    The module gets `folder` and the arguments.
    """
    torchrun(count, module, folder, *arguments)
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(count)]
    assert all(found == ranks[0] for found in ranks)
    return dict(ranks[0])


def python_path() -> str:
    """PYTHONPATH for processes that import this checkout, and what this one can import."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def torchrun(count: int, module: str, folder: Path, *arguments: str) -> None:
    """Run the module on so many ranks; it gets `folder` and the arguments."""
    share = ["tests.parallel.shared_gpus"] if 0 < torch.cuda.device_count() < count else []
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(count), "-m", *share, module, str(folder), *arguments,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    assert done.returncode == 0, done.stderr[-3000:]
