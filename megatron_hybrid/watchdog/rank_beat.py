"""What each rank tells the others once a second: that it lives, how far it is, and where."""

from __future__ import annotations

import os
import socket
from enum import StrEnum
from pathlib import Path
from types import FrameType

import msgspec

import megatron_hybrid
from megatron_hybrid.rank_layout import RankLayout

PACKAGE = str(Path(megatron_hybrid.__file__).parent) + os.sep
COLLECTIVES = PACKAGE + os.path.join("parallel", "ranks.py")
TORCH_DISTRIBUTED = os.path.join("torch", "distributed") + os.sep
# Functions of ours, by file, that say more than their own names. The innermost one counts.
WORDS = {
    ("engine/scheduler.py", "schedule"): "planning a step",
    ("engine/engine.py", "_receive"): "waiting for the device",
    ("execution/sampler.py", "result"): "waiting for the device",
    ("execution/runner.py", "launch"): "launching a step",
    ("execution/runner.py", "dummy_forward"): "launching an idle step",
    ("execution/cuda_graphs.py", "capture"): "capturing a CUDA graph",
    ("engine/engine.py", "update_weights"): "loading new weights",
    ("engine/weights.py", "put"): "loading new weights",
    ("weight_transfer/transfers.py", "open"): "loading: waiting for a trainer",
    ("engine/build.py", "build_engine"): "loading the model",
    ("server/loop/engine_loop.py", "_receive"): "waiting for requests",
}
DEVICE = "waiting for the device"


class Stage(StrEnum):
    """What the others may expect of a rank."""

    LOADING = "loading"  # the model, or new weights: no turns, and long calls
    SERVING = "serving"  # a turn of the loop now and then
    LEFT = "left"  # it ends in order, or has said itself why it ends


class RankBeat(msgspec.Struct):
    """One rank as it describes itself."""

    rank: int  # of the lockstep group
    global_rank: int  # torchrun's
    pid: int
    name: str  # for a log line
    place: str  # processes with the same one can signal each other
    stage: Stage = Stage.LOADING
    count: int = 0  # of beats
    turn: int = 0  # of the engine's loop
    doing: str = "starting"
    waits: bool = False  # for other ranks or for the device


def own_beat(layout: RankLayout, device: str = "CPU") -> RankBeat:
    """This process's first one."""
    pid = os.getpid()
    name = (
        f"rank {layout.rank} (host {socket.gethostname()}, process {pid}, {device}, "
        f"replica {layout.replica}, pipeline stage {layout.pipeline_rank})"
    )
    return RankBeat(layout.lockstep_rank, layout.rank, pid, name, _place())


def describe(frame: FrameType | None) -> tuple[str, bool, bool]:
    """A thread's stack in words: what it does, whether it waits for other ranks or for the device,
    and whether it loads weights. Costs its own loop nothing: nobody there has to say it."""
    doing, waits, loads, where = "", False, False, ""
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if not doing and (file == COLLECTIVES or TORCH_DISTRIBUTED in file):
            doing, waits = f"waiting for other ranks in {code.co_name}", True
        if file.startswith(PACKAGE):
            file = file.removeprefix(PACKAGE)
            where = where or f"{file}:{frame.f_lineno}, {code.co_name}"
            words = WORDS.get((file, code.co_name), "")
            doing = doing or words
            loads = loads or words.startswith("loading")
        frame = frame.f_back
    waits = waits or doing == DEVICE
    return f"{doing or 'running'} ({where or 'outside of the package'})", waits, loads


def _place() -> str:
    """Which processes' numbers mean the same as ours: those of our machine, our container and our
    agent of torchrun."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"  # nobody else's
    return f"{machine} {namespace} {os.environ.get('GROUP_RANK', '')}"
