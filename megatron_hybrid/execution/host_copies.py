"""KV blocks and states between the caches and pages of host memory, beside the steps.

What pages hold is page_parts.py's. On a GPU each direction has streams of its own. What lies in
long rows goes from place to place by the copy engines. What lies in short ones or is rounded is
gathered on the GPU, and goes over as whole pages. Neither direction waits on the host, or for the
other.
"""

from __future__ import annotations

import mmap
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from queue import SimpleQueue
from threading import Thread, current_thread

import numpy as np
import torch
from torch import Tensor

from megatron_hybrid.cache.host_tier import Copy
from megatron_hybrid.execution.batch_copies import Copies, Place, batch_copies, copies_of, joined
from megatron_hybrid.execution.device import upload
from megatron_hybrid.execution.long_rows import LongRows, addresses, runs
from megatron_hybrid.execution.page_parts import EXACT, HostForm, PageParts, Part, RoundedPart
from megatron_hybrid.layers.inputs import LayerCaches

PIECE_BYTES = 32 * 2**20  # gathered at a time; two of them in each direction
PIECES_AHEAD = 2  # enqueued and not done, beside the next one: they take memory
SWITCH_SECONDS = 1e-4  # for which a thread keeps Python's lock that another one waits for
_END = object()


class HostCopier:
    """Between one rank's caches and its pages; this one for a CPU, where a copy is done at once."""

    def __init__(
        self, caches: LayerCaches, num_pages: int, page_bytes: int, form: HostForm = EXACT
    ) -> None:
        """Pages are numbered from 1. form: what they hold."""
        parts = PageParts.of(caches, form)
        self.page_bytes, self.device = page_bytes, caches.end_logits.device
        self.caches = caches
        self._word = parts.word(page_bytes)
        placed = parts.placed(self._word)
        self._blocks, self._states = placed.blocks, placed.states
        words = page_bytes // self._word.itemsize
        assert not self._blocks or self._blocks[-1].end <= words, "a block does not fit into a page"
        self._pages = self._allocate(num_pages + 1, words)
        self._bytes = self._pages.view(torch.uint8).numpy()

    def begin_step(self, step: int) -> None:
        """Those before it were launched."""

    def write(self, copy: Copy) -> HostCopier:
        """To the pages."""
        if copy.blocks:
            pages = torch.tensor(copy.pages)
            self._pages[pages] = self._gathered(torch.tensor(copy.blocks))
        if copy.slot:
            self._pages[torch.tensor(copy.state_pages)] = self._state(copy)
        return self

    def fetch(self, copy: Copy) -> HostCopier:
        """From the pages."""
        if copy.blocks:
            self._scatter(torch.tensor(copy.blocks), self._pages[torch.tensor(copy.pages)])
        if copy.slot:
            self._put_state(copy.slot, self._pages[torch.tensor(copy.state_pages)])
        return self

    def is_done(self) -> bool:
        """It was, when the copy was begun."""
        return True

    @property
    def region(self) -> tuple[int, int]:
        """The address of all pages, and their bytes: of page 0, which is nobody's, too."""
        return self._pages.data_ptr(), self._bytes.nbytes

    def views(self, pages: Sequence[int]) -> list[memoryview]:
        """The bytes of pages, to read and to write."""
        return [memoryview(self._bytes[page]) for page in pages]

    def rate(self) -> float:
        """Bytes a second that a fetch moves, about."""
        return 2e9

    def _allocate(self, pages: int, words: int) -> Tensor:
        # Zeros, for which a system gives memory when they are written to; at the beginning of one
        # of its own pages, which nothing else uses.
        size = pages * words * self._word.itemsize
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(memory, dtype=self._word).view(pages, words)

    def _rows(self, count: int) -> Tensor:
        """[count, words of a page], on the caches' device."""
        return torch.empty((count, self._pages.shape[1]), dtype=self._word, device=self.device)

    def _gathered(self, blocks: Tensor) -> Tensor:
        """[len(blocks), words of a page]."""
        found = self._rows(len(blocks))
        for part in self._blocks:
            found[:, part.start : part.end] = part.take(blocks)
        return found

    def _scatter(self, blocks: Tensor, pages: Tensor) -> None:
        for part in self._blocks:
            part.put(blocks, pages[:, part.start : part.end])

    def _state(self, copy: Copy) -> Tensor:
        """[pages of a state, words of a page]."""
        found = self._rows(len(copy.state_pages))
        flat = found.view(-1)
        for part in self._states:
            flat[part.start : part.end] = part.take(_row(copy.slot, part))[0]
        return found

    def _put_state(self, slot: int, pages: Tensor) -> None:
        flat = pages.reshape(-1)
        for part in self._states:
            part.put(_row(slot, part), flat[None, part.start : part.end])


