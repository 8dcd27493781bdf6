"""The arguments that kernels share: which sequences, which slots, which blocks.

The tokens of a step are packed, decodes first:

    tokens      d0 d1 d2 | p0 p0 p0 p0 p1 p1 p2 p2 p2
    sequences    0  1  2 |           3     4        5
                 num_decodes = 3

A recurrent kernel sees one of the two parts, as `DecodeSlots` or `PrefillSegments`; an attention
kernel sees all sequences at once as `PagedSequences`.
"""

from __future__ import annotations

from dataclasses import dataclass

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

    def checkpoints(self) -> list[tuple[int, int, int]]:
        """(sequence, position, slot) of the checkpoints that are to be written, on the host."""
        entries = zip(
            self.checkpoint_sequence.tolist(),
            self.checkpoint_position.tolist(),
            self.checkpoint_slot.tolist(),
            strict=True,
        )
        return [entry for entry in entries if entry[0] >= 0 and entry[2] > 0]


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
