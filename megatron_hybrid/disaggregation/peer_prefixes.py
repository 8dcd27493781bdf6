"""PeerPrefixes: what servers that compute prompts have of them, read out of their memory.

Only the peer that a request names is asked, by the request's prompt: for its very end, and for the
last places before it where a state can be. Each rank reads its part itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from megatron_hybrid.cache.block_hash import BlockKey
from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.cache.stored_prefixes import Ending, Found, Stored, Views, Wanted
from megatron_hybrid.cache.tail_index import is_usable
from megatron_hybrid.disaggregation import messages as wire
from megatron_hybrid.disaggregation.peer_memory import Connection, PeerMemory
from megatron_hybrid.disaggregation.peers import Peers
from megatron_hybrid.disaggregation.remote_memory import FLAG
from megatron_hybrid.errors import ConfigurationError, StoreError

FIND_SECONDS = 8.0  # what is not there yet comes within some of the other one's steps
FOLLOW_SECONDS = 8.0  # after which it is asked again, if the peer's engine is alive
READ_SECONDS = 20.0  # from the offer on: it stays longer, so that nothing can change meanwhile
HELLO_SECONDS = 5.0


class Place(NamedTuple):
    """Where an offered prefix lies. Sent to all ranks."""

    peer: str
    instance: str
    lease: int
    pages: list[int]
    state_pages: list[int]
    until: float  # by the first rank's clock


def _place(peer: str, offered: wire.Offered, begin: float) -> Place:
    until = begin + READ_SECONDS
    pages, state_pages = offered.pages, offered.state_pages
    return Place(peer, offered.instance, offered.lease, pages, state_pages, until)


def _checked(peer: str, answer: wire.Message) -> wire.Message:
    if isinstance(answer, wire.Nothing) and answer.reason:
        raise StoreError(
            f"Nothing can be had from {peer} ({FLAG}): {answer.reason}. Both servers "
            "need the same model, weights and types of caches."
        )
    return answer


class PeerPrefixes:
    """A Prefixes."""

    name, max_bytes = "peers", 0
    pause, patience = 0.0, 10.0  # a peer that does not answer is left alone by itself
    writes, is_always_read = False, True

    def __init__(
        self,
        addresses: Sequence[str],
        identity: Callable[[], wire.Identity],
        geometry: CacheGeometry,
        memory: PeerMemory,
        *,
        is_first: bool,
    ) -> None:
        """addresses: HOST:PORT, of whom nobody else is asked. identity: returns the engine's.
        geometry: of host memory. memory: this rank's. is_first: this rank asks."""
        self.addresses = tuple(addresses)
        self._identity, self._geometry = identity, geometry
        self._memory, self._is_first = memory, is_first
        self._peers = Peers()

    def is_asked(self, peer: str) -> bool:
        """A peer has something where a request says so."""
        return peer in self.addresses

    def find(self, wanted: Wanted) -> Found | None:
        """As Prefixes."""
        keys, length = wanted.keys, wanted.length
        last = length if wanted.most is None else min(length, wanted.most)
        places = [end for end in self._ends(length) if wanted.beyond < end <= last]
        if not places:
            return None
        begin, number = time.monotonic(), self._peers.number()
        ends = [(end, keys.at(end)) for end in places]
        blocks = keys.blocks[: places[0] // self._geometry.block_size]
        question = wire.Find(number, self._identity(), blocks, ends, FIND_SECONDS)
        answer = _checked(wanted.peer, self._peers.ask(wanted.peer, question, FIND_SECONDS + 1.0))
        if not isinstance(answer, wire.Offered):
            return None
        place = _place(wanted.peer, answer, begin)
        if self._is_whole(answer, dict(ends), length):
            return Found(answer.position, answer.ending, place)
        self.ended(place)
        return None

    def follow(
        self, peer: str, request: str, kv: list[BlockKey], first: int
    ) -> Future[Found | None]:
        """As Prefixes."""
        begin, number = time.monotonic(), self._peers.number()
        question = wire.Follow(number, self._identity(), kv, first, request, FOLLOW_SECONDS)
        found: Future[Found | None] = Future()

        def settle(answered: Future[wire.Message]) -> None:
            try:
                answer = _checked(peer, answered.result())
                found.set_result(self._part(peer, answer, begin, first, len(kv)))
            except StoreError as error:
                found.set_exception(error)

        self._peers.begin(peer, question, FOLLOW_SECONDS + 1.0).add_done_callback(settle)
        return found

    def _part(
        self, peer: str, answer: wire.Message, begin: float, first: int, most: int
    ) -> Found | None:
        """What is offered of a prompt of `most` full blocks behind the first ones."""
        if isinstance(answer, wire.Offered):
            place = _place(peer, answer, begin)
            blocks = first + len(answer.pages)
            if first < blocks <= most and not answer.state_pages:
                return Found(blocks * self._geometry.block_size, None, place)
            self.ended(place)
        comes = isinstance(answer, wire.Nothing) and answer.comes
        return Found(0, None) if comes else None

    def read(self, stored: Stored, blocks: Sequence[Views], state: Views) -> bool:
        """As Prefixes."""
        place: Place = stored.place
        is_late = self._is_first and time.monotonic() > place.until
        if is_late or len(blocks) > len(place.pages):  # the latter: what was here is gone
            return False
        connection = self._connection(place)
        pages = place.pages[len(place.pages) - len(blocks) :]
        own = [view for views in blocks for view in views]
        self._memory.read(connection, pages, own, place.state_pages, state, READ_SECONDS)
        return True

    def ended(self, place: Place) -> None:
        """The peer may give up what it has offered."""
        self._peers.tell(place.peer, wire.Done(0, place.lease))

    def write(
        self, stored: Stored, blocks: Sequence[Views], state: Views, ending: Ending
    ) -> int | None:
        """Nothing is."""
        return None

    def usage(self) -> tuple[int, int]:
        """Nothing is kept there."""
        return 0, 0

    def close(self) -> None:
        """Reads that are under way end."""
        self._peers.close()
        self._memory.close()

    def _ends(self, length: int) -> list[int]:
        """Where a prompt may be gone on from, the furthest first."""
        geometry = self._geometry
        ends = {length, geometry.floor_granule(length), geometry.floor_grid(length - 1)}
        return sorted((end for end in ends if end), reverse=True)

    def _is_whole(self, found: wire.Offered, ends: dict[int, bytes], length: int) -> bool:
        """Whether the prompt can be gone on from there, as the answer says."""
        position, ending, geometry = found.position, found.ending, self._geometry
        if ending is None or position not in ends or ending.key != ends[position].hex():
            return False
        state = ending if ending.has_state else None
        return is_usable(state, position, length, needs_state=geometry.has_recurrent) and len(
            found.pages
        ) == geometry.blocks_for(position)

    def _connection(self, place: Place) -> Connection:
        known = self._memory.connection(place.peer)
        if known is not None and known.instance == place.instance:
            return known
        hello = wire.Hello(self._peers.number())
        answer = self._peers.ask(place.peer, hello, HELLO_SECONDS)
        if not isinstance(answer, wire.Welcome) or answer.instance != place.instance:
            raise StoreError(f"{place.peer} ({FLAG}) was started anew; what it had is gone.")
        try:
            return self._memory.connect(place.peer, answer)
        except ConfigurationError as error:
            raise StoreError(str(error)) from error
