"""Multi-head latent attention in Triton: one cached latent a token is the key and the value of all
heads, whose own weights are multiplied with the queries before, and with the results behind it.

Decodes are cut into splits of keys, prompts into tiles of queries; a row is a head of a query. What
programs do, and how they find it, is as in paged_attention/triton_by_split.py, with which this has
its plan in common. Splits are cut in one of two ways:

- By what is to do: splits of all sequences are of one length, so many that the device is busy. A
  row's results come about in one piece otherwise.
- In batch-invariant mode always after so many keys, and a row's results are those of its splits,
  put together in their order, whoever computes them: see triton_by_split.py for why bits then
  depend on nothing else. So a prompt's program has results of two kinds, in registers: half as many
  rows.

Outside of batch-invariant mode long prompts are computed by keys and values of each head instead
(triton_expanded.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import FP8, AttentionShape, KVCache, PagedSequences
from megatron_hybrid.kernels.dependent_launch import OPTIONS
from megatron_hybrid.kernels.devices import processors, stages_that_fit
from megatron_hybrid.kernels.latent_attention import triton_expanded as expanded
from megatron_hybrid.kernels.latent_attention.protocol import LatentNorm, LatentWeights
from megatron_hybrid.kernels.latent_attention.triton_prepare import by_head, store_latents
from megatron_hybrid.kernels.latent_attention.triton_split_kernels import (
    decode_kernel,
    join_kernel,
    prompt_kernel,
)
from megatron_hybrid.kernels.launching import cdiv, next_power_of_2
from megatron_hybrid.kernels.paged_attention.triton_by_split import (
    SPLIT,
    SplitAttention,
    SplitPlan,
    Tile,
)
from megatron_hybrid.kernels.paged_attention.triton_decode import LOG2_E

_LEAST_SPLIT = 128  # keys: fewer are read as fast as a split's results are written and read
_KEYS_A_ROW = 4  # and so many for each row that a split has results of
_ITEMS = 4  # splits that a multiprocessor is to have, of many sequences
_FEW = 8  # sequences: their splits are so many that each multiprocessor has one
_WIDE = 64  # rows of Hopper's wider products
_ROWS, _KEYS = 32, 64  # of a tile of decodes
_REGISTERS = 1 << 16  # of a multiprocessor
_JOINED_ROWS, _JOINED_DIMS = 2, 128  # of a program
_JOINED_SPLITS = 32, 8  # at the same time, of few sequences and of many


def default_tile(shape: AttentionShape, folds: bool, device: torch.device) -> tuple[int, Tile]:
    """Keys of a tile, and how programs compute them. Where it folds, bits depend on the keys: there
    nothing may count that differs from step to step, or between devices."""
    # Of loops that make numbers of FP8 ones, ptxas 12.8 keeps most in memory, in 32 registers a
    # thread, unless it is told that there are more.
    limit = 255 if shape.kv_dtype.itemsize == 1 else None
    if shape.dtype == torch.float32:
        return 16, Tile(16, 8, 2, registers=limit)
    row = shape.head_dim * shape.dtype.itemsize
    if folds:
        tile_bytes = 32 * shape.head_dim * shape.kv_dtype.itemsize
        stages = stages_that_fit(3, tile_bytes + 32 * row // 3, device)
        return 32, Tile(32, 8, stages, registers=limit)
    if shape.kv_dtype.itemsize == 1 and stages_that_fit(2, 96 * row, device) == 2:
        # Keys are made numbers of the products once, on their way to shared memory, from where
        # products of 64 rows take them; each warp would make them for itself for those of fewer.
        return 64, Tile(_WIDE, 8, 2)
    if stages_that_fit(2, 64 * row, device) == 2:
        return 64, Tile(32, 8, 1 + stages_that_fit(2, 80 * row, device))
    return 32, Tile(32, 8, 2)


def decode_tile(shape: AttentionShape, device: torch.device) -> tuple[int, Tile]:
    """As default_tile, for decodes outside of batch-invariant mode: of four warps, so that queries
    are read from shared memory by few of them, and two programs on each multiprocessor, one of
    which computes while the other waits."""
    if shape.dtype != torch.float32:
        assert shape.value_dim is not None
        dims = _padded(shape.value_dim) + _padded(shape.head_dim - shape.value_dim)
        rows = _ROWS * (dims + _KEYS) * shape.dtype.itemsize  # of queries and of weights
        for stages in (3, 2):
            ahead = (stages - 1) * _KEYS * dims * shape.kv_dtype.itemsize
            if stages_that_fit(2, rows + ahead, device) == 2:
                return _KEYS, Tile(_ROWS, 4, stages)
    return default_tile(shape, False, device)


def _padded(dims: int) -> int:
    """Columns of a tile with so many numbers."""
    return max(next_power_of_2(dims), 16)


def _programs_at_once(tile: Tile) -> int:
    """On a multiprocessor, by their registers."""
    return max(1, _REGISTERS // (32 * tile.warps * (tile.registers or 256)))


def _is_read_by_pairs(shape: AttentionShape) -> bool:
    """Whether decodes read two FP8 numbers as one of 16 bits: see triton_decode."""
    assert shape.value_dim is not None
    is_even = shape.value_dim % 2 == shape.head_dim % 2 == 0
    return shape.kv_dtype == FP8 and shape.dtype != torch.float32 and is_even


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """Of a step, the same for every layer."""

    inner: SplitPlan
    wanted: int  # splits of all decodes, about
    prompts: expanded.Prompts | None = None  # that are computed by keys and values of each head
    few: LatentPlan | None = None  # of prompts with so few queries that they are cut by keys, too

    @property
    def kv_slot(self) -> Tensor:
        """[tokens]: where each token's latent goes."""
        return self.inner.kv_slot


