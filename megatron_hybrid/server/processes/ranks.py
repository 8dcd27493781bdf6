"""The ranks of one machine, started here where torchrun has not: by its own library, so that they
are what they are under it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING

import psutil

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.server.processes.launch import python_path

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

logger = logging.getLogger(__name__)

SAID_WHY = 2  # exit code of a rank that has ended with a sentence


def check_devices(ranks: int, device: str) -> None:
    """ConfigurationError if they are to have GPUs, and there are fewer of them. device: as
    --device says."""
    count = _gpus(device)
    if 0 < count < ranks:
        raise ConfigurationError(
            f"The model is to be split over {ranks} ranks (--tensor-model-parallel-size and the "
            f"like, times --data-parallel-size), each with a GPU of its own, and torch finds "
            f"{count} on this machine (see CUDA_VISIBLE_DEVICES, too). Over several machines "
            "torchrun starts them, as examples/launch/two_nodes.sh does."
        )


def run_ranks(ranks: int, device: str, arguments: Sequence[str]) -> int:
    """Run so many processes, with these arguments for the Python interpreter, until all have
    ended; the exit code. When one fails, the others are ended, too. SIGINT and SIGTERM are passed
    on to each."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    threads = 1 if _gpus(device) else max(1, (os.cpu_count() or 1) // ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ["PYTHONPATH"] = python_path()
    came: list[int] = []

    def pass_on(signum: int, frame: FrameType | None) -> None:
        came.append(signum)
        started = psutil.Process().children()
        if not started:
            sys.exit(128 + signum)
        for rank in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, pass_on)
    logger.info("%d ranks are started on this machine, each in a process of its own", ranks)
    logging.disable(logging.ERROR)  # the library's lines; ranks speak for themselves
    with tempfile.TemporaryDirectory() as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=str(os.getpid()),
            rdzv_backend="c10d",  # this and the next as torchrun --standalone has them
            rdzv_endpoint="localhost:0",
            local_addr="127.0.0.1",  # also where this machine does not know its own name
            max_restarts=0,
            signals_to_handle="SIGHUP,SIGQUIT",  # the others are ours
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, sys.executable)("-u", *arguments)
        except SignalException as error:
            return 128 + error.sigval
        except ChildFailedError as error:
            _, first = error.get_first_failure()
            if not came and first.exitcode != SAID_WHY:
                logging.disable(logging.NOTSET)
                logger.error("%s", _described(error.failures))
            return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    return 0


def _described(failures: Mapping[int, ProcessFailure]) -> str:
    """Which ranks have failed, and how; not those that were only ended."""
    said: list[str] = []
    for rank, failure in failures.items():
        how = f"exit code {failure.exitcode}"
        if failure.exitcode < 0:
            how = signal.Signals(-failure.exitcode).name
        if not said or failure.exitcode != -signal.SIGTERM:
            said.append(f"rank {rank} (process {failure.pid}) ended with {how}")
    return f"{', '.join(said)}; so all ranks were ended"


def _gpus(device: str) -> int:
    """That ranks would have, each one; 0: they are on the CPU."""
    import torch

    return torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
