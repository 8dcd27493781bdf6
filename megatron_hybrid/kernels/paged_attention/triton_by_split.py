"""Paged attention in Triton of which a query's bits depend on the query and its keys and values
alone: what a GPU runs in batch-invariant mode. Not on the batch, not on how a prompt is cut or how
many drafts are computed at once, not on where blocks lie.

A sequence's keys are cut, from position 0 on (the first that is seen), into tiles of KEYS, and into
splits of SPLIT:

    tiles       0    1    2    3    4    5    6    7  |  8    9   10   11 ...
                running maximum m, sum of weights l, weighted values a
    splits                  (m, l, a)                 |       (m, l, a)        -> in their order

Inside of a split a row's results are rescaled tile by tile (Milakov and Gimelshein, "Online
normalizer calculation for softmax", arXiv 1805.02867), and splits are put together one after the
other by the same formula (`_folded`), by who computes all of them, or by a second kernel where
splits were computed by different programs (Dao et al., "Flash-Decoding", 2023). So much for the
order. (With a sliding window all keys are one split, as sequences begin with the first block that
is still there. That is at a multiple of KEYS; tiles of which a query sees nothing change nothing.)
The rest is that each number comes about alike wherever it is computed:

- Products are a tensor core's, summed in the order of the keys (or dims) in one accumulator. Their
  bits don't depend on a tile's size or on its warps. Sums of weights are such products, too, with
  ones; the order of tl.sum follows from the layout of threads.
- What a tile or a split adds to a row that sees none of its keys is zero, and the factor of what
  was there before is exp2(0), so other rows of a tile may go on.
- Products with sums are tl.fma or can't become one: the compiler has no choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import AttentionShape, KVCache, PagedSequences
from megatron_hybrid.kernels.dependent_launch import OPTIONS
from megatron_hybrid.kernels.devices import processors, stages_that_fit
from megatron_hybrid.kernels.launching import cdiv, next_power_of_2
from megatron_hybrid.kernels.paged_attention import reference
from megatron_hybrid.kernels.paged_attention.protocol import RelativeBias
from megatron_hybrid.kernels.paged_attention.triton import store_kv
from megatron_hybrid.kernels.paged_attention.triton_bias import BiasArguments
from megatron_hybrid.kernels.paged_attention.triton_decode import LOG2_E, sink_stride
from megatron_hybrid.kernels.paged_attention.triton_kv_tiles import has_whole_tiles, tiles_of
from megatron_hybrid.kernels.paged_attention.triton_split_kernels import (
    decode_kernel,
    join_kernel,
    prompt_kernel,
)

# Other numbers give other bits.
KEYS = 64  # of a tile, in 16 bits
SPLIT = 512  # keys

_NO_LIMIT = 1 << 30
# Of layers with a sliding window, whose sequences begin anywhere on the grid of tiles: all keys.
_WINDOW_SPLIT = 1 << 30
# Programs a multiprocessor that decodes are given at most, about as many as run at once: in a graph
# most may find nothing to do.
_PROGRAMS = 4
_JOINED_ROWS = 4  # of a program
_BYTES_AHEAD = 64 << 10  # of keys and values, on their way to a program of decodes
_FEW_DECODES = 4  # whose programs have a multiprocessor each, and so twice as much on its way


class Tile(NamedTuple):
    """How a program computes; bits don't depend on it."""

    rows: int  # of the queries' heads; a power of 2, 16 or more
    warps: int
    stages: int  # tiles of keys and values that are loaded or used at the same time
    described: bool = False  # by tensor descriptors (TMA), where blocks are whole tiles
    registers: int | None = None  # of a thread at most; None: the compiler's choice

    @property
    def options(self) -> dict[str, int]:
        """Of a launch."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, **limit}


def tile_of_keys(shape: AttentionShape) -> int:
    """Keys of a tile. Bits depend on it, so nothing may count that differs from step to step."""
    if shape.dtype == torch.float32:  # whose products a thread writes out
        return 32 if shape.head_dim <= 128 else 16
    return KEYS


def prompt_tile(shape: AttentionShape) -> Tile:
    """By default."""
    dims = next_power_of_2(shape.head_dim)
    if shape.dtype == torch.float32:
        return Tile(32 if dims <= 128 else 16, 4 if dims <= 64 else 8, 2)
    if shape.relative:  # whose biases take registers, too
        return Tile(64, 4, 2, described=True)
    return Tile(128, 8, 3 if dims <= 128 else 2, described=True)


def decode_tile(shape: AttentionShape, longest: int, decodes: int, device: torch.device) -> Tile:
    """By default, for so many sequences of up to `longest` queries."""
    dims = next_power_of_2(shape.head_dim)
    rows = next_power_of_2(longest * (shape.heads // shape.kv_heads))
    rows = min(max(rows, 16), 64 if shape.dtype != torch.float32 else 16)
    tile_bytes = 2 * tile_of_keys(shape) * dims * shape.kv_dtype.itemsize
    # of so many stages one less is loaded ahead
    ahead = 2 * _BYTES_AHEAD if decodes <= _FEW_DECODES else _BYTES_AHEAD
    stages = min(max(ahead // tile_bytes + 1, 2), 5)
    return Tile(rows, 4 if dims <= 128 else 8, stages_that_fit(stages, tile_bytes, device))


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """Of a step, the same for every layer: the step as it came, and sizes of launches."""

    paged: PagedSequences
    shape: AttentionShape
    longest: int  # queries of a decode, or more
    items: int  # splits of all decodes, or more
    joins: bool  # some decode may have more than one split
    prompt_tokens: int  # or more

    @property
    def kv_slot(self) -> Tensor:
        """[tokens]: where each token's key and value go."""
        return self.paged.kv_slot


