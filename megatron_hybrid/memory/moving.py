"""A model's weights into an arena, one after the other: there are never two copies of all."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_hybrid.memory.arena import Arena

# What is smaller stays where it is. That is no memory to speak of, and some of it no checkpoint
# brings again: rotary frequencies, scales of inputs.
LEAST_BYTES = 64 * 2**10
_FREED_AT_ONCE = 2**30  # bytes that torch's allocator keeps of what has moved


def move_in(model: nn.Module, arena: Arena) -> None:
    """Move the memory of parameters, buffers and modules' own tensors that is on the arena's
    device. Every tensor of it that modules hold, also inside of lists and dataclasses, is then at
    its new address, with its shape and strides. Raises MemoryError."""
    moved = 0
    for tensors in _by_storage(model, arena.device):
        old = weakref.ref(tensors[0].untyped_storage())
        size = tensors[0].untyped_storage().nbytes()
        new = arena.empty((size,), torch.uint8).untyped_storage()
        new.copy_(tensors[0].untyped_storage())
        for tensor in tensors:
            place = tensor.storage_offset(), tensor.shape, tensor.stride()
            there = torch.empty(0, dtype=tensor.dtype, device=arena.device)
            tensor.data = there.set_(new, *place)
        assert old() is None, "somebody holds a tensor of the weights that modules do not hold"
        moved += size
        if moved >= _FREED_AT_ONCE:
            _return_what_is_free(arena.device)
            moved = 0
    _return_what_is_free(arena.device)


def _return_what_is_free(device: torch.device) -> None:
    """From torch's allocator to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _by_storage(model: nn.Module, device: torch.device) -> list[list[Tensor]]:
    """All tensors in each piece of memory that is moved."""
    wanted = {
        tensor.untyped_storage().data_ptr()
        for tensor in _own_tensors(model)
        if tensor.device == device and tensor.untyped_storage().nbytes() >= LEAST_BYTES
    }
    found: dict[int, list[Tensor]] = {}
    for tensor in _tensors_in(model, set()):
        place = tensor.untyped_storage().data_ptr() if tensor.device == device else 0
        if place in wanted:
            found.setdefault(place, []).append(tensor)
    return list(found.values())


def _own_tensors(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        yield from module.parameters(recurse=False)
        yield from module.buffers(recurse=False)
        yield from (value for value in vars(module).values() if isinstance(value, Tensor))


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Of an object and what it is made of."""
    if id(value) in seen:
        return
    seen.add(id(value))
    inner: Any = ()
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        inner = vars(value).values()
    elif isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        inner = value
    elif is_dataclass(value) and not isinstance(value, type):
        inner = [getattr(value, field.name) for field in fields(value)]
    for one in inner:
        yield from _tensors_in(one, seen)
