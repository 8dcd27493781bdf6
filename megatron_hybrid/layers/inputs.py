"""What one step hands to the layers, and what the layers need to be given: specs and caches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import (
    DecodeRuns,
    DecodeSlots,
    KVCache,
    PackedStates,
    PagedSequences,
    PrefillSegments,
    RecurrentState,
)
from megatron_hybrid.memory.arena import Arena

SCALES_DTYPE = torch.float32  # of packed states
Zeros = Callable[[tuple[int, ...], torch.dtype], Tensor]  # by shape and type


@dataclass(frozen=True, slots=True)
class CacheMoves:
    """What a step moves in the caches outside of the layers. All tensors are on the model's
    device; a place is block * block_size + offset."""

    copy_source: Tensor  # [copied tokens] places whose KV is copied before the step writes any
    copy_destination: Tensor  # [copied tokens] places that it goes to
    stored_rows: Tensor  # [stored] rows of the step's logits that are kept
    stored_slots: Tensor  # [stored] their rows of LayerCaches.end_logits
    resumed_slots: Tensor  # [resumed] rows of LayerCaches.end_logits that give a token
    packed_from: Tensor  # [packed] slots whose states are packed before all else
    packed_to: Tensor  # [packed] the packed slots
    unpacked_from: Tensor  # [unpacked] packed slots whose states are unpacked then
    unpacked_to: Tensor  # [unpacked] the slots that the step reads them from
    window_source: Tensor  # [copied tokens] as copy_source, of layers with a sliding window
    window_destination: Tensor  # [copied tokens]


class LockstepSize(NamedTuple):
    """The most that any replica of the lockstep group computes in a step; each pads to it what it
    shares with the others."""

    tokens: int
    rows: int  # of logits
    all_to_all: bool = False  # experts' tokens travel so; else by all-gather


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's tokens and where their past is. All tensors on the model's device.

    Decodes come first: one token a sequence as DecodeSlots say, or one and drafts as DecodeRuns do.
    """

    token_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens], absolute
    num_decodes: int  # the first sequences
    paged: PagedSequences
    decode: DecodeSlots | DecodeRuns | None  # None when the step has no decodes
    prefill: PrefillSegments | None  # None when the step has no prefill
    logits_index: Tensor  # [rows]: tokens whose logits are wanted
    decode_rows: Tensor  # [decodes] rows of the row table
    sampled_rows: Tensor  # [sampled] rows of the row table that get a token
    # The sequences as layers with a sliding window see them, without what was given back; None:
    # nothing was, or there are no such layers.
    window: PagedSequences | None = None
    moves: CacheMoves | None = None  # None when the step moves nothing
    lockstep: LockstepSize | None = None  # None: nobody computes more than we do
    num_drafts: int = 0  # tokens of the decodes behind each sequence's first one
    adapters: Tensor | None = None  # [tokens]: slot of each one's adapter; None: nobody has one
    # Puts in place what only the device knows of decodes with drafts; before the model computes.
    take_up: Callable[[], None] | None = None

    @property
    def num_tokens(self) -> int:
        """Of all sequences, drafts included."""
        return int(self.token_ids.shape[0])

    def of_logits(self, values: Tensor) -> Tensor:
        """Of rows of all tokens those of tokens whose logits are wanted: as they are where nothing
        but decodes is computed."""
        if self.prefill is None and len(self.logits_index) == len(values):
            return values
        return values.index_select(0, self.logits_index)

    @property
    def num_decode_tokens(self) -> int:
        """Of the sequences that decode; they come first."""
        return self.num_decodes + self.num_drafts


