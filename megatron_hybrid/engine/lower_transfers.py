"""LowerTransfers: prefixes on their way between host memory and an ObjectStore, in threads.

A request first asks what the store has of its prompt beyond host memory, and then waits for that to
be read: each for a time, after which it goes on without. What is read all the same is in host
memory for the next one. A store that fails is left alone for a while. Nothing here waits for it.

Of ranks that share a scheduler the first one asks, and each reads and writes its own part.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice, takewhile
from typing import Any, TypeVar

from megatron_hybrid.cache.block_hash import BlockKey, SequenceKeys
from megatron_hybrid.cache.host_tier import Move
from megatron_hybrid.cache.lower_tier import LowerTier, Save
from megatron_hybrid.cache.prefix_store import PrefixMatch
from megatron_hybrid.cache.stored_prefixes import Found, Prefixes, Stored, Wanted
from megatron_hybrid.cache.tier import COUNTERS
from megatron_hybrid.engine.agreement import Agreement
from megatron_hybrid.engine.below import Below
from megatron_hybrid.engine.tracked_request import TrackedRequest
from megatron_hybrid.errors import StoreError

logger = logging.getLogger(__name__)

MOST_LOOKS = 64  # under way
MOST_LOADS = 4
MOST_ENDED = 16  # of what is written, in one step
THREADS = "tier-ask", "tier-read", "tier-write"
FIRST_RATE = 1e9  # bytes a second of reading, until some was measured
MEASURED_SECONDS = 10.0  # of reading, after which earlier ones count for half
FORGOTTEN = 0.99  # with each read that would take too long: without any, nothing new is measured

_PARTS = 1_000_000  # of a byte a second, in which ranks agree on a rate
_PENDING, _FAILED, _NOTHING, _THERE = range(4)  # what became of something, the worst first

Clock = Callable[[], float]
Views = list[memoryview]
T = TypeVar("T")


def _one_thread(name: str) -> Executor:
    return ThreadPoolExecutor(1, name)


@dataclass(eq=False, slots=True)
class _Look:
    """What becomes of one request's question."""

    keys: SequenceKeys
    beyond: int  # tokens that need not be computed anyway
    late: float  # when it is not waited for any more
    version: int
    future: Future[Found | None] | None  # None: another rank asks
    is_open: bool = True  # it was not answered
    load: BlockKey | None = None  # that the request waits for


@dataclass(eq=False, slots=True)
class _Ahead:
    """What is read of a prompt while another server computes it, before the engine has its request:
    part by part."""

    name: str
    keys: SequenceKeys
    peer: str
    request: str  # the other one's
    version: int
    future: Future[Found | None] | None = None  # None: another rank asks
    is_read: bool = False  # a part is
    reads: bool = True  # parts; else it is only waited for the request's end
    is_wanted: bool = True


@dataclass(eq=False, slots=True)
class _Load:
    move: Move
    future: Future[float | None]  # seconds that it took; None: not all of it was there
    late: float  # when nobody waits for it any more
    place: Any  # of Found
    ahead: _Ahead | None = None  # of which it is a part


Asked = TypeVar("Asked", _Look, _Ahead)


