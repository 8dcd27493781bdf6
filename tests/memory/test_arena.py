"""Memory that comes and goes under tensors that stay where they are."""

from __future__ import annotations

from mmap import PAGESIZE

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_hybrid.memory import arena as arena_module
from megatron_hybrid.memory.arena import ALIGNMENT, Arena
from megatron_hybrid.memory.pages import HostPages

MIB = 2**20


def resident(tensor: Tensor) -> int:
    """Bytes of its own memory that are there, as Linux says of each page."""
    first, last = tensor.data_ptr() // PAGESIZE, (tensor.data_ptr() + tensor.nbytes) // PAGESIZE
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(8 * first)
        pages = np.frombuffer(file.read(8 * (last - first)), dtype=np.uint64)
    return int((pages >> np.uint64(63)).sum()) * PAGESIZE


def test_tensors_are_apart_aligned_and_of_their_types() -> None:
    arena = Arena(HostPages())
    made = [
        arena.empty((3, 5), torch.float32),
        arena.empty((7,), torch.bfloat16),
        arena.empty((), torch.int64),
        arena.empty((33,), torch.float8_e4m3fn),
        arena.zeros((2, 2, 2), torch.float16),
    ]
    assert [(tuple(t.shape), t.dtype) for t in made] == [
        ((3, 5), torch.float32), ((7,), torch.bfloat16), ((), torch.int64),
        ((33,), torch.float8_e4m3fn), ((2, 2, 2), torch.float16),
    ]  # fmt: skip
    first = made[0].data_ptr()
    assert [t.data_ptr() - first for t in made] == [ALIGNMENT * i for i in range(5)]
    for value, tensor in enumerate(made):
        tensor.fill_(value)
    assert [float(t.float().mean()) for t in made] == [0, 1, 2, 3, 4]
    assert arena.empty((0, 4), torch.float32).shape == (0, 4)
    assert arena.nbytes == -(-(4 * ALIGNMENT + 16) // 4096) * 4096


def test_memory_goes_and_comes_back_at_the_same_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "PIECE_BYTES", MIB)  # several pieces, the last one shorter
    arena = Arena(HostPages())
    tensor = arena.empty((5 * MIB // 2,), torch.int32)
    view, address = tensor[1000:2000], tensor.data_ptr()
    tensor.copy_(torch.arange(len(tensor)))
    assert resident(tensor) > 9 * MIB
    arena.release(keep=True)
    assert arena.is_released and resident(tensor) == 0
    arena.release(keep=False)  # is not done twice: what was kept is still there
    arena.restore()
    assert not arena.is_released and tensor.data_ptr() == address
    assert torch.equal(tensor, torch.arange(len(tensor), dtype=torch.int32))
    assert int(view[0]) == 1000
    arena.release(keep=False)
    assert resident(tensor) == 0
    arena.restore()
    arena.restore()
    assert not tensor.any()
    tensor[5] = 7
    assert int(tensor[5]) == 7


def test_caches_take_memory_only_where_something_is_written() -> None:
    arena = Arena(HostPages())
    tensor = arena.zeros((1024, 256, 256), torch.float32)
    tensor[3] = 1.0
    assert resident(tensor) < 8 * MIB and not tensor[4].any()


def test_an_arena_is_no_larger_than_was_said() -> None:
    arena = Arena(HostPages(capacity=MIB))
    arena.empty((MIB - 4096,), torch.uint8)
    with pytest.raises(MemoryError, match="bytes are wanted; there are 1048576"):
        arena.empty((8192,), torch.uint8)
    arena.empty((4096,), torch.uint8)


def test_nothing_is_cut_from_what_is_released() -> None:
    arena = Arena(HostPages())
    arena.empty((4,), torch.float32)
    arena.release(keep=False)
    with pytest.raises(AssertionError):
        arena.empty((4,), torch.float32)
