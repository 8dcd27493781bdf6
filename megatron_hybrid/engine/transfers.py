"""Transfers: prefixes on their way between the device and host memory, and who waits for them.

A request waits for a fetch as it does for a twin: others are admitted past it, and what was fetched
is kept until it was tried. States are written when a step that was launched after they were
published has left them where they stay.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megatron_hybrid.cache.block_hash import BlockKey, SequenceKeys
from megatron_hybrid.cache.host_tier import Copy, HostTier, Move
from megatron_hybrid.cache.hybrid_cache import HybridCache
from megatron_hybrid.cache.lease import Lease, Pin
from megatron_hybrid.cache.prefix_store import PrefixMatch
from megatron_hybrid.engine.agreement import Agreement
from megatron_hybrid.engine.below import Below
from megatron_hybrid.engine.tracked_request import TrackedRequest
from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.execution.plan import CatchUp

MOST_FETCHES = 4  # for one request: what it fetched may be evicted before there is room for it
# Under way. Requests that end together leave many states at once, which nothing keeps on the
# device until they are being written.
MOST_WRITES = 16
# A fetch is begun while those under way take less than one part in so many of the device's blocks
# and states: who has no room beside them would compute what the host has.
FETCHED_PART = 4
# Begun in one step while nobody runs: more would hold up the step that computes the first of them.
FETCHES_AT_ONCE = 4
WAIT_SECONDS = 5e-4  # between two looks for what is fetched
LOOKS = 8  # in one step: threads need the time, too


class Ticket(Protocol):
    """A copy that was begun."""

    def is_done(self) -> bool:
        """Whether steps that are launched from now on see it, and its source may be given up."""


class Copier(Protocol):
    """Copies between the device and pages of host memory, beside the steps."""

    def begin_step(self, step: int) -> None:
        """Those before it were launched."""

    def write(self, copy: Copy) -> Ticket:
        """To the pages, when the steps are done that are launched and may touch it."""

    def fetch(self, copy: Copy) -> Ticket:
        """From the pages, likewise."""


class PutOff(Protocol):
    """States that are to be written in the coming step."""

    @property
    def owes_states(self) -> bool:
        """Whether there are any."""

    def forget_slot(self, slot: int) -> None:
        """Something else comes into a slot."""

    def take_catch_ups(self) -> list[CatchUp]:
        """They are written now."""


class CatchesUp(Protocol):
    """Who writes them."""

    def catch_up(self, catch_ups: Sequence[CatchUp]) -> None:
        """As Runner's."""


class _Underway:
    __slots__ = ("fetch", "ticket", "waiting")

    def __init__(self, fetch: Move, ticket: Ticket) -> None:
        self.fetch, self.ticket = fetch, ticket
        self.waiting: set[TrackedRequest] = set()


