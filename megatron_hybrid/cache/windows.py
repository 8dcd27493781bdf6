"""Windows: what running requests and cached states have of layers with a sliding window.

A token sees itself and the `window - 1` tokens before it. So a request holds the blocks from its
window on, and those behind it are given back while it runs:

    tokens      |...................................| window - 1 |t|
    blocks      [given back][given back][  7   ][  2   ][  9   ][  4   ]
                                         first                   first + len(blocks)

A cached state keeps the blocks that whoever goes on from it would read. They are of no use without
the state, nor is the state without them, so they come and go together; states whose windows overlap
share blocks. The last one may be filled up by whoever computes it, so who goes on from there copies
the tokens in it.

Every running request may always hold `geometry.window_quota` blocks: more only what is left beside
those of all the others. So a request that was admitted never lacks one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from megatron_hybrid.cache.cached_state import CachedState
from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.cache.lease import Lease, Pin, TailCopy, WindowTable
from megatron_hybrid.cache.window_blocks import DUMMY_BLOCK, WindowBlocks
from megatron_hybrid.errors import KVBlocksExhausted


class NoWindows:
    """Of an engine whose model has no such layers: nothing is held, and nothing is lacking."""

    def __init__(self, num_blocks: int = 0) -> None:
        self.blocks = WindowBlocks(num_blocks)

    def check_room(self, skip: int) -> None:
        """Raises KVBlocksExhausted, without any effect, if a request that skips so many tokens has
        to wait."""

    def admit(self, lease: Lease, state: CachedState | None) -> None:
        """Give a lease the blocks that are kept with the state that it goes on from, which is
        pinned; None: it begins. There is room."""

    def reach(self, lease: Lease) -> int:
        """How many tokens of its sequence a lease can have places for now; at least one behind
        those that it has computed."""
        raise NotImplementedError

    def extend_to(self, lease: Lease, position: int) -> bool:
        """Places for all tokens before `position`, which is within `reach`; whether the table
        grew."""
        return False

    def move_on(self, lease: Lease, position: int) -> bool:
        """Give back the blocks that no token from `position` on sees; whether there were any."""
        return False

    def state_was_read(self, lease: Lease) -> None:
        """The step that copies what is in the last block, and reads the state, was launched."""

    def keep(self, lease: Lease, state: CachedState) -> None:
        """A state of the lease's sequence is cached now: so are the blocks that it needs."""

    def drop(self, state: CachedState) -> None:
        """A state is cached no more."""

    def release(self, lease: Lease) -> None:
        """A request stops."""

    def pin(self, state: CachedState) -> tuple[int, ...] | None:
        """Hold the blocks of a cached state for who waits for it; None: there is no room."""
        return ()

    def unpin(self, pin: Pin) -> None:
        """Let them go with the state."""

    def check_integrity(
        self,
        states: Iterable[CachedState],
        leases: Iterable[Lease] | None,
        pins: Iterable[Pin],
    ) -> None:
        """Assert every invariant. states: all that are cached. leases, pins: of all running
        requests, and all; None: not known."""


