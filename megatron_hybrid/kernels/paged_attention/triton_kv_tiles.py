"""Tiles of a paged cache's keys and values, as attention's kernels in Triton load them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_hybrid.kernels.contract import AttentionShape


def has_whole_tiles(shape: AttentionShape, keys: int) -> bool:
    """Whether every tile of so many keys lies in one block."""
    return shape.block_size % keys == 0 and shape.first_position % keys == 0


def tiles_of(stored: Tensor, keys: int) -> TensorDescriptor:
    """Of keys or values, where tiles are whole: one is so many tokens of one head."""
    blocks, block_size, kv_heads, head_dim = stored.shape
    rows, width = blocks * block_size, kv_heads * head_dim
    return TensorDescriptor(stored, [rows, width], [width, 1], [keys, head_dim])


@triton.jit
def block_of(
    blocks, first, end, FIRST: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Of a tile, or of each of its keys; of those from `end` on block 0."""
    if WHOLE:
        return tl.load(blocks + (FIRST + first) // BLOCK_SIZE, mask=first < end, other=0)
    else:
        at = first + tl.arange(0, KEYS)
        return tl.load(blocks + (FIRST + at) // BLOCK_SIZE, mask=at < end, other=0)


@triton.jit
def sees(position, at, FIRST: tl.constexpr, WINDOW: tl.constexpr):
    """Whether rows [ROWS], the last key of each of which is at `position`, see the keys at `at`
    [KEYS]: [ROWS, KEYS]."""
    seen = at[None, :] <= position[:, None]
    if FIRST > 0:
        seen = seen & (at >= FIRST)[None, :]
    if WINDOW > 0:
        seen = seen & (at[None, :] > position[:, None] - WINDOW)
    return seen


@triton.jit
def load_kv(
    key_cache, value_cache, key_tiles, value_tiles, block, kv_head, kv_heads, first, end,
    MASKED: tl.constexpr, KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, FIRST: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Keys and values [KEYS, DIMS] of the tile that begins at `first`, counted from FIRST, as they
    are stored, with what block_of says; if MASKED zeros from `end` on. key_tiles, value_tiles:
    descriptors of the cache, or None."""
    tile, dim = tl.arange(0, KEYS), tl.arange(0, DIMS)
    if key_tiles is not None:
        row = block.to(tl.int32) * BLOCK_SIZE + (FIRST + first) % BLOCK_SIZE
        k = key_tiles.load([row, kv_head * HEAD_DIM])
        v = value_tiles.load([row, kv_head * HEAD_DIM])
    else:
        at = first + tile
        if WHOLE:
            row = block.to(tl.int64) * BLOCK_SIZE + (FIRST + first) % BLOCK_SIZE
            place = tile[:, None] * (kv_heads * HEAD_DIM) + dim[None, :]
            where = (row * kv_heads + kv_head) * HEAD_DIM + place
        else:
            row = block.to(tl.int64) * BLOCK_SIZE + (FIRST + at) % BLOCK_SIZE
            where = ((row * kv_heads + kv_head) * HEAD_DIM)[:, None] + dim[None, :]
        if MASKED or DIMS > HEAD_DIM:
            # what lies past the end was never written: it is not read
            readable = (at < end)[:, None] & (dim < HEAD_DIM)[None, :]
            k = tl.load(key_cache + where, mask=readable, other=0.0)
            v = tl.load(value_cache + where, mask=readable, other=0.0)
        else:
            k = tl.load(key_cache + where)
            v = tl.load(value_cache + where)
    return k, v