class Transfers:
    """Of an engine without a tier in host memory: nothing ever moves."""

    @property
    def is_fetching(self) -> bool:
        """Whether anything is on its way to the device."""
        return False

    handover_address = ""  # where others get what was computed here; empty: nowhere

    peers: tuple[str, ...] = ()  # where prompts may have been computed

    def check_peer(self, peer: str) -> None:
        """Raises InvalidRequestError, unless it is "" or one of --disaggregation-peers."""
        if peer and peer not in self.peers:
            raise InvalidRequestError(
                "kv_transfer_params",
                f"kv_transfer_params names the server {peer!r}, which is none of "
                "--disaggregation-peers.",
            )

    def read_ahead(
        self, name: str, tokens: npt.NDArray[np.int32], cache_salt: str, peer: str, request: str
    ) -> None:
        """Begin to read the KV of a prompt that a peer's request computes, for a request that is
        added here when it has ended. name: of the latter."""

    def is_read_ahead(self, name: str) -> bool:
        """Whether there is nothing to read for it any more, as far as this rank knows."""
        return True

    def stop_reading_ahead(self, name: str) -> None:
        """Nobody waits for it."""

    def attach(self, put_off: PutOff) -> None:
        """What was put off until the coming step must not be written where something comes."""

    def begin_step(self, step: int) -> None:
        """`end_copies`, and ages are counted in steps."""

    def end_copies(self) -> None:
        """What has arrived can be found from now on."""

    def to_be_tried(self, requests: Sequence[TrackedRequest]) -> Iterable[TrackedRequest]:
        """Without those that need not be tried: what they wait for is on its way to the device, or
        there is no room for it yet."""
        return requests

    def write_back(self) -> None:
        """A step was launched, or all that was put off until one is done: what was published before
        may be written now."""

    def write_ahead(self, lease: Lease) -> None:
        """A part of a prompt is computed and published, whose end others wait for on a server that
        hands it over: its KV may be written meanwhile, although no state is behind it yet."""

    def use_idle_time(self, runner: CatchesUp) -> bool:
        """Nothing is in flight or to be launched: write what was left by the last steps, without
        another one behind them. Whether there is anything."""
        return False

    def wait(self, *, is_idle: bool) -> None:
        """There is nothing to launch. is_idle: nothing is in flight either, so that there is
        nothing to do but to wait for what requests wait for, if they do."""

    def must_wait(self, request: TrackedRequest, match: PrefixMatch, num_running: int) -> bool:
        """Whether a request, of which the device has `match`, had better wait for what is fetched
        for it, leaving a block for each that runs. If not, call `was_tried` once it was."""
        return False

    def was_tried(self, request: TrackedRequest) -> None:
        """The request was admitted, could not be, or waits no more: nothing is kept for it."""

    def release_pins(self) -> bool:
        """Let everything that has come be evicted; whether anything was kept."""
        return False

    def finish(self) -> None:
        """Wait until nothing is on its way to or from the device, and keep nothing there."""

    def pins(self) -> Iterable[Pin]:
        """What is kept on the device: of what has come, of what is written, and of what comes."""
        return ()

    def slots(self) -> Iterable[int]:
        """Of the device, to which states are on their way."""
        return ()

    def check_integrity(self) -> None:
        """Assert every invariant of what is in host memory."""


