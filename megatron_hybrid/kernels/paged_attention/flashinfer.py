"""Paged attention with flashinfer's kernels.

Decodes run on the tensor-core decode wrapper, which splits long KV over programs; prompts on a
prefill wrapper: on Hopper on the one that `prompts.choose` finds the fastest for the step, else on
FlashAttention 2. They are planned once a step, from the host arrays, for every layer: a plan is a
schedule that goes to the device from the wrapper's own pinned buffer (replanning.py), so a step's
plan is made only when the copies of the step before have been executed.

The fastest one for long prompts wants their keys and values in one piece. They are gathered layer
by layer into the workspace, which has nothing to keep from one kernel to the next; where they don't
fit there, FlashAttention 3 reads them from their blocks.

A CUDA graph has wrappers of its own, whose launches are the same for every plan. The short prompts
of mixed graphs run on FlashAttention 2, which splits long KV over programs, and 3 does not.

Decodes of few sequences run on our own kernel (triton_decode.py) where that is faster.

Keys and values in FP8: prefills run on FlashAttention 2, as 3 has no kernels for them beside 16-bit
queries; decodes on our own kernel, as flashinfer's takes nearly as long for them as for 16 bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import flashinfer
import numpy as np
import torch
from flashinfer.decode import fast_decode_plan
from flashinfer.prefill import get_batch_prefill_module
from torch import Tensor

from megatron_hybrid.kernels.contract import (
    FP8,
    AttentionShape,
    Ints,
    KVCache,
    PagedSequences,
)
from megatron_hybrid.kernels.devices import processors
from megatron_hybrid.kernels.paged_attention import prompts, reference
from megatron_hybrid.kernels.paged_attention.prompts import GatheredLayout, PromptKernel
from megatron_hybrid.kernels.paged_attention.protocol import RelativeBias
from megatron_hybrid.kernels.paged_attention.replanning import Aside, PlanCall
from megatron_hybrid.kernels.paged_attention.triton import (
    TritonAttention,
    TritonPlan,
    gather_kv,
    store_kv,
)
from megatron_hybrid.kernels.pinned import PinnedNumbers, copy_by_kernel

_HEAD_DIMS = (64, 128, 256)
# Up to so many sequences decodes with keys and values in 16 bits are our kernel's: of one it takes
# little more than half of flashinfer's time (docs/performance.md). It cuts every sequence into as
# many parts, which are small enough for a long one beside short ones while sequences are few.
_MOST_OWN = 8
# A graph's schedule takes about 30 bytes a sequence, 15 a program and 4 a token, thousands of each
# at most; the wrapper's own 8 MiB times the number of graphs would be wasted.
_GRAPH_SCHEDULE_BYTES = 1 << 20
# Decodes, sequences, tokens, and where their tables lie: one graph's, of one engine.
_Graph = tuple[int, int, int, int, int]
_QUERIES = "_qo_indptr_buf"  # where a wrapper has their bounds
# With the arguments of prompts.choose.
Choice = Callable[[Ints, Ints, AttentionShape, int, int], PromptKernel]


@dataclass(frozen=True, slots=True)
class _PromptsInBlocks:
    """A BatchPrefillWithPagedKVCacheWrapper that is planned."""

    wrapper: Any

    def run(self, query: Tensor, cache: KVCache, out: Tensor) -> None:
        """query, out [tokens of prompts, heads, head_dim]."""
        scales = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
        self.wrapper.run(query, (cache.key, cache.value), out=out, **scales)


@dataclass(frozen=True, slots=True)
class _GatheredPrompts:
    """A BatchPrefillWithRaggedKVCacheWrapper that is planned, and where it finds keys and values,
    which are in 16 bits. All layers gather them to the same place, one after the other."""

    wrapper: Any
    key: Tensor  # [rows of a GatheredLayout, kv_heads, head_dim]
    value: Tensor
    sequence: Tensor  # [tiles]
    position: Tensor  # [tiles]
    paged: PagedSequences

    def run(self, query: Tensor, cache: KVCache, out: Tensor) -> None:
        """As of _PromptsInBlocks."""
        self.gather(cache)
        self.wrapper.run(query, self.key, self.value, out=out)

    def gather(self, cache: KVCache) -> None:
        """The first half."""
        tiles = self.sequence, self.position
        gather_kv(cache, self.key, self.value, *tiles, self.paged)


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """Wrappers as they are planned: only a FlashInferAttention's latest plan of a shape may run."""

    decode: Any  # None where the step has no decodes; a TritonPlan for drafts and FP8
    prefill: _PromptsInBlocks | _GatheredPrompts | None  # None where it has no prompts
    num_decode_tokens: int
    num_tokens: int
    kv_slot: Tensor  # [tokens]


