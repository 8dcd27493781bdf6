"""A trainer's process beside a test: it holds tensors on a GPU, and sends them as it is told.

python -m tests.gpu.trainer_process handles FILE     pickles, until a line comes
python -m tests.gpu.trainer_process nccl PORT        as rank 0 of vLLM's group, from GPU 1
"""

from __future__ import annotations

import pickle
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from megatron_hybrid.weight_transfer.packing import pack


def tensors(device: str) -> dict[str, Tensor]:
    """The same in every process."""
    generator = torch.Generator("cpu").manual_seed(7)
    found = {
        "a": torch.randn(300, 70, generator=generator),
        "b": torch.randn(5, generator=generator).half(),
        "c": torch.randn(33, 3, generator=generator).bfloat16(),
        "d": torch.randint(-100, 100, (77,), generator=generator, dtype=torch.int8),
        "e": torch.randn(2048, 64, generator=generator),
    }
    return {name: tensor.to(device) for name, tensor in found.items()}


def handles(path: str) -> None:
    own = tensors("cuda:0")
    buffer = pack(own.values())
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    torch.cuda.synchronize()
    pickles = {
        "pairs": bytes(ForkingPickler.dumps(list(own.items()))),
        "each": pickle.dumps([{uuid: reduce_tensor(tensor)[1]} for tensor in own.values()]),
        "packed": pickle.dumps({uuid: reduce_tensor(buffer)[1]}),
        "with function": pickle.dumps([{uuid: reduce_tensor(one)} for one in own.values()]),
        "elsewhere": pickle.dumps([{"another GPU": reduce_tensor(one)[1]} for one in own.values()]),
    }
    Path(path).write_bytes(pickle.dumps(pickles))
    print("ready", flush=True)
    sys.stdin.readline()


def nccl(port: str) -> None:
    from megatron_hybrid.weight_transfer.groups import GroupAddress
    from megatron_hybrid.weight_transfer.nccl import NcclGroup

    device = torch.device("cuda:1")
    group = NcclGroup(GroupAddress("127.0.0.1", int(port), 0, 2), device, 60)
    own = tensors("cuda:1")
    for tensor in own.values():
        group.broadcast(tensor)
    group.broadcast(pack(own.values()))
    sys.stdin.readline()  # and then it goes without a word


if __name__ == "__main__":
    {"handles": handles, "nccl": nccl}[sys.argv[1]](sys.argv[2])