class HostTransfers(Transfers):
    """Of an engine whose cache has one."""

    def __init__(
        self,
        cache: HybridCache,
        tier: HostTier,
        copier: Copier,
        agreement: Agreement | None = None,
    ) -> None:
        """The cache tells the tier from now on. Copies of one direction end in order."""
        self._cache, self.tier, self.copier = cache, tier, copier
        self._agreement = Agreement() if agreement is None else agreement
        self.lower = Below()
        cache.tier = tier
        self._writes: list[tuple[Move, Ticket]] = []
        self._fetches: dict[BlockKey, _Underway] = {}  # by the prefix that is to be there
        self._coming = [0, 0]  # blocks and states of the device, to which these come
        self._needs_writes = False  # in this step a fetch was put off until they have ended
        self._is_full = False  # in this step one was put off, for whatever reason
        self._without_room: set[TrackedRequest] = set()  # whose fetches were put off
        self._may_begin: float | None = None  # fetches in this step; None: nobody was tried yet
        self._put_off: PutOff | None = None
        # what has come, until those who waited for it were tried
        self._pins: dict[BlockKey, tuple[Pin, set[TrackedRequest]]] = {}

    def add_lower(self, lower: Below) -> None:
        """To and from what is below host memory."""
        self.lower, self.tier.lower_figures = lower, lower.figures

    def read_ahead(
        self, name: str, tokens: npt.NDArray[np.int32], cache_salt: str, peer: str, request: str
    ) -> None:
        cache = self._cache
        root, size = cache.root(cache_salt), cache.geometry.block_size
        keys = SequenceKeys(root, size, lambda start, end: tokens[start:end], cache_salt=cache_salt)
        keys.extend_to(len(tokens))
        self.lower.read_ahead(name, keys, peer, request)

    def is_read_ahead(self, name: str) -> bool:
        return self.lower.is_read_ahead(name)

    def stop_reading_ahead(self, name: str) -> None:
        self.lower.stop_reading_ahead(name)

    def attach(self, put_off: PutOff) -> None:
        self._put_off = put_off

    @property
    def is_fetching(self) -> bool:
        return bool(self._fetches) or self.lower.is_reading

    def begin_step(self, step: int) -> None:
        self._needs_writes = self._is_full = False
        self._may_begin = None
        self.tier.begin_step(step)
        self.copier.begin_step(step)
        self.end_copies()

    def end_copies(self) -> None:
        writes, fetches, agreed = self._agreed()
        self.lower.end_copies(agreed)
        for write, _ in self._writes[:writes]:
            if self.tier.end_write(write):
                self.lower.was_written(write)
        del self._writes[:writes]
        for key in list(self._fetches)[:fetches]:
            underway = self._fetches.pop(key)
            self._is_coming(underway.fetch.copy, -1)
            pin = self.tier.end_fetch(underway.fetch)
            if pin is None or not underway.waiting:
                for request in underway.waiting:
                    request.fetched = None
                if pin is not None:
                    self._cache.store.unpin(pin)
                continue
            if (earlier := self._pins.pop(key, None)) is not None:  # of a cache that was emptied
                underway.waiting |= earlier[1]
                self._cache.store.unpin(earlier[0])
            self._pins[key] = pin, underway.waiting

    def to_be_tried(self, requests: Sequence[TrackedRequest]) -> Iterator[TrackedRequest]:
        for request in requests:
            is_put_off = self._is_full and request in self._without_room
            if not is_put_off and request.fetched not in self._fetches:
                yield request

    def _agreed(self) -> tuple[int, int, list[int]]:
        """Writes and fetches that have ended on every rank, and how far the store below is."""
        if not (self._writes or self._fetches or self.lower.is_underway):
            return 0, 0, []
        tickets = [ticket for _, ticket in self._writes]
        fetching = [underway.ticket for underway in self._fetches.values()]
        here = [_num_done(tickets), _num_done(fetching), *self.lower.progress()]
        writes, fetches, *agreed = self._agreement.least(here)
        return writes, fetches, agreed

    def use_idle_time(self, runner: CatchesUp) -> bool:
        self.end_copies()
        is_writing = bool(self._writes) or self.tier.has_published
        if not is_writing or self._cache.packing.is_pending:
            return False
        if self._put_off is not None and (catch_ups := self._put_off.take_catch_ups()):
            runner.catch_up(catch_ups)
        under_way = len(self._writes)
        self.write_back()
        if len(self._writes) == under_way:
            time.sleep(WAIT_SECONDS)  # threads make the copies
        return True

    def wait(self, *, is_idle: bool) -> None:
        if not is_idle:
            return
        if self._put_off is not None and not self._put_off.owes_states:
            self.write_back()  # no step may be launched before there is room
        # For all that come soon: they are computed together.
        awaited = [underway.ticket for underway in islice(reversed(self._fetches.values()), 1)]
        if self._needs_writes:
            awaited += [ticket for _, ticket in self._writes[:1]]
        if not awaited and not self.lower.is_reading:
            return
        for _ in range(1 if self.lower.is_reading else LOOKS):
            if any(ticket.is_done() for ticket in awaited):
                return
            time.sleep(WAIT_SECONDS)

    def write_back(self) -> None:
        while len(self._writes) < MOST_WRITES:
            # Who waits for room on the device does not wait for what hardly anybody will want.
            write = self.tier.begin_write(covered=not self._fetches)
            if write is None:
                return
            self._writes.append((write, self.copier.write(write.copy)))

    def write_ahead(self, lease: Lease) -> None:
        position = lease.num_published * self._cache.geometry.block_size
        if self.handover_address and position and self._cache.publishes(lease):
            self.tier.was_published(lease.keys, position, None)

    def must_wait(self, request: TrackedRequest, match: PrefixMatch, num_running: int) -> bool:
        if self._may_begin is None:
            self._may_begin = math.inf if num_running else FETCHES_AT_ONCE
        if request.fetched is not None:  # it has come
            return False
        keys, length, tier = request.keys, request.num_tokens, self.tier
        if keys is None or request.fetches >= MOST_FETCHES:
            return False
        if self.lower.must_wait(request, match):
            return True
        found = tier.find(keys, match, length)
        if found is None:
            return False
        key = keys.at(found.skip)
        underway = self._fetches.get(key)
        if underway is None:
            if not tier.is_worth_it(match, found, length):
                tier.refused["slower"] += 1
                return False
            if self._may_begin <= 0 or self._has_no_room_yet(match, found):
                self._is_full = True
                self._without_room.add(request)
                return True
            fetch = tier.begin_fetch(keys, match, found, length, num_running)
            if fetch is None:
                tier.refused["device_full"] += 1
                return False
            if self._put_off is not None:
                self._put_off.forget_slot(fetch.copy.slot)
            ticket = self.copier.fetch(fetch.copy)
            underway = self._fetches[key] = _Underway(fetch, ticket)
            self._is_coming(fetch.copy, 1)
            self._may_begin -= 1
        underway.waiting.add(request)
        request.fetched = key
        request.fetches += 1
        return True

    def _has_no_room_yet(self, match: PrefixMatch, found: PrefixMatch) -> bool:
        """Whether others come before, or what goes for it had better be written before."""
        geometry = self._cache.geometry
        there = geometry.num_blocks, geometry.num_cached_slots
        if any(FETCHED_PART * n > all_ for n, all_ in zip(self._coming, there, strict=True)):
            return True
        missing = self.tier.missing(match, found)
        needs_writes = bool(self._writes) and self.tier.is_pressed(len(missing))
        self._needs_writes |= needs_writes
        return needs_writes

    def _is_coming(self, copy: Copy, sign: int) -> None:
        self._coming[0] += sign * len(copy.blocks)
        self._coming[1] += sign * bool(copy.slot)

    def was_tried(self, request: TrackedRequest) -> None:
        self.lower.was_tried(request)
        self._without_room.discard(request)
        key, request.fetched = request.fetched, None
        if key is None:
            return
        if (underway := self._fetches.get(key)) is not None and request in underway.waiting:
            underway.waiting.discard(request)
            return
        pin, waiting = self._pins[key]
        waiting.discard(request)
        if not waiting:
            del self._pins[key]
            self._cache.store.unpin(pin)

    def release_pins(self) -> bool:
        pins = list(self._pins.values())
        self._pins.clear()
        for pin, waiting in pins:
            self._cache.store.unpin(pin)
            for request in waiting:
                request.fetched = None
        return bool(pins)

    def finish(self) -> None:
        while self._writes or self._fetches:
            self.end_copies()
            time.sleep(WAIT_SECONDS)
        self.release_pins()

    def pins(self) -> Iterator[Pin]:
        yield from (pin for pin, _ in self._pins.values())
        yield from (write.pin for write, _ in self._writes)
        for underway in self._fetches.values():
            yield Pin(0, underway.fetch.blocks)

    def slots(self) -> list[int]:
        slots = [underway.fetch.copy.slot for underway in self._fetches.values()]
        return [slot for slot in slots if slot]

    def check_integrity(self) -> None:
        writes = [*(write for write, _ in self._writes), *self.lower.loads()]
        pins = [underway.fetch.pin for underway in self._fetches.values()]
        pins += [save.pin for save in self.lower.saves()]
        self.tier.host.check_integrity(
            [write.blocks for write in writes] + [pin.blocks for pin in pins],
            [write.slot for write in writes if write.slot],
            [pin.slot for pin in pins if pin.slot],
        )


def _num_done(tickets: Iterable[Ticket]) -> int:
    """Of the first ones."""
    return sum(1 for _ in takewhile(lambda ticket: ticket.is_done(), tickets))


def without_slot(catch_ups: list[CatchUp], slot: int, cache: HybridCache) -> list[CatchUp]:
    """Those of states that are to be cached, where something else comes into a slot whose state is
    gone. A checkpoint that one of the others was to leave on its way is lost with it."""
    kept = []
    for one in catch_ups:
        if one.slot != slot:
            is_lost = one.checkpoint_slot == slot
            kept.append(one._replace(checkpoint_position=0, checkpoint_slot=0) if is_lost else one)
        elif one.checkpoint_slot:
            state = cache.states.state_in(one.checkpoint_slot)
            if state is not None:
                cache.store.forget(state)
    return kept
