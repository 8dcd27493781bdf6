"""PeerMemory: pages of one rank of ours, filled from those of a peer's ranks.

Where a rank of the peer has the same part of the model, its pages are read into ours. Otherwise
parts of several ranks' pages come to a memory beside ours, and are put together from there.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megatron_hybrid.disaggregation import messages as wire
from megatron_hybrid.disaggregation.page_layout import Bytes, PageGather, PageLayout
from megatron_hybrid.disaggregation.remote_memory import NixlMemory, Piece, RemoteMemory

BESIDE_BYTES = 64 << 20  # read at once, where pages are put together; more, if a state has more

Region = tuple[int, int]  # address and bytes
Memory = Callable[[str, Region], RemoteMemory]


class Connection(NamedTuple):
    """With one instance of a peer."""

    instance: str
    ranks: list[wire.RankMemory]
    layouts: list[PageLayout]
    gather: PageGather
    names: dict[int, str]  # of its ranks that are read, for RemoteMemory


class PeerMemory:
    """Of one rank. One thread calls `connect` and `read` at a time."""

    def __init__(
        self, name: str, region: Region, layout: PageLayout, rank: int, memory: Memory = NixlMemory
    ) -> None:
        """name: of this process. region, layout: this rank's pages. rank: its number. Raises
        ConfigurationError, if nothing can be read."""
        self._name, self._layout, self._rank, self._new = name, layout, rank, memory
        self._whole = memory(name, region)  # into our pages
        self._beside: RemoteMemory | None = None
        self._room: Bytes = np.zeros(0, np.uint8)  # where that is
        self._connections: dict[str, Connection] = {}

    def connection(self, peer: str) -> Connection | None:
        """With a peer, whichever instance; None: there is none."""
        return self._connections.get(peer)

    def connect(self, peer: str, welcome: wire.Welcome) -> Connection:
        """To this instance of a peer. Raises StoreError, and ConfigurationError for one whose
        caches are not the same."""
        layouts = [PageLayout.load(rank.layout) for rank in welcome.ranks]
        gather = PageGather(self._layout, layouts, self._rank)
        if gather.same_rank is not None:
            ranks: tuple[int, ...] = (gather.same_rank,)
            memory = self._whole
        else:
            ranks, memory = gather.needed_ranks, self._for_parts(layouts, gather)
        names = {rank: memory.connect(welcome.ranks[rank].metadata) for rank in ranks}
        found = Connection(welcome.instance, welcome.ranks, layouts, gather, names)
        self._connections[peer] = found
        return found

    def read(
        self,
        peer: Connection,
        pages: Sequence[int],
        own: Sequence[memoryview],
        state_pages: Sequence[int],
        state: Sequence[memoryview],
        seconds: float,
    ) -> None:
        """own: our pages, one for each of the peer's `pages`; state: those of the state. Raises
        StoreError."""
        rank = peer.gather.same_rank
        if rank is not None:
            views = zip([*pages, *state_pages], [*own, *state], strict=True)
            pieces = [(_page(peer, rank, page), _address(v), v.nbytes) for page, v in views]
            self._whole.read(peer.names[rank], pieces, seconds)
            return
        beside = self._beside
        assert beside is not None, "it is connected with"
        ranks = peer.gather.block_ranks
        if pages and ranks:
            size = sum(peer.layouts[rank].page_bytes for rank in ranks)
            at_once = len(self._room) // size
            for first in range(0, len(pages), at_once):
                chunk = pages[first : first + at_once]
                found = self._read_parts(peer, beside, ranks, chunk, seconds)
                for i, view in enumerate(own[first : first + at_once]):
                    parts = {rank: rows[i] for rank, rows in found.items()}
                    peer.gather.fill_block(np.frombuffer(view, np.uint8), parts)
        if state and peer.gather.state_ranks:
            found = self._read_parts(peer, beside, peer.gather.state_ranks, state_pages, seconds)
            whole = np.zeros(sum(view.nbytes for view in state), np.uint8)
            parts = {rank: rows.reshape(-1) for rank, rows in found.items()}
            peer.gather.fill_state(whole, parts)
            for view, data in zip(state, np.split(whole, len(state)), strict=True):
                np.frombuffer(view, np.uint8)[:] = data

    def close(self) -> None:
        """Reads that are under way end with a StoreError."""
        for memory in (self._whole, self._beside):
            if memory is not None:
                memory.close()

    def _read_parts(
        self,
        peer: Connection,
        beside: RemoteMemory,
        ranks: Sequence[int],
        pages: Sequence[int],
        seconds: float,
    ) -> dict[int, Bytes]:
        """[pages, bytes of a page] of each rank."""
        found: dict[int, Bytes] = {}
        for rank, rows in self._places(peer, ranks, len(pages)):
            size, to = rows.shape[1], rows.ctypes.data
            pieces: list[Piece] = [
                (_page(peer, rank, page), to + i * size, size) for i, page in enumerate(pages)
            ]
            beside.read(peer.names[rank], pieces, seconds)
            found[rank] = rows
        return found

    def _places(
        self, peer: Connection, ranks: Sequence[int], count: int
    ) -> Iterator[tuple[int, Bytes]]:
        first = 0
        for rank in ranks:
            size = peer.layouts[rank].page_bytes
            yield rank, self._room[first : first + count * size].reshape(count, size)
            first += count * size

    def _for_parts(self, layouts: Sequence[PageLayout], gather: PageGather) -> RemoteMemory:
        """With room for a state of all ranks that it comes from, and a block."""
        state = self._layout.pages_per_state
        least = sum(max(1, state) * layouts[rank].page_bytes for rank in gather.needed_ranks)
        if self._beside is not None and len(self._room) >= least:
            return self._beside
        if self._beside is not None:  # other peers are connected with anew
            self._beside.close()
            self._connections.clear()
        self._room = np.frombuffer(mmap.mmap(-1, max(least, BESIDE_BYTES)), np.uint8)
        region = self._room.ctypes.data, len(self._room)
        self._beside = self._new(f"{self._name} beside", region)
        return self._beside


def _page(peer: Connection, rank: int, page: int) -> int:
    return peer.ranks[rank].address + page * peer.layouts[rank].page_bytes


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)
