"""Many tensors in one buffer: their bytes one behind the other, without padding and header."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from megatron_hybrid.errors import WeightsError
from megatron_hybrid.models.checkpoints.sent_tensors import TensorInfo
from megatron_hybrid.weight_transfer.requests import Described

Infos = Mapping[str, TensorInfo]


def chunks(infos: Infos, limit: int) -> Iterator[dict[str, TensorInfo]]:
    """As vLLM's senders cut them: a chunk is closed by the tensor that makes it larger than `limit`
    bytes."""
    chunk, size = dict[str, TensorInfo](), 0
    for name, info in infos.items():
        chunk[name] = info
        size += info.nbytes
        if size > limit:
            yield chunk
            chunk, size = {}, 0
    if chunk:
        yield chunk


def total_bytes(infos: Infos) -> int:
    """Of a buffer that holds them."""
    return sum(info.nbytes for info in infos.values())


def pack(tensors: Iterable[Tensor]) -> Tensor:
    """[bytes] uint8: a buffer of these."""
    return torch.cat([one.detach().contiguous().view(-1).view(torch.uint8) for one in tensors])


def unpack(buffer: Tensor, infos: Infos) -> Iterator[tuple[str, Tensor]]:
    """The tensors in a buffer, as views of it where they begin at a multiple of their numbers'
    size. Raises WeightsError for a buffer that is too small."""
    flat, start = buffer.view(-1).view(torch.uint8), 0
    if (needed := total_bytes(infos)) > flat.nbytes:
        raise WeightsError(f"The buffer has {flat.nbytes} bytes; its tensors take {needed}.")
    for name, info in infos.items():
        yield name, view(flat[start : start + info.nbytes], info)
        start += info.nbytes


def view(data: Tensor, info: TensorInfo) -> Tensor:
    """[bytes] uint8 as the tensor that it is."""
    if data.storage_offset() % info.dtype.itemsize:
        data = data.clone()
    return data.view(info.dtype).view(info.shape)


def infos_of(tensors: Described) -> Infos:
    """What is said of tensors, by name. Raises WeightsError for what can't be."""
    names, dtypes, shapes = tensors.names, tensors.dtypes, tensors.shapes
    if not len(names) == len(dtypes) == len(shapes):
        raise WeightsError(
            f"There are {len(names)} names, {len(dtypes)} types and {len(shapes)} shapes; there "
            "has to be one of each for every tensor."
        )
    infos = {
        name: TensorInfo(dtype_of(dtype), tuple(shape))
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    }
    if len(infos) < len(names):
        raise WeightsError("A name is there twice.")
    return infos


def dtype_of(name: str) -> torch.dtype:
    """ "bfloat16" or "torch.bfloat16". Raises WeightsError for another word."""
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise WeightsError(f"{name!r} is no type of torch's.")
    return found
