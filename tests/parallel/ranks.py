"""Runs a worker module on several ranks, as torchrun would, and hands back what they found.

Without a GPU the ranks are forked from a process that has imported torch and the package already:
importing them takes longer than most of what is tested. CUDA can't be used in a process that was
forked after anything asked for it, even only whether it is there, as imports do: with a GPU each
rank imports them itself. What concerns torchrun itself is in test_launch_files.py.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import sys
import traceback
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from bench.ports import free_port

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 500

_processes = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
_processes.set_forkserver_preload(["tests.parallel.imported"])


def run_on_two_ranks(module: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """`run_on_ranks` with two."""
    return run_on_ranks(2, module, folder, *arguments)


def run_on_ranks(count: int, module: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """What each of so many ranks wrote to `folder/rank<number>.json`; they must agree.

    The module gets `folder` and the arguments.
    """
    start_ranks(count, module, folder, *arguments)
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(count)]
    assert all(found == ranks[0] for found in ranks)
    return dict(ranks[0])


def start_ranks(count: int, module: str, folder: Path, *arguments: str) -> None:
    """Run the module on so many ranks; it gets `folder` and the arguments. Each rank's output is in
    `folder/rank<number>.log`. A rank that fails ends the others."""
    places = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": free_port()}
    share = ["tests.parallel.shared_gpus"] if 0 < torch.cuda.device_count() < count else []
    processes = []
    logs = [folder / f"rank{rank}.log" for rank in range(count)]
    for rank, log in enumerate(logs):
        environment = {name: str(value) for name, value in places.items()} | {
            "MASTER_ADDR": "127.0.0.1",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "OMP_NUM_THREADS": "1",
            **{name: os.environ[name] for name in ("TESTS",) if name in os.environ},
        }
        argv = [*share, module, str(folder), *arguments]
        process = _processes.Process(target=_be_rank, args=(argv, environment, log))
        process.start()
        processes.append(process)
    try:
        _join(processes)
    finally:
        for process in processes:
            process.kill()
    failed = [rank for rank, process in enumerate(processes) if process.exitcode != 0]
    assert not failed, "\n".join(
        f"rank {rank}: {logs[rank].read_text()[-3000:]}" for rank in failed
    )


def _join(processes: list[Any]) -> None:
    """Until all have ended, or one has failed."""
    left = {process.sentinel: process for process in processes}
    while left:
        ended = wait(list(left), TIMEOUT_SECONDS)
        assert ended, f"the ranks have not ended after {TIMEOUT_SECONDS} s"
        for process in (left.pop(sentinel) for sentinel in ended):
            process.join()
            if process.exitcode != 0:
                for other in left.values():
                    other.join(5.0)  # it may say why, too
                return


def _be_rank(argv: list[str], environment: dict[str, str], log: Path) -> None:
    """Run argv[0] as `python -m` would."""
    os.environ.update(environment)
    with log.open("w") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    sys.argv = list(argv)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    try:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