def _row(slot: int, part: Part) -> slice:
    return slice(slot - part.first, slot - part.first + 1)


class CudaHostCopier(HostCopier):
    """The same for a GPU: copies go on while steps are computed."""

    def __init__(
        self, caches: LayerCaches, num_pages: int, page_bytes: int, form: HostForm = EXACT
    ) -> None:
        super().__init__(caches, num_pages, page_bytes, form)
        # The coming step, and the one before it, each with what was launched before.
        self._launched: deque[tuple[int, torch.cuda.Event]] = deque(maxlen=2)
        # A copy's thread needs Python's lock some times, which the engine's does not let go of
        # while it plans and launches a step.
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
        self._up, self._down = _Direction(self.device), _Direction(self.device)
        self._batch = batch_copies()
        self._block_rows, self._state_rows = (
            LongRows.of(parts, self._pages) if self._batch is not None else None
            for parts in (self._blocks, self._states)
        )
        # Blocks that are gathered together; rounding takes some times what they have.
        is_rounded = any(isinstance(part, RoundedPart) for part in self._blocks)
        self.piece = max(1, PIECE_BYTES // page_bytes // (4 if is_rounded else 1))

    def begin_step(self, step: int) -> None:
        self._launched.append((step, torch.cuda.current_stream(self.device).record_event()))

    def write(self, copy: Copy) -> _Job:  # type: ignore[override]
        return self._begin(self._down, copy, self._write_gathered, to_host=True)

    def fetch(self, copy: Copy) -> _Job:  # type: ignore[override]
        return self._begin(self._up, copy, self._fetch_gathered, to_host=False)

    def rate(self) -> float:
        """As measured with one piece, when copies have taken the memory that they take. Waits for
        the device."""
        blocks = [0] * (2 * self.piece if self._blocks else 0)  # it and page 0 are nobody's
        nothing = Copy(blocks, blocks, 0, [])
        for job in (self.write(nothing), self.fetch(nothing)):
            while not job.is_done():
                time.sleep(1e-3)
        pages = list(range(min(self.piece, len(self._pages))))
        rows = self._rows(len(pages))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            for _ in range(2):
                begin.record()
                self._move(rows, pages, to_host=False)
                end.record()
        end.synchronize()
        return rows.numel() * rows.itemsize / (1e-3 * begin.elapsed_time(end))

    def _allocate(self, pages: int, words: int) -> Tensor:
        memory = super()._allocate(pages, words)
        size = memory.numel() * memory.itemsize
        # torch's own pinned memory comes in powers of 2.
        if code := int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0)):
            raise MemoryError(
                f"{size / 2**30:.1f} GiB of host memory can't be pinned: CUDA's error {code}."
            )
        weakref.finalize(self, _unpin, memory).atexit = False  # at the end of all it goes anyway
        return memory

    def _begin(
        self,
        direction: _Direction,
        copy: Copy,
        gathered: Callable[[Copy], Iterator[None]],
        *,
        to_host: bool,
    ) -> _Job:
        """gathered: enqueues what is in no long rows, a piece in each of its steps."""
        pieces = self._pieces_of(copy, gathered, to_host=to_host)
        return direction.begin(pieces, self._behind(copy.touched))

    def _pieces_of(
        self, copy: Copy, gathered: Callable[[Copy], Iterator[None]], *, to_host: bool
    ) -> Iterator[None]:
        rows = []
        if copy.blocks and self._block_rows is not None:
            rows.append(self._block_rows.of_blocks(copy.blocks, copy.pages, to_host=to_host))
            copy = copy._replace(blocks=[], pages=[])
        if copy.slot and self._state_rows is not None:
            rows.append(self._state_rows.of_state(copy.slot, copy.state_pages, to_host=to_host))
            copy = copy._replace(slot=0, state_pages=[])
        if rows:
            yield from self._enqueue(joined(rows))
        yield from gathered(copy)

    def _behind(self, step: int) -> torch.cuda.Event:
        """When what was launched with this step, and before, is done."""
        for later, launched in self._launched:
            if later > step:
                return launched
        return torch.cuda.current_stream(self.device).record_event()

    def _enqueue(self, rows: Copies) -> Iterator[None]:
        assert self._batch is not None
        return self._batch.enqueue(rows)

    def _write_gathered(self, copy: Copy) -> Iterator[None]:
        for blocks, pages in self._pieces(copy):
            self._move(self._gathered(self._upload(blocks)), pages, to_host=True)
            yield
        if copy.slot:
            self._move(self._state(copy), copy.state_pages, to_host=True)

    def _fetch_gathered(self, copy: Copy) -> Iterator[None]:
        for blocks, pages in self._pieces(copy):
            rows = self._rows(len(pages))
            self._move(rows, pages, to_host=False)
            self._scatter(self._upload(blocks), rows)
            yield
        if copy.slot:
            rows = self._rows(len(copy.state_pages))
            self._move(rows, copy.state_pages, to_host=False)
            self._put_state(copy.slot, rows)

    def _pieces(self, copy: Copy) -> Iterator[tuple[list[int], list[int]]]:
        for first in range(0, len(copy.blocks), self.piece):
            end = first + self.piece
            yield copy.blocks[first:end], copy.pages[first:end]

    def _upload(self, blocks: list[int]) -> Tensor:
        return upload(np.asarray(blocks, dtype=np.int64), self.device)

    def _move(self, rows: Tensor, pages: Sequence[int], *, to_host: bool) -> None:
        """Between rows on the GPU and pages; those that lie side by side at once."""
        begins, counts = runs(pages)
        first = np.asarray(pages)[begins]
        if self._batch is None:
            for row, page, count in zip(
                *(x.tolist() for x in (begins, first, counts)), strict=True
            ):
                here, there = rows[row : row + count], self._pages[page : page + count]
                to, source = (there, here) if to_host else (here, there)
                to.copy_(source, non_blocking=True)
            return
        sizes = counts * np.uint64(self.page_bytes)
        at = Place(addresses(rows, begins), sizes), Place(addresses(self._pages, first), sizes)
        for _ in self._enqueue(copies_of(*at, sizes, to_host=to_host)):
            pass