class LowerTransfers(Below):
    """Of one engine with a store; all calls are its thread's."""

    def __init__(
        self,
        lower: LowerTier,
        stored: Prefixes,
        view: Callable[[Sequence[int]], Views],
        identity: Callable[[], str],
        seconds_per_token: float,
        *,
        agreement: Agreement | None = None,
        executor: Callable[[str], Executor] = _one_thread,
        clock: Clock = time.monotonic,
    ) -> None:
        """view: memory of pages of the host. identity: names all that this rank's cached bytes
        depend on besides tokens. seconds_per_token: that computing one takes, about. executor: by
        the name of its thread; what one does ends in order."""
        self.lower, self._stored, self._view = lower, stored, view
        self._identity, self._seconds_per_token = identity, seconds_per_token
        self._agreement = Agreement() if agreement is None else agreement
        # So that no question waits for what is read for others.
        self._asker, self._reader, self._writer = map(executor, THREADS)
        self._in_words = f" It is left alone for {stored.pause:g} s." if stored.pause else ""
        self._clock = clock
        self._now: float | None = None  # of this step; None: nobody asked yet
        self._agreed_rate = FIRST_RATE
        self._read_bytes, self._read_seconds = FIRST_RATE, 1.0  # as if it had been measured
        self._paused_until = 0.0
        self._looks: list[_Look] = []  # not answered yet
        self._open: dict[TrackedRequest, _Look] = {}  # by who waits
        self._loads: dict[BlockKey, _Load] = {}
        self._aheads: dict[str, _Ahead] = {}  # by name
        self._saves: deque[tuple[Save, Future[int | None]]] = deque()

    @property
    def is_reading(self) -> bool:
        return bool(self._looks or self._loads)

    @property
    def is_underway(self) -> bool:
        return self.is_reading or bool(self._saves or self._aheads)

    @property
    def read_rate(self) -> float:
        """Bytes a second, as measured by this rank."""
        return self._read_bytes / self._read_seconds

    # ------------------------------------------------------------------- read

    def must_wait(self, request: TrackedRequest, match: PrefixMatch) -> bool:
        if not request.asked:
            request.asked = True
            self._ask(request, match)
        look = self._open.get(request)
        if look is None:
            return False
        load = None if look.load is None else self._loads.get(look.load)
        if load is None and not look.is_open:
            return False
        if self._time() > (look.late if load is None else load.late):
            self.lower.upper.refused["late"] += 1
            del self._open[request]
            return False
        return True

    def was_tried(self, request: TrackedRequest) -> None:
        self._open.pop(request, None)

    def _ask(self, request: TrackedRequest, match: PrefixMatch) -> None:
        keys, length, host = request.keys, request.num_tokens, self.lower.upper.host
        assert keys is not None
        now = self._time()
        if now < self._paused_until or len(self._looks) >= MOST_LOOKS:
            return
        if not self._stored.is_asked(request.prefilled_by):
            return
        found = host.match(keys, length, most=match.most)
        beyond = max(found.skip, match.skip)
        last = length if match.most is None else min(length, match.most)
        if last - beyond < host.geometry.block_size:
            return  # too little to wait for
        future = None
        if self._agreement.is_first:
            tokens = keys.tokens(0, length).copy()
            own = keys.copy_for(lambda start, end: tokens[start:end])  # for the other thread
            blocks, peer = len(found.blocks), request.prefilled_by
            wanted = Wanted(self._root(), own, blocks, beyond, length, match.most, peer)
            future = self._asker.submit(self._stored.find, wanted)
        look = _Look(keys, beyond, now + self._stored.patience, self.lower.upper.version, future)
        self._open[request] = look
        self._looks.append(look)

    def progress(self) -> list[int]:
        looks = [_became(look.future) for look in self._looks]
        aheads = [_PENDING if one.is_read else _became(one.future) for one in self._aheads.values()]
        loads = [_became(load.future) for load in self._loads.values()]
        saves = [_became(future) for _, future in islice(self._saves, MOST_ENDED)]
        return [*looks, *aheads, *loads, *saves, max(1, int(self.read_rate * _PARTS))]

    def end_copies(self, agreed: Sequence[int]) -> None:
        self._now = None
        if not agreed:
            return
        each = iter(agreed)  # of what is under way, as `progress` has it
        looks, aheads, loads = (
            list(islice(each, len(some))) for some in (self._looks, self._aheads, self._loads)
        )
        *saves, rate = each
        self._agreed_rate = rate / _PARTS
        self._go_on_ahead(aheads)  # before loads end, behind which others are asked
        self._give_up_what_is_late()
        for key, became in zip(list(self._loads), takewhile(bool, loads), strict=False):
            self._end_load(self._loads.pop(key), became)
        self._end_looks(looks)
        for became in takewhile(bool, saves):
            save, future = self._saves.popleft()
            size = self._result(future, became)
            self.lower.end_save(save, size if became == _THERE else None)

    def _end_load(self, load: _Load, became: int) -> None:
        seconds = self._result(load.future, became)
        self._give_back(load.place)
        self.lower.end_load(load.move, is_there=became == _THERE)
        if seconds is not None:
            self._was_read(self._bytes_of(load.move), seconds)
        if load.ahead is not None:
            load.ahead.reads = became == _THERE
            self._ask_ahead(load.ahead)

    def _answers(
        self, asked: Iterable[Asked], became: Sequence[int]
    ) -> list[tuple[Asked, Found | None]]:
        """Who of them was answered, as many as may read, and what. Not in order: some stores let
        one wait while others are answered."""
        pairs = [pair for pair in zip(asked, became, strict=False) if pair[1]]
        pairs = pairs[: MOST_LOADS - len(self._loads)]
        results = [self._result(one.future, how) for one, how in pairs]
        if any(how == _THERE for _, how in pairs):
            results = self._agreement.of_first(results)
        return [(one, found) for (one, _), found in zip(pairs, results, strict=True)]

    def _end_looks(self, became: Sequence[int]) -> None:
        for look, found in self._answers(self._looks, became):
            self._looks.remove(look)
            look.is_open = False
            if found is not None and not self._is_loading(look, found):
                self._give_back(found.place)

    def _is_loading(self, look: _Look, found: Found) -> bool:
        """Whether what was found is being read, for this request first."""
        if look.version != self.lower.upper.version:
            return False
        look.load = key = look.keys.at(found.position)
        if key in self._loads:
            return False
        move = self.lower.begin_load(look.keys, found, look.beyond)
        if move is None:
            return False
        seconds = self._bytes_of(move) / self._agreed_rate
        takes_longer = seconds > move.tokens * self._seconds_per_token
        if takes_longer and not self._stored.is_always_read:
            self.lower.upper.refused["slower"] += 1
            self._read_seconds *= FORGOTTEN
            self.lower.end_load(move, is_there=False)
            return False
        self._begin_load(key, move, found.place)
        return True

    def _begin_load(
        self, key: BlockKey, move: Move, place: Any, ahead: _Ahead | None = None
    ) -> None:
        reading = self._reader.submit(
            self._read,
            self.lower.stored(self._root(), move)._replace(place=place),
            [self._view([page]) for page in move.copy.pages],
            self._view(move.copy.state_pages),
        )
        seconds = self._bytes_of(move) / self._agreed_rate
        late = self._time() + self._stored.patience + 2 * seconds
        self._loads[key] = _Load(move, reading, late, place, ahead)

    def _give_back(self, place: Any) -> None:
        if place is not None and self._agreement.is_first:
            self._asker.submit(self._stored.ended, place)

    def _read(self, stored: Stored, blocks: list[Views], state: Views) -> float | None:
        begin = time.perf_counter()
        is_there = self._stored.read(stored, blocks, state)
        return time.perf_counter() - begin if is_there else None

    def _was_read(self, size: int, seconds: float) -> None:
        """Sums, in which small reads, that take long for their size, count for little."""
        self._read_bytes += size
        self._read_seconds += seconds
        if self._read_seconds > MEASURED_SECONDS:
            self._read_bytes /= 2
            self._read_seconds /= 2

    # ------------------------------------------------------------- read ahead

    def read_ahead(self, name: str, keys: SequenceKeys, peer: str, request: str) -> None:
        if self._stored.is_asked(peer):
            self._ask_ahead(_Ahead(name, keys, peer, request, self.lower.upper.version))

    def is_read_ahead(self, name: str) -> bool:
        return name not in self._aheads or not self._aheads[name].is_wanted

    def stop_reading_ahead(self, name: str) -> None:
        if name in self._aheads:
            self._aheads[name].is_wanted = False

    def _ask_ahead(self, ahead: _Ahead) -> None:
        self._aheads.pop(ahead.name, None)
        self._aheads[ahead.name] = ahead  # behind the others
        ahead.is_read = False
        if self._agreement.is_first:
            kv = ahead.keys.blocks
            first = self.lower.num_there(ahead.keys) if ahead.reads else len(kv)
            ahead.future = self._stored.follow(ahead.peer, ahead.request, kv, first)

    def _go_on_ahead(self, became: Sequence[int]) -> None:
        for ahead, found in self._answers(self._aheads.values(), became):
            is_current = ahead.is_wanted and ahead.version == self.lower.upper.version
            if found is None or not is_current:
                del self._aheads[ahead.name]
                self._give_back(None if found is None else found.place)
            elif found.position:
                self._read_part(ahead, found)
            else:
                self._ask_ahead(ahead)

    def _give_up_what_is_late(self) -> None:
        """A read that hangs holds nobody up."""
        for load in self._loads.values():
            ahead = load.ahead
            if ahead is not None and ahead.is_wanted and self._time() > load.late:
                ahead.is_wanted = False
                self.lower.upper.refused["late"] += 1

    def _read_part(self, ahead: _Ahead, found: Found) -> None:
        key = ahead.keys.at(found.position)
        move = None
        if key not in self._loads:
            move = self.lower.begin_load(ahead.keys, found, beyond=found.position)
        if move is not None:
            ahead.is_read = True
            self._begin_load(key, move, found.place, ahead)
            return
        self._give_back(found.place)
        ahead.reads = key in self._loads  # else there is no room for it
        self._ask_ahead(ahead)

    # ------------------------------------------------------------------ write

    def was_written(self, move: Move) -> None:
        if not self._stored.writes or self._time() < self._paused_until:
            return
        held = sum(len(save.pages) + len(save.state_pages) for save, _ in self._saves)
        if 2 * held > self.lower.upper.host.kv.num_blocks:
            self.lower.upper.refused["late"] += 1
            return
        save = self.lower.begin_save(move.keys, move.position)
        if save is not None:
            assert save.ending is not None, "it is no part"
            future = self._writer.submit(
                self._stored.write,
                save.stored(self._root()),
                [self._view([page]) for page in save.pages],
                self._view(save.state_pages),
                save.ending,
            )
            self._saves.append((save, future))

    # ------------------------------------------------------------------ whole

    def figures(self) -> dict[str, dict[str, int]]:
        store, counts = self._stored, self.lower.counts
        used, objects = store.usage()
        found = {name: counts[name] for name in COUNTERS if name != "tier_refused"}
        found |= {"tier_bytes": store.max_bytes, "tier_bytes_used": used}
        found |= {"tier_states": objects, "tier_rate": int(self.read_rate)}
        return {name: {store.name: number} for name, number in found.items()}

    def saves(self) -> list[Save]:
        return [save for save, _ in self._saves]

    def loads(self) -> list[Move]:
        return [load.move for load in self._loads.values()]

    def close(self) -> None:
        """What is being written is finished; nothing else is begun."""
        for executor in (self._asker, self._reader):
            executor.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(wait=True)
        self._stored.close()

    def _root(self) -> bytes:
        host = self.lower.upper.host
        shape = f"1 {self._identity()} {host.page_bytes} {host.pages_per_state}"
        return blake2b(shape.encode(), digest_size=32).digest()

    def _bytes_of(self, move: Move) -> int:
        pages = len(move.copy.pages) + len(move.copy.state_pages)
        return pages * self.lower.upper.host.page_bytes

    def _time(self) -> float:
        """The same on all ranks, and all through a step."""
        if self._now is None:
            self._now = self._agreement.of_first(self._clock())
        return self._now

    def _result(self, future: Future[T] | None, became: int) -> T | None:
        """What this rank has of it; None, too, where another one asked. became: of all ranks."""
        try:
            return None if future is None else future.result()
        except StoreError as error:
            if self._clock() >= self._paused_until:
                logger.warning("%s%s", error, self._in_words)
        except Exception:  # of somebody's plug-in
            logger.exception("A store failed.%s", self._in_words)
        finally:
            if became == _FAILED:
                self._paused_until = self._time() + self._stored.pause
                self.lower.upper.refused["failed"] += 1
        return None


def _became(future: Future[T] | None) -> int:
    if future is None:
        return _THERE  # so that the rank counts that has one
    if not future.done():
        return _PENDING
    if future.exception() is not None:
        return _FAILED
    return _NOTHING if future.result() is None else _THERE