@dataclass(frozen=True, slots=True)
class KVSpec:
    """One attention layer's cache on this rank. `value_dim`: numbers of a value; None: as many as
    of a key, 0: values are the first numbers of their keys (see KVCache). `window`: tokens that its
    sliding window has, with keys and values in blocks of their own; 0: it sees all. `index_dim`:
    numbers that an index keeps of a token, of its own type, in groups of `index_group` tokens
    (IndexShape)."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    value_dim: int | None = None
    window: int = 0
    index_dim: int = 0
    index_dtype: torch.dtype = torch.float32
    index_group: int = 1

    @property
    def dims(self) -> tuple[int, int]:
        """Numbers that a head has of a key and of a value."""
        return self.head_dim, self.head_dim if self.value_dim is None else self.value_dim

    def bytes_per_token(self) -> int:
        """Of a key and a value, and of an index."""
        return self.num_kv_heads * sum(self.dims) * self.dtype.itemsize + self.index_bytes

    @property
    def index_bytes(self) -> int:
        """Of a token's entry."""
        return self.index_dim * self.index_dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One recurrent layer's state in one slot on this rank: what its convolution and its recurrence
    keep. A layer without a recurrence has an ssm_shape of (0,).

    `kernel_chunk`: the kernel cuts sequences at multiples of it. `writes_checkpoints`: the
    kernel can store states in the middle of a chunk. `inputs_shapes`: what the recurrence takes in
    of one token, and a ring keeps beside the convolution's input, in `inputs_dtype`. `scaled_over`:
    the dimension of ssm_shape along which entries of a packed state share a scale (PackedStates).
    """

    conv_shape: tuple[int, ...]  # (channels, width - 1): the last inputs, oldest first
    conv_dtype: torch.dtype
    ssm_shape: tuple[int, ...]  # for instance (heads, head_dim, state)
    ssm_dtype: torch.dtype
    kernel_chunk: int
    inputs_shapes: tuple[tuple[int, ...], ...] = ()
    inputs_dtype: torch.dtype = torch.float32
    writes_checkpoints: bool = True
    scaled_over: int = -2

    def bytes_per_ring_place(self) -> int:
        """What a ring keeps of one token."""
        shapes = (self.conv_shape[:1], *self.inputs_shapes)
        return sum(map(math.prod, shapes)) * self.inputs_dtype.itemsize

    def bytes_per_slot(self) -> int:
        """Of the convolution's window and the recurrence's state."""
        conv = math.prod(self.conv_shape) * self.conv_dtype.itemsize
        return conv + math.prod(self.ssm_shape) * self.ssm_dtype.itemsize

    def bytes_per_packed_slot(self, dtype: torch.dtype) -> int:
        """The same where the recurrence's state is packed into this type."""
        conv = math.prod(self.conv_shape) * self.conv_dtype.itemsize
        scales = math.prod(self.scales_shape(dtype) or (0,)) * SCALES_DTYPE.itemsize
        return conv + math.prod(self.ssm_shape) * dtype.itemsize + scales

    def scales_shape(self, dtype: torch.dtype) -> tuple[int, ...] | None:
        """Of a state's scales, if it has any in this type."""
        if dtype != torch.int8 or not math.prod(self.ssm_shape):
            return None
        shape = list(self.ssm_shape)
        shape[self.scaled_over] = 1
        return tuple(shape)


class RoutedSpec(NamedTuple):
    """What is kept of the routers' choices for each token: of so many layers with experts, `chosen`
    ids of this type."""

    layers: int
    chosen: int
    dtype: torch.dtype

    def bytes_per_token(self) -> int:
        """Of all layers."""
        return self.layers * self.chosen * self.dtype.itemsize


class RecurrentRings(NamedTuple):
    """Inputs of one recurrent layer's last tokens, [rings, R, ...] each: see DecodeRuns."""

    conv: Tensor  # [rings, R, channels]
    inputs: tuple[Tensor, ...]  # the recurrence's, in the order of StateSpec.inputs_shapes


@dataclass(frozen=True, slots=True)
class LayerCaches:
    """The caches of all layers, by layer index in the model's pattern, and the logits kept for
    prompts that end at a cached state."""

    kv: dict[int, KVCache]
    state: dict[int, RecurrentState]
    end_logits: Tensor  # [slots, vocabulary] float32; a row goes with the state slot of that id
    rings: dict[int, RecurrentRings] = field(default_factory=dict)  # where decodes have drafts
    packed: tuple[PackedStates, ...] = ()  # of the layers in `state`, where cached ones are packed
    rounding_seed: int | None = None  # of stochastic rounding of states; None: to the nearest
    # [blocks, block_size, layers, chosen] experts of the tokens whose keys and values lie there, in
    # the layers that have any; None: they are not kept
    routed: Tensor | None = None
    windowed: frozenset[int] = frozenset()  # layers in `kv` with a sliding window

    def caches_of(self, *, windowed: bool) -> Iterator[KVCache]:
        """Keys and values of layers with a sliding window, or of the others."""
        return (cache for layer, cache in self.kv.items() if (layer in self.windowed) == windowed)

    def copy_routed(self, source: Tensor, destination: Tensor) -> None:
        """Places [tokens] each: as the keys and values there are copied."""
        if self.routed is not None:
            rows = self.routed.flatten(0, 1)
            rows.index_copy_(0, destination.long(), rows.index_select(0, source))

    def keep_routed(self, places: Tensor, chosen: Sequence[Tensor]) -> None:
        """places [tokens]: as PagedSequences.kv_slot. chosen: of each layer [tokens, chosen]."""
        if self.routed is not None:
            ids = torch.stack(list(chosen), dim=1).to(self.routed.dtype)
            self.routed.flatten(0, 1).index_copy_(0, places.long(), ids)

    @property
    def ring_length(self) -> int:
        """Tokens that the rings keep (R); 0 without rings."""
        return next((ring.conv.shape[1] for ring in self.rings.values()), 0)


