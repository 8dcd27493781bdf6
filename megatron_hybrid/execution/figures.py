"""The figures of a step, which go to the device in one copy: arrays on the host, then the same
tuples of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron_hybrid.execution.device import record
from megatron_hybrid.kernels.contract import Ints, PagedHost, PagedSequences
from megatron_hybrid.kernels.pinned import as_on_device, copy_by_kernel

T = TypeVar("T")
HOSTS = 3  # steps under way, and one that is planned
_ALIGNMENT = 4  # int32 in 16 bytes: Triton compiles a kernel once more for pointers that are not


class SegmentFigures(NamedTuple, Generic[T]):
    """Of the prompts, as in PrefillSegments."""

    cu_seqlens: T
    start_position: T
    read_slot: T
    write_slot: T
    cu_checkpoints: T
    checkpoint_sequence: T
    checkpoint_position: T
    checkpoint_slot: T
    sequence_of_token: T
    ring: T


class SingleFigures(NamedTuple, Generic[T]):
    """Of decodes of one token each as DecodeRuns: [decodes] but for cu_seqlens."""

    cu_seqlens: T  # [decodes + 1]
    position: T
    unfolded: T
    nothing: T  # positions and slots of checkpoints


class DraftFigures(NamedTuple, Generic[T]):
    """Of n decodes with drafts, F tokens in all: what the host knows, and room for what only the
    device does."""

    places: T  # [n] of LastSteps
    certain: T  # [n] tokens that are the sequence's, whatever is accepted
    unfolded: T  # [n] the last of them, which its state does not include
    sequence: T  # [F] that each token belongs to; -1: padding
    offset: T  # [F] 0: the next token; 1, 2, ...: a draft
    window_start: T  # [n], and the others: see DraftPlan
    windows: T  # [n, width]
    checkpoint_position: T  # [n]
    checkpoint_slot: T  # [n]
    stop_ids: T  # [n, MOST_STOP_IDS]
    position_now: T  # [n] DecodeRuns.position, of the device
    unfolded_now: T  # [n] DecodeRuns.unfolded, of the device


class WindowFigures(NamedTuple, Generic[T]):
    """Of sequences as layers with a sliding window see them (windows.py): as in PagedSequences."""

    kv_slot: T  # [tokens]
    kv_length: T  # [sequences]
    kv_indptr: T  # [sequences + 1]
    last_block_length: T  # [sequences]
    first_position: T  # [sequences] where each begins
    kv_indices: T  # [blocks of all sequences]


class StepFigures(NamedTuple, Generic[T]):
    """All of a step, in the order in which they lie on the device. Decodes come first."""

    token_ids: T  # [tokens]
    positions: T  # [tokens]
    kv_slot: T  # [tokens], and the next three and the last one: as in PagedSequences
    cu_seqlens: T  # [sequences + 1]
    kv_length: T  # [sequences]
    kv_indptr: T  # [sequences + 1]
    last_block_length: T  # [sequences]
    decode_rows: T  # [decodes] of the row table
    read_slot: T  # [decodes]
    write_slot: T  # [decodes]
    logits_index: T  # [rows] tokens whose logits are wanted
    prefill: SegmentFigures[T] | None  # None: there are no prompts
    chunk_bounds: tuple[T, ...]  # cu_chunk_seqlens of each kernel chunk
    decodes: SingleFigures[T] | DraftFigures[T] | None  # None: DecodeSlots say all
    adapters: T | None  # [tokens] slots of adapters; None: nobody has one
    window: WindowFigures[T] | None  # None: no layer has a sliding window
    # Last, because it varies: all others are as long as their graph has room for.
    kv_indices: T  # [blocks of all sequences]

    @staticmethod
    def most(max_tokens: int, requests: int, chunk_sizes: int) -> int:
        """Numbers of a step of so many tokens and requests but for the tables of requests: each of
        the figures has one for each token and two for each request at the most."""
        figures = len(StepFigures._fields) + len(SegmentFigures._fields) + chunk_sizes
        figures += len(WindowFigures._fields)
        return (figures + len(DraftFigures._fields)) * (max_tokens + 2 * requests + 2 * _ALIGNMENT)


def paged_sequences(
    step: StepFigures[Tensor],
    host: PagedHost,
    num_decodes: int,
    *,
    static: bool,
    longest_run: int = 0,
    most_blocks: int = 0,
) -> PagedSequences:
    """Of a step's figures, which lie on the host, too; the others as in PagedSequences."""
    return PagedSequences(
        cu_seqlens=step.cu_seqlens,
        kv_length=step.kv_length,
        kv_indptr=step.kv_indptr,
        kv_indices=step.kv_indices,
        last_block_length=step.last_block_length,
        kv_slot=step.kv_slot,
        num_decodes=num_decodes,
        host=host,
        static=static,
        longest_run=longest_run,
        most_blocks=most_blocks,
    )


class Kept(NamedTuple):
    """Figures of steps of one size but for kv_indices, kept from one step to the next."""

    host: StepFigures[Ints]  # views of the numbers
    numbers: Ints  # as they lie on the device
    device: StepFigures[Tensor]


