"""Desk: what a server that computes prompts has for others, between its engine's thread and the one
that they talk to.

What is offered stays where it is until it was read, or for a time. What is asked for before it is
offered is looked for by the engine once: it is there, or it comes, or it does not. Of a prompt that
is computed meanwhile KV is offered to who asks, as soon as there is more than they have: the engine
looks at every step.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_hybrid.cache.stored_prefixes import Ending
from megatron_hybrid.disaggregation.messages import LEASE_SECONDS

KEPT_SECONDS = 60.0  # for whom it was computed


class Offer(NamedTuple):
    """A prefix in pages of host memory."""

    position: int
    pages: list[int]  # of all its KV
    state_pages: list[int]
    # None: of a prompt that is still computed, without a state, and without what is not wanted
    ending: Ending | None


class Wanted(NamedTuple):
    """Places in a prompt, the furthest first, with their keys; and the keys of its full blocks. Of
    a prompt that is computed no places, the request that does that, and how many blocks need not
    be there."""

    kv: list[bytes]
    ends: list[tuple[int, bytes]]
    request: str = ""
    first: int = 0
    number: int = 0  # of the question, by which it is answered


class Answer(NamedTuple):
    """To a question about something that was not on offer."""

    part: bytes = b""  # by which end KV is on offer now, of a prompt that is computed
    comes: bool = False  # the request that computes it has not ended

    @property
    def is_final(self) -> bool:
        """Else the engine looks again."""
        return bool(self.part) or not self.comes


@dataclass(slots=True)
class _Open:
    offer: Offer
    since: float
    leases: dict[int, float] = field(default_factory=dict)  # by number: until when
    was_read: bool = False

    @property
    def num_pages(self) -> int:
        return len(self.offer.pages) + len(self.offer.state_pages)


class Desk:
    """Any thread may call it; nothing waits long."""

    def __init__(self, most_pages: int, clock: Callable[[], float] = time.monotonic) -> None:
        """most_pages: that offers may keep; the oldest go first."""
        self._most, self._clock = most_pages, clock
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._offers: dict[bytes, _Open] = {}  # by their ends, the oldest first
        self._leases: dict[int, bytes] = {}
        self._wanted: list[Wanted] = []
        self._answers: dict[int, Answer | None] = {}  # by open question
        self.num_changes = 0  # of what can be leased, and of final answers

    # ------------------------------------------------------ the engine's thread

    def offer(self, end: bytes, offer: Offer) -> None:
        """It is there, and can't change."""
        with self._lock:
            self._offers[end] = _Open(offer, self._clock())
            self.num_changes += 1

    def take_wanted(self) -> list[Wanted]:
        """What was asked for, and is not on offer: since the last call, or with no final answer."""
        with self._lock:
            found, self._wanted = self._wanted, []
            return [one for one in found if one.number in self._answers]

    def answer(self, wanted: Wanted, answer: Answer) -> None:
        """To a question about a place that is not on offer."""
        with self._lock:
            if wanted.number in self._answers:
                self._answers[wanted.number] = answer
                if answer.is_final:
                    self.num_changes += 1
                else:
                    self._wanted.append(wanted)

    def take_back(self) -> list[tuple[bytes, bool]]:
        """The ends of what is not on offer any more, and whether it was read."""
        now = self._clock()
        with self._lock:
            kept = sum(one.num_pages for one in self._offers.values())
            gone = []
            for end, one in self._offers.items():
                if any(until > now for until in one.leases.values()):
                    continue
                if one.was_read or now > one.since + KEPT_SECONDS or kept > self._most:
                    gone.append((end, one.was_read))
                    kept -= one.num_pages
            for end, _ in gone:
                for lease in self._offers.pop(end).leases:
                    self._leases.pop(lease, None)
            return gone

    # ------------------------------------------------------- the others' thread

    def lease(self, ends: Iterable[bytes]) -> tuple[int, Offer] | None:
        """What is there by the first of some ends, and the number by which to give it back."""
        with self._lock:
            for end in ends:
                found = self._offers.get(end)
                if found is None:
                    continue
                number = next(self._numbers)
                found.leases[number] = self._clock() + LEASE_SECONDS
                self._leases[number] = end
                return number, found.offer
            return None

    def want(self, wanted: Wanted) -> int:
        """The engine may have it where it did not offer it. The question's number."""
        with self._lock:
            number = next(self._numbers)
            self._wanted.append(wanted._replace(number=number))
            self._answers[number] = None
            return number

    def answer_to(self, number: int) -> Answer | None:
        """None: there is none yet."""
        with self._lock:
            return self._answers[number]

    def was_answered(self, number: int) -> None:
        """Nobody waits for an answer any more."""
        with self._lock:
            del self._answers[number]

    def give_back(self, lease: int) -> None:
        """It is not read any more."""
        with self._lock:
            end = self._leases.pop(lease, None)
            if end is not None and end in self._offers:
                one = self._offers[end]
                one.leases.pop(lease, None)
                one.was_read = True
