"""Runs a module or script as one of several ranks that share this machine's GPUs.

torchrun --nproc-per-node 4 -m tests.parallel.shared_gpus MODULE_OR_SCRIPT ARGUMENT...

NCCL wants a GPU of its own for each rank of a host. So here it takes every rank for a host of its
own, and they talk over sockets: it shows that they agree, not how fast they are.
"""

from __future__ import annotations

import os
import runpy
import sys

import torch


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    os.environ["LOCAL_RANK"] = str(rank % torch.cuda.device_count())
    os.environ["NCCL_HOSTID"] = f"rank{rank}"
    os.environ["NCCL_NET"] = "Socket"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    del sys.argv[0]
    if sys.argv[0].endswith(".py"):
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