class _Direction:
    """One way between GPU and host: copies, one behind the other. A thread enqueues them: where
    others are under way CUDA's driver takes as long for that as a copy engine for them."""

    def __init__(self, device: torch.device) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        # Pieces take turns: one is scattered while the next one comes.
        streams = [torch.cuda.Stream(device) for _ in range(2)]
        # Not of this object, which would live as long as the thread.
        thread = Thread(target=_enqueue, args=(self._jobs, streams), name="copies", daemon=True)
        thread.start()
        weakref.finalize(self, _end, self._jobs, thread)  # also before the interpreter ends

    def begin(self, pieces: Iterator[None], behind: torch.cuda.Event) -> _Job:
        """Enqueue a copy behind the others, and behind that."""
        job = _Job(pieces, behind)
        self._jobs.put(job)
        return job


class _Job:
    """A copy that was begun."""

    def __init__(self, pieces: Iterator[None], behind: torch.cuda.Event) -> None:
        self.pieces, self.behind = pieces, behind
        self.end: torch.cuda.Event | None = None  # None: not all of it is enqueued
        self.error: BaseException | None = None

    def is_done(self) -> bool:
        """Whether all of it is there. Raises what its thread raised."""
        if self.error is not None:
            raise self.error
        return self.end is not None and self.end.query()


def _end(jobs: SimpleQueue[_Job | None], thread: Thread) -> None:
    jobs.put(None)
    if thread is not current_thread():  # which may have had the last copy of a copier's
        thread.join()


def _enqueue(jobs: SimpleQueue[_Job | None], streams: Sequence[torch.cuda.Stream]) -> None:
    """Of one direction, until there is None."""
    # One behind each piece; they are used in turn.
    events = [torch.cuda.Event(blocking=True) for _ in range(PIECES_AHEAD + 1)]
    turns = zip(cycle(streams), cycle(events), cycle([*events[1:], events[0]]), strict=False)
    last = streams[-1]
    torch.cuda.set_device(last.device)
    while (job := jobs.get()) is not None:
        try:
            for stream in streams:
                stream.wait_event(job.behind)
            with torch.inference_mode():
                for stream, event, oldest in turns:
                    with torch.cuda.stream(stream):
                        if next(job.pieces, _END) is _END:
                            break
                        event.record()
                    oldest.synchronize()
            for stream in streams[:-1]:
                last.wait_stream(stream)
            job.end = last.record_event()
        except BaseException as error:  # whoever asks for it has it
            job.error = error
        del job  # its pages and caches may go


def _unpin(memory: Tensor) -> None:
    torch.cuda.synchronize()  # copies may be under way
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
