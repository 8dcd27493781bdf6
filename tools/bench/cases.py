"""What the cases of tools/benchmark_kernels.py are made of: a model's sizes, and inputs at them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.recurrent_kinds import RecurrentKind
from bench.timing import Call
from megatron_hybrid.kernels import kernel_set
from megatron_hybrid.kernels.contract import (
    AttentionShape,
    DecodeRuns,
    DecodeSlots,
    IndexShape,
    KVCache,
    PagedHost,
    PagedSequences,
    PrefillSegments,
    RecurrentState,
    chunk_bounds,
)
from megatron_hybrid.kernels.protocols import ConvConstants
from megatron_hybrid.layers.attention import AttentionConfig
from megatron_hybrid.layers.indexed_attention import IndexedAttentionConfig
from megatron_hybrid.layers.indexed_latent_attention import IndexedLatentConfig
from megatron_hybrid.layers.inputs import KVSpec, StateSpec, allocate_caches
from megatron_hybrid.layers.kimi_delta_attention import KimiDeltaAttentionConfig
from megatron_hybrid.layers.latent_attention import LatentAttentionConfig
from megatron_hybrid.layers.mixer import LayerConfig
from megatron_hybrid.layers.relative_attention import RelativeAttentionConfig
from megatron_hybrid.models.config import HybridModelConfig

BLOCK = 64  # tokens in a KV block
EPS = 1e-5

# What a case runs on fresh inputs: our kernel, named "ours", and libraries' kernels.
Calls = dict[str, Call]


@dataclass(frozen=True)
class Case:
    name: str
    shape: str
    num_bytes: float  # that have to be moved
    make: Callable[[], Calls]
    flops: float = 0.0
    rounds: int = 1  # in which all calls are timed, one after the other


class Bench:
    """The sizes of one model, its kernels, and inputs at these sizes."""

    def __init__(self, model: HybridModelConfig, device: torch.device, kernels: str) -> None:
        self.device = device
        self.tiny = device.type == "cpu"
        self.model = _shrunk(model) if self.tiny else model
        self.kernels = kernel_set.select(kernels, device)
        self.ints = torch.int64 if self.tiny else torch.int32
        self.dtype = torch.float32 if self.tiny else torch.bfloat16
        self.item = self.dtype.itemsize

    # ---------------------------------------------------------------- sizes

    def batches(self) -> list[int]:
        return [1, 3] if self.tiny else [1, 32, 256]

    def rows(self) -> list[int]:
        return [1, 20] if self.tiny else [1, 256, 8192]

    def prefills(self) -> list[int]:
        return [96] if self.tiny else [4096, 8192, 65536]

    # --------------------------------------------------------------- inputs

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, dtype=dtype or self.dtype, device=self.device)

    def integers(self, values: Any) -> Tensor:
        return torch.as_tensor(np.asarray(values), dtype=self.ints, device=self.device)

    def states(self, kind: RecurrentKind, slots: int, dtype: torch.dtype) -> RecurrentState:
        """Laid out as an engine's."""
        spec = StateSpec(
            conv_shape=(kind.channels, kind.width - 1),
            conv_dtype=self.dtype,
            ssm_shape=kind.state,
            ssm_dtype=dtype,
            kernel_chunk=kind.kernel_chunk,
        )
        return allocate_caches({}, {0: spec}, 1, BLOCK, slots + 1, self.device).state[0]

    def projected(self, kind: RecurrentKind, tokens: int) -> Tensor:
        """The convolution's inputs, columns of a wider tensor."""
        return self.normal(tokens, kind.channels + 64)[:, :-64]

    def slots(self, batch: int) -> DecodeSlots:
        """Each sequence reads and writes its own; they lie anywhere."""
        order = np.random.default_rng(0).permutation(batch) + 1
        return DecodeSlots(self.integers(order), self.integers(order))

    def decode_runs(
        self,
        unfolded: np.ndarray,
        drafts: int,
        writes: np.ndarray,
        ring_length: int,
        most_unfolded: int | None = None,
    ) -> DecodeRuns:
        """unfolded, writes [batch]; each sequence has so many drafts."""
        batch = len(unfolded)
        slots, nothing = self.slots(batch), self.integers([0] * batch)
        return DecodeRuns(
            cu_seqlens=self.integers(np.arange(batch + 1) * (1 + drafts)),
            position=self.integers([ring_length + 5] * batch),
            unfolded=self.integers(unfolded),
            read_slot=slots.read_slot,
            write_slot=slots.write_slot * self.integers(writes),
            ring=self.integers(range(batch)),
            checkpoint_position=nothing,
            checkpoint_slot=nothing,
            most_unfolded=most_unfolded,
        )

    def usual_runs(self, batch: int, interval: int) -> DecodeRuns:
        """One token each, of which every state is written every so many: as many sequences with
        one number of unfolded tokens as with another, and the middle one for a single sequence. A
        ring has `interval` places."""
        unfolded = (2 * np.arange(batch) + 1) * interval // (2 * batch)
        unfolded = np.random.default_rng(0).permutation(unfolded)
        return self.decode_runs(unfolded, 0, unfolded == interval - 1, interval, interval - 1)

    def ring(self, kind: RecurrentKind, batch: int, length: int) -> tuple[Tensor, ...]:
        """Of the scan's inputs."""
        return tuple(self.normal(batch, length, *v.shape[1:]) for v in kind.inputs(1).kept)

    def conv_constants(self, kind: RecurrentKind) -> ConvConstants:
        """The taps as a layer keeps them on a GPU, channels side by side."""
        weight = self.normal(kind.width, kind.channels).t()
        return ConvConstants(weight, self.normal(kind.channels), kind.silu)

    def segments(self, lengths: list[int], checkpoints: int, kernel_chunk: int) -> PrefillSegments:
        """Fresh sequences with so many checkpoints each, evenly spaced on the cache's grid."""
        starts = np.zeros(len(lengths), dtype=np.int64)
        bounds = chunk_bounds(starts, np.asarray(lengths), kernel_chunk)
        chunk = math.lcm(kernel_chunk, 16 if self.tiny else BLOCK)
        count = len(lengths)
        found = [
            (s, position)
            for s, length in enumerate(lengths)
            for i in range(checkpoints)
            if (position := length * (i + 1) // (checkpoints + 1) // chunk * chunk) > 0
        ]
        per_sequence = np.bincount([s for s, _ in found], minlength=count)
        return PrefillSegments(
            cu_seqlens=self.integers(np.concatenate([[0], np.cumsum(lengths)])),
            start_position=self.integers([0] * count),
            read_slot=self.integers([0] * count),
            write_slot=self.integers(range(1, count + 1)),
            cu_checkpoints=self.integers(np.concatenate([[0], np.cumsum(per_sequence)])),
            checkpoint_sequence=self.integers([s for s, _ in found]),
            checkpoint_position=self.integers([position for _, position in found]),
            checkpoint_slot=self.integers(range(count + 1, count + 1 + len(found))),
            sequence_of_token=self.integers(np.repeat(np.arange(count), lengths)),
            longest=max(lengths),
            cu_chunk_seqlens={kernel_chunk: self.integers(bounds)},
        )

    def paged(self, queries: list[int], keys: list[int], longest_run: int = 1) -> PagedSequences:
        """Blocks lie anywhere. longest_run: queries of decodes with drafts."""
        blocks = [-(-length // BLOCK) for length in keys]
        order = np.random.default_rng(0).permutation(sum(blocks)) + 1
        table = np.zeros((len(keys), max(blocks)), dtype=np.int64)
        taken = 0
        for row, count in enumerate(blocks):
            table[row, :count] = order[taken : taken + count]
            taken += count
        host = PagedHost.of(np.asarray(queries), np.asarray(keys), table, BLOCK)
        decodes = sum(q <= longest_run for q in queries)
        positions = [np.arange(k - q, k) for q, k in zip(queries, keys, strict=True)]
        places = [table[s, p // BLOCK] * BLOCK + p % BLOCK for s, p in enumerate(positions)]
        return PagedSequences(
            cu_seqlens=self.integers(host.cu_seqlens),
            kv_length=self.integers(host.kv_length),
            kv_indptr=self.integers(host.kv_indptr),
            kv_indices=self.integers(host.kv_indices),
            last_block_length=self.integers(host.last_block_length),
            kv_slot=self.integers(np.concatenate(places)),
            num_decodes=decodes,
            host=host,
            static=decodes == len(queries) and not self.tiny,
            longest_run=longest_run if longest_run > 1 else 0,
            most_blocks=max(blocks),
        )

    def kv_cache(self, blocks: int, dtype: torch.dtype | None = None) -> KVCache:
        config = self.attention()
        spec = KVSpec(config.num_kv_heads, config.head_dim, dtype or self.dtype)
        cache = allocate_caches({0: spec}, {}, blocks + 1, BLOCK, 1, self.device).kv[0]
        for values in (cache.key, cache.value):
            values.copy_(self.normal(*values.shape))
        return cache

    def attention(self) -> AttentionConfig:
        assert self.model.attention is not None
        return self.model.attention

    def attention_shape(self, kv_dtype: torch.dtype | None = None) -> AttentionShape:
        config = self.attention()
        return AttentionShape(
            config.num_heads, config.num_kv_heads, config.head_dim, config.scale, BLOCK,
            self.dtype, kv_dtype or self.dtype,
        )  # fmt: skip


def num_written(runs: DecodeRuns) -> int:
    """States that are."""
    return int((runs.write_slot > 0).sum())


def _shrunk(model: HybridModelConfig) -> HybridModelConfig:
    """The same kinds of layers, small enough for a CPU."""
    return replace(
        model,
        hidden_size=64,
        vocab_size=200,
        attention=model.attention and _shrunk_attention(model.attention),
        mamba=model.mamba
        and replace(
            model.mamba, num_heads=4, head_dim=16, state_size=16, num_groups=2, kernel_chunk=16
        ),
        mamba1=model.mamba1 and replace(model.mamba1, inner_size=128, dt_rank=4),
        gated_delta_net=model.gated_delta_net
        and replace(
            model.gated_delta_net,
            key_heads=2,
            value_heads=4,
            key_dim=16,
            value_dim=16,
            kernel_chunk=16,
        ),
        others={letter: _shrunk_layer(layer) for letter, layer in model.others.items()},
        mlp=model.mlp and replace(model.mlp, intermediate_size=96),
        moe=model.moe
        and replace(
            model.moe,
            num_experts=8,
            experts_per_token=2,
            num_groups=min(model.moe.num_groups, 4),
            chosen_groups=min(model.moe.chosen_groups, 4),
            expert=replace(model.moe.expert, intermediate_size=32),
            shared=model.moe.shared and replace(model.moe.shared, intermediate_size=64),
        ),
    )


def _shrunk_layer(layer: LayerConfig) -> LayerConfig:
    if isinstance(layer, IndexedAttentionConfig | IndexedLatentConfig):
        index = IndexShape(layer.index.heads, 16, layer.index.group, 2)
        layer = replace(layer, index=index)
    if isinstance(layer, AttentionConfig):
        return _shrunk_attention(layer)
    if isinstance(layer, LatentAttentionConfig):
        return replace(
            layer, num_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8,
            v_head_dim=16, rope=layer.rope and replace(layer.rope, rotary_dim=8),
        )  # fmt: skip
    if isinstance(layer, KimiDeltaAttentionConfig):
        return replace(layer, num_heads=4, head_dim=16, kernel_chunk=16)
    return layer


def _shrunk_attention(layer: AttentionConfig) -> AttentionConfig:
    if isinstance(layer, RelativeAttentionConfig):
        layer = replace(layer, profiles=4, extent=32)
    return replace(layer, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
