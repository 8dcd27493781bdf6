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
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import AttentionShape, KVCache, PagedSequences
from megatron_hybrid.kernels.dependent_launch import OPTIONS
from megatron_hybrid.kernels.devices import processors, stages_that_fit
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
_ITEMS = 4  # splits that a multiprocessor is to have
_JOINED_ROWS = 2  # of a program


def tile_of_keys(shape: AttentionShape) -> int:
    """Keys of a tile. Bits depend on it, so nothing may count that differs from step to step."""
    return 16 if shape.dtype == torch.float32 else 32


def prompt_tile(shape: AttentionShape, folds: bool, device: torch.device) -> Tile:
    """By default. 64 rows are the least of Hopper's wider products, whose queries lie in shared
    memory beside the tiles of keys."""
    if shape.dtype == torch.float32:
        return Tile(16, 8, 2)
    row, keys = shape.head_dim * shape.dtype.itemsize, tile_of_keys(shape)
    tile_bytes = keys * shape.head_dim * shape.kv_dtype.itemsize
    stages = stages_that_fit(3, tile_bytes + 64 * row // 3, device)
    if folds or stages == 1:
        return Tile(32, 8, stages_that_fit(3, tile_bytes + 32 * row // 3, device))
    return Tile(64, 8, stages)


def decode_tile(shape: AttentionShape, longest: int, folds: bool, device: torch.device) -> Tile:
    """By default, for sequences of up to `longest` queries: those of one with 32 heads have their
    rows to themselves, and twice as many products of half the width for it."""
    tile = prompt_tile(shape, folds, device)
    rows = max(next_power_of_2(longest * shape.heads), 16)
    return tile._replace(rows=min(rows, tile.rows))


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """Of a step, the same for every layer."""

    inner: SplitPlan
    wanted: int  # splits of all decodes, about

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
        """`keys` (None: tile_of_keys), `split` (keys of a split, or in another mode the least of
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
        wanted = _ITEMS * processors(paged.kv_slot.device)
        return LatentPlan(self._planner.plan(paged, shape), wanted)

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
        nope = weights.key.shape[1]
        absorbed = by_head(query[..., :nope], weights.key.transpose(1, 2))
        turned = query[..., nope:]
        latents = torch.empty_like(absorbed)
        inner = plan.inner
        decodes = inner.paged.num_decodes
        if decodes:
            self._attend_decodes(absorbed, turned, cache, plan, latents)
        if len(inner.paged.kv_length) > decodes and inner.prompt_tokens:
            self._attend_prompts(absorbed, turned, cache, inner, latents)
        return by_head(latents, weights.value)

    def _attend_decodes(
        self, query: Tensor, turned: Tensor, cache: KVCache, plan: LatentPlan, output: Tensor
    ) -> None:
        inner = plan.inner
        paged, shape, longest = inner.paged, inner.shape, inner.longest
        count, device, latent = paged.num_decodes, query.device, query.shape[2]
        tile = self._decodes or decode_tile(shape, longest, self._folds, device)
        places = longest * shape.heads
        items = inner.items if self._folds else min(inner.items, plan.wanted + count)
        room = min(self._workspace_bytes // (4 * places * (latent + 2)), items * inner.joins)
        parts = query.new_empty((room, places, latent), dtype=torch.float32)
        sums = query.new_empty((room, places, 2), dtype=torch.float32)
        constants = self._constants(shape)
        sizes = count, room, places, self._split, plan.wanted
        programs = min(items * cdiv(places, tile.rows), processors(device))
        decode_kernel[(programs,)](
            query, turned, cache.key, output, parts, sums,
            paged.cu_seqlens, paged.kv_length, paged.kv_indptr, paged.kv_indices,
            shape.scale * cache.k_scale * LOG2_E, cache.k_scale, *turned.stride()[:2], *sizes,
            **constants, **self._inner(shape), ROWS=tile.rows, STAGES=tile.stages,
            **tile.options, **OPTIONS,
        )  # fmt: skip
        if room:
            join_kernel[(count, cdiv(places, _JOINED_ROWS))](
                output, parts, sums, paged.cu_seqlens, paged.kv_length, paged.kv_indptr,
                cache.k_scale, *sizes, **constants, ROWS=_JOINED_ROWS, num_warps=4, **OPTIONS,
            )  # fmt: skip

    def _attend_prompts(
        self, query: Tensor, turned: Tensor, cache: KVCache, plan: SplitPlan, output: Tensor
    ) -> None:
        paged, shape = plan.paged, plan.shape
        tile = self._prompts or prompt_tile(shape, self._folds, query.device)
        decodes, sequences = paged.num_decodes, len(paged.kv_length) - paged.num_decodes
        tiles = plan.prompt_tokens * shape.heads // tile.rows + sequences
        prompt_kernel[(tiles,)](
            query, turned, cache.key, output,
            paged.cu_seqlens, paged.kv_length, paged.kv_indptr, paged.kv_indices,
            shape.scale * cache.k_scale * LOG2_E, cache.k_scale, *turned.stride()[:2],
            decodes, sequences, self._split,
            **self._constants(shape), **self._inner(shape), ROWS=tile.rows, STAGES=tile.stages,
            **tile.options,
        )  # fmt: skip

    def _constants(self, shape: AttentionShape) -> dict[str, Any]:
        """Of all kernels but `_inner`'s."""
        assert shape.value_dim is not None
        return {
            "HEADS": shape.heads,
            "FOLDS": self._folds,
            "KEYS": self._keys or tile_of_keys(shape),
            "LATENT": shape.value_dim,
            "DIMS": max(next_power_of_2(shape.value_dim), 16),
            "BLOCK_SIZE": shape.block_size,
            "FIRST": shape.first_position,
        }

    def _inner(self, shape: AttentionShape) -> dict[str, Any]:
        """Of those that read the cache."""
        assert shape.value_dim is not None
        keys, turned = self._keys or tile_of_keys(shape), shape.head_dim - shape.value_dim
        return {
            "TURNED": turned,
            "TURNED_DIMS": max(next_power_of_2(turned), 16),
            "WHOLE": shape.block_size % keys == 0 and shape.first_position % keys == 0,
        }
