"""A trace: sessions whose next request depends on when the last answer came.

A session is a generator of stages. A stage is a list of requests and further sessions that run
side by side; the session goes on when all of them have ended. So a session's texts depend on
nothing but its own seed, and only its times on the engine.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from simulation.text import GENERATION_PROMPT, Context, Tokens


class Ask(NamedTuple):
    """One request of a session."""

    parts: tuple[Tokens, ...]  # the prompt
    message_ends: tuple[int, ...]
    answers: tuple[Tokens, ...]  # one for each sample
    delay: int  # steps from the end of the stage before


Stage: TypeAlias = "Sequence[Ask | Session]"
Session: TypeAlias = Iterator[Stage]


def ask(context: Context, answers: Sequence[Tokens], delay: int) -> Ask:
    """A chat request: the template's generation prompt stands at the end."""
    return Ask((*context.parts, GENERATION_PROMPT), context.ends, tuple(answers), delay)


class TraceRequest:
    """What a client sends, and the answer that it will get. `n` samples share the prompt."""

    __slots__ = ("_task", "answers", "arrival", "message_ends", "number", "parts")

    cache_salt = ""

    def __init__(self, number: int, arrival: int, asked: Ask, task: _Task) -> None:
        self.number = number  # from 0, in order of arrival
        self.arrival = arrival  # step
        self.parts = asked.parts
        self.message_ends = asked.message_ends  # positions in the prompt
        self.answers = asked.answers
        self._task = task

    @property
    def n(self) -> int:
        return len(self.answers)

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.parts))

    def prompt(self) -> Tokens:
        """The prompt's tokens, put together anew by every call."""
        return np.concatenate(self.parts)


class _Task:
    """A session that has begun, and how many of its stage are still under way."""

    __slots__ = ("parent", "pending", "session")

    def __init__(self, session: Session, parent: _Task | None) -> None:
        self.session = session
        self.parent = parent
        self.pending = 0


class Trace:
    """Hands out requests when they are due; told of finished ones, it knows what comes next."""

    def __init__(self, arrivals: Iterator[tuple[int, Session]], limit: int) -> None:
        self.limit = limit  # requests
        self.issued = 0
        self.sessions_begun = 0
        self.sessions_open = 0
        self._arrivals = arrivals  # (step, session), ascending, without an end
        self._due: list[tuple[int, int, Ask, _Task]] = []  # a heap
        self._pushed = 0
        self._next_session = next(arrivals)

    def next_arrival(self) -> int | None:
        """The step at which the next request is due, as far as is known; None when all were."""
        if self.issued == self.limit:
            return None
        self._begin_sessions()
        return self._due[0][0]

    def take(self, now: int) -> list[TraceRequest]:
        """The requests that are due at step `now` or before."""
        taken = []
        while (due := self.next_arrival()) is not None and due <= now:
            arrival, _, asked, task = heapq.heappop(self._due)
            taken.append(TraceRequest(self.issued, arrival, asked, task))
            self.issued += 1
        return taken

    def finished(self, request: TraceRequest, now: int) -> None:
        """All samples of the request have ended in step `now`."""
        self._ended(request._task, now)

    def _begin_sessions(self) -> None:
        """Begin every session that comes before the next request of those that are open."""
        while not self._due or self._next_session[0] <= self._due[0][0]:
            step, session = self._next_session
            self._next_session = next(self._arrivals)
            self.sessions_begun += 1
            self.sessions_open += 1
            self._advance(_Task(session, None), step)

    def _advance(self, task: _Task, now: int) -> None:
        stage = next(task.session, None)
        if stage is None:
            if task.parent is None:
                self.sessions_open -= 1
            else:
                self._ended(task.parent, now)
            return
        task.pending = len(stage)
        for item in stage:
            if isinstance(item, Ask):
                heapq.heappush(self._due, (now + item.delay, self._pushed, item, task))
                self._pushed += 1
            else:
                self._advance(_Task(item, task), now)

    def _ended(self, task: _Task, now: int) -> None:
        task.pending -= 1
        if task.pending == 0:
            self._advance(task, now)
