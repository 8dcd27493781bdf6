"""A digest of all weights of a model, computed on the device where they are."""

from __future__ import annotations

from functools import cache
from hashlib import sha256

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from megatron_hybrid.layers.ngram_table import NGramTable

LANE_BYTES = 4  # a lane is an int32
BLOCK_BITS = 18
BLOCK = 2**BLOCK_BITS  # lanes whose sum goes into the digest: a part of its meaning
BLOCKS_AT_ONCE = 16  # which take 32 MiB while they are added up


@torch.no_grad()
def weight_digest(model: nn.Module, blocks_at_once: int = BLOCKS_AT_ONCE) -> str:
    """64 hex digits, of this rank's parameters and buffers, and of tables that stay on the host,
    which the device reads: names, types, shapes and every bit.

    A tensor's bytes are lanes, of which each block gives one number, the sum of lane * multiplier
    modulo 2^64; its value does not depend on the order in which a device adds up. What changes in
    one lane changes it for certain, and so do two lanes that swap places (see `multipliers`).
    blocks_at_once: changes the memory that it takes, and nothing else.
    """
    tensors: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    for name, layer in model.named_modules():
        if isinstance(layer, NGramTable) and layer.on_host:
            tensors.append((f"{name}.weight", layer.there))
    tables = {device: _on(device) for device in {tensor.device for _, tensor in tensors}}
    # All are launched before the first is waited for.
    sums = [block_sums(tensor, tables[tensor.device], blocks_at_once) for _, tensor in tensors]
    digest = sha256()
    for (name, tensor), numbers in zip(tensors, sums, strict=True):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(numbers.cpu().numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def block_sums(tensor: Tensor, table: Tensor, blocks_at_once: int = BLOCKS_AT_ONCE) -> Tensor:
    """[blocks] int64 of a tensor's bytes; zeros fill up its last lane. table: `multipliers`."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % LANE_BYTES:
        data = data.clone()
    lanes, rest = divmod(len(data), LANE_BYTES)
    blocks = lanes // BLOCK  # whole ones
    words = data[: lanes * LANE_BYTES].view(torch.int32)
    tail = words[blocks * BLOCK :]
    if rest:
        last = data.new_zeros(LANE_BYTES)
        last[:rest] = data[lanes * LANE_BYTES :]
        tail = torch.cat((tail, last.view(torch.int32)))
    sums = table.new_empty(blocks + (len(tail) > 0))
    for first in range(0, blocks, blocks_at_once):
        stop = min(first + blocks_at_once, blocks)
        sums[first:stop] = _weighed(words[first * BLOCK : stop * BLOCK].view(-1, BLOCK), table)
    if len(tail):
        sums[blocks:] = _weighed(tail[None], table[: len(tail)])
    return sums


def _weighed(lanes: Tensor, table: Tensor) -> Tensor:
    """[n, lanes] int32, [lanes] int64 -> [n]: the sums of their products, modulo 2^64."""
    if lanes.is_cpu:  # without threads, of which others may need theirs, and without a copy
        return torch.from_numpy(np.einsum("ij,j->i", lanes.numpy(), table.numpy()))
    return (lanes * table).sum(1)


@cache
def multipliers() -> npt.NDArray[np.int64]:
    """[BLOCK], by a lane's place in its block. They are odd, and the difference of two can be
    halved BLOCK_BITS times at most, that of two lanes 31 times: their product, modulo 2^64, is not
    0. The upper bits are those of splitmix64 (Steele, Lea, Flood 2014)."""
    place = np.arange(BLOCK, dtype=np.uint64)
    mixed = (place + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    own = (place << np.uint64(1)) | np.uint64(1)
    return ((mixed << np.uint64(BLOCK_BITS + 1)) | own).view(np.int64)


def _on(device: torch.device) -> Tensor:
    return torch.from_numpy(multipliers()).to(device)
