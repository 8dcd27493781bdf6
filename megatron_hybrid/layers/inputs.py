"""What one step hands to the layers: which sequences, which slots, which blocks.

The rows of a step are packed, decodes first:

    tokens      d0 d1 d2 | p0 p0 p0 p0 p1 p1 p2 p2 p2
    sequences    0  1  2 |           3     4        5
                 num_decodes = 3

A recurrent layer sees the two parts as `DecodeSlots` and `PrefillSegments`; an attention
layer sees all sequences at once as `PagedSequences`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DecodeSlots:
    """One token a sequence. Read and write slot may be the same; slot 0 reads as zeros and is
    never written."""

    read_slot: Tensor  # [decodes] int64
    write_slot: Tensor  # [decodes] int64


@dataclass(frozen=True, slots=True)
class PrefillSegments:
    """The contract of every recurrent prefill kernel.

    Packed tokens [T, ...] of S sequences. Sequence s starts at absolute position
    start_position[s] from the state in read_slot[s] (slot 0: zeros) and leaves its last state in
    write_slot[s]. Checkpoint c stores the state after absolute position checkpoint_position[c]
    (that many tokens of the sequence have gone in) of sequence checkpoint_sequence[c] in
    checkpoint_slot[c]; start < position <= end, on the kernel's chunk grid, which is counted
    from position 0 of the sequence. Entries of -1 do nothing. All initial states are read
    before anything is written.
    """

    cu_seqlens: Tensor  # [S + 1] int64, from 0 to T
    start_position: Tensor  # [S] int64
    read_slot: Tensor  # [S] int64
    write_slot: Tensor  # [S] int64
    checkpoint_sequence: Tensor  # [C] int64
    checkpoint_position: Tensor  # [C] int64
    checkpoint_slot: Tensor  # [C] int64
    longest: int  # tokens of the longest segment


@dataclass(frozen=True, slots=True)
class PagedSequences:
    """All sequences of the step for paged attention.

    Query i of sequence s stands at absolute position kv_length[s] - query_length[s] + i and
    attends to every position up to its own. `kv_slot` is block * block_size + offset of where each
    token's KV is written; masked writes go to the dummy block 0, which no sequence reads.
    """

    cu_seqlens: Tensor  # [sequences + 1] int64, over all tokens, decodes included
    kv_length: Tensor  # [sequences] int64, this step's tokens included
    block_table: Tensor  # [sequences, blocks] int64, padded with 0
    kv_slot: Tensor  # [tokens] int64
    num_decodes: int


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's tokens and where their past is. All tensors on the model's device."""

    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64, absolute
    num_decodes: int  # the first sequences; one token each
    paged: PagedSequences
    decode: DecodeSlots | None  # None when the step has no decodes
    prefill: PrefillSegments | None  # None when the step has no prefill
    logits_index: Tensor  # [rows] int64: tokens whose logits are wanted

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])


@dataclass(frozen=True, slots=True)
class KVSpec:
    """One attention layer's cache on this rank."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One recurrent layer's state in one slot on this rank.

    `kernel_chunk`: the kernel cuts sequences at multiples of it. `writes_checkpoints`: the
    kernel can store states in the middle of a chunk.
    """

    conv_shape: tuple[int, ...]  # (channels, width - 1): the last inputs, oldest first
    conv_dtype: torch.dtype
    ssm_shape: tuple[int, ...]  # (heads, head_dim, state)
    ssm_dtype: torch.dtype
    kernel_chunk: int
    writes_checkpoints: bool = True

    def bytes_per_slot(self) -> int:
        conv = _prod(self.conv_shape) * self.conv_dtype.itemsize
        return conv + _prod(self.ssm_shape) * self.ssm_dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of one attention layer, [blocks, block_size, kv_heads, head_dim] each."""

    key: Tensor
    value: Tensor


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """States of one recurrent layer: conv [slots, channels, width - 1],
    ssm [slots, heads, head_dim, state]."""

    conv: Tensor
    ssm: Tensor


@dataclass(frozen=True, slots=True)
class LayerCaches:
    """The caches of all layers, by layer index in the model's pattern."""

    kv: dict[int, KVCache]
    state: dict[int, RecurrentState]


def allocate_caches(
    kv_specs: dict[int, KVSpec],
    state_specs: dict[int, StateSpec],
    num_blocks: int,
    block_size: int,
    num_slots: int,
    device: torch.device,
) -> LayerCaches:
    """Zeroed caches; zeroing also touches every page, so that no step pays for page faults."""
    kv = {}
    for layer, kv_spec in kv_specs.items():
        shape = (num_blocks, block_size, kv_spec.num_kv_heads, kv_spec.head_dim)
        kv[layer] = KVCache(
            key=torch.empty(shape, dtype=kv_spec.dtype, device=device).zero_(),
            value=torch.empty(shape, dtype=kv_spec.dtype, device=device).zero_(),
        )
    state = {}
    for layer, spec in state_specs.items():
        state[layer] = RecurrentState(
            conv=torch.empty(
                (num_slots, *spec.conv_shape), dtype=spec.conv_dtype, device=device
            ).zero_(),
            ssm=torch.empty(
                (num_slots, *spec.ssm_shape), dtype=spec.ssm_dtype, device=device
            ).zero_(),
        )
    return LayerCaches(kv=kv, state=state)


def _prod(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
