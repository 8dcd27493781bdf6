"""Attention with an index in Triton.

Each token goes through what it sees by itself: its groups' scores, from the keys that the index has
of them; the choice, a list of groups in their order; and the tokens in those, whose keys and values
are gathered by the block table. The query heads of a KV head are the rows of a tile. So what is
read of a long sequence is one key a group, and no more keys and values than the budget.

Neighbouring tokens of a prompt are computed together, outside of batch-invariant mode. A tile has
as many tokens as its rows have room for, at least two; a kernel lists the groups that any of them
has chosen, with a bit for each one that has, and their keys and values are gathered once. Who
chooses alike shares all; where all choices differ, as many tokens share a key as would by chance,
in a text that is not much longer than the budget nearly all. Scores are products of tiles, too.

Where a step has few tokens, the groups of each are split over programs, and what it attends to,
too: the parts are put together by a second kernel. In batch-invariant mode the latter is not: a
token's bits are those of one program, whatever is beside it.

Where it is known on the host that no sequence exceeds the budget, all is left to attention without
an index; in batch-invariant mode it is not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import AttentionShape, KVCache, PagedSequences
from megatron_hybrid.kernels.dependent_launch import OPTIONS
from megatron_hybrid.kernels.devices import processors
from megatron_hybrid.kernels.indexed_attention.protocol import (
    GatedPool,
    IndexNorm,
    MeanPool,
    Pool,
)
from megatron_hybrid.kernels.indexed_attention.triton_attend_kernel import attend_kernel
from megatron_hybrid.kernels.indexed_attention.triton_index_kernels import (
    choose_kernel,
    score_kernel,
    store_kernel,
    turn_kernel,
)
from megatron_hybrid.kernels.indexed_attention.triton_prompts import (
    IndexedPlan,
    Tile,
    attend_tiles,
    prompts_of,
    room_to_share,
    score_tiles,
    share,
)
from megatron_hybrid.kernels.latent_attention import triton_expanded as expanded
from megatron_hybrid.kernels.latent_attention.protocol import LatentAttention, LatentWeights
from megatron_hybrid.kernels.latent_attention.triton_prepare import by_head
from megatron_hybrid.kernels.launching import are_compiled_ahead, cdiv, next_power_of_2
from megatron_hybrid.kernels.paged_attention import triton_decode
from megatron_hybrid.kernels.paged_attention.protocol import Attention
from megatron_hybrid.kernels.paged_attention.triton_decode import LOG2_E
from megatron_hybrid.kernels.protocols import Plan

_LEAST_SPLIT = 128  # keys of a part
_PROGRAMS = 4  # of a multiprocessor
_GROUPS = 64  # of a tile
# Groups whose scores are kept in registers, and by how many warps; of texts of any length.
_CHOICES = {2048: 2, 8192: 8, 16384: 16}
_SCORES = 1 << 24  # numbers: of as many tokens as are chosen for at once


class TritonIndexedAttention:
    """An IndexedAttention that keeps nothing between steps and may be captured in a CUDA graph."""

    def __init__(
        self,
        attention: Attention,
        latent_attention: LatentAttention,
        batch_invariant: bool = False,
        *,
        scores: int = _SCORES,
        prompts: Tile | None = None,
    ) -> None:
        """`attention`, `latent_attention`: without an index. `scores`: as many are kept at once.
        `prompts`: how their tiles are computed (None: as suits the shape)."""
        self._attention, self._latent_attention = attention, latent_attention
        self._splits = not batch_invariant  # what is beside a token may count
        self._scores, self._prompts = scores, prompts

    def plan(self, paged: PagedSequences, shape: AttentionShape, every: Plan) -> IndexedPlan:
        """As in IndexedAttention."""
        index = shape.index
        assert index is not None and not shape.window and not shape.first_position
        assert shape.value_dim in (None, shape.head_dim), "nothing behind a latent is rotated"
        longest = int(paged.host.kv_length.max(initial=1))
        if paged.static:
            longest = (paged.most_blocks or len(paged.kv_indices)) * shape.block_size
        prompts = None
        if self._splits:
            prompts = prompts_of(paged, shape, self._prompt_tile(shape), every)
        return IndexedPlan(every, paged, shape, index, longest // index.group, prompts)

    def turn(self, query: Tensor, norm: IndexNorm, positions: Tensor) -> Tensor:
        """As in IndexedAttention."""
        tokens, heads, dim = query.shape
        output = query.new_empty(query.shape)
        if tokens:
            turn_kernel[(tokens,)](
                query, norm.weight, norm.frequencies, positions, output, *query.stride()[:2],
                norm.eps, HEADS=heads, DIM=dim, HALF=len(norm.frequencies),
                ROWS=next_power_of_2(heads), DIMS=next_power_of_2(dim), num_warps=4, **OPTIONS,
            )  # fmt: skip
        return output

    def store(
        self, entries: Tensor, pool: Pool, positions: Tensor, cache: KVCache, plan: IndexedPlan
    ) -> None:
        """As in IndexedAttention."""
        assert cache.index is not None
        index, width = plan.index, entries.shape[1]
        norm = pool.norm if isinstance(pool, MeanPool) else None
        if len(entries):
            store_kernel[(len(entries),)](
                entries, cache.index, plan.paged.kv_slot,
                None if norm is None else norm.weight, 0.0 if norm is None else norm.eps,
                None if norm is None else norm.frequencies,
                pool.bias if isinstance(pool, GatedPool) else None, positions, entries.stride(0),
                GROUP=index.group, DIM=index.dim, WIDTH=width,
                HALF=0 if norm is None else len(norm.frequencies),
                MEMBERS=next_power_of_2(index.group), DIMS=next_power_of_2(index.dim),
                BLOCK=next_power_of_2(width), num_warps=4, **OPTIONS,
            )  # fmt: skip

    def select(
        self, query: Tensor, weights: Tensor | None, cache: KVCache, plan: IndexedPlan
    ) -> None:
        """As in IndexedAttention."""
        assert cache.index is not None
        index, tokens = plan.index, len(query)
        plan.chosen = plan.bits = plan.shared = None
        fits = self._splits and plan.room <= index.chosen and not are_compiled_ahead()
        if not tokens or fits:
            return
        plan.chosen = torch.empty((tokens, index.chosen), dtype=torch.int32, device=query.device)
        query, prompts = query.contiguous(), plan.prompts
        alone = tokens if prompts is None else prompts.first
        most = min(max(self._scores // max(plan.room, 1), 1), tokens)
        if prompts is not None:
            most = cdiv(most, prompts.queries) * prompts.queries
        columns = cdiv(max(plan.room, 1), 4) * 4  # that rows begin where vectors may
        scores = torch.empty((most, columns), dtype=torch.float32, device=query.device)
        for first in range(0, alone, most):
            rows = min(most, alone - first)
            self._score(query, weights, cache, plan, scores, first, rows)
            self._choose(scores, None, plan, first, rows)
        if prompts is None:
            return
        bits, words = None, plan.room // 32 + 1
        if prompts.by_heads is not None:
            plan.bits = bits = scores.new_empty((tokens - alone, words), dtype=torch.int32)
        elif prompts.queries > 1:
            bits = scores.new_empty((most, words), dtype=torch.int32)
            plan.shared = room_to_share(plan, prompts, tokens - alone)
        for first in range(alone, tokens, most):
            rows = min(most, tokens - first)
            own = bits if plan.bits is None else plan.bits[first - alone :]
            score_tiles(query, weights, cache, plan, scores, first, rows)
            self._choose(scores, own, plan, first, rows)
            if plan.shared is not None and own is not None:
                share(own, plan, prompts, first, rows)

    def _score(
        self,
        query: Tensor,
        weights: Tensor | None,
        cache: KVCache,
        plan: IndexedPlan,
        scores: Tensor,
        first: int,
        rows: int,
    ) -> None:
        """Of so many tokens from `first` on, each by itself."""
        paged = plan.paged
        programs = _PROGRAMS * processors(query.device) // rows
        parts = max(1, min(programs, cdiv(plan.room, _GROUPS)))
        score_kernel[(rows, parts)](
            query, weights, cache.index, scores, paged.cu_seqlens, paged.kv_length,
            paged.kv_indptr, paged.kv_indices, first, len(paged.kv_length), scores.shape[1],
            0 if weights is None else weights.stride(0), query.stride(0),
            **plan.score_constants(cache), ROWS=max(next_power_of_2(plan.index.heads), 16),
            GROUPS=_GROUPS, STAGES=2, num_warps=4, **OPTIONS,
        )  # fmt: skip

    def _choose(
        self, scores: Tensor, bits: Tensor | None, plan: IndexedPlan, first: int, rows: int
    ) -> None:
        index, paged = plan.index, plan.paged
        fitting = [size for size in _CHOICES if size >= plan.room] or [max(_CHOICES)]
        for block in _CHOICES if are_compiled_ahead() else fitting[:1]:
            choose_kernel[(rows,)](
                scores, plan.chosen, bits, paged.cu_seqlens, paged.kv_length, first,
                len(paged.kv_length), scores.shape[1], 0 if bits is None else bits.shape[1],
                GROUP=index.group, CHOSEN=index.chosen, BLOCK=block,
                FEW=min(block, min(_CHOICES)), num_warps=_CHOICES[block], **OPTIONS,
            )  # fmt: skip

    def attend(self, query: Tensor, cache: KVCache, plan: IndexedPlan) -> Tensor:
        """As in IndexedAttention."""
        if plan.chosen is None or are_compiled_ahead():  # as another step would ask
            every = self._attention.attend(query, cache, plan.every)
            if plan.chosen is None:
                return every
        return self._attended(query, cache, plan, plan.chosen)

    def attend_latents(
        self, query: Tensor, weights: LatentWeights, cache: KVCache, plan: IndexedPlan
    ) -> Tensor:
        """As in IndexedAttention."""
        if plan.chosen is None or are_compiled_ahead():  # as another step would ask
            every = self._latent_attention.attend(query, weights, cache, plan.every)
            if plan.chosen is None:
                return every
        prompts, shape = plan.prompts, plan.shape
        if prompts is None or plan.bits is None or not expanded.fits(weights, shape):
            return self._absorbed(query, weights, cache, plan, plan.chosen)
        assert prompts.by_heads is not None
        output = query.new_empty(*query.shape[:2], weights.value.shape[1])
        # a longer prompt takes the other one
        alone = prompts.first if not are_compiled_ahead() else len(query)
        if alone:
            output[:alone] = self._absorbed(query[:alone], weights, cache, plan, plan.chosen)
        chosen = expanded.Chosen(plan.bits, plan.index.group)
        expanded.attend(query, weights, cache, plan.paged, shape, prompts.by_heads, output, chosen)
        return output

    def _absorbed(
        self,
        query: Tensor,
        weights: LatentWeights,
        cache: KVCache,
        plan: IndexedPlan,
        chosen: Tensor,
    ) -> Tensor:
        absorbed = by_head(query, weights.key.transpose(1, 2))
        return by_head(self._attended(absorbed, cache, plan, chosen), weights.value)

    def _attended(self, query: Tensor, cache: KVCache, plan: IndexedPlan, chosen: Tensor) -> Tensor:
        tokens = len(query)
        everything = output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if plan.prompts is not None and plan.shared is not None:
            tile = self._prompt_tile(plan.shape)
            attend_tiles(query, cache, plan, plan.prompts, tile, output)
            if not are_compiled_ahead():  # a shorter prompt takes the other one
                tokens = plan.prompts.first
                query, output = query[:tokens], output[:tokens]
        if tokens:
            self._attend_alone(query, cache, plan, chosen, output)
        return everything

    def _attend_alone(
        self, query: Tensor, cache: KVCache, plan: IndexedPlan, chosen: Tensor, output: Tensor
    ) -> None:
        """Each token by itself."""
        shape, index, tokens = plan.shape, plan.index, len(query)
        heads, rows = shape.heads // shape.kv_heads, self._tile(shape).rows
        tiles = cdiv(heads, rows) * shape.kv_heads
        splits = 1
        if self._splits:
            wanted = _PROGRAMS * processors(query.device) // max(tokens * tiles, 1)
            splits = max(1, min(wanted, cdiv(index.budget + index.group, _LEAST_SPLIT)))
            splits = min(splits, triton_decode.MOST_SPLITS)
        if self._splits and are_compiled_ahead():  # a step of another size takes the other one
            self._launch(query[:1], cache, plan, chosen, output[:1], 1 if splits > 1 else 2)
        self._launch(query, cache, plan, chosen, output, splits)

    def _launch(
        self,
        query: Tensor,
        cache: KVCache,
        plan: IndexedPlan,
        chosen: Tensor,
        output: Tensor,
        splits: int,
    ) -> None:
        shape, paged, index = plan.shape, plan.paged, plan.index
        tokens, heads = len(query), shape.heads // shape.kv_heads
        rows, warps, keys, stages = self._tile(shape)
        tiles = cdiv(heads, rows) * shape.kv_heads
        parts, sums = triton_decode.parts_of(output, splits)
        attend_kernel[(tokens, tiles * splits)](
            query, cache.key, None if shape.value_dim is not None else cache.value,
            output, parts, sums, chosen,
            paged.cu_seqlens, paged.kv_length, paged.kv_indptr, paged.kv_indices,
            shape.scale * cache.k_scale * LOG2_E, cache.v_scale, *query.stride()[:2],
            len(paged.kv_length), tokens, splits, shape.kv_heads,
            GROUP=index.group, CHOSEN=index.chosen, IS_SPLIT=splits > 1, HEADS=heads,
            HEAD_DIM=shape.head_dim, DIMS=max(next_power_of_2(shape.head_dim), 16),
            BLOCK_SIZE=shape.block_size, ROWS=rows, KEYS=keys, STAGES=stages,
            AHEAD=warps > 4,  # else other programs of the multiprocessor compute meanwhile
            num_warps=warps, **OPTIONS,
        )  # fmt: skip
        triton_decode.join(output, parts, sums, paged.cu_seqlens, cache.v_scale)

    def _prompt_tile(self, shape: AttentionShape) -> Tile:
        """Of tokens that share their keys."""
        if self._prompts is not None:
            return self._prompts
        if shape.dtype == torch.float32:
            return self._tile(shape)
        if shape.head_dim > 256:
            return Tile(64, 8, 32, 2)
        return Tile(64, 4, 64 if shape.head_dim <= 128 else 32, 2)

    def _tile(self, shape: AttentionShape) -> Tile:
        """What tiles of keys and the results, in registers, have room for."""
        rows = max(next_power_of_2(shape.heads // shape.kv_heads), 16)
        if shape.dtype == torch.float32:
            return Tile(16, 4, 16 if shape.head_dim > 128 else 32, 1)
        if shape.head_dim > 256:
            return Tile(min(rows, 64), 8, 64, 2)
        return Tile(min(rows, 64), 4, 64 if shape.head_dim <= 128 else 32, 2)
