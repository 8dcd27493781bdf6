"""The arguments that kernels share: which sequences, which slots, which blocks.

The tokens of a step are packed, decodes first:

    tokens      d0 d1 d2 | p0 p0 p0 p0 p1 p1 p2 p2 p2
    sequences    0  1  2 |           3     4        5
                 num_decodes = 3

Integer tensors are int64 on a CPU (what torch indexes with) and int32 on a GPU.

A recurrent kernel sees one of the two parts, as `DecodeSlots` or `PrefillSegments`; an attention
kernel sees all sequences at once as `PagedSequences`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.integer]

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # its largest number


@dataclass(frozen=True, slots=True)
class DecodeSlots:
    """One token a sequence. Read and write slot may be the same; slot 0 reads as zeros and is
    never written. A padded row has both 0."""

    read_slot: Tensor  # [decodes]
    write_slot: Tensor  # [decodes]


@dataclass(frozen=True, slots=True)
class DecodeRuns:
    """Decodes of one token or several a sequence: the next one, and behind it drafts, of which
    nobody knows yet whether they are accepted.

    tokens [T, ...]     n0 d0 d0 d0 | n1 | n2 d2          cu_seqlens 0 4 5 7

    A sequence's next token stands at `position`. Its state in read_slot is the one after the first
    position - unfolded tokens; the inputs of those since lie in row `ring` of the layer's rings,
    [rows, R, ...] each, the token at position t in place t % R. A call

        reads the state, and folds the unfolded tokens and the next one into it;
        leaves it in write_slot, after position + 1 tokens;
        goes on with the drafts from there, and leaves their inputs in the ring.

    Then the outputs of all tokens are known. If it turns out that a of the drafts are accepted, the
    next call begins at position + 1 + a with a unfolded tokens. That is all there is to take back:
    the others are never read again. R is at least the unfolded tokens and those of the call.

    With a write_slot of 0 or less the state stays, and the next token's inputs go to the ring, too:
    the next call has unfolded + 1 + a unfolded tokens. A sequence without tokens only folds.

    The state after checkpoint_position tokens goes to checkpoint_slot as well, if the call folds
    its last one: position - unfolded < checkpoint_position <= position + 1; else, and with slots of
    0 or less, nothing is written. As everywhere slot 0 reads as zeros, and read and write slot may
    be the same; a padded sequence has no tokens and both 0. Tokens past cu_seqlens[sequences] are
    padding, whose outputs are zeros.

    Keeping inputs instead of states: ReplaySSM, Dao AI Lab and NVIDIA, 2026,
    https://dao-lab.ai/blog/2026/replayssm/.
    """

    cu_seqlens: Tensor  # [decodes + 1]
    position: Tensor  # [decodes]
    unfolded: Tensor  # [decodes]
    read_slot: Tensor  # [decodes]
    write_slot: Tensor  # [decodes]
    ring: Tensor  # [decodes]
    checkpoint_position: Tensor  # [decodes]
    checkpoint_slot: Tensor  # [decodes]
    # Where no sequence has more than one token: the most unfolded ones of one. None: not so.
    most_unfolded: int | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """In this order, for a kernel's launch."""
        return (
            self.cu_seqlens, self.position, self.unfolded, self.read_slot, self.write_slot,
            self.ring, self.checkpoint_position, self.checkpoint_slot,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PrefillSegments:
    """The contract of every recurrent prefill kernel.

    Packed tokens [T, ...] of S sequences. Sequence s starts at absolute position
    start_position[s] from the state in read_slot[s] (slot 0: zeros) and leaves its last state in
    write_slot[s]. Checkpoint c stores the state after absolute position checkpoint_position[c]
    (that many tokens of the sequence have gone in) of sequence checkpoint_sequence[c] in
    checkpoint_slot[c]; start < position <= end, on the kernel's chunk grid, which is counted
    from position 0 of the sequence. Checkpoints are sorted by sequence, then by position;
    slots of 0 or less are not written. All initial states are read before anything is written.

    Padding: sequences of length 0 with slots 0 at the end, and tokens past cu_seqlens[S], whose
    sequence_of_token is -1 and whose outputs nobody reads.
    """

    cu_seqlens: Tensor  # [S + 1], from 0 to T
    start_position: Tensor  # [S]
    read_slot: Tensor  # [S]
    write_slot: Tensor  # [S]
    cu_checkpoints: Tensor  # [S + 1]: the checkpoints of sequence s are [s] to [s + 1] of these:
    checkpoint_sequence: Tensor  # [C]
    checkpoint_position: Tensor  # [C]
    checkpoint_slot: Tensor  # [C]
    sequence_of_token: Tensor  # [T]
    longest: int  # tokens of the longest segment
    # [S]: rows of the layers' rings; of kernels whose states lie on the grid alone (Replay)
    ring: Tensor | None = None
    # By kernel chunk Q, for kernels that work on chunks: cu_chunk_seqlens [chunks + 1], the bounds
    # of all chunks in the packed tokens. A sequence's chunks end at multiples of Q of its own
    # positions, the last one where it ends; the first one completes a chunk that was cut. Padding
    # chunks, at the end, are empty.
    cu_chunk_seqlens: Mapping[int, Tensor] = field(default_factory=dict)

    @property
    def of_sequences(self) -> tuple[Tensor, ...]:
        """What a program of one sequence reads, in the order of the kernels' arguments."""
        return (
            self.cu_seqlens, self.start_position, self.read_slot, self.write_slot,
            self.cu_checkpoints, self.checkpoint_position, self.checkpoint_slot,
        )  # fmt: skip

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

    The same lengths and tables lie on the host, so that planning a step never waits for the
    device. `static`: the device tensors stay where they are from step to step, and as long as they
    are: a CUDA graph reads them there. Then a kernel's launches may depend on nothing else: not on
    the lengths, which differ from step to step. Padded decodes, and padded prompts without queries,
    stand behind the real ones and have one token of KV, the first of block 0; tokens past
    cu_seqlens[sequences] are padding, whose attention nobody reads.

    `most_blocks`: where static, that a sequence can have; 0: nobody knows.
    `longest_run`: not 0 where decodes have drafts: so many queries each at most. Then on a GPU only
    the device knows their kv_length; the host's is the largest that is possible.
    """

    cu_seqlens: Tensor  # [sequences + 1], over all tokens, decodes included
    kv_length: Tensor  # [sequences], this step's tokens included
    kv_indptr: Tensor  # [sequences + 1]: the blocks of sequence s are [s] to [s + 1] of these:
    kv_indices: Tensor  # [blocks of all sequences; more where static]
    last_block_length: Tensor  # [sequences]: tokens in each sequence's last block
    kv_slot: Tensor  # [tokens]
    num_decodes: int
    host: PagedHost
    static: bool = False
    longest_run: int = 0
    most_blocks: int = 0

    def decodes_alone(self) -> PagedSequences:
        """The first sequences, without the prompts behind them."""
        count, host = self.num_decodes, self.host
        ends = host.cu_seqlens[: count + 1], host.kv_length[:count], host.kv_indptr[: count + 1]
        return replace(
            self,
            cu_seqlens=self.cu_seqlens[: count + 1],
            kv_length=self.kv_length[:count],
            kv_indptr=self.kv_indptr[: count + 1],
            last_block_length=self.last_block_length[:count],
            host=PagedHost(*ends, host.kv_indices, host.last_block_length[:count]),
        )

    def behind(self, first: int) -> PagedSequences:
        """The sequences from this one on, whose tokens stay where they are in the step."""
        host, base = self.host, int(self.host.kv_indptr[first])
        return replace(
            self,
            cu_seqlens=self.cu_seqlens[first:],
            kv_length=self.kv_length[first:],
            kv_indptr=self.kv_indptr[first:] - base,
            kv_indices=self.kv_indices[base:],
            last_block_length=self.last_block_length[first:],
            num_decodes=max(self.num_decodes - first, 0),
            host=PagedHost(
                host.cu_seqlens[first:],
                host.kv_length[first:],
                host.kv_indptr[first:] - base,
                host.kv_indices[base:],
                host.last_block_length[first:],
            ),
        )


class PagedHost(NamedTuple):
    """The figures of PagedSequences on the host, int32 each."""

    cu_seqlens: Ints
    kv_length: Ints
    kv_indptr: Ints
    kv_indices: Ints
    last_block_length: Ints

    @classmethod
    def of(
        cls, query_length: Ints, kv_length: Ints, block_table: Ints, block_size: int
    ) -> PagedHost:
        """query_length, kv_length [sequences]; block_table [sequences, blocks], what is past a
        sequence's end is ignored. Every sequence has at least one token of KV."""
        blocks = -(-kv_length // block_size)
        used = np.arange(block_table.shape[1]) < blocks[:, None]
        return cls(
            cu_seqlens=_cumulative(query_length),
            kv_length=kv_length.astype(np.int32),
            kv_indptr=_cumulative(blocks),
            kv_indices=block_table[used].astype(np.int32),
            last_block_length=(kv_length - (blocks - 1) * block_size).astype(np.int32),
        )


def chunk_bounds(starts: Ints, lengths: Ints, chunk: int) -> npt.NDArray[np.int64]:
    """PrefillSegments.cu_chunk_seqlens of sequences with so many tokens from these positions."""
    starts, lengths = np.asarray(starts), np.asarray(lengths)
    counts = np.where(lengths > 0, -(-(starts + lengths) // chunk) - starts // chunk, 0)
    begins = np.cumsum(lengths, dtype=np.int64) - lengths
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    # of each chunk: where it would begin, had its sequence not been cut there
    whole = np.repeat(begins - starts + starts // chunk * chunk, counts) + number * chunk
    bounds = np.append(np.maximum(whole, np.repeat(begins, counts)), lengths.sum())
    return bounds.astype(np.int64)


def _cumulative(lengths: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


class IndexShape(NamedTuple):
    """How attention with an index chooses what a query sees: so many groups of tokens, counted from
    the sequence's start, and those behind the last group that is whole. `group` divides the block
    size."""

    heads: int  # of index queries; every rank has all of them
    dim: int  # of an index query and of a group's key
    group: int  # tokens
    chosen: int  # groups

    @property
    def budget(self) -> int:
        """Tokens of the chosen groups: a sequence of no more is seen as a whole."""
        return self.group * self.chosen


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What is the same for every attention layer of a kind, on this rank.

    `window`: a token sees itself and the window - 1 tokens before it; 0: all. Sequences may begin
    anywhere then, as with the first block that is still there.
    `first_position`: KV before it is not seen. A query before it sees nothing: its output is
    undefined, or zeros on a GPU, where padded sequences have such queries.
    `relative`: scores have a bias by distance, a RelativeBias that attention is called with.
    `sinks`: attention is called with sinks (see Attention).
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    block_size: int
    dtype: torch.dtype  # of queries, and of keys and values before they are stored
    kv_dtype: torch.dtype  # that they are stored in: the same, or FP8
    first_position: int = 0
    # Numbers of a value, which are the first ones of its key (LatentAttention); None: values are
    # like keys, and beside them.
    value_dim: int | None = None
    window: int = 0
    relative: bool = False
    sinks: bool = False
    index: IndexShape | None = None  # None: queries see all


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of one attention layer, [blocks, block_size, kv_heads, head_dim] each,
    contiguous. Where values are the first numbers of keys (AttentionShape.value_dim) they have no
    memory of their own: what is allocated has 0 in place of their head_dim, and kernels are given a
    view of the keys.

    In FP8 a number x is stored as x / scale, rounded to e4m3 as to_fp8 does, and stands for that
    times the scale. Numbers on the host, so that launches that are captured in a CUDA graph have
    them: they stay as long as the cache.

    `index`: of attention with an index (IndexedAttention), [blocks, block_size, index_dim] in the
    model's type.
    """

    key: Tensor
    value: Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0
    index: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it has of tokens."""
        return (self.key, self.value, *(() if self.index is None else (self.index,)))

    @property
    def is_fp8(self) -> bool:
        """Whether the scales count."""
        return self.key.dtype == FP8


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """States of one recurrent layer: conv [slots, channels, width - 1], and ssm [slots, ...] in the
    shape of the layer's kind: [slots, heads, head_dim, state] for Mamba2."""

    conv: Tensor
    ssm: Tensor


@dataclass(frozen=True, slots=True)
class PackedStates:
    """Cached states that are smaller than those which kernels read and write: of L recurrent layers
    of one shape, with all that RecurrentState has of them.

    Full slots come first; slot number `full_ssm.shape[1] + i` is row i of what is packed. Entries
    of a state that differ only along the dimension `over` share a scale, the largest of them / 127,
    and are value * scale; without scales the values are the states, in another type.
    """

    full_conv: Tensor  # [L, full slots, channels, width - 1]
    full_ssm: Tensor  # [L, full slots, ...]
    conv: Tensor  # [L, packed slots, channels, width - 1], in the type of full_conv
    values: Tensor  # [L, packed slots, ...] int8, or another type without scales
    scales: Tensor | None  # [L, packed slots, ...] float32, 1 along `over`
    over: int  # counted from the last dimension: -1, -2
