"""The five traces: chat, agents, forks, shared and mixed; all of it decided by a seed.

trace = make_trace("mixed", requests=100_000, seed=1)
for request in trace.take(step): ...
trace.finished(request, step)
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from random import Random

from simulation.agents import AgentSessions
from simulation.chat import ChatSessions, SharedSessions
from simulation.forks import RolloutSessions, TreeSearchSessions
from simulation.parameters import STEP_SECONDS, TraceParameters
from simulation.sessions import Session, Trace, TraceRequest
from simulation.text import Corpus

TRACES = ("chat", "agents", "forks", "shared", "mixed")

SessionKind = Callable[[Random, int], Session]  # (its own randomness, its number) -> session


def make_trace(
    name: str, requests: int, seed: int, parameters: TraceParameters | None = None
) -> Trace:
    """A trace that ends after so many requests. How fast they come doesn't depend on how many.

    Raises ValueError for a name that is none of TRACES.
    """
    if name not in TRACES:
        raise ValueError(f"There is no trace {name!r}; there are {', '.join(TRACES)}.")
    p = TraceParameters() if parameters is None else parameters
    corpus = Corpus(seed)
    streams = []
    for stream, (trace, kind, rate) in enumerate(_kinds(p)):
        share = 1.0 if name == trace else getattr(p.mixed, trace) if name == "mixed" else 0.0
        if share:
            rng = Random(f"{seed}/{trace}/{stream}")
            streams.append(_arrivals(kind(corpus, rng), rng, rate * share, stream))
    return Trace(((step, session) for step, _, _, session in heapq.merge(*streams)), requests)


def play(trace: Trace) -> Iterator[TraceRequest]:
    """The requests of a trace in front of an ideal engine: an answer takes a step a token."""
    running: list[tuple[int, int, TraceRequest]] = []  # a heap by end
    while (due := trace.next_arrival()) is not None:
        if running and running[0][0] <= due:
            end, _, request = heapq.heappop(running)
            trace.finished(request, end)
            continue
        for request in trace.take(due):
            end = due + max(map(len, request.answers))
            heapq.heappush(running, (end, request.number, request))
            yield request


def _kinds(
    p: TraceParameters,
) -> list[tuple[str, Callable[[Corpus, Random], SessionKind], float]]:
    """Trace, maker of sessions, sessions a second."""
    return [
        ("chat", lambda c, r: ChatSessions(p.chat, c, r), p.chat.sessions_per_second),
        ("agents", lambda c, r: AgentSessions(p.agents, c, r), p.agents.sessions_per_second),
        ("forks", lambda c, r: RolloutSessions(p.forks, c, r), p.forks.groups_per_second),
        ("forks", lambda c, r: TreeSearchSessions(p.forks, c, r), p.forks.trees_per_second),
        ("shared", lambda c, r: SharedSessions(p.shared, c, r), p.shared.sessions_per_second),
    ]


def _arrivals(
    kind: SessionKind, rng: Random, rate: float, stream: int
) -> Iterator[tuple[int, int, int, Session]]:
    """(step, stream, number, session): a Poisson process of `rate` sessions a second."""
    seconds = 0.0
    number = stream  # numbers differ between streams: they mark a session's texts as its own
    while True:
        seconds += rng.expovariate(rate)
        session = kind(Random(rng.getrandbits(64)), number)
        yield round(seconds / STEP_SECONDS), stream, number, session
        number += 8