class FlashInferAttention:
    """An Attention. What flashinfer has no kernel for goes to TritonAttention."""

    def __init__(
        self,
        workspace_bytes: int = 512 << 20,
        choose: Choice = prompts.choose,
        most_own: int = _MOST_OWN,
    ) -> None:
        """`workspace_bytes`: room for the gathered keys and values of a layer, and at other times
        for partial results where KV is split over programs. Of the latter a CUDA graph takes
        4 * p * heads * head_dim * t bytes: t = 16 for the decodes of up to 16 query heads a KV
        head, 64 for up to 64, up to 128 for prompts; p is the larger of two programs a
        multiprocessor, divided by the KV heads, and the number of tiles of t queries, counting
        each of the query heads of a KV head. flashinfer raises an error where it is not enough.

        `choose`: on which kernel prompts run on Hopper, outside of graphs. `most_own`: sequences
        whose decodes are our own kernel's.
        """
        self._most_own = most_own
        self._workspace_bytes = workspace_bytes
        self._choose_kernel = choose
        self._triton = TritonAttention()
        self._wrappers: dict[AttentionShape, _Wrappers | None] = {}
        self._workspace: Tensor | None = None  # of all shapes, whose kernels run in turn

    def plan(self, paged: PagedSequences, shape: AttentionShape) -> FlashInferPlan | TritonPlan:
        """As in Attention."""
        if shape.first_position:
            return self._triton.plan(paged, shape)
        if shape not in self._wrappers:
            self._wrappers[shape] = self._new_wrappers(shape, paged.kv_slot.device)
        wrappers = self._wrappers[shape]
        if wrappers is None:
            return self._triton.plan(paged, shape)
        decodes, tokens = paged.num_decodes, len(paged.kv_slot)
        has_prefills = len(paged.kv_length) > decodes
        decode = None
        is_ours = shape.kv_dtype == FP8 or decodes <= self._most_own
        # flashinfer plans with the lengths, which only the device knows where there are drafts
        if decodes and (paged.longest_run or is_ours):
            decode = self._triton.plan(paged.decodes_alone(), shape)
        elif decodes:
            decode = wrappers.plan_decodes(paged)
        return FlashInferPlan(
            decode=decode,
            prefill=wrappers.plan_prefills(paged) if has_prefills else None,
            num_decode_tokens=int(paged.host.cu_seqlens[decodes]) if has_prefills else tokens,
            num_tokens=tokens,
            kv_slot=paged.kv_slot,
        )

    def append(
        self, key: Tensor, value: Tensor, cache: KVCache, plan: FlashInferPlan | TritonPlan
    ) -> None:
        """As in Attention."""
        store_kv(key, value, cache, plan.kv_slot)

    def attend(
        self,
        query: Tensor,
        cache: KVCache,
        plan: FlashInferPlan | TritonPlan,
        bias: RelativeBias | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """As in Attention."""
        if isinstance(plan, TritonPlan):
            return self._triton.attend(query, cache, plan, bias, sinks)
        assert bias is None and sinks is None
        if isinstance(plan.decode, TritonPlan) and plan.prefill is None:
            return self._triton.attend(query, cache, plan.decode)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        middle, end = plan.num_decode_tokens, plan.num_tokens
        if isinstance(plan.decode, TritonPlan):
            output[:middle] = self._triton.attend(query[:middle], cache, plan.decode)
        elif plan.decode is not None:
            plan.decode.run(query[:middle], (cache.key, cache.value), out=output[:middle])
        if plan.prefill is not None:
            plan.prefill.run(query[middle:end], cache, output[middle:end])
        return output

    copy_tokens = staticmethod(reference.copy_tokens)

    def most_captured(self, shape: AttentionShape, prompts: int) -> int:
        """As in Attention: what the workspace has room for."""
        if not _is_flashinfers(shape):
            return self._triton.most_captured(shape, prompts)
        rows = 64 if shape.head_dim == 256 else 128  # of a tile
        tiles = self._workspace_bytes // (4 * rows * shape.heads * (shape.head_dim + 1))
        return max(tiles - prompts, 0) * rows // (shape.heads // shape.kv_heads)

    def _new_wrappers(self, shape: AttentionShape, device: torch.device) -> _Wrappers | None:
        """The wrappers for `shape`; None where flashinfer can't do it."""
        if not _is_flashinfers(shape):
            return None
        if not _has_kernels("fa2", shape):
            warnings.warn(
                f"flashinfer has no attention kernels for {shape.dtype}, keys and values in "
                f"{shape.kv_dtype}, and heads of {shape.head_dim}, so slower ones are used. To "
                "build them unset FLASHINFER_DISABLE_JIT and install flashinfer-python with a CUDA "
                "compiler.",
                stacklevel=4,
            )
            return None
        hopper = torch.cuda.get_device_capability(device)[0] == 9
        # of keys in a window there are too few for what it gains
        takes_fa3 = hopper and not shape.window and shape.kv_dtype != FP8
        has_fa3 = takes_fa3 and _has_kernels("fa3", shape)
        if self._workspace is None:  # flashinfer wants zeros at first use
            self._workspace = torch.zeros(self._workspace_bytes, dtype=torch.uint8, device=device)
        return _Wrappers(shape, self._workspace, self._choose_kernel if has_fa3 else None)


class _Wrappers:
    """flashinfer's wrappers for one shape; a graph has some of its own, which keep reading the
    tensors that it was captured with. All share the workspace."""

    def __init__(self, shape: AttentionShape, workspace: Tensor, choose: Choice | None) -> None:
        """`choose`: None: there is only FlashAttention 2."""
        self._shape = shape
        self._heads = (shape.heads, shape.kv_heads, shape.head_dim)
        self._options = {
            "sm_scale": shape.scale,
            "q_data_type": shape.dtype,
            "kv_data_type": shape.kv_dtype,
            "window_left": shape.window - 1,  # tokens before its own; -1: all
        }
        self._workspace = workspace
        self._choose = choose
        kernels = PromptKernel if choose else (PromptKernel.FA2,)
        # All at once: each of them allocates memory, which a step would wait for.
        self._prefill: dict[_Graph | PromptKernel, Aside] = {
            kernel: Aside(_new_prefill_wrapper(workspace, kernel)) for kernel in kernels
        }
        self._figures = PinnedNumbers()  # of a plan for prompts
        self._decode: dict[_Graph | None, Any] = {}  # None: outside of graphs
        self._decodes: Aside | None = None  # outside of graphs
        # of graphs' decodes; None: it can't be made again
        self._calls: dict[_Graph | None, PlanCall | None] = {}

    def plan_decodes(self, paged: PagedSequences) -> Any:
        """The decode wrapper, planned for the first num_decodes sequences."""
        count = paged.num_decodes
        graph = _graph_of(paged)
        indptr = torch.from_numpy(paged.host.kv_indptr[: count + 1])
        kv_length = torch.from_numpy(paged.host.kv_length[:count])
        if (call := self._calls.get(graph)) is not None:
            call.again(indptr, kv_length)
            return call.aside.wrapper
        wrapper = self._decode.get(graph)
        last_length = torch.from_numpy(paged.host.last_block_length[:count])
        sizes = *self._heads, self._shape.block_size
        if wrapper is None:
            wrapper = self._decode[graph] = self._new_decode_wrapper(paged)
            wrapper.plan(indptr, paged.kv_indices, last_length, *sizes, **self._options)
            return wrapper
        # plan() again would take microseconds a sequence and copy tables that are there already
        plan = partial(
            fast_decode_plan,
            wrapper,
            paged.kv_indptr[: count + 1],
            paged.kv_indices,
            last_length,
            *sizes,
            **self._options,
            global_override_indptr_cpu=indptr,
        )
        if not paged.static:
            if self._decodes is None:
                self._decodes = Aside(wrapper)
            queries = torch.arange(count + 1, dtype=torch.int32, device=paged.kv_indptr.device)
            self._decodes.plan(plan, {_QUERIES: queries, **_tables(paged, 0, count)})
        elif graph not in self._calls:
            self._calls[graph] = PlanCall.watch(wrapper, plan, indptr, kv_length)
        else:
            plan()
        return wrapper

    def plan_prefills(self, paged: PagedSequences) -> _PromptsInBlocks | _GatheredPrompts:
        """For the sequences after the decodes."""
        kernel = self._kernel_for(paged)
        place = _graph_of(paged) or kernel
        prefill = self._prefill.get(place)
        if prefill is None:  # a graph's
            prefill = self._prefill[place] = Aside(self._new_graph_wrapper(paged))
        gathers = kernel is PromptKernel.GATHERED
        plan = self._plan_gathered if gathers else self._plan_in_blocks
        planned: _PromptsInBlocks | _GatheredPrompts = plan(prefill, paged)
        # run() compares with it: padding is run, too
        first = int(paged.host.cu_seqlens[paged.num_decodes])
        prefill.wrapper._qo_indptr_last = len(paged.kv_slot) - first
        return planned

    def _kernel_for(self, paged: PagedSequences) -> PromptKernel:
        if paged.static or self._choose is None:
            return PromptKernel.FA2
        host, first, workspace = paged.host, paged.num_decodes, self._workspace
        queries, keys = np.diff(host.cu_seqlens[first:]), host.kv_length[first:]
        count = processors(workspace.device)
        return self._choose(queries, keys, self._shape, count, workspace.numel())

    def _plan_in_blocks(self, prefill: Aside, paged: PagedSequences) -> _PromptsInBlocks:
        host, first, wrapper = paged.host, paged.num_decodes, prefill.wrapper
        # The blocks keep their places in kv_indices, the queries are counted from the first one.
        query_indptr = host.cu_seqlens[first:] - host.cu_seqlens[first]
        tokens = len(paged.kv_slot) - int(host.cu_seqlens[first])
        longest = tokens if paged.static else int(np.diff(query_indptr).max())
        tables = (t[first:] for t in (host.kv_indptr, host.last_block_length, host.kv_length))
        (queries, kv_indptr, last_length, kv_length), _ = self._figures.hold(query_indptr, *tables)
        bounds, on_device = paged.cu_seqlens[first:], _tables(paged, first, None)
        if paged.static:  # it has the tables already
            on_device = {name: getattr(wrapper, name) for name in on_device}
            on_device[_QUERIES] = torch.sub(bounds, bounds[0], out=wrapper._qo_indptr_buf)
        else:
            on_device[_QUERIES] = bounds - bounds[0]
        plan = partial(
            wrapper.plan,
            queries,
            kv_indptr,
            paged.kv_indices[:0] if paged.static else paged.kv_indices,
            last_length,
            *self._heads,
            self._shape.block_size,
            causal=True,
            **self._options,
            seq_lens=kv_length,
            max_token_per_sequence=longest,
        )
        prefill.plan(plan, on_device)
        return _PromptsInBlocks(wrapper)

    def _plan_gathered(self, prefill: Aside, paged: PagedSequences) -> _GatheredPrompts:
        shape, wrapper = self._shape, prefill.wrapper
        layout = GatheredLayout.of(paged.host, paged.num_decodes)
        (query_indptr, kv_indptr, *_), there = self._figures.hold(*layout)
        here = torch.empty_like(there)
        copy_by_kernel(here, there)
        queries, keys, sequence, position = here.split([len(part) for part in layout])
        plan = partial(wrapper.plan, query_indptr, kv_indptr, *self._heads, causal=True)
        names = _QUERIES, "_kv_indptr_buf", "_o_indptr_buf", "_v_indptr_buf"
        on_device = dict(zip(names, (queries, keys, queries, keys), strict=True))
        prefill.plan(partial(plan, **self._options), on_device)
        kv = self._workspace[: layout.rows * prompts.bytes_of_a_row(shape)].view(shape.kv_dtype)
        key, value = kv.view(2, layout.rows, shape.kv_heads, shape.head_dim)
        return _GatheredPrompts(wrapper, key, value, sequence, position, paged)

    def _new_graph_wrapper(self, paged: PagedSequences) -> Any:
        first, device = paged.num_decodes, self._workspace.device
        sequences = len(paged.kv_length) - first
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=torch.zeros(sequences + 1, dtype=torch.int32, device=device),
            paged_kv_indptr_buf=paged.kv_indptr[first:],
            paged_kv_indices_buf=paged.kv_indices,
            paged_kv_last_page_len_buf=paged.last_block_length[first:],
            backend="fa2",
        )
        # The wrapper would take the tokens of the first plan, which may have less than the graph.
        wrapper._max_total_num_rows = len(paged.kv_slot) - first
        self._shorten_schedule(wrapper)
        return wrapper

    def _new_decode_wrapper(self, paged: PagedSequences) -> Any:
        buffers = {}
        if paged.static:
            buffers = {
                "paged_kv_indptr_buffer": paged.kv_indptr[: paged.num_decodes + 1],
                "paged_kv_indices_buffer": paged.kv_indices,
                "paged_kv_last_page_len_buffer": paged.last_block_length[: paged.num_decodes],
            }
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=paged.static,
            use_tensor_cores=True,
            **buffers,
        )
        if paged.static:
            self._shorten_schedule(wrapper)
        return wrapper

    def _shorten_schedule(self, wrapper: Any) -> None:
        schedule = torch.empty(
            _GRAPH_SCHEDULE_BYTES, dtype=torch.uint8, device=self._workspace.device
        )
        wrapper.reset_workspace_buffer(self._workspace, schedule)


def _new_prefill_wrapper(workspace: Tensor, kernel: PromptKernel) -> Any:
    """Outside of graphs."""
    if kernel is PromptKernel.GATHERED:
        return flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa3")
    backend = "fa2" if kernel is PromptKernel.FA2 else "fa3"
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)


def _tables(paged: PagedSequences, first: int, end: int | None) -> dict[str, Tensor]:
    """Of these sequences, by the names that wrappers have for them."""
    return {
        "_paged_kv_indptr_buf": paged.kv_indptr[first : None if end is None else end + 1],
        "_paged_kv_indices_buf": paged.kv_indices,
        "_paged_kv_last_page_len_buf": paged.last_block_length[first:end],
    }


def _graph_of(paged: PagedSequences) -> _Graph | None:
    """None: the step is not one of a graph."""
    if not paged.static:
        return None
    sizes = paged.num_decodes, len(paged.kv_length), len(paged.kv_slot)
    return *sizes, paged.kv_indptr.data_ptr(), paged.kv_indices.data_ptr()


def _is_flashinfers(shape: AttentionShape) -> bool:
    """Whether it computes such heads, if its kernels are there."""
    in_16_bits = shape.dtype in (torch.bfloat16, torch.float16)
    in_the_usual_way = not shape.relative and not shape.sinks
    return in_16_bits and shape.head_dim in _HEAD_DIMS and in_the_usual_way


def _has_kernels(backend: str, shape: AttentionShape) -> bool:
    """Whether flashinfer has, or can build, the module of a shape."""
    dtypes, dim = (shape.dtype, shape.kv_dtype, shape.dtype), shape.head_dim
    variant = (0, shape.window > 0, False, False)  # no positions, logit cap, fp16 accumulation
    try:
        get_batch_prefill_module(backend, *dtypes, torch.int32, dim, dim, *variant)
    except RuntimeError:
        return False
    return True
