"""What tools/benchmark_kernels.py times: every kernel at the sizes of one model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.few_row_cases import few_row_cases
from bench.normed_router_cases import normed_router_cases
from bench.projected_cases import projected_cases
from bench.quantized_cases import expert_cases, linear_cases
from bench.recurrent_kinds import RecurrentKind, library, recurrent_kinds
from bench.timing import Call
from megatron_hybrid.kernels import kernel_set
from megatron_hybrid.kernels.contract import (
    FP8,
    AttentionShape,
    DecodeRuns,
    DecodeSlots,
    KVCache,
    PagedHost,
    PagedSequences,
    PrefillSegments,
    RecurrentState,
    chunk_bounds,
)
from megatron_hybrid.kernels.experts.protocol import (
    ExpertWeights,
    Router,
    Shared,
    SharedExpert,
    SharedResult,
)
from megatron_hybrid.kernels.protocols import ConvConstants, Filters, Gates, HeadNorms
from megatron_hybrid.layers.attention import AttentionConfig
from megatron_hybrid.layers.inputs import KVSpec, StateSpec, allocate_caches
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.mlp import MLPConfig
from megatron_hybrid.layers.moe import MoEConfig
from megatron_hybrid.layers.recurrent import RecurrentMixer
from megatron_hybrid.layers.rope import RopeConfig, inverse_frequencies
from megatron_hybrid.models.config import SHORT_CONV, HybridModelConfig
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import initialize

BLOCK = 64  # tokens in a KV block
EPS = 1e-5
# Tokens unfolded, drafts, whether the state is written.
RUNS = [(0, 0, True), (4, 4, True), (0, 4, True), (1, 0, False), (3, 0, False), (4, 4, False)]

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
    """The sizes of one model, and the cases at these sizes."""

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

    def paged(self, queries: list[int], keys: list[int]) -> PagedSequences:
        """Blocks lie anywhere."""
        blocks = [-(-length // BLOCK) for length in keys]
        order = np.random.default_rng(0).permutation(sum(blocks)) + 1
        table = np.zeros((len(keys), max(blocks)), dtype=np.int64)
        taken = 0
        for row, count in enumerate(blocks):
            table[row, :count] = order[taken : taken + count]
            taken += count
        host = PagedHost.of(np.asarray(queries), np.asarray(keys), table, BLOCK)
        decodes = sum(q == 1 for q in queries)
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

    # ---------------------------------------------------------------- cases

    def cases(self) -> Iterator[Case]:
        several = [48, 48] if self.tiny else [4096, 4096]
        for kind in recurrent_kinds(self.model, self.kernels, self.device, self.dtype):
            if kind.kernel is not None:
                for dtype in (torch.float32, torch.bfloat16):
                    for batch in self.batches():
                        yield self.state_update(kind, batch, dtype)
                for batch in self.batches():
                    for unfolded, drafts, writes in RUNS:
                        yield self.state_runs(kind, batch, unfolded, drafts, writes)
                    for interval in (2, 4, 8):
                        yield self.spared_writes(kind, batch, interval)
                for lengths in (*([n] for n in self.prefills()), several):
                    for checkpoints in (0, 4):
                        yield self.scan(kind, lengths, checkpoints)
                for moves in (1, 4):
                    yield self.packing(kind, moves)
            for batch in self.batches():
                yield self.conv_decode(kind, batch)
            for tokens in self.prefills():
                for checkpoints in (0, 4):
                    yield self.conv_prefill(kind, [tokens], checkpoints)
            short = self.prefills()[:2]
            for requests in (2, 3) if self.tiny else (8, 64):
                yield self.conv_prefill(kind, [short[-1] // requests] * requests, 0)
            for tokens in short:
                yield self.layer_prefill(kind, tokens, 4)
        yield from projected_cases(self, Case)
        if self.model.mamba is not None and self.model.mamba.norm == "gate_first":
            size, groups = self.model.mamba.inner_size, self.model.mamba.num_groups
            for rows in self.rows():
                yield self.gated_rms_norm(rows, size, size // groups)
        if (net := self.model.gated_delta_net) is not None:
            for rows in self.rows():
                size = net.value_heads * net.value_dim
                yield self.gated_rms_norm(rows, size, net.value_dim, norm_first=True)
        if self.model.attention is not None:
            kv, long = (70, 300) if self.tiny else (1024, 65536)
            for batch in self.batches():
                yield self.decode_attention(batch, kv)
            yield self.decode_attention(1, long)
            for batch in self.batches():
                yield self.decode_attention_fp8(batch, kv if self.tiny else 8192)
            yield self.decode_attention_fp8(1, long)
            for sequences, queries, keys in (
                [(1, 96, 96), (2, 32, 300)]
                if self.tiny
                else [(1, 8192, 8192), (64, 128, 128), (1, 8192, 65536), (1, 2048, 32768)]
                + [(8, 256, 16384), (1, 32, 65536)]
            ):
                yield self.prefill_attention(sequences, queries, keys)
            for rows in self.rows():
                yield self.append(rows)
            for rows in self.rows():
                yield self.rope(rows)
        for rows in self.rows():
            yield self.add_rms_norm(rows)
        mlp = self.model.mlp or (self.model.moe.shared if self.model.moe is not None else None)
        if mlp is not None:
            for rows in self.rows():
                yield self.activation(rows, mlp)
        if self.model.moe is not None:
            for tokens in [*self.batches(), self.rows()[-1]]:
                yield self.router(tokens, self.model.moe)
                yield self.experts(tokens, self.model.moe)
                if _shared_of_experts_kind(self.model.moe):
                    yield self.experts(tokens, self.model.moe, self.model.moe.shared)
            yield from expert_cases(self, Case)
        yield from normed_router_cases(self, Case)
        yield from linear_cases(self, Case)
        yield from few_row_cases(self, Case)
        for rows in self.batches():
            yield self.argmax(rows)
            for top_k, top_p in ((0, 1.0), (50, 0.9), (0, 0.9)):
                yield self.draw(rows, top_k, top_p)

    def state_update(self, kind: RecurrentKind, batch: int, dtype: torch.dtype) -> Case:
        slots = self.slots(batch)
        plan = self.kernels.plan_decode(slots)

        def make() -> Calls:
            inputs, state = kind.inputs(batch), self.states(kind, batch, dtype).ssm
            return {
                "ours": lambda: kind.kernel.decode(inputs, kind.constants, state, plan),
                **kind.update_libraries(inputs, state, slots),
            }

        state_bytes = math.prod(kind.state) * dtype.itemsize
        moved = batch * (2 * state_bytes + kind.values_per_token * self.item)
        return Case("state update", f"B={batch} {_short(dtype)} state", moved, make)

    def state_runs(
        self, kind: RecurrentKind, batch: int, unfolded: int, drafts: int, writes: bool
    ) -> Case:
        """Decodes with so many drafts and tokens unfolded, beside plain ones of one token."""
        make = self._runs(kind, np.full(batch, unfolded), drafts, np.full(batch, writes))
        state_bytes = (1 + writes) * math.prod(kind.state) * 4
        length = 1 + drafts
        moved = batch * (state_bytes + (length + unfolded) * kind.values_per_token * self.item)
        written = "" if writes else ", not written"
        shape = f"B={batch} {unfolded} unfolded, {drafts} drafts{written}"
        return Case("runs", shape, moved, make)

    def spared_writes(self, kind: RecurrentKind, batch: int, interval: int) -> Case:
        """Decodes of which each writes its state every so many tokens, beside plain ones."""
        unfolded = np.random.default_rng(0).permutation(np.arange(batch) % interval)
        writes = unfolded == interval - 1
        make = self._runs(kind, unfolded, 0, writes, most_unfolded=interval - 1)
        state_bytes = (batch + int(writes.sum())) * math.prod(kind.state) * 4
        tokens = batch + int(unfolded.sum())
        moved = state_bytes + tokens * kind.values_per_token * self.item
        return Case("spared writes", f"B={batch} every {interval} tokens", moved, make)

    def _runs(
        self,
        kind: RecurrentKind,
        unfolded: np.ndarray,
        drafts: int,
        writes: np.ndarray,
        most_unfolded: int | None = None,
    ) -> Callable[[], Calls]:
        """unfolded, writes [batch]"""
        batch, length = len(unfolded), 1 + drafts
        ring_length = int(unfolded.max()) + length
        slots, nothing = self.slots(batch), self.integers([0] * batch)
        runs = DecodeRuns(
            cu_seqlens=self.integers(np.arange(batch + 1) * length),
            position=self.integers([ring_length + 5] * batch),
            unfolded=self.integers(unfolded),
            read_slot=slots.read_slot,
            write_slot=slots.write_slot * self.integers(writes),
            ring=self.integers(range(batch)),
            checkpoint_position=nothing,
            checkpoint_slot=nothing,
            most_unfolded=most_unfolded,
        )
        plan = self.kernels.plan_runs(runs, ring_length)
        plain = self.kernels.plan_decode(slots)

        def make() -> Calls:
            inputs, single = kind.inputs(batch * length), kind.inputs(batch)
            state = self.states(kind, batch, torch.float32).ssm
            ring = tuple(self.normal(batch, ring_length, *v.shape[1:]) for v in inputs.kept)
            layer = (kind.constants, state)
            return {
                "ours": lambda: kind.kernel.decode_runs(inputs, *layer, ring, plan),
                "one token": lambda: kind.kernel.decode(single, *layer, plain),
            }

        return make

    def scan(self, kind: RecurrentKind, lengths: list[int], checkpoints: int) -> Case:
        tokens, count = sum(lengths), len(lengths)
        segments = self.segments(lengths, checkpoints, kind.kernel_chunk)
        plan = kind.kernel.plan(segments, kind.kernel_chunk)
        stored = count + len(segments.checkpoint_slot)

        def make() -> Calls:
            inputs = kind.inputs(tokens)
            state = self.states(kind, stored, torch.float32).ssm
            calls: Calls = {
                "ours": lambda: kind.kernel.prefill(inputs, kind.constants, state, plan)
            }
            if not checkpoints and len(set(lengths)) == 1:
                calls |= kind.prefill_libraries(inputs, count)
            return calls

        moved = tokens * kind.values_per_token * self.item + stored * math.prod(kind.state) * 4
        shape = f"{count} x {lengths[0]} tokens, {checkpoints} checkpoints"
        return Case("scan", shape, moved, make, tokens * kind.flops_per_token)

    def packing(self, kind: RecurrentKind, moves: int) -> Case:
        """So many states of all layers into int8, and back."""
        layers = 2 if self.tiny else self.model.pattern.count(kind.letter)
        over = -1 if len(kind.state) == 2 else -2
        spec = StateSpec(
            (kind.channels, kind.width - 1), self.dtype, kind.state, torch.float32,
            kind.kernel_chunk, scaled_over=over,
        )  # fmt: skip
        full = self.integers(range(1, moves + 1))
        packed = full + moves

        def make() -> Calls:
            (states,) = allocate_caches(
                {}, dict.fromkeys(range(layers), spec), 1, BLOCK, moves + 1, self.device,
                num_packed=moves, packed_dtype=torch.int8,
            ).packed  # fmt: skip
            states.full_ssm.normal_()
            kernel = self.kernels.packing
            return {
                "ours": lambda: kernel.pack(states, full, packed),
                "back": lambda: kernel.unpack(states, packed, full),
            }

        each = spec.bytes_per_slot() + spec.bytes_per_packed_slot(torch.int8)
        return Case("packing", f"{layers} layers, {moves} states", layers * moves * each, make)

    def layer_prefill(self, kind: RecurrentKind, tokens: int, checkpoints: int) -> Case:
        """A whole layer, its projections included, with and without checkpoints; and with those,
        which are packed then."""
        config = replace(self.model, pattern=kind.letter, vocab_size=32, tie_word_embeddings=True)
        with torch.device(self.device):
            model = HybridModel(
                config, initialize(device=self.device), self.dtype, self.dtype, torch.float32
            )
        for _, part in model.weight_parts():
            part.put(self.normal(*part.target.shape).mul_(part.shape[-1] ** -0.5))
        model.after_loading()
        mixer = model.blocks[0].mixer.recurrent  # type: ignore[union-attr]
        assert isinstance(mixer, RecurrentMixer)
        found = [self.segments([tokens], n, kind.kernel_chunk) for n in (checkpoints, 0)]
        plans = [mixer.plan(0, None, segments, self.kernels) for segments in found]
        slots = 2 + len(found[0].checkpoint_slot)

        def make() -> Calls:
            x = self.normal(tokens, self.model.hidden_size)
            caches = allocate_caches(
                {}, {0: mixer.spec}, 1, BLOCK, slots, self.device,
                num_packed=slots - 2, packed_dtype=torch.int8,
            )  # fmt: skip
            (states,) = caches.packed
            staged = found[0].checkpoint_slot
            steps = [
                KernelPlans(caches, self.kernels, recurrent={mixer.kind: plan}) for plan in plans
            ]

            def packed() -> None:
                mixer(x, steps[0])
                self.kernels.packing.pack(states, staged, staged + slots - 2)

            return {
                "ours": lambda: mixer(x, steps[0]),
                "without": lambda: mixer(x, steps[1]),
                "packed": packed,
            }

        weights = sum(weight.numel() for weight in mixer.parameters())
        flops = 2 * weights * tokens + tokens * kind.flops_per_token
        shape = f"{kind.letter}, {tokens} tokens, {checkpoints} checkpoints"
        return Case("layer prefill", shape, weights * self.item, make, flops, rounds=9)

    def conv_constants(self, kind: RecurrentKind) -> ConvConstants:
        weight, bias = self.normal(kind.channels, kind.width), self.normal(kind.channels)
        return ConvConstants(weight, bias, kind.silu)

    def conv_decode(self, kind: RecurrentKind, batch: int) -> Case:
        conv, slots = self.kernels.conv, self.slots(batch)
        plan = self.kernels.plan_decode(slots)
        constants = self.conv_constants(kind)

        def make() -> Calls:
            x, state = self.projected(kind, batch), self.states(kind, batch, self.dtype).conv
            calls: Calls = {"ours": lambda: conv.decode(x, constants, state, plan)}
            if kind.letter == SHORT_CONV:
                calls |= self.gated(
                    kind, batch, partial(conv.decode, constants=constants, state=state, plan=plan)
                )
            if fast := library("causal_conv1d"):
                activation = "silu" if kind.silu else None
                calls["causal_conv1d"] = lambda: fast.causal_conv1d_update(
                    x, state, *constants[:2], activation, conv_state_indices=slots.read_slot
                )
            return calls

        moved = batch * kind.channels * (2 + 2 * (kind.width - 1)) * self.item
        return Case("conv decode", f"B={batch}", moved, make)

    def conv_prefill(self, kind: RecurrentKind, lengths: list[int], checkpoints: int) -> Case:
        conv, constants = self.kernels.conv, self.conv_constants(kind)
        segments = self.segments(lengths, checkpoints, kind.kernel_chunk)
        plan = conv.plan(segments, kind.width)
        tokens, stored = sum(lengths), len(lengths) + len(segments.checkpoint_slot)

        def make() -> Calls:
            x, state = self.projected(kind, tokens), self.states(kind, stored, self.dtype).conv
            calls: Calls = {"ours": lambda: conv.prefill(x, constants, state, plan)}
            if kind.letter == SHORT_CONV:
                calls |= self.gated(
                    kind, tokens, partial(conv.prefill, constants=constants, state=state, plan=plan)
                )
            if (fast := library("causal_conv1d")) and not checkpoints:
                activation = "silu" if kind.silu else None
                # The library's call for several requests, which leaves no state.
                of_token = segments.sequence_of_token[None].int() if len(lengths) > 1 else None
                calls["causal_conv1d"] = lambda: fast.causal_conv1d_fn(
                    x.t()[None], *constants[:2], seq_idx=of_token, activation=activation
                )
            return calls

        moved = 2 * tokens * kind.channels * self.item
        size = f"{tokens} tokens, {checkpoints} checkpoints"
        if len(lengths) > 1:
            size = f"{len(lengths)} x {lengths[0]} tokens"
        return Case("conv prefill", size, moved, make)

    def gated(self, kind: RecurrentKind, tokens: int, convolve: Callable[..., Tensor]) -> Calls:
        """A short convolution between its gates, in its kernels and in kernels of their own."""
        wide = self.normal(tokens, 3 * kind.channels)
        before, after, x = wide.split(kind.channels, dim=1)
        gates, gate = Gates(before, after), self.kernels.activation.gate

        def apart() -> None:
            inputs = gate(x, before, "none")
            gate(convolve(inputs), after, "none")

        return {"with gates": lambda: convolve(x, gates=gates), "gates apart": apart}

    def decode_attention(self, batch: int, kv: int) -> Case:
        attention, shape = self.kernels.attention, self.attention_shape()
        plan = attention.plan(self.paged([1] * batch, [kv] * batch), shape)
        blocks = batch * -(-kv // BLOCK)

        def make() -> Calls:
            query = self.normal(batch, shape.heads, shape.head_dim)
            cache = self.kv_cache(blocks)
            dense = [
                values[1:].reshape(batch, -1, shape.kv_heads, shape.head_dim)[:, :kv]
                for values in (cache.key, cache.value)
            ]
            key, value = (values.transpose(1, 2) for values in dense)
            return {
                "ours": lambda: attention.attend(query, cache, plan),
                "SDPA": lambda: F.scaled_dot_product_attention(
                    query[:, :, None], key, value, scale=shape.scale, enable_gqa=True
                ),
            }

        moved = batch * kv * shape.kv_heads * shape.head_dim * 2 * self.item
        flops = 4 * batch * kv * shape.heads * shape.head_dim
        return Case("attention decode", f"B={batch} kv {kv}", moved, make, flops)

    def decode_attention_fp8(self, batch: int, kv: int) -> Case:
        """Over keys and values in FP8, beside the same in the model's type."""
        attention, paged = self.kernels.attention, self.paged([1] * batch, [kv] * batch)

        def make() -> Calls:
            query = self.normal(batch, self.attention().num_heads, self.attention().head_dim)
            calls: Calls = {}
            for label, dtype in (("ours", FP8), ("ours, not in FP8", self.dtype)):
                plan = attention.plan(paged, self.attention_shape(dtype))
                cache = self.kv_cache(batch * -(-kv // BLOCK), dtype)
                calls[label] = partial(attention.attend, query, cache, plan)
            return calls

        shape = self.attention_shape(FP8)
        moved = batch * kv * shape.kv_heads * shape.head_dim * 2
        flops = 4 * batch * kv * shape.heads * shape.head_dim
        return Case("attention decode", f"B={batch} kv {kv} FP8", moved, make, flops)

    def prefill_attention(self, sequences: int, queries: int, keys: int) -> Case:
        """So many sequences alike, as a step outside of CUDA graphs computes them."""
        attention, shape = self.kernels.attention, self.attention_shape()
        plan = attention.plan(self.paged([queries] * sequences, [keys] * sequences), shape)

        def make() -> Calls:
            query = self.normal(sequences * queries, shape.heads, shape.head_dim)
            cache = self.kv_cache(sequences * -(-keys // BLOCK))
            calls: Calls = {"ours": lambda: attention.attend(query, cache, plan)}
            if queries == keys:
                key, value = (
                    values[1:].flatten(0, 1)[: sequences * keys]
                    .unflatten(0, (sequences, keys)).transpose(1, 2)
                    for values in (cache.key, cache.value)
                )  # fmt: skip
                calls["SDPA"] = lambda: F.scaled_dot_product_attention(
                    query.unflatten(0, (sequences, queries)).transpose(1, 2), key, value,
                    is_causal=True, scale=shape.scale, enable_gqa=True,
                )  # fmt: skip
            return calls

        seen = sequences * queries * (keys - queries / 2)  # pairs of a query and a key that it sees
        width = shape.head_dim * self.item
        moved = 2 * sequences * (keys * shape.kv_heads + queries * shape.heads) * width
        flops = 4 * seen * shape.heads * shape.head_dim
        size = f"{queries} on {keys}"
        if sequences > 1:
            size = f"{sequences} x {size}"
        return Case("attention prefill", size, moved, make, flops)

    def append(self, tokens: int) -> Case:
        attention, shape = self.kernels.attention, self.attention_shape()
        lengths = [tokens] if tokens > 1 else [1]
        paged = self.paged(lengths, lengths)
        plan = attention.plan(paged, shape)
        blocks = -(-tokens // BLOCK)
        heads = [shape.heads + shape.kv_heads, shape.kv_heads]

        def make() -> Calls:
            qkv = self.normal(tokens, sum(heads), shape.head_dim)
            qk, value = qkv.split(heads, dim=1)
            key, cache = qk[:, shape.heads :], self.kv_cache(blocks)
            return {"ours": lambda: attention.append(key, value, cache, plan)}

        moved = 4 * tokens * shape.kv_heads * shape.head_dim * self.item
        return Case("append KV", f"{tokens} tokens", moved, make)

    def rope(self, tokens: int) -> Case:
        """Also with norms, where heads have them; the rotation of models without one would be
        Llama's."""
        attention, shape = self.kernels.attention, self.attention_shape()
        given = self.model.rope or RopeConfig(10000.0, shape.head_dim)
        config = replace(given, rotary_dim=min(given.rotary_dim, shape.head_dim))
        frequencies = inverse_frequencies(config).to(self.device)
        plan = self.kernels.rope.plan(self.integers(range(tokens)), frequencies, self.dtype)
        paged = attention.plan(self.paged([tokens], [tokens]), shape)
        norms = None
        if self.attention().qk_norm:
            kind = torch.float32 if self.attention().zero_centered_norm else self.dtype
            query, key = self.normal(2, shape.head_dim, dtype=kind)
            norms = HeadNorms(query, key, EPS)
        heads = shape.heads + 2 * shape.kv_heads

        def make() -> Calls:
            qkv = self.normal(tokens, heads, shape.head_dim)
            cache = self.kv_cache(-(-tokens // BLOCK))
            return {"ours": lambda: self.kernels.rope.prepare(qkv, norms, plan, cache, paged)}

        moved = 2 * tokens * heads * shape.head_dim * self.item
        return Case("rope", f"{tokens} tokens{', norms' if norms else ''}", moved, make)

    def add_rms_norm(self, rows: int) -> Case:
        norm, size = self.kernels.norm, self.model.hidden_size
        kind = torch.float32 if self.model.residual_in_fp32 else self.dtype
        weight = self.normal(size)

        def make() -> Calls:
            x, residual = self.normal(rows, size), self.normal(rows, size, dtype=kind)
            calls: Calls = {"ours": lambda: norm.add_rms_norm(x, residual, 1.0, weight, EPS)}
            if (fast := library("flashinfer")) and kind == self.dtype:
                calls["flashinfer"] = lambda: fast.fused_add_rmsnorm(x, residual, weight, EPS)
            return calls

        moved = rows * size * (2 * self.item + 2 * kind.itemsize)
        return Case("add_rms_norm", f"{rows} x {size}", moved, make)

    def gated_rms_norm(self, rows: int, size: int, group: int, norm_first: bool = False) -> Case:
        norm = self.kernels.norm
        weight = self.normal(size)

        def make() -> Calls:
            x, gate = self.normal(rows, size), self.normal(rows, 2 * size)[:, :size]
            return {"ours": lambda: norm.gated_rms_norm(x, gate, weight, group, EPS, norm_first)}

        moved = 3 * rows * size * self.item
        return Case("gated_rms_norm", f"{rows} x {size}, groups of {group}", moved, make)

    def activation(self, rows: int, config: MLPConfig) -> Case:
        activate, size = self.kernels.activation.activate, config.intermediate_size
        columns = 2 * size if config.gated else size

        def make() -> Calls:
            x = self.normal(rows, columns)
            return {"ours": lambda: activate(x, config.activation, config.gated)}

        shape = f"{rows} x {columns} {config.activation}{' gated' if config.gated else ''}"
        return Case("activation", shape, rows * (columns + size) * self.item, make)

    def router(self, tokens: int, config: MoEConfig) -> Case:
        number, width = config.num_experts, self.model.hidden_size

        def make() -> Calls:
            x, weight = self.normal(tokens, width), self.normal(number, width)
            to = Router(weight, config.experts_per_token, config.scoring, config.normalize_weights)
            return {"ours": lambda: self.kernels.experts.route(x, to)}

        moved = (number + tokens) * width * self.item
        return Case("router", f"{tokens} tokens", moved, make, 2 * tokens * number * width)

    def experts(self, tokens: int, config: MoEConfig, beside: MLPConfig | None = None) -> Case:
        """`beside`: the MLP that all tokens share, as a layer computes it with its experts."""
        inner = config.expert.intermediate_size
        halves = 2 if config.expert.gated else 1
        rows, shared_inner = halves * inner, 0 if beside is None else beside.intermediate_size
        width, number = config.latent_size or self.model.hidden_size, config.num_experts
        chosen = (
            torch.rand(tokens, number, device=self.device).topk(config.experts_per_token).indices
        )

        def make() -> Calls:
            x = self.normal(tokens, width)
            weights = torch.rand(chosen.shape, device=self.device)
            up = self.normal(number, rows, width).mul_(width**-0.5)
            down = self.normal(number, width, inner).mul_(inner**-0.5)
            layer = ExpertWeights(up, down, config.expert.activation, config.expert.gated)
            shared = None
            if beside is not None:
                shared = SharedExpert(
                    self.normal(halves * shared_inner, width).mul_(width**-0.5),
                    self.normal(width, shared_inner).mul_(shared_inner**-0.5),
                    self.normal(1, width) if config.shared_gate else None,
                )
            return {"ours": lambda: self._mix(x, chosen, weights, layer, shared)}

        used = len(chosen.unique())  # experts whose weights are read
        moved = ((used * inner + shared_inner) * (halves + 1) + 2 * tokens) * width * self.item
        products = config.experts_per_token * inner + shared_inner
        flops = 2 * tokens * products * width * (halves + 1)
        name = "experts" if beside is None else "experts and shared MLP"
        return Case(name, f"{tokens} tokens", moved, make, flops)

    def _mix(
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        layer: ExpertWeights,
        shared: SharedExpert | None,
    ) -> Tensor:
        """As in a layer of experts."""
        kernels = self.kernels
        beside: Shared | None = shared
        if shared is not None and not kernels.experts.takes_shared(len(x), layer, shared):
            up = kernels.linear.multiply(x, shared.up)
            hidden = kernels.activation.activate(up, layer.activation, layer.gated)
            beside = SharedResult(kernels.linear.multiply(hidden, shared.down), shared.gate)
        return kernels.experts.mix(x, chosen, weights, layer, beside)

    def argmax(self, rows: int) -> Case:
        sampling, vocabulary = self.kernels.sampling, self.model.vocab_size

        def make() -> Calls:
            logits = self.normal(rows, vocabulary)
            return {"ours": lambda: sampling.argmax(logits), "torch": lambda: logits.argmax(1)}

        return Case("argmax", f"{rows} x {vocabulary}", rows * vocabulary * self.item, make)

    def draw(self, rows: int, top_k: int, top_p: float) -> Case:
        """Of a flat distribution: top-p alone keeps half of the vocabulary."""
        sampling, vocabulary = self.kernels.sampling, self.model.vocab_size

        def full(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((rows,), value, dtype=dtype, device=self.device)

        def make() -> Calls:
            logits = self.normal(rows, vocabulary)
            point = torch.rand(rows, dtype=torch.float64, device=self.device)
            values = full(0.7), full(top_k, torch.int32), full(top_p), full(0.0)
            filters = Filters(*values, top_k > 0, top_p < 1, uses_min_p=False)
            return {"ours": lambda: sampling.draw(logits, filters, point)}

        used = [f"top-k {top_k}"] * (top_k > 0) + [f"top-p {top_p}"] * (top_p < 1)
        shape = f"{rows} x {vocabulary} {', '.join(used)}".rstrip()
        return Case("draw", shape, rows * vocabulary * self.item, make)


def _shared_of_experts_kind(config: MoEConfig) -> bool:
    """Whether all tokens share an MLP that is like the experts but for its size."""
    shared, expert = config.shared, config.expert
    if shared is None or config.latent_size is not None:
        return False
    return replace(shared, intermediate_size=expert.intermediate_size) == expert


def _shrunk(model: HybridModelConfig) -> HybridModelConfig:
    """The same kinds of layers, small enough for a CPU."""
    return replace(
        model,
        hidden_size=64,
        vocab_size=200,
        attention=model.attention
        and replace(model.attention, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25),
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
        mlp=model.mlp and replace(model.mlp, intermediate_size=96),
        moe=model.moe
        and replace(
            model.moe,
            num_experts=8,
            experts_per_token=2,
            expert=replace(model.moe.expert, intermediate_size=32),
            shared=model.moe.shared and replace(model.moe.shared, intermediate_size=64),
        ),
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
