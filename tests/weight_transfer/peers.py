"""Processes of a trainer that hold the same weights, each beside a rank of the server's model."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file

from megatron_hybrid.training.weight_sender import SendError, WeightSender


def send_from_two(url: str, weights: Path, folder: Path) -> list[list[str]]:
    """All weights, as version "peers", and then one that fits nowhere: what each process of two was
    told."""
    mp.spawn(_send, (url, str(weights), str(folder)), nprocs=2)
    return [(folder / f"told-{rank}").read_text().splitlines() for rank in range(2)]


def _send(rank: int, url: str, weights: str, folder: str) -> None:
    meet, wait = f"file://{folder}/meet", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2, timeout=wait)
    told = []
    sender = WeightSender([url], seconds=30, peers=dist.group.WORLD)
    drawn = []

    def all_weights():  # type: ignore[no-untyped-def]
        for name, weight in load_file(weights).items():
            drawn.append(name)
            yield name, weight

    sender.send(all_weights(), "peers")
    told.append(f"sent {len(drawn)}")
    try:
        sender.send([("no.such.weight", torch.ones(2))])
    except SendError as error:
        told.append(str(error))
    sender._ask("/finish_weight_update", {"weight_version": "after"})
    sender.close()
    Path(folder, f"told-{rank}").write_text("\n".join(told))
    dist.destroy_process_group()
