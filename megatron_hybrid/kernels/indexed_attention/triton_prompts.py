"""What is launched for the prompts of a step, whose neighbouring tokens are computed together: see
triton.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import AttentionShape, IndexShape, KVCache, PagedSequences
from megatron_hybrid.kernels.dependent_launch import OPTIONS
from megatron_hybrid.kernels.devices import processors
from megatron_hybrid.kernels.indexed_attention.triton_prompt_kernels import (
    attend_tiles_kernel,
    score_tiles_kernel,
    share_kernel,
)
from megatron_hybrid.kernels.latent_attention import triton_expanded as expanded
from megatron_hybrid.kernels.latent_attention.triton import LatentPlan
from megatron_hybrid.kernels.launching import are_compiled_ahead, cdiv, next_power_of_2
from megatron_hybrid.kernels.paged_attention.triton_decode import LOG2_E
from megatron_hybrid.kernels.protocols import Plan

_LEAST_TOKENS = 16  # of a prompt, on average: for less a tile has too little to share
_MOST_QUERIES = 31  # of a tile: bits of a number but its sign
_LISTED = 1024  # groups at a time
# Keys that a query of latents could see, on average, up to which each head's keys are made, and
# those that were not chosen are hidden.
HIDDEN_UP_TO = 8192


class Tile(NamedTuple):
    """Of attention to what is chosen."""

    rows: int  # heads
    warps: int
    keys: int
    stages: int


class Prompts(NamedTuple):
    """The last tokens of a step."""

    first: int  # token
    queries: int  # of a tile of attention; 1: each token is attended for alone
    by_heads: expanded.Prompts | None  # not None: by each head's keys, of which some are hidden


class Shared(NamedTuple):
    """What the tokens of tiles see: see triton_prompt_kernels.py."""

    entries: Tensor  # [tiles, 2, entries] int32
    counts: Tensor  # [tiles, 2] int32


@dataclass(slots=True)
class IndexedPlan:
    """Of a step, the same for every layer."""

    every: Plan
    paged: PagedSequences
    shape: AttentionShape
    index: IndexShape
    room: int  # groups of the longest sequence, or more
    prompts: Prompts | None  # None: there are none, or it is not for them
    chosen: Tensor | None = None  # [tokens, index.chosen] int32; None: all is seen
    bits: Tensor | None = None  # [tokens of prompts, words] int32, where they are attended by heads
    shared: Shared | None = None

    def score_constants(self, cache: KVCache) -> dict[str, int]:
        """Of the kernels that score groups."""
        index = self.index
        assert cache.index is not None
        return {
            "GROUP": index.group,
            "CHOSEN": index.chosen,
            "HEADS": index.heads,
            "DIM": index.dim,
            "DIMS": max(next_power_of_2(index.dim), 16),
            "WIDTH": cache.index.shape[2],
            "BLOCK_SIZE": self.shape.block_size,
        }


def prompts_of(
    paged: PagedSequences, shape: AttentionShape, tile: Tile, every: Plan
) -> Prompts | None:
    """Those of a step that may depend on what the host knows of it, if they are long enough."""
    first, host, index = paged.num_decodes, paged.host, shape.index
    assert index is not None
    queries = np.diff(host.cu_seqlens[first:]).astype(np.int64)
    tokens = int(queries.sum())
    if paged.static or not tokens or tokens < _LEAST_TOKENS * np.count_nonzero(queries):
        return None
    begin = int(host.cu_seqlens[first])
    pairs = int((queries * (host.kv_length[first:] - queries // 2)).sum())
    by_heads = every.prompts if isinstance(every, LatentPlan) else None
    if pairs <= HIDDEN_UP_TO * tokens and by_heads and expanded.Chosen.takes(index.group):
        return Prompts(begin, 1, by_heads)
    shared = min(tile.rows // (shape.heads // shape.kv_heads), _MOST_QUERIES)
    programs = tokens // max(shared, 1) * shape.kv_heads
    # Few tokens' keys are split over programs instead.
    if programs < processors(paged.kv_slot.device) and not are_compiled_ahead():
        shared = 1
    return Prompts(begin, max(shared, 1), None)


def score_tiles(
    query: Tensor,
    weights: Tensor | None,
    cache: KVCache,
    plan: IndexedPlan,
    scores: Tensor,
    first: int,
    rows: int,
) -> None:
    """Scores [>= rows, room] of so many tokens of the prompts, from `first` on."""
    paged = plan.paged
    tokens, groups = (64, 128) if query.dtype != torch.float32 else (16, 64)
    score_tiles_kernel[(cdiv(rows, tokens), cdiv(plan.room, groups))](
        query, weights, cache.index, scores, paged.cu_seqlens, paged.kv_length,
        paged.kv_indptr, paged.kv_indices, first, rows, len(paged.kv_length), scores.shape[1],
        0 if weights is None else weights.stride(0), query.stride(0),
        **plan.score_constants(cache), TOKENS=tokens, GROUPS=groups, STAGES=2, num_warps=4,
        **OPTIONS,
    )  # fmt: skip


def share(bits: Tensor, plan: IndexedPlan, prompts: Prompts, first: int, rows: int) -> None:
    """Fills what the tiles of so many tokens, from `first` on, have of plan.shared; bits [>= rows,
    words]: what each token has chosen."""
    index, paged, shared = plan.index, plan.paged, plan.shared
    assert shared is not None
    share_kernel[(cdiv(rows, prompts.queries),)](
        bits, *shared, paged.cu_seqlens, paged.kv_length, paged.kv_indptr, paged.kv_indices,
        first, rows, len(paged.kv_length), bits.shape[1],
        (first - prompts.first) // prompts.queries,
        GROUP=index.group, CHOSEN=index.chosen, BLOCK_SIZE=plan.shape.block_size,
        QUERIES=prompts.queries, MEMBERS=next_power_of_2(index.group), BLOCK=_LISTED, num_warps=4,
        **OPTIONS,
    )  # fmt: skip


def room_to_share(plan: IndexedPlan, prompts: Prompts, tokens: int) -> Shared:
    """For so many tokens."""
    index, tiles = plan.index, cdiv(tokens, prompts.queries)
    entries = prompts.queries * (index.chosen + index.group)
    empty = plan.paged.kv_slot.new_empty
    return Shared(
        empty((tiles, 2, entries), dtype=torch.int32), empty((tiles, 2), dtype=torch.int32)
    )


def attend_tiles(
    query: Tensor,
    cache: KVCache,
    plan: IndexedPlan,
    prompts: Prompts,
    tile: Tile,
    output: Tensor,
) -> None:
    """query -> output [tokens of the step, heads, head_dim], of the prompts."""
    shape, index, shared = plan.shape, plan.index, plan.shared
    assert shared is not None
    attend_tiles_kernel[(len(shared.counts) * shape.kv_heads,)](
        query, cache.key, None if shape.value_dim is not None else cache.value, output,
        *shared, shape.scale * cache.k_scale * LOG2_E, cache.v_scale, *query.stride()[:2],
        prompts.first, len(query), shape.kv_heads,
        GROUP=index.group, CHOSEN=index.chosen, HEADS=shape.heads // shape.kv_heads,
        HEAD_DIM=shape.head_dim, DIMS=max(next_power_of_2(shape.head_dim), 16),
        QUERIES=prompts.queries, ROWS=tile.rows, KEYS=tile.keys, STAGES=tile.stages,
        num_warps=tile.warps, **OPTIONS,
    )  # fmt: skip
