"""Tensors in another process's memory on the same machine, by the handles that trainers pickle.

Of a tensor on a GPU torch.multiprocessing's reductions give a CUDA IPC handle, and where the tensor
lies behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from megatron_hybrid.errors import WeightsError
from megatron_hybrid.models.checkpoints.sent_tensors import (
    GivenTensors,
    SentTensors,
    TensorInfo,
)
from megatron_hybrid.weight_transfer import requests as wire
from megatron_hybrid.weight_transfer.packing import Infos, infos_of, unpack, view
from megatron_hybrid.weight_transfer.pickles import Call, Record, read, recorded

DEVICE = 6  # among the arguments of rebuild_cuda_tensor: the number of the sender's device
HANDLE = 7  # the CUDA IPC handle
ARGUMENTS = 15  # of it
_REBUILD = "rebuild_cuda_tensor"
# What such pickles name.
_NAMES: dict[tuple[str, str], Any] = {
    ("torch", "Tensor"): Tensor,
    ("torch._tensor", "Tensor"): Tensor,
    ("torch.nn.parameter", "Parameter"): Tensor,
    ("torch.storage", "TypedStorage"): torch.UntypedStorage,
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    ("torch.multiprocessing.reductions", _REBUILD): recorded(_REBUILD),
    ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"): recorded(_REBUILD),
    ("sglang.srt.patch_torch", "_rebuild_cuda_tensor_modified"): recorded(_REBUILD),
    **dict.fromkeys(
        [
            ("sglang.srt.model_executor.model_runner", "LocalSerializedTensor"),
            (
                "sglang.srt.model_executor.model_runner_components.weight_updater",
                "LocalSerializedTensor",
            ),
        ],
        Record,
    ),
    ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"): Record,
}


def opened(wanted: wire.FromHandles, rank: int, device: torch.device) -> SentTensors:
    """What this rank's pickle names. Raises WeightsError for what can't be read or opened."""
    each = wanted.pickled
    pickled = each[0] if len(each) == 1 else each[rank % len(each)]
    if wanted.tensors is not None:
        return _of_vllm(pickled, infos_of(wanted.tensors), device, in_one=wanted.in_one)
    return _of_sglang(pickled, device, in_one=wanted.in_one)


def _of_vllm(pickled: bytes, infos: Infos, device: torch.device, *, in_one: bool) -> SentTensors:
    """By GPU, where a tensor is; a list of them, one a tensor, or the one of all."""
    found = read(pickled, "ipc_handles_pickled", _NAMES)
    uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"
    each = [found] if in_one else found
    if not isinstance(each, list) or not all(isinstance(one, dict) for one in each):
        raise WeightsError("ipc_handles_pickled has to hold handles by the GPU's UUID.")
    if not in_one and len(each) != len(infos):
        raise WeightsError(f"There are {len(each)} handles for {len(infos)} tensors.")
    missing = [one for one in each if uuid not in one]
    if missing:
        there = ", ".join(map(str, missing[0]))
        raise WeightsError(f"There is no handle for GPU {uuid}, which this rank has, but {there}.")
    tensors = [tensor_of(one[uuid], device) for one in each]
    if in_one:
        return SentTensors(infos, partial(unpack, tensors[0], infos))
    return GivenTensors(zip(infos, tensors, strict=True))


def _of_sglang(pickled: bytes, device: torch.device, *, in_one: bool) -> SentTensors:
    """Pairs of a name and a tensor; or a buffer of all tensors, and where each is in it."""
    found = read(pickled, "serialized_named_tensors", _NAMES)
    if not in_one:
        try:
            return GivenTensors([(str(name), tensor_of(one, device)) for name, one in found])
        except (TypeError, ValueError) as error:
            raise WeightsError(
                f"serialized_named_tensors has to hold pairs of a name and a tensor: {error}."
            ) from error
    try:
        buffer, places = tensor_of(found["flattened_tensor"], device), found["metadata"]
        cut = [
            (str(one.name), TensorInfo(one.dtype, tuple(one.shape)), int(one.start_idx))
            for one in places
        ]
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise WeightsError(f"A flattened bucket has another form: {error!r}.") from error
    flat, scale = buffer.view(-1).view(torch.uint8), buffer.element_size()

    def views() -> Iterator[tuple[str, Tensor]]:
        for name, info, start in cut:
            yield name, view(flat[start * scale :][: info.nbytes], info)

    return SentTensors({name: info for name, info, _ in cut}, views)


def tensor_of(found: Any, device: torch.device) -> Tensor:
    """What a pickle has of a tensor. Raises WeightsError unless this device can open it."""
    if isinstance(found, Record):  # SGLang's LocalSerializedTensor: a pickle for each rank
        found = read(getattr(found, "values", [b""])[0], "A tensor", _NAMES)
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], tuple):
        found = found[1]  # with its function, as old versions of vLLM
    arguments = list(found.arguments if isinstance(found, Call) else found)
    if len(arguments) != ARGUMENTS or not isinstance(arguments[HANDLE], bytes | None):
        raise WeightsError("A tensor's handle has another form than torch.multiprocessing's.")
    if device.type != "cuda":
        raise WeightsError("CUDA handles can't be opened without a GPU: send by a gloo group.")
    if arguments[HANDLE] is None:  # of no memory at all
        return torch.empty(arguments[1], dtype=arguments[5], device=device)
    arguments[DEVICE] = device.index or 0
    arguments[0], arguments[4] = Tensor, torch.UntypedStorage
    try:
        opened: Tensor = reductions.rebuild_cuda_tensor(*arguments)
    except (RuntimeError, TypeError) as error:
        raise WeightsError(f"A tensor's memory can't be opened here: {error}") from error
    return opened