class Uploads:
    """The device's memory for a step's figures: that of the last step is written over."""

    def __init__(self, before: int, behind: int, device: torch.device) -> None:
        """Numbers that there is room for, before and behind a fixed origin."""
        self._origin = -(-before // _ALIGNMENT) * _ALIGNMENT
        dtype = torch.int64 if device.type == "cpu" else torch.int32
        self._buffer = torch.empty(self._origin + behind, dtype=dtype, device=device)
        self._hosts = cycle([_Host(self._buffer) for _ in range(HOSTS)])
        self._host = next(self._hosts)

    def upload(
        self, loose: list[Ints], figures: StepFigures[Ints]
    ) -> tuple[list[Tensor], StepFigures[Tensor]]:
        """Both as tensors on the device: `loose` before the origin, the figures from there on, so
        that their places depend on nothing but their lengths."""
        every = [*loose, *_arrays(figures)]
        sizes = _with_gaps(every)
        first = self._origin - sum(sizes[: 2 * len(loose)])
        host = self._on_host(first, sum(sizes))
        numbers, start = host.numpy(), 0
        for part in every:
            numbers[start : start + part.size] = part if part.ndim == 1 else part.reshape(-1)
            start += part.size + -part.size % _ALIGNMENT
        target = self._send(first, host)
        tensors = iter(target.split(sizes)[::2])  # the others are gaps
        return [next(tensors) for _ in loose], _shaped(figures, tensors)

    def keep(self, figures: StepFigures[Ints]) -> Kept:
        """Where `upload` puts figures of such sizes, without kv_indices. Nothing is copied to the
        device."""
        assert not figures.kv_indices.size
        parts = list(_arrays(figures))
        sizes = _with_gaps(parts)
        target = self._buffer[self._origin : self._origin + sum(sizes)]
        numbers = torch.zeros(sum(sizes), dtype=self._buffer.dtype).numpy()
        views = np.split(numbers, np.cumsum(sizes)[:-1])[::2]
        for view, part in zip(views, parts, strict=True):
            view[:] = part.reshape(-1)
        tensors = iter(target.split(sizes)[::2])
        return Kept(_shaped(figures, iter(views)), numbers, _shaped(figures, tensors))

    def upload_again(self, kept: Kept, kv_indices: Ints, length: int) -> Ints:
        """Kept figures as they are now, and behind them these kv_indices and zeros, `length` in
        all, which are returned as they went to the device."""
        fixed, given = len(kept.numbers), len(kv_indices)
        host = self._on_host(self._origin, fixed + length)
        numbers: Ints = host.numpy()
        numbers[:fixed] = kept.numbers
        numbers[fixed : fixed + given] = kv_indices
        numbers[fixed + given :] = 0
        self._send(self._origin, host)
        return numbers[fixed:]

    def _on_host(self, first: int, length: int) -> Tensor:
        """Memory for what goes there in the buffer."""
        room = len(self._buffer) - first
        assert first >= 0 and length <= room, "the step is too large"
        self._host = next(self._hosts)
        return self._host.memory(length)

    def _send(self, first: int, host: Tensor) -> Tensor:
        """Where it lies on the device."""
        target = self._buffer[first : first + len(host)]
        self._host.send(target)
        return target

    def to_the_end(self, tensor: Tensor) -> Tensor:
        """From where the tensor begins to where there is no more room: for what the graph reads of
        later steps."""
        return self._buffer[tensor.storage_offset() :]


class _Host:
    """Memory of one of the last steps' figures."""

    def __init__(self, buffer: Tensor) -> None:
        self._is_cuda = buffer.is_cuda
        self._memory = torch.empty(
            len(buffer), dtype=buffer.dtype, pin_memory=self._is_cuda, device="cpu"
        )
        if self._is_cuda:
            self._there = as_on_device(self._memory)
            self._sent = torch.cuda.Event()

    def memory(self, length: int) -> Tensor:
        """To be written to: what was sent from it has gone."""
        if self._is_cuda:
            self._sent.synchronize()
        return self._memory[:length]

    def send(self, target: Tensor) -> None:
        """As much as there is room for."""
        if not self._is_cuda:
            target.copy_(self._memory[: len(target)])
            return
        copy_by_kernel(target, self._there[: len(target)])
        record(self._sent, target.device)


def filled(values: Ints | list[int], length: int, filler: int = 0) -> Ints:
    """Behind the values as many fillers as are lacking."""
    whole = np.full(length, filler, dtype=np.int64)
    whole[: len(values)] = values
    return whole


def _with_gaps(parts: list[Ints]) -> list[int]:
    """The size of each part, and behind it that of the gap before the next one."""
    return [size for part in parts for size in (part.size, -part.size % _ALIGNMENT)]


def _arrays(figures: tuple[Any, ...]) -> Iterator[Ints]:
    for part in figures:
        if isinstance(part, tuple):
            yield from _arrays(part)
        elif part is not None:
            yield part


def _shaped(figures: Any, flats: Iterator[Any]) -> Any:
    """The same tuples, of these tensors or arrays in the shapes of the arrays."""
    parts: list[Any] = []
    for part in figures:
        if part is None or isinstance(part, tuple):
            parts.append(part and _shaped(part, flats))
        else:
            flat = next(flats)
            parts.append(flat if part.ndim == 1 else flat.reshape(part.shape))
    return figures._make(parts) if hasattr(figures, "_make") else tuple(parts)
