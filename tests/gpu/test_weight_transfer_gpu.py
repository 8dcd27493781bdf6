"""Tensors from a trainer's process: CUDA IPC handles on one GPU, NCCL alone from another one."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron_hybrid.errors import WeightsError
from megatron_hybrid.models.checkpoints.sent_tensors import SentTensors
from megatron_hybrid.weight_transfer import requests as wire
from megatron_hybrid.weight_transfer.groups import TransferBroken
from megatron_hybrid.weight_transfer.transfers import WeightTransfers
from tests.gpu.trainer_process import tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)
OWN = tensors("cpu")
DESCRIBED = wire.Described(
    tuple(OWN),
    tuple(str(one.dtype) for one in OWN.values()),
    tuple(tuple(one.shape) for one in OWN.values()),
)


def trainer(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.trainer_process", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def pickles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, bytes]]:
    path = tmp_path_factory.mktemp("handles") / "pickles"
    process = trainer("handles", str(path))
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    yield pickle.loads(path.read_bytes())
    process.communicate("\n", timeout=60)


def received(sent: str | SentTensors) -> dict[str, Tensor]:
    assert isinstance(sent, SentTensors)
    return {name: sent.held[name].cpu().clone() for name in sent.arrivals()}


def check(found: dict[str, Tensor]) -> None:
    assert list(found) == list(OWN)
    assert all(torch.equal(found[name], OWN[name]) for name in OWN)


@pytest.mark.parametrize("form", ["pairs", "each", "packed", "with function"])
def test_handles_of_another_process(form: str, pickles: dict[str, bytes]) -> None:
    described = None if form == "pairs" else DESCRIBED
    wanted = wire.FromHandles((pickles[form],), in_one=form == "packed", tensors=described)
    (sent,) = WeightTransfers(DEVICE).sources(wanted)
    check(received(sent))


def test_handles_of_another_gpu_are_refused(pickles: dict[str, bytes]) -> None:
    wanted = wire.FromHandles((pickles["elsewhere"],), tensors=DESCRIBED)
    with pytest.raises(WeightsError, match="no handle for GPU .* but another GPU"):
        list(WeightTransfers(DEVICE).sources(wanted))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_nccl_without_torch_distributed() -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    process = trainer("nccl", str(port))
    transfers = WeightTransfers(DEVICE, seconds=60)
    group = wire.TransferGroup("vllm", "127.0.0.1", port, 1, 2, made_by="vllm")
    transfers.open(group)
    (each,) = transfers.sources(wire.FromGroup("vllm", DESCRIBED))
    check(received(each))
    (packed,) = transfers.sources(wire.FromGroup("vllm", wire.Described(), chunk_bytes=2**30))
    check(received(packed))
    process.communicate("\n", timeout=60)
    transfers._groups["vllm"].group._seconds = 5  # type: ignore[attr-defined]
    start = time.monotonic()
    (nothing,) = transfers.sources(wire.FromGroup("vllm", wire.Described()))
    with pytest.raises(TransferBroken, match="--weight-transfer-timeout"):
        received(nothing)
    assert time.monotonic() - start < 30