def allocate_caches(
    kv_specs: dict[int, KVSpec],
    state_specs: dict[int, StateSpec],
    num_blocks: int,
    block_size: int,
    num_slots: int,
    device: torch.device,
    end_logits_vocab: int = 0,
    num_rings: int = 0,
    ring_length: int = 0,
    num_packed: int = 0,
    packed_dtype: torch.dtype | None = None,
    rounding_seed: int | None = None,
    arena: Arena | None = None,
    routed: RoutedSpec | None = None,
    num_window_blocks: int | None = None,
) -> LayerCaches:
    """Zeroed caches, in memory of the `arena` if there is one.

    `end_logits_vocab`: the vocabulary size when logits are to be kept, 4 bytes times that a slot;
    0 keeps none. `num_rings`, `ring_length`: sequences that decode with drafts, and the tokens that
    a ring has room for (DecodeRuns); 0: there are none. `num_packed`, `packed_dtype`: slots behind
    the `num_slots` that hold packed states, and their type; None: none are packed. `rounding_seed`:
    of LayerCaches. `routed`: what is kept of the routers' choices; None: nothing.
    `num_window_blocks`: of layers with a sliding window; None: as many as of the others.
    """
    zeros = partial(_zeros, device=device, arena=arena)
    kv = {}
    for layer, kv_spec in kv_specs.items():
        blocks = num_blocks
        if kv_spec.window and num_window_blocks is not None:
            blocks = num_window_blocks
        rows = (blocks, block_size, kv_spec.num_kv_heads)
        key, value = (zeros((*rows, dim), kv_spec.dtype) for dim in kv_spec.dims)
        index = None
        if kv_spec.index_dim:
            index = zeros((blocks, block_size, kv_spec.index_dim), kv_spec.index_dtype)
        kv[layer] = KVCache(key, value, index=index)
    state, packed = {}, []
    if packed_dtype is None:
        for layer, spec in state_specs.items():
            ssm = zeros((num_slots, *spec.ssm_shape), spec.ssm_dtype)
            state[layer] = RecurrentState(_conv_states((num_slots,), spec, device, zeros), ssm)
    else:
        for spec in dict.fromkeys(state_specs.values()):
            layers = [layer for layer, own in state_specs.items() if own == spec]
            states = _packed_states(
                spec, len(layers), (num_slots, num_packed), packed_dtype, device, zeros
            )
            packed.append(states)
            each = zip(layers, states.full_conv, states.full_ssm, strict=True)
            state |= {layer: RecurrentState(conv, ssm) for layer, conv, ssm in each}
    end_logits = zeros((num_slots + num_packed, end_logits_vocab), torch.float32)
    rings = {}
    if num_rings:
        rings = {
            layer: _rings(spec, (num_rings, ring_length), zeros)
            for layer, spec in state_specs.items()
        }
    experts = None
    if routed is not None:
        experts = zeros((num_blocks, block_size, routed.layers, routed.chosen), routed.dtype)
    return LayerCaches(
        kv, dict(sorted(state.items())), end_logits, rings, tuple(packed), rounding_seed, experts,
        frozenset(layer for layer, kv_spec in kv_specs.items() if kv_spec.window),
    )  # fmt: skip


def _packed_states(
    spec: StateSpec,
    layers: int,
    slots: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    zeros: Zeros,
) -> PackedStates:
    """`slots`: full and packed ones."""
    full, packed = ((layers, count) for count in slots)
    scales_shape = spec.scales_shape(dtype)
    scales = None
    if scales_shape is not None:
        scales = zeros((*packed, *scales_shape), SCALES_DTYPE)
    return PackedStates(
        full_conv=_conv_states(full, spec, device, zeros),
        full_ssm=zeros((*full, *spec.ssm_shape), spec.ssm_dtype),
        conv=_conv_states(packed, spec, device, zeros),
        values=zeros((*packed, *spec.ssm_shape), dtype),
        scales=scales,
        over=spec.scaled_over,
    )


def _rings(spec: StateSpec, size: tuple[int, int], zeros: Zeros) -> RecurrentRings:
    def ring(shape: tuple[int, ...]) -> Tensor:
        return zeros((*size, *shape), spec.inputs_dtype)

    return RecurrentRings(ring(spec.conv_shape[:1]), tuple(map(ring, spec.inputs_shapes)))


def _zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, arena: Arena | None
) -> Tensor:
    """On a CPU it takes memory only where something is written: a laptop has other uses for it, and
    to touch all of a gigabyte can take seconds."""
    if arena is not None:
        return arena.zeros(shape, dtype)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(shape, dtype=f"i{dtype.itemsize}")).view(dtype)


def _conv_states(
    slots: tuple[int, ...], spec: StateSpec, device: torch.device, zeros: Zeros
) -> Tensor:
    """[*slots, channels, width - 1], zeroed."""
    if device.type == "cpu":
        return zeros((*slots, *spec.conv_shape), spec.conv_dtype)
    # channels lie side by side, as in the activations: neighbouring threads read neighbours
    shape = (*slots, *reversed(spec.conv_shape))
    return zeros(shape, spec.conv_dtype).transpose(-1, -2)
