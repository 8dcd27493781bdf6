"""WeightSender: a trainer's weights into running servers.

    sender = WeightSender(["http://127.0.0.1:8000"], device)
    sender.send(model.weights.items(), version="step-7")

On the server's GPU by CUDA IPC handles; on another one over NCCL, without a GPU over gloo, through
a group with the servers' ranks. Tensors go in buckets, each by one request and one copy.

A rank of the server opens handles of its own GPU alone. Where the model has several ranks, the
trainer's processes on their GPUs are `peers`: all hold the same tensors and make the same calls,
and the first one of them asks.
"""

from __future__ import annotations

import base64
import json
import pickle
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from megatron_hybrid.weight_transfer.groups import GroupAddress, TorchGroup
from megatron_hybrid.weight_transfer.packing import pack

BUCKET_BYTES = 512 * 2**20
Named = Iterable[tuple[str, Tensor]]


class SendError(RuntimeError):
    """A server has refused what was sent; the message is its answer."""


class WeightSender:
    """`way`: "ipc" to servers on `device`, "nccl" or "gloo" through a group; None: ipc on a GPU,
    else gloo. Close it to leave the group."""

    def __init__(
        self,
        urls: Sequence[str],
        device: torch.device | str = "cpu",
        *,
        way: str | None = None,
        key: str | None = None,
        ranks_of_each: int = 1,
        host: str = "127.0.0.1",
        seconds: float = 300.0,
        peers: dist.ProcessGroup | None = None,
    ) -> None:
        """`key`: of --admin-api-key. `ranks_of_each`: the model's ranks behind each URL. `host`:
        this machine's, as the servers know it. `seconds`: to wait. `peers`: a group over gloo, in
        which this process is. Raises SendError."""
        self._is_first = peers is None or dist.get_rank(peers) == 0
        self._urls, self._key, self._seconds = list(urls) if self._is_first else [], key, seconds
        self._device, self._peers = torch.device(device), peers
        self._way = way or ("ipc" if self._device.type == "cuda" else "gloo")
        self.group_name = f"weight_sender_{uuid.uuid4().hex}"  # torch has one group of a name
        self._group: TorchGroup | None = None
        self._pool = ThreadPoolExecutor(max(1, len(self._urls)), "weight_sender")
        if self._way != "ipc" and self._is_first:
            self._meet(host, ranks_of_each)

    def _meet(self, host: str, ranks: int) -> None:
        size = 1 + ranks * len(self._urls)
        # The system chooses its port.
        store = dist.TCPStore(host, 0, size, is_master=True, wait_for_workers=False)
        address = GroupAddress(host, store.port, 0, size)
        common = {
            "master_address": host,
            "master_port": store.port,
            "world_size": size,
            "group_name": self.group_name,
            "backend": self._way,
        }
        bodies = [
            {**common, "rank_offset": 1 + number * ranks} for number in range(len(self._urls))
        ]
        with self._asking("/init_weights_update_group", bodies):
            self._group = TorchGroup(address, self.group_name, self._way, self._seconds, store)

    def send(self, weights: Named | Mapping[str, Tensor], version: str | None = None) -> None:
        """All of these, as one update. Raises SendError."""
        self._ask("/start_weight_update", {})
        for bucket in _buckets(weights.items() if isinstance(weights, Mapping) else weights):
            self._send(bucket)
        self._ask("/finish_weight_update", {"weight_version": version})

    def _send(self, bucket: list[tuple[str, Tensor]]) -> None:
        names = [name for name, _ in bucket]
        dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket]
        shapes = [list(tensor.shape) for _, tensor in bucket]
        if self._way == "ipc":
            buffer = pack(tensor.to(self._device) for _, tensor in bucket)
            torch.cuda.synchronize(self._device)  # what they open has to be there
            info = {
                "names": names,
                "dtype_names": dtypes,
                "shapes": shapes,
                "ipc_handles_pickled": self._handles(buffer),
                "tensor_sizes": [tensor.nbytes for _, tensor in bucket],
            }
            self._ask("/update_weights", {"update_info": info})
            return
        body = {
            "names": names,
            "dtypes": dtypes,
            "shapes": shapes,
            "group_name": self.group_name,
            "load_format": "flattened_bucket",
        }

        def broadcast() -> None:
            if self._group is not None:  # which the first one has
                self._group.broadcast(pack(tensor.to(self._device) for _, tensor in bucket))

        self._ask("/update_weights_from_distributed", body, broadcast)

    def _handles(self, buffer: Tensor) -> str:
        """By the GPU's UUID, as vLLM's servers take them; those of all peers."""
        _, arguments = reduce_tensor(buffer)
        by_gpu = {str(torch.cuda.get_device_properties(buffer.device).uuid): arguments}
        if self._peers is not None:
            each = [by_gpu] * dist.get_world_size(self._peers)  # to be overwritten
            dist.all_gather_object(each, by_gpu, group=self._peers)
            by_gpu = {gpu: handle for one in each for gpu, handle in one.items()}
        return base64.b64encode(pickle.dumps(by_gpu)).decode()

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            bodies = [{"group_name": self.group_name}] * len(self._urls)
            with self._asking("/destroy_weights_update_group", bodies):
                self._group.close()
            self._group = None
        self._pool.shutdown()

    # ------------------------------------------------------------- requests

    @contextmanager
    def _asking(self, path: str, bodies: Sequence[dict[str, Any]]) -> Iterator[None]:
        """Each server is asked meanwhile. Raises SendError for one that refuses."""
        asked = [
            self._pool.submit(self._post, url + path, body)
            for url, body in zip(self._urls, bodies, strict=True)
        ]
        try:
            yield
        except Exception as error:  # that a server refuses is why
            for one in asked:
                if one.done() and one.exception() is not None:
                    raise one.exception() from error  # type: ignore[misc]
            raise
        for one in asked:
            one.result()

    def _ask(
        self, path: str, body: dict[str, Any], meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """Each server. All peers return when it has answered, since what they hold is read until
        then, or raise SendError."""
        failed: Exception | None = None
        try:
            with self._asking(path, [body] * len(self._urls)):
                meanwhile()
        except Exception as error:
            failed = error
        if self._peers is not None:
            said = [None if failed is None else str(failed)]
            dist.broadcast_object_list(said, group=self._peers, group_src=0)
            if failed is None and said[0] is not None:
                raise SendError(said[0])
        if failed is not None:
            raise failed

    def _post(self, url: str, body: dict[str, Any]) -> None:
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=self._seconds) as answer:
                answer.read()
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")
            raise SendError(f"{url} answered {error.code}: {said}") from error
        except OSError as error:
            raise SendError(f"{url} can't be reached: {error}") from error


def _buckets(weights: Named) -> Iterator[list[tuple[str, Tensor]]]:
    """Of up to BUCKET_BYTES, or one tensor."""
    bucket, size = list[tuple[str, Tensor]](), 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket
