"""How memory is divided at start: KV blocks, live slots and cached slots."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from megatron_hybrid.cache.geometry import (
    GIB,
    STAGED_SLOTS,
    CacheGeometry,
    slots_for_budget,
)
from megatron_hybrid.config import EngineConfig
from megatron_hybrid.engine.context import DynamicInferenceContext
from megatron_hybrid.engine.host_memory import available_memory
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.kernels.replay_protocol import Replays
from megatron_hybrid.layers.inputs import KVSpec, RoutedSpec, StateSpec
from megatron_hybrid.models.config import (
    CHUNKED,
    GATED_DELTA_NET,
    KIMI_DELTA_ATTENTION,
    LIGHTNING_ATTENTION,
    MAMBA,
    MAMBA1,
    SHARED_TRANSFORMER,
    SIDE_BY_SIDE,
    resolve_dtype,
)

CPU_BUFFER_BYTES = GIB  # more is rarely used on a CPU
CPU_STATE_BYTES = GIB // 4
GPU_SHARE = 0.95  # of what is left for caches: allocators leave gaps
WORKSPACE_BYTES = GIB  # of kernels and libraries
GRAPH_BYTES = GIB // 32  # of a captured CUDA graph, besides its logits
MAX_REQUESTS = 256
LOGITS_ITEM_BYTES = 4  # kept in float32
# Tokens from one write of a decoding request's states to the next, by kind of layer, where more
# than one pays: see docs/performance.md.
WRITE_INTERVALS = {
    MAMBA: 8,
    SIDE_BY_SIDE: 8,
    SHARED_TRANSFORMER: 8,
    GATED_DELTA_NET: 4,
    KIMI_DELTA_ATTENTION: 4,
    LIGHTNING_ATTENTION: 4,
}
NO_LIMIT = 2**62  # blocks or slots, on a stage where they take nothing
# Keys that kernels of batch-invariant mode take at a time, or a multiple: a window's blocks begin
# at a multiple of it.
TILE = 64


class StageLayers(NamedTuple):
    """What one pipeline stage keeps of a model's caches."""

    kv_specs: list[KVSpec]
    state_specs: list[StateSpec]
    has_logits: bool  # keeps those at the ends of prompts
    routed: RoutedSpec | None = None  # kept beside keys and values


def gpu_cache_bytes(
    device: torch.device,
    *,
    share: float | None = None,
    weights: int = 0,
    held: int = 0,
    activations: int = 0,
    graph_sizes: Sequence[int] = (),
    vocab_size: int = 0,
) -> int:
    """Bytes that the caches can take of what is free on a GPU.

    share: of the GPU's memory that this process may take in all, with what torch holds of it
    already; None: what is free. weights: bytes still to be loaded. held: bytes that this process
    has of it besides, which torch does not know of. activations: bytes that a step
    takes besides weights and caches. graph_sizes: rows of logits of each CUDA graph that is to be
    captured, now or later.
    Raises ConfigurationError when the weights alone do not fit.
    """
    free, total = torch.cuda.mem_get_info(device)
    are_free = "are free"
    if share is not None:
        ours = int(share * total) - torch.cuda.memory_reserved(device) - held
        if ours < free:
            free, are_free = max(0, ours), f"may be taken (--gpu-memory-utilization {share:g})"
    if weights > free:
        raise ConfigurationError(
            f"The model's weights take {weights / GIB:.2f} GB; of the {total / GIB:.2f} GB of "
            f"{device}, {free / GIB:.2f} GB {are_free}. Use a larger GPU, or split the model over "
            "several with --tensor-model-parallel-size or --pipeline-model-parallel-size."
        )
    # of all graphs in the same memory
    logits = max(graph_sizes, default=0) * vocab_size * LOGITS_ITEM_BYTES
    graphs = len(graph_sizes) * GRAPH_BYTES + logits
    left = free - weights - activations - WORKSPACE_BYTES - graphs
    return max(0, int(left * GPU_SHARE))


def cpu_cache_bytes(*, weights: int = 0, processes: int = 1) -> int:
    """Bytes that the caches can take of the machine's memory, on a CPU.

    weights: bytes still to be loaded. processes: that share the memory, each with as much as this
    one. Raises ConfigurationError when the weights alone do not fit.
    """
    available = available_memory() // processes
    if weights > available:
        each = f" to each of {processes} processes" if processes > 1 else ""
        raise ConfigurationError(
            f"The model's weights take {weights / GIB:.2f} GB; {available / GIB:.2f} GB of memory "
            f"are available{each}. Free some, use a machine or a container with "
            "more, a smaller --dtype, or split the model over several machines with "
            "--tensor-model-parallel-size or --pipeline-model-parallel-size."
        )
    return available - weights


def derive_geometry(
    config: EngineConfig,
    kv_specs: Iterable[KVSpec],
    state_specs: Iterable[StateSpec],
    vocab_size: int,
    limit: int,
    *,
    on_gpu: bool = True,
    minimum: Callable[[int], int] = lambda value: value,
    stage: StageLayers | None = None,
    ring_length: int = 0,
    batch_invariant: bool = False,
) -> CacheGeometry:
    """Divide the memory of this rank. Raises ConfigurationError naming the flag that is too small,
    or too large.

    The specs are of the whole model, and so are the bytes of what is returned: ranks that decide
    alike must be told the same. `limit`: bytes that caches can take on this rank. `stage`: what of
    the model it keeps and has to pay for; None: all. `minimum` returns the smallest of all ranks'
    values: they must have equal pools to decide alike. `ring_length`: of a request's rings.
    `batch_invariant`: states lie on the kernels' grid alone.
    """
    kv_specs, state_specs = list(kv_specs), list(state_specs)
    stage = stage or StageLayers(kv_specs, state_specs, has_logits=True)
    block_size = config.inference_dynamic_batching_block_size
    caches = config.inference_dynamic_batching_prefix_caching
    keeps_logits = caches and config.inference_dynamic_batching_prefix_caching_exact_ends
    bytes_per_logits = vocab_size * LOGITS_ITEM_BYTES if keeps_logits else 0
    own_logits = bytes_per_logits if stage.has_logits else 0
    kernel_chunk = math.lcm(*(spec.kernel_chunk for spec in state_specs)) if state_specs else 1
    granule = kernel_chunk if batch_invariant else 1
    windows = _windows(config, kv_specs, granule, batch_invariant)
    _check_groups(block_size, kv_specs)
    own_block = _bytes_per_block(stage.kv_specs, block_size)
    own_window_block = _bytes_per_block(stage.kv_specs, block_size, windowed=True)
    if stage.routed is not None:
        own_block += block_size * stage.routed.bytes_per_token()
    own_slot = bytes_per_state(stage.state_specs) + own_logits
    ring_bytes = sum(spec.bytes_per_ring_place() for spec in stage.state_specs)
    own_live = own_slot + ring_length * ring_bytes + windows.quota * own_window_block
    needs_state = bool(state_specs) or windows.window > 0
    keeps_states = caches and needs_state
    packed_dtype = packed_states_dtype(config) if caches and state_specs else None
    own_cached = bytes_per_state(stage.state_specs, packed_dtype) + own_logits
    own_cached += windows.of_state * own_window_block
    pays_for_states = keeps_states and own_cached > 0
    buffer, states = _budgets(config, pays_for_states, minimum(limit), on_gpu=on_gpu)
    most_staged = 0 if packed_dtype is None else STAGED_SLOTS
    buffer_of_all = buffer
    buffer -= (windows.of_prompts + 1) * own_window_block  # and the dummy
    max_requests = _max_requests(config, buffer, own_live if needs_state else 0, most_staged)
    max_requests = minimum(max_requests)
    cached = 0
    if keeps_states:
        cached = slots_for_budget(states / GIB, own_cached) if own_cached else NO_LIMIT
    elif keeps_logits:  # without recurrent layers, prompts' ends are all that slots are for
        cached = max_requests
        if own_logits:
            cached = min(cached, buffer // 8 // own_logits)
        buffer -= cached * own_logits
    live_bytes = max_requests * own_live if needs_state else 0
    live_bytes += min(most_staged, max_requests) * own_slot
    has_attention = any(not spec.window for spec in kv_specs)
    num_blocks = NO_LIMIT if has_attention else 0
    if own_block:
        num_blocks = max(0, (buffer - live_bytes) // own_block - 1)  # the dummy
    least = minimum(num_blocks)
    if has_attention and least == 0 or own_window_block and live_bytes > buffer:
        needed = live_bytes + 2 * own_block + buffer_of_all - buffer
        here = num_blocks == 0 or live_bytes > buffer
        live = "sliding windows and live states" if own_window_block else "live states"
        raise _no_block(buffer_of_all, needed, max_requests, live, here=here)
    cached = minimum(cached)
    return CacheGeometry(
        block_size=block_size,
        kernel_chunk=kernel_chunk,
        num_blocks=least,
        max_requests=max_requests,
        num_cached_slots=cached,
        bytes_per_block=_bytes_per_block(kv_specs, block_size),
        bytes_per_state=bytes_per_state(state_specs),
        bytes_per_logits=bytes_per_logits,
        stored_as=",".join(sorted({str(spec.dtype).removeprefix("torch.") for spec in kv_specs})),
        bytes_per_packed_state=(
            None if packed_dtype is None else bytes_per_state(state_specs, packed_dtype)
        ),
        granule=granule,
        window=windows.window,
        num_window_blocks=windows.blocks_for(max_requests, cached),
        bytes_per_window_block=_bytes_per_block(kv_specs, block_size, windowed=True),
        window_alignment=windows.alignment,
        most_ahead=windows.most_ahead,
    )


class _Windows(NamedTuple):
    """How many blocks of layers with a sliding window there have to be; without such layers none.
    window, alignment, most_ahead: of CacheGeometry."""

    window: int
    alignment: int
    most_ahead: int
    quota: int  # of a request
    of_state: int  # of a cached state
    of_prompts: int  # beside the quotas, for all that a step may compute of prompts

    def blocks_for(self, requests: int, states: int) -> int:
        """For so many running requests and cached states, even if they share nothing."""
        return requests * self.quota + states * self.of_state + self.of_prompts


def _windows(
    config: EngineConfig, kv_specs: Iterable[KVSpec], granule: int, batch_invariant: bool
) -> _Windows:
    windows = {spec.window for spec in kv_specs if spec.window}
    if not windows:
        return _Windows(0, 0, 1, 0, 0, 0)
    if len(windows) > 1:
        sizes = " and ".join(map(str, sorted(windows)))
        raise ConfigurationError(
            f"The model has layers with sliding windows of {sizes} tokens; only those of one size "
            "are supported."
        )
    size, drafts = config.inference_dynamic_batching_block_size, config.num_speculative_tokens
    window, alignment = windows.pop(), math.lcm(size, TILE) if batch_invariant else 0
    # the accepted drafts of the last step, this one's, the token before them and the one behind
    ahead = 2 * drafts + 2 if drafts else 1
    own = CacheGeometry(
        block_size=size, kernel_chunk=1, num_blocks=0, max_requests=0, num_cached_slots=0,
        bytes_per_block=0, bytes_per_state=0, granule=granule, window=window,
        window_alignment=alignment, most_ahead=ahead,
    )  # fmt: skip
    of_prompts = config.inference_dynamic_batching_max_tokens // size + 1
    return _Windows(window, alignment, ahead, own.window_quota, own.window_of_state, of_prompts)


def _check_groups(block_size: int, kv_specs: Iterable[KVSpec]) -> None:
    for group in sorted({spec.index_group for spec in kv_specs}):
        if block_size % group:
            raise ConfigurationError(
                f"--inference-dynamic-batching-block-size is {block_size}, but must be a multiple "
                f"of {group}: attention of the model chooses among groups of {group} tokens."
            )


def packed_states_dtype(config: EngineConfig) -> torch.dtype | None:
    """Of cached states; None where they are of the type of the live ones, and exact."""
    name = config.mamba_inference_cached_states_dtype
    if name is None or name == config.mamba_inference_ssm_states_dtype:
        return None
    return torch.int8 if name == "int8" else resolve_dtype(name)


def _bytes_per_block(specs: Iterable[KVSpec], block_size: int, *, windowed: bool = False) -> int:
    """Of layers that see all tokens, or of those with a sliding window."""
    own = (spec for spec in specs if (spec.window > 0) == windowed)
    return block_size * sum(spec.bytes_per_token() for spec in own)


def bytes_per_state(specs: Iterable[StateSpec], packed: torch.dtype | None = None) -> int:
    """Of one slot in all these layers, as it is or packed in a type."""
    if packed is None:
        return sum(spec.bytes_per_slot() for spec in specs)
    return sum(spec.bytes_per_packed_slot(packed) for spec in specs)


def write_interval(pattern: str) -> int:
    """Of a model with such layers, on a GPU."""
    return min((WRITE_INTERVALS[kind] for kind in set(pattern) & set(WRITE_INTERVALS)), default=1)


def replay_chunk_of(pattern: str, kernels: Replays) -> int:
    """Tokens of a chunk in batch-invariant mode: the same for all recurrent layers of a model."""
    kinds = set(pattern)
    of_mamba1 = kernels.mamba1_chunk if MAMBA1 in kinds else 1
    return max(of_mamba1, kernels.chunk if kinds & CHUNKED else 1)


def ring_length(drafts: int, write_interval: int, stochastic_rounding: bool = False) -> int:
    """Places of a ring: for a step's own tokens, and for the unfolded ones: the accepted drafts of
    the last step, or tokens since the state was written. Both at once are never: a step with
    drafts writes it."""
    if not drafts and write_interval == 1:
        return int(stochastic_rounding)  # of states, which needs the positions of DecodeRuns
    return max(drafts, write_interval - 1) + drafts + 1


def _no_block(
    buffer: int, needed: int, max_requests: int, live: str, *, here: bool
) -> ConfigurationError:
    """live: what requests have beside KV blocks. `here`: on this rank; else on one with other
    layers, which says how much it needs."""
    flag = "--inference-dynamic-batching-buffer-size-gb"
    if not here:
        return ConfigurationError(f"{flag} leaves no KV block on another rank; its log says why.")
    return ConfigurationError(
        f"{flag} is {buffer / GIB:.4f}, which leaves no KV block beside the {live} of "
        f"{max_requests} requests "
        "(--inference-dynamic-batching-max-requests); it must be at least "
        f"{math.ceil(needed / GIB * 1e4) / 1e4:.4f}."
    )


def _budgets(
    config: EngineConfig, keeps_states: bool, limit: int, *, on_gpu: bool
) -> tuple[int, int]:
    """Bytes for KV blocks and live states, and bytes for cached states. What is not given gets on a
    GPU what is left, or half of it each; on a CPU what is rarely exceeded, and at most a part of
    what is left."""
    buffer = _bytes(config.inference_dynamic_batching_buffer_size_gb)
    states = _bytes(config.inference_dynamic_batching_prefix_caching_mamba_gb)
    states = states if keeps_states else 0
    wanted = (buffer or 0) + (states or 0)
    if wanted > limit or limit == 0:
        given = {
            "--inference-dynamic-batching-buffer-size-gb": buffer,
            "--inference-dynamic-batching-prefix-caching-mamba-gb": states,
        }
        flags = " and ".join(f"{flag} is {n / GIB:.2f}" for flag, n in given.items() if n)
        left = f"beside the model's weights, {limit / GIB:.2f} GB of memory are available."
        if on_gpu:
            left = (
                "beside the weights, the activations of --inference-dynamic-batching-max-tokens "
                f"{config.inference_dynamic_batching_max_tokens} and CUDA graphs, "
                f"{limit / GIB:.2f} GB of the GPU are left for caches."
            )
        raise ConfigurationError(f"{flags or 'There is no memory for caches'}; {left}")
    if not on_gpu:
        if buffer is None:
            buffer = min(CPU_BUFFER_BYTES, (limit - wanted) // 2)
        return buffer, min(CPU_STATE_BYTES, (limit - buffer) // 4) if states is None else states
    if buffer is None:
        states = limit // 2 if states is None else states
        return limit - states, states
    return buffer, limit - buffer if states is None else states


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else max(0, int(gigabytes * GIB))


def _max_requests(config: EngineConfig, buffer: int, bytes_per_slot: int, most_staged: int) -> int:
    """`bytes_per_slot`: 0 for a model or a stage without states. `most_staged`: that many more
    slots at most, and as many as there are requests."""
    given = config.inference_dynamic_batching_max_requests
    if given is not None:
        return given
    limit = min(MAX_REQUESTS, config.inference_dynamic_batching_max_tokens)
    if bytes_per_slot:  # live states may take half of the buffer
        room = buffer // 2 // bytes_per_slot
        limit = min(limit, room - min(most_staged, room // 2))
    if limit < 1:
        raise ConfigurationError(
            f"--inference-dynamic-batching-buffer-size-gb is {buffer / GIB:.4f}; the state of one "
            f"request alone takes {bytes_per_slot / GIB:.4f} GB, and half of the buffer is for "
            "states."
        )
    return limit


def useless_budget(config: EngineConfig, geometry: CacheGeometry) -> str:
    """What to say where states are to be cached, but the budget for them holds none; else empty."""
    given = config.inference_dynamic_batching_prefix_caching_mamba_gb
    wanted = config.inference_dynamic_batching_prefix_caching and (given is None or given > 0)
    if not wanted or not geometry.needs_state or geometry.num_cached_slots:
        return ""
    budget = "chosen by the engine" if given is None else f"{given:g}"
    return (
        f"--inference-dynamic-batching-prefix-caching-mamba-gb is {budget}, which holds no state, "
        "so no prefix could be skipped: one state takes "
        f"{geometry.bytes_per_cached_slot / GIB:.6f} GB. "
        "Give at least that, or 0 to cache no states."
    )


def describe(geometry: CacheGeometry, context: DynamicInferenceContext) -> str:
    """The start log: what was chosen, so that "nothing is cached" can be told from "broken"."""
    text = (
        f"block size {geometry.block_size} tokens, grid {geometry.grid} tokens, "
        f"{geometry.num_blocks} KV blocks of {geometry.bytes_per_block} bytes"
        f"{f' ({geometry.stored_as})' if geometry.stored_as else ''}, "
        f"{geometry.max_requests} requests at a time, up to {context.max_seq_length} tokens each "
        f"({context.max_seq_length_flag}), {context.max_tokens} computed tokens a step"
    )
    if geometry.has_recurrent:
        text += (
            f", {geometry.bytes_per_slot} bytes per state, "
            f"{geometry.max_requests} live and {geometry.num_cached_slots} cached state slots"
        )
    if geometry.has_window:
        if not geometry.has_recurrent:
            text += f", room for {geometry.num_cached_slots} cached windows"
        text += (
            f", {geometry.num_window_blocks} window blocks of {geometry.bytes_per_window_block} "
            f"bytes for layers that see {geometry.window} tokens: {geometry.window_quota} a "
            f"request, {geometry.window_of_state} a cached state, and those of a step's prompts"
        )
    if geometry.packs_states:
        text += (
            f" of {geometry.bytes_per_cached_slot} bytes each, and {geometry.num_staged_slots} for "
            "states that are to be packed into these"
        )
    if not context.cache.enabled:
        return text + (
            "; nothing is reused (--inference-dynamic-batching-prefix-caching and, for recurrent "
            "layers, --inference-dynamic-batching-prefix-caching-mamba-gb decide)"
        )
    text += f"; smallest prefix that can be reused: {geometry.smallest_reusable_prefix} tokens"
    if context.cache.placement.exact_ends:
        text += ", or a whole prompt or conversation of any length"
    return text