class SplitAttention:
    """An Attention that keeps nothing between steps and may be captured in a CUDA graph."""

    def __init__(
        self,
        keys: int | None = None,
        split: int = SPLIT,
        workspace_bytes: int = 64 << 20,
        prompts: Tile | None = None,
        decodes: Tile | None = None,
    ) -> None:
        """`keys` (None: tile_of_keys), `split`: bits depend on them. `workspace_bytes`: for the
        results of splits; decodes that find no room are computed by one program a KV head each.
        `prompts`, `decodes`: see Tile."""
        assert split % (keys or KEYS) == 0
        self._keys, self._split = keys, split
        self._workspace_bytes = workspace_bytes
        self._prompts, self._decodes = prompts, decodes

    def plan(self, paged: PagedSequences, shape: AttentionShape) -> SplitPlan:
        """As in Attention."""
        host, decodes, tokens = paged.host, paged.num_decodes, len(paged.kv_slot)
        split = self._split_of(shape)
        longest = max(paged.longest_run, 1)
        if paged.static:
            blocks = len(paged.kv_indices)
            joins = blocks * shape.block_size > split
            prompt_tokens = tokens if paged.longest_run else tokens - decodes
        else:
            queries = host.cu_seqlens[1 : decodes + 1] - host.cu_seqlens[:decodes]
            longest = max(longest, int(queries.max(initial=1)))
            blocks = int(host.kv_indptr[decodes])
            keys = int(host.kv_length[:decodes].max(initial=0)) - shape.first_position
            joins = keys > split
            prompt_tokens = int(host.cu_seqlens[-1] - host.cu_seqlens[decodes])
        items = blocks * shape.block_size // split + decodes
        return SplitPlan(paged, shape, longest, items, joins, prompt_tokens)

    def most_captured(self, shape: AttentionShape, prompts: int) -> int:
        """No limit: a grid is as large as it has to be for so many tokens."""
        return _NO_LIMIT

    def append(self, key: Tensor, value: Tensor, cache: KVCache, plan: SplitPlan) -> None:
        """As in Attention."""
        store_kv(key, value, cache, plan.kv_slot)

    def attend(
        self,
        query: Tensor,
        cache: KVCache,
        plan: SplitPlan,
        bias: RelativeBias | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """As in Attention; heads may be strided, too."""
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        decodes = plan.paged.num_decodes
        if decodes:
            self._attend_decodes(query, cache, plan, output, bias, sinks)
        if len(plan.paged.kv_length) > decodes and plan.prompt_tokens:
            self._attend_prompts(query, cache, plan, output, bias, sinks)
        return output

    copy_tokens = staticmethod(reference.copy_tokens)

    def _attend_decodes(
        self,
        query: Tensor,
        cache: KVCache,
        plan: SplitPlan,
        output: Tensor,
        bias: RelativeBias | None,
        sinks: Tensor | None,
    ) -> None:
        paged, shape = plan.paged, plan.shape
        heads, kv_heads, head_dim = shape.heads, shape.kv_heads, shape.head_dim
        count, device = paged.num_decodes, query.device
        tile = self._decodes or decode_tile(shape, plan.longest, count, device)
        places = plan.longest * heads // kv_heads
        room = 0
        if plan.joins:
            room = self._workspace_bytes // (4 * plan.longest * heads * (head_dim + 2))
            room = min(room, plan.items)
        size = room, heads * plan.longest
        parts = query.new_empty((*size, head_dim), dtype=torch.float32)
        sums = query.new_empty((*size, 2), dtype=torch.float32)
        programs = plan.items * kv_heads * cdiv(places, tile.rows)
        programs = min(programs, _PROGRAMS * processors(device))
        keys, constants = self._keys_of(shape), self._constants(shape)
        relative = BiasArguments.of(bias, tile.rows, heads // kv_heads, keys)
        decode_kernel[(programs,)](
            query, cache.key, cache.value, output, parts, sums,
            paged.cu_seqlens, paged.kv_length, paged.kv_indptr, paged.kv_indices,
            shape.scale * cache.k_scale * LOG2_E, cache.v_scale, *query.stride()[:2],
            *relative[:4], sinks, sink_stride(sinks), count, room, places, kv_heads,
            KEYS=keys, WHOLE=has_whole_tiles(shape, keys), ROWS=tile.rows, STAGES=tile.stages,
            **tile.options, **constants, SPAN=relative.span, **relative.constants, **OPTIONS,
        )  # fmt: skip
        if room:
            join_kernel[(count, cdiv(heads * plan.longest, _JOINED_ROWS))](
                output, parts, sums, paged.cu_seqlens, paged.kv_length, paged.kv_indptr,
                cache.v_scale, sinks, sink_stride(sinks), room, places, kv_heads,
                ROWS=_JOINED_ROWS, num_warps=4, **constants, **OPTIONS,
            )  # fmt: skip

    def _attend_prompts(
        self,
        query: Tensor,
        cache: KVCache,
        plan: SplitPlan,
        output: Tensor,
        bias: RelativeBias | None,
        sinks: Tensor | None,
    ) -> None:
        paged, shape = plan.paged, plan.shape
        tile = self._prompts or prompt_tile(shape)
        decodes, sequences = paged.num_decodes, len(paged.kv_length) - paged.num_decodes
        group = shape.heads // shape.kv_heads
        keys, constants = self._keys_of(shape), self._constants(shape)
        whole = has_whole_tiles(shape, keys)
        key_tiles = value_tiles = None
        if tile.described and whole and constants["DIMS"] == shape.head_dim:
            key_tiles, value_tiles = tiles_of(cache.key, keys), tiles_of(cache.value, keys)
        relative = BiasArguments.of(bias, tile.rows, group, keys)
        tiles = plan.prompt_tokens * group // tile.rows + sequences
        prompt_kernel[(tiles * shape.kv_heads,)](
            query, cache.key, cache.value, key_tiles, value_tiles, output,
            paged.cu_seqlens, paged.kv_length, paged.kv_indptr, paged.kv_indices,
            shape.scale * cache.k_scale * LOG2_E, cache.v_scale, *query.stride()[:2],
            *relative[:4], sinks, sink_stride(sinks), decodes, sequences, shape.kv_heads,
            KEYS=keys, WHOLE=whole, ROWS=tile.rows, STAGES=tile.stages,
            MASKED_STAGES=min(tile.stages, 2), SPAN=relative.span,
            **tile.options, **constants, **relative.constants,
        )  # fmt: skip

    def _split_of(self, shape: AttentionShape) -> int:
        return _WINDOW_SPLIT if shape.window else self._split

    def _keys_of(self, shape: AttentionShape) -> int:
        return self._keys or tile_of_keys(shape)

    def _constants(self, shape: AttentionShape) -> dict[str, int]:
        """Of all kernels."""
        return {
            "GROUP": shape.heads // shape.kv_heads,
            "SPLIT": self._split_of(shape),
            "HEAD_DIM": shape.head_dim,
            "DIMS": max(next_power_of_2(shape.head_dim), 16),
            "BLOCK_SIZE": shape.block_size,
            "FIRST": shape.first_position,
            "WINDOW": shape.window,
        }
