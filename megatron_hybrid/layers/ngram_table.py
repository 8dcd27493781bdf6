"""A table of embeddings that may be larger than a device's memory: then it stays in the host's,
where the device's kernels read the few rows that a step needs."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_hybrid.kernels.pinned import WORD, as_on_device
from megatron_hybrid.layers.mixer import LayerContext, parameter
from megatron_hybrid.layers.parts import Parts, section

TABLES = "tables of n-grams"  # of which a step reads little


class _HostTable:
    """Pinned memory, and the same as the device sees it. Not the model's: what moves a model's
    weights, or counts them to the device's, does not find it."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        size = shape[0] * shape[1] * dtype.itemsize
        room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        words = torch.frombuffer(memory, dtype=torch.int32)
        # torch's own pinned memory comes in powers of 2.
        if code := int(torch.cuda.cudart().cudaHostRegister(words.data_ptr(), room, 0)):
            raise MemoryError(
                f"{room / 2**30:.1f} GiB of host memory can't be pinned for n-gram embeddings: "
                f"CUDA's error {code}."
            )
        weakref.finalize(self, _unpin, words).atexit = False  # at the end of all it goes anyway
        used = size // dtype.itemsize  # numbers
        assert room % WORD == 0
        self.host = words.view(dtype)[:used].view(shape)
        self.there = as_on_device(words).view(dtype)[:used].view(shape)


def _unpin(words: Tensor) -> None:
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(words.data_ptr())


class NGramTable(nn.Module):
    """[rows, numbers] of which a checkpoint may have `shards` one below the other, as torch.chunk
    cuts them. Ranks have some of the columns each."""

    weight: Tensor | None  # of a table on the model's device

    def __init__(
        self, rows: int, numbers: int, heads: int, shards: int, context: LayerContext
    ) -> None:
        """`heads`: rows that a token reads."""
        super().__init__()
        self.rows, self.numbers, self.heads, self.shards = rows, numbers, heads, shards
        self.parallel = context.parallel
        own = context.share(numbers, "numbers of an n-gram's embedding")
        self.held: _HostTable | None = None
        self.on_host = context.tables_on_host
        if not self.on_host:
            self.weight = parameter((rows, own), context.dtype)
            return
        self.weight = None
        if torch.empty(0).device.type == "cuda":
            self.held = _HostTable((rows, own), context.dtype)
        else:  # shapes alone
            self._planned = torch.empty((rows, own), dtype=context.dtype)

    @property
    def there(self) -> Tensor:
        """[rows, this rank's numbers] as the device sees it."""
        if self.held is not None:
            return self.held.there
        return self._planned if self.weight is None else self.weight

    def weight_parts(self) -> Parts:
        """Of each shard, this rank's columns."""
        target = self.there if self.held is None else self.held.host
        each = -(-self.rows // self.shards)
        first = self.parallel.rank * target.shape[1]
        for i, rows in enumerate(target.split(each)):
            yield section(f"shard_{i}.weight", rows, 1, first, self.numbers)

    def kept_bytes(self) -> Iterator[tuple[str, int]]:
        """How it is kept, and what it takes."""
        kind = f"{self.there.dtype}, {TABLES}"
        yield (f"{kind} on the host" if self.on_host else kind), self.there.nbytes

    def forward(self, places: Tensor) -> Tensor:
        """places [tokens, heads] -> [tokens, heads * numbers]"""
        found = F.embedding(places, self.there)
        if self.parallel.size == 1:
            return found.flatten(1)
        return self.parallel.all_gather(found.flatten(0, 1)).view(len(places), -1)