class Windows(NoWindows):
    """Of one engine whose model has such layers. Its methods are described above."""

    def __init__(self, geometry: CacheGeometry, evict_state: Callable[[], bool]) -> None:
        """`evict_state`: gives up the cached state that goes first; whether there was one."""
        assert geometry.num_window_blocks > geometry.max_requests * geometry.window_quota
        super().__init__(geometry.num_window_blocks)
        self._geometry = geometry
        self._evict_state = evict_state
        self._tables = 0  # of running requests
        self._surplus = 0  # blocks that any of them holds above the quota
        self._beside = 0  # that are held beside their tables

    @property
    def _spare(self) -> int:
        """Blocks that nobody may need who runs."""
        promised = self._tables * self._geometry.window_quota
        return self.blocks.num_blocks - promised - self._surplus - self._beside

    # -------------------------------------------------------------- admission

    def check_room(self, skip: int) -> None:
        needed = self._geometry.window_quota + bool(skip % self._geometry.block_size)
        if needed > self._spare:
            raise KVBlocksExhausted(
                f"A request needs {needed} window blocks of {self._geometry.block_size} tokens; "
                f"{max(0, self._spare)} are not promised to others."
            )

    def admit(self, lease: Lease, state: CachedState | None) -> None:
        lease.window = table = WindowTable(self._geometry.first_in_window(lease.skip))
        self._tables += 1
        if state is None:
            return
        shared, fill = list(state.window), lease.skip % self._geometry.block_size
        if fill and shared:
            table.source = shared.pop()
            self.blocks.hold((table.source,))
            self._beside += 1
        self.blocks.hold(shared)
        self._add(table, shared)
        if table.source:
            own = self._allocate(1)
            self._add(table, own)
            table.copy = TailCopy(table.source, own[0], fill)

    # --------------------------------------------------------------- stepping

    def reach(self, lease: Lease) -> int:
        table = lease.window
        assert table is not None
        room = max(0, self._geometry.window_quota - len(table.blocks)) + max(0, self._spare)
        return (table.end + room) * self._geometry.block_size

    def extend_to(self, lease: Lease, position: int) -> bool:
        table = lease.window
        assert table is not None
        lacking = -(-position // self._geometry.block_size) - table.end
        if lacking <= 0:
            return False
        self._add(table, self._allocate(lacking))
        return True

    def move_on(self, lease: Lease, position: int) -> bool:
        table = lease.window
        assert table is not None
        count = min(self._geometry.first_in_window(position) - table.first, len(table.blocks))
        if count <= 0:
            return False
        self.blocks.release(table.blocks[:count])
        self._surplus -= self._above(len(table.blocks)) - self._above(len(table.blocks) - count)
        del table.blocks[:count]
        table.first += count
        return True

    def state_was_read(self, lease: Lease) -> None:
        table = lease.window
        assert table is not None
        table.copy = None
        if table.source:
            self.blocks.release((table.source,))
            self._beside -= 1
            table.source = DUMMY_BLOCK

    def keep(self, lease: Lease, state: CachedState) -> None:
        table, geometry = lease.window, self._geometry
        assert table is not None
        first = geometry.first_in_window(state.position) - table.first
        end = -(-state.position // geometry.block_size) - table.first
        assert first >= 0 and end <= len(table.blocks), "a window block was given back too early"
        state.window = tuple(table.blocks[first:end])
        self.blocks.keep(state.window)

    def drop(self, state: CachedState) -> None:
        self.blocks.drop(state.window)
        state.window = ()

    def release(self, lease: Lease) -> None:
        self.state_was_read(lease)
        table = lease.window
        assert table is not None
        self.blocks.release(table.blocks)
        self._surplus -= self._above(len(table.blocks))
        self._tables -= 1
        lease.window = None

    # ------------------------------------------------------------------- pins

    def pin(self, state: CachedState) -> tuple[int, ...] | None:
        if len(state.window) > self._spare:
            return None
        self.blocks.hold(state.window)
        self._beside += len(state.window)
        return state.window

    def unpin(self, pin: Pin) -> None:
        self.blocks.release(pin.window)
        self._beside -= len(pin.window)

    # ---------------------------------------------------------------- details

    def _allocate(self, count: int) -> list[int]:
        while self.blocks.num_free < count:
            evicted = self._evict_state()
            assert evicted, "window blocks are promised that are not there"
        return self.blocks.allocate(count)

    def _add(self, table: WindowTable, blocks: Sequence[int]) -> None:
        self._surplus -= self._above(len(table.blocks))
        table.blocks += blocks
        self._surplus += self._above(len(table.blocks))

    def _above(self, count: int) -> int:
        return max(0, count - self._geometry.window_quota)

    def check_integrity(
        self,
        states: Iterable[CachedState],
        leases: Iterable[Lease] | None,
        pins: Iterable[Pin],
    ) -> None:
        kept = [state.window for state in states]
        if leases is None:
            self.blocks.check_integrity(None, kept)
            return
        tables = [lease.window for lease in leases if lease.window is not None]
        held = [[*table.blocks, *([table.source] if table.source else [])] for table in tables]
        pinned = [pin.window for pin in pins]
        self.blocks.check_integrity([*held, *pinned], kept)
        assert self._tables == len(tables)
        assert self._surplus == sum(self._above(len(table.blocks)) for table in tables)
        sources = sum(table.source != DUMMY_BLOCK for table in tables)
        assert self._beside == sources + sum(map(len, pinned))
        assert self._spare >= 0, "window blocks are promised that are not there"
