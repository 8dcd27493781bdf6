"""Which of flashinfer's kernels the prompts of a step run on, outside of CUDA graphs and on Hopper,
and how their keys and values lie where they are gathered for it. Host arrays alone, once a step.

FlashAttention 3 takes keys and values in tiles by the tensor memory accelerator if they lie in one
piece, and row by row, on smaller tiles, if they lie in blocks. So gathering them first saves a
fifth to a third of its time, and costs as much as moving them twice. It gives a tile of 128 query
tokens (192 with heads of 64) of one head to one multiprocessor, whatever their keys: a few tokens
on a long prefix leave most of the GPU idle. FlashAttention 2 is slower where there is much to do,
but has the query heads of a KV head in one tile, and splits long KV over all multiprocessors.

`choose` estimates what each of the three would take of the whole step, and takes the least.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np

from megatron_hybrid.kernels.contract import AttentionShape, Ints, PagedHost

# Keys of a tile of FlashAttention 3, or a multiple: 64 with heads of 256, else 128.
TILE = 128


class PromptKernel(enum.Enum):
    """In the order in which they are taken where they would take as long."""

    FA2 = "FlashAttention 2 on blocks"
    FA3 = "FlashAttention 3 on blocks"
    GATHERED = "FlashAttention 3 on gathered keys and values"


class _Rates(NamedTuple):
    """1e12 operations a second of a multiprocessor that always has work."""

    fa2: float
    fa3: float
    gathered: float


# By head_dim. FlashAttention 3 with heads of 128 and 256 was measured on an H100, with 8,192 tokens
# on up to 65,536; the other figures are guesses.
_RATES = {
    64: _Rates(2.3, 3.0, 3.7),
    128: _Rates(2.6, 3.9, 4.8),
    256: _Rates(2.2, 3.55, 5.1),
}
# What a tile of FlashAttention 3 takes besides its keys, in keys: it begins and ends alone.
_KEYS_OF_A_TILE = 200
# 1e12 bytes a second, of copies and of kernels that only read.
_COPIED, _READ = 2.6, 2.8
# Microseconds: a launch of its own; joining the parts of split keys.
_GATHER_LAUNCH, _JOIN = 3.0, 8.0


def choose(
    queries: Ints, keys: Ints, shape: AttentionShape, processors: int, room: int
) -> PromptKernel:
    """For sequences with so many queries and keys each [sequences], keys in 16 bits; `room`: bytes
    that gathered keys and values may take."""
    times = estimate(queries, keys, shape, processors)
    if gathered_bytes(queries, keys, shape) > room:
        del times[PromptKernel.GATHERED]
    return min(times, key=times.__getitem__)


def estimate(
    queries: Ints, keys: Ints, shape: AttentionShape, processors: int
) -> dict[PromptKernel, float]:
    """Microseconds of one layer; arguments as of `choose`."""
    rates, per_key = _RATES[shape.head_dim], 4 * shape.head_dim  # operations, of a query row
    queries, keys = queries.astype(np.float64), keys.astype(np.float64)

    # FlashAttention 3. Tile i of a sequence sees all keys but those behind its last query.
    rows = 192 if shape.head_dim == 64 else 128
    tiles = np.ceil(queries / rows)
    unseen = (tiles - 1) * (queries - rows * tiles / 2)
    seen = (tiles * (keys + _KEYS_OF_A_TILE) - unseen).sum()
    longest = (keys + _KEYS_OF_A_TILE)[queries > 0].max(initial=0.0)
    operations = rows * per_key * max(seen * shape.heads / processors, longest)

    # FlashAttention 2: the query heads of a KV head are rows of its tiles.
    group = shape.heads // shape.kv_heads
    packed = np.ceil(queries * group / 64) * 64
    pairs = (packed * (keys - (queries - 1) / 2)).sum() * shape.kv_heads
    read = keys[queries > 0].sum() * bytes_of_a_row(shape)
    split = max(pairs * per_key / (rates.fa2 * processors), read / _READ)

    moved = 2 * gathered_bytes(queries, keys, shape)
    return {
        PromptKernel.FA2: split * 1e-6 + _JOIN,
        PromptKernel.FA3: operations / rates.fa3 * 1e-6,
        PromptKernel.GATHERED: (operations / rates.gathered + moved / _COPIED) * 1e-6
        + _GATHER_LAUNCH,
    }


def gathered_bytes(queries: Ints, keys: Ints, shape: AttentionShape) -> int:
    """Of a GatheredLayout's keys and values."""
    return int(_padded(queries, keys).sum()) * bytes_of_a_row(shape)


def bytes_of_a_row(shape: AttentionShape) -> int:
    """Of one token's key and value, in 16 bits."""
    return 2 * shape.kv_heads * shape.head_dim * 2


class GatheredLayout(NamedTuple):
    """Keys (and values likewise) of sequences in one piece:

        rows       a a a a a 0 0 0 | b b 0 0 | ...      tiles of 4 here, of TILE rows in truth

    Each sequence is filled up to whole tiles with zeros. A kernel reads a tile as a whole, and
    multiplies what lies past a sequence's end by 0: NaN of another sequence there would be seen.
    What the kernel is told of are twice as many sequences: behind each real one there is one
    without queries, which has the zeros. A sequence without queries has no rows.
    """

    query_indptr: Ints  # [2 * sequences + 1] int32, from the first prompt's first token
    kv_indptr: Ints  # [2 * sequences + 1] int32, in rows
    sequence: Ints  # [tiles] int32: of the step, whose rows a tile has
    position: Ints  # [tiles] int32: of a tile's first row in its sequence

    @property
    def rows(self) -> int:
        """A multiple of TILE."""
        return TILE * len(self.sequence)

    @classmethod
    def of(cls, host: PagedHost, first: int) -> GatheredLayout:
        """Of a step's sequences from `first` on."""
        cu_seqlens, keys = host.cu_seqlens[first:], host.kv_length[first:]
        queries = np.diff(cu_seqlens)
        padded = _padded(queries, keys)
        starts = np.concatenate(([0], np.cumsum(padded)))
        kv_indptr = np.empty(2 * len(keys) + 1, dtype=np.int32)
        kv_indptr[::2] = starts
        kv_indptr[1::2] = starts[:-1] + np.where(queries > 0, keys, 0)
        owner = np.repeat(np.arange(len(keys)), padded // TILE)
        position = np.arange(len(owner)) * TILE - starts[owner]
        return cls(
            query_indptr=np.repeat(cu_seqlens - cu_seqlens[0], 2)[1:].astype(np.int32),
            kv_indptr=kv_indptr,
            sequence=(first + owner).astype(np.int32),
            position=position.astype(np.int32),
        )


def _padded(queries: Ints, keys: Ints) -> Ints:
    """Rows of each sequence."""
    return np.where(queries > 0, -(-keys // TILE) * TILE, 0).astype(np.int64)