class TritonLatentAttention:
    """A LatentAttention that keeps nothing between steps and may be captured in a CUDA graph."""

    def __init__(
        self,
        batch_invariant: bool = False,
        *,
        keys: int | None = None,
        split: int | None = None,
        workspace_bytes: int = 64 << 20,
        prompts: Tile | None = None,
        decodes: Tile | None = None,
    ) -> None:
        """`keys` (None: default_tile's), `split` (keys of a split, or in another mode the least of
        them): bits depend on them. `workspace_bytes`: for the results of splits; decodes that find
        no room are computed by one program each. `prompts`, `decodes`: see Tile."""
        self._folds = batch_invariant
        self._split = split or (SPLIT if batch_invariant else _LEAST_SPLIT)
        self._keys = keys
        self._planner = SplitAttention(keys, self._split)
        self._workspace_bytes = workspace_bytes
        self._prompts, self._decodes = prompts, decodes

    def plan(self, paged: PagedSequences, shape: AttentionShape) -> LatentPlan:
        """As in LatentAttention."""
        wanted = processors(paged.kv_slot.device)
        if paged.num_decodes > _FEW:
            wanted *= _ITEMS
        else:  # the last of each sequence may be one more
            wanted = max(wanted - paged.num_decodes, 1)
        inner = self._planner.plan(paged, shape)
        prompts = None if self._folds else expanded.long_prompts(paged, shape)
        few = self._few_queries(paged, shape) if prompts is None else None
        return LatentPlan(inner, wanted, prompts, few)

    def _few_queries(self, paged: PagedSequences, shape: AttentionShape) -> LatentPlan | None:
        """Of the prompts as if they were decodes, if most multiprocessors had no tile of theirs."""
        first, device = paged.num_decodes, paged.kv_slot.device
        count = len(paged.kv_length) - first
        if paged.static or not count:
            return None
        _, tile = self._tile(shape, device)
        queries = np.diff(paged.host.cu_seqlens[first:])
        tiles = int((-(-queries * shape.heads // tile.rows)).sum())
        if not 0 < 2 * tiles <= processors(device):
            return None
        own = paged.behind(first)
        wanted = max(processors(device) * count // tiles, count)
        return LatentPlan(self._planner.plan(replace(own, num_decodes=count), shape), wanted)

    def most_captured(self, shape: AttentionShape, prompts: int) -> int:
        """As in LatentAttention."""
        return self._planner.most_captured(shape, prompts)

    def prepare(
        self,
        query: Tensor,
        latent: Tensor,
        norm: LatentNorm,
        rotation: Tensor | None,
        interleaved: bool,
        cache: KVCache,
        plan: LatentPlan,
    ) -> Tensor:
        """As in LatentAttention."""
        store_latents(query, latent, norm, rotation, interleaved, cache, plan.kv_slot)
        return query

    def attend(
        self, query: Tensor, weights: LatentWeights, cache: KVCache, plan: LatentPlan
    ) -> Tensor:
        """As in LatentAttention."""
        paged, shape, prompts = plan.inner.paged, plan.inner.shape, plan.prompts
        if prompts is None or not expanded.fits(weights, shape):
            return self._absorbed(query, weights, cache, plan)
        output = query.new_empty(*query.shape[:2], weights.value.shape[1])
        if paged.num_decodes:
            tokens = int(paged.host.cu_seqlens[paged.num_decodes])
            output[:tokens] = self._absorbed(query[:tokens], weights, cache, plan, of_prompts=False)
        expanded.attend(query, weights, cache, paged, shape, prompts, output)
        return output

    def _absorbed(
        self,
        query: Tensor,
        weights: LatentWeights,
        cache: KVCache,
        plan: LatentPlan,
        of_prompts: bool = True,
    ) -> Tensor:
        """By latents alone; of all tokens, or of the decodes', which come first."""
        nope = weights.nope
        absorbed = by_head(query[..., :nope], weights.key.transpose(1, 2))
        turned = query[..., nope:]
        latents = torch.empty_like(absorbed)
        inner = plan.inner
        decodes = inner.paged.num_decodes
        if decodes:
            self._attend_decodes(absorbed, turned, cache, plan, latents)
        if of_prompts and plan.few is not None:
            self._attend_decodes(absorbed, turned, cache, plan.few, latents)
        elif of_prompts and len(inner.paged.kv_length) > decodes and inner.prompt_tokens:
            self._attend_prompts(absorbed, turned, cache, inner, latents)
        return by_head(latents, weights.value)

    def _attend_decodes(
        self, query: Tensor, turned: Tensor, cache: KVCache, plan: LatentPlan, output: Tensor
    ) -> None:
        inner = plan.inner
        paged, shape, longest = inner.paged, inner.shape, inner.longest
        count, device, latent = paged.num_decodes, query.device, query.shape[2]
        places = longest * shape.heads
        pairs = not self._folds and _is_read_by_pairs(shape)
        one_loop = pairs or (not self._folds and count > _FEW)
        keys, tile = self._decode_tile(shape, places, one_loop, count, device)
        items = inner.items if self._folds else min(inner.items, plan.wanted + count)
        room = min(self._workspace_bytes // (4 * places * (latent + 2)), items * inner.joins)
        parts = query.new_empty((room, places, latent), dtype=torch.float32)
        sums = query.new_empty((room, places, 2), dtype=torch.float32)
        constants = self._constants(shape, keys)
        split = self._split
        if not self._folds:
            split = cdiv(max(split, _KEYS_A_ROW * places), keys) * keys
        sizes = count, room, places, split, plan.wanted
        programs = items * cdiv(places, tile.rows)
        programs = min(programs, processors(device) * _programs_at_once(tile))
        latents = cache.key.view(torch.int16) if pairs else cache.key
        decode_kernel[(programs,)](
            query, turned, latents, output, parts, sums,
            paged.cu_seqlens, paged.kv_length, paged.kv_indptr, paged.kv_indices,
            shape.scale * cache.k_scale * LOG2_E, cache.k_scale, *turned.stride()[:2], *sizes,
            **constants, **self._inner(shape, keys), ROWS=tile.rows, STAGES=tile.stages,
            ONE_LOOP=one_loop, PAIRS=pairs, **tile.options, **OPTIONS,
        )  # fmt: skip
        if room:
            part = min(constants.pop("DIMS"), _JOINED_DIMS if count <= _FEW else 512)
            rows = 1 if one_loop else _JOINED_ROWS
            at_once = _JOINED_SPLITS[count > _FEW] if one_loop else 0
            grid = count, cdiv(places, rows), cdiv(latent, part)
            join_kernel[grid](
                output, parts, sums, paged.cu_seqlens, paged.kv_length, paged.kv_indptr,
                cache.k_scale, *sizes, **constants, ROWS=rows, PART=part,
                SPLITS=at_once, num_warps=4, **OPTIONS,
            )  # fmt: skip

    def _attend_prompts(
        self, query: Tensor, turned: Tensor, cache: KVCache, plan: SplitPlan, output: Tensor
    ) -> None:
        paged, shape = plan.paged, plan.shape
        keys, tile = self._tile(shape, query.device)
        tile = self._prompts or tile
        decodes, sequences = paged.num_decodes, len(paged.kv_length) - paged.num_decodes
        tiles = plan.prompt_tokens * shape.heads // tile.rows + sequences
        prompt_kernel[(tiles,)](
            query, turned, cache.key, output,
            paged.cu_seqlens, paged.kv_length, paged.kv_indptr, paged.kv_indices,
            shape.scale * cache.k_scale * LOG2_E, cache.k_scale, *turned.stride()[:2],
            decodes, sequences, self._split,
            **self._constants(shape, keys), **self._inner(shape, keys),
            ROWS=tile.rows, STAGES=tile.stages, **tile.options,
        )  # fmt: skip

    def _tile(self, shape: AttentionShape, device: torch.device) -> tuple[int, Tile]:
        keys, tile = default_tile(shape, self._folds, device)
        return self._keys or keys, tile

    def _decode_tile(
        self, shape: AttentionShape, places: int, one_loop: bool, count: int, device: torch.device
    ) -> tuple[int, Tile]:
        """For decodes of so many rows each, of `count` sequences."""
        if one_loop:
            own, tile = decode_tile(shape, device)
            if count <= _FEW:  # what one program takes for a tile counts, not what all take
                tile = tile._replace(warps=8)
        else:
            own, tile = default_tile(shape, self._folds, device)
        if tile.rows < _WIDE:  # which some products need
            tile = tile._replace(rows=min(max(next_power_of_2(places), 16), tile.rows))
        return self._keys or own, self._decodes or tile

    def _constants(self, shape: AttentionShape, keys: int) -> dict[str, Any]:
        """Of all kernels but `_inner`'s."""
        assert shape.value_dim is not None
        return {
            "HEADS": shape.heads,
            "FOLDS": self._folds,
            "KEYS": keys,
            "LATENT": shape.value_dim,
            "DIMS": _padded(shape.value_dim),
            "BLOCK_SIZE": shape.block_size,
            "FIRST": shape.first_position,
        }

    def _inner(self, shape: AttentionShape, keys: int) -> dict[str, Any]:
        """Of those that read the cache."""
        assert shape.value_dim is not None
        turned = shape.head_dim - shape.value_dim
        return {
            "TURNED": turned,
            "TURNED_DIMS": _padded(turned),
            "WHOLE": shape.block_size % keys == 0 and shape.first_position % keys == 0,
        }
