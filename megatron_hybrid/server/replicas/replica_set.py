"""One engine, or several replicas as one: a client for each, and where a request goes."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
from msgspec.structs import replace

from megatron_hybrid.engine.latency import Histogram
from megatron_hybrid.server.link import messages as wire
from megatron_hybrid.server.link.engine_client import EngineClient, Placement, QueryFailed
from megatron_hybrid.server.link.subscription import EngineUnavailable
from megatron_hybrid.server.replicas.coordinator_client import CoordinatorClient

QUERY_SECONDS = 60.0  # a step may take that long
STATS_SECONDS = 2.0
# Replicas say something once a second, or at the end of a step that takes longer.
QUIET_SECONDS = 10.0
_LOWEST = ("epoch", "started")  # what every replica has reached; when the first one began
BUSY = "The engine is busy and did not answer in time."


class ReplicaSet:
    """What the routes need of an engine, from all replicas behind this address.

    Requests, their answers and queries go between this process and the replicas directly; the
    coordinator is only asked for places, and one engine has none. Replica k is `clients[k]`.
    """

    def __init__(
        self, endpoints: Sequence[str], coordinator: CoordinatorClient | None = None
    ) -> None:
        self._first_ready = threading.Event()
        self.clients = [EngineClient(endpoint, self._first_ready) for endpoint in endpoints]
        self._coordinator = coordinator

    def join(self, url: str) -> None:
        """Begin to look for the replicas, and tell each that comes that we listen at `url`."""
        if self._coordinator is not None:
            self._coordinator.join("")
        for client in self.clients:
            client.join(url)

    def wait_until_ready(self, seconds: float) -> bool:
        """Whether a first replica has answered within that time."""
        return self._first_ready.wait(seconds)

    @property
    def state(self) -> str:
        """ "ok" if a replica takes requests and begins them, else "paused"."""
        living = filter(_takes_requests, self.clients)
        return "ok" if any(client.state == "ok" for client in living) else "paused"

    def check(self) -> wire.EngineReady:
        """What a living replica said of itself, the one that serves the shortest sequences: any may
        get a request; and the adapters of all. EngineUnavailable if none takes requests."""
        reasons: dict[str, list[int]] = {}
        living: list[wire.EngineReady] = []
        for replica, client in enumerate(self.clients):
            try:
                living.append(client.check())
            except EngineUnavailable as error:
                reasons.setdefault(str(error), []).append(replica)
        if living:
            return _all_of(living)
        if len(reasons) == 1:
            raise EngineUnavailable(next(iter(reasons)))
        said = (f"Replica {', '.join(map(str, who))}: {why}" for why, who in reasons.items())
        raise EngineUnavailable(" ".join(said))

    @property
    def ready(self) -> wire.EngineReady | None:
        """What a replica that is there said of itself; which one: see `check`."""
        there = [client.ready for client in self.clients if client.ready is not None]
        return _all_of(there) if there else None

    def running(self) -> int:
        """Requests of this process that have not ended, on all replicas."""
        return sum(client.running() for client in self.clients)

    def place(self, wanted: wire.Wanted) -> Placement:
        """A replica that takes the request; EngineUnavailable if there is none."""
        placement = self._place(wanted, frozenset())
        if placement is None:
            self.check()  # which knows why
            raise EngineUnavailable("Every replica has just ended.")
        return placement

    def ask(
        self, kind: type[wire.AnyQuery], *arguments: Any, timeout: float | None = QUERY_SECONDS
    ) -> dict[str, Any]:
        """The results of a query of this kind that every living replica gets, as one.

        Raises EngineUnavailable if none answers, QueryFailed if one refuses; then it says what
        the others did.
        """
        self.check()
        results, refusals, silent = self._ask_each(kind, *arguments, timeout=timeout)
        if refusals:
            raise _as_one(refusals, sorted(results))
        if not results:
            raise EngineUnavailable(next(iter(silent.values()), "Every replica has just ended."))
        for replica, reason in silent.items():
            if self.clients[replica].ready is not None:  # it lives, and has not done it yet
                raise EngineUnavailable(f"Replica {replica}: {reason}{_done_on(sorted(results))}")
        return sum_stats(list(results.values()))

    def stats(self) -> dict[str, Any]:
        """The engine's counters; of several, added up and, under `engines`, each by its number."""
        each = self.stats_by_engine()
        if not each:
            self.check()
            raise EngineUnavailable(BUSY)
        if len(self.clients) == 1:
            return each["0"]
        return {**sum_stats(list(each.values())), "engines": each}

    def stats_by_engine(self) -> dict[str, dict[str, Any]]:
        """Each replica's counters, of those that answer in time."""
        results, _, _ = self._ask_each(wire.GetStats, timeout=STATS_SECONDS)
        return {str(replica): values for replica, values in results.items()}

    def fingerprints(self) -> dict[str, wire.Fingerprint]:
        """What computes answers on each replica that is there."""
        return {
            str(replica): client.fingerprint
            for replica, client in enumerate(self.clients)
            if client.ready is not None and client.fingerprint is not None
        }

    def weight_version(self) -> str | None:
        """Of the weights that every replica which is there has reached; None if none is."""
        each = self.fingerprints().values()
        return min(each, key=attrgetter("epoch")).weight_version if each else None

    def states(self) -> dict[str, dict[str, Any]]:
        """Of each replica: whether it takes requests ("ok", "paused"), or "loading", "draining" or
        "down"; and its process id while it has one."""
        states = {}
        for replica, client in enumerate(self.clients):
            ready = client.ready
            pid = {} if ready is None else {"pid": ready.pid}
            state = "down" if client.is_stalled else client.state
            states[str(replica)] = {"status": state, **pid}
        return states

    def close(self) -> None:
        """End all connections."""
        for client in self.clients:
            client.close()
        if self._coordinator is not None:
            self._coordinator.close()

    def _place(self, wanted: wire.Wanted, tried: frozenset[int]) -> Placement | None:
        candidates = [
            replica
            for replica, client in enumerate(self.clients)
            if replica not in tried and _takes_requests(client)
        ]
        if not candidates:
            return None
        if wanted.adapters:  # a replica that was started again may have none
            able = [one for one in candidates if self._has_adapters(one, wanted)]
            candidates = able or candidates
        coordinator, chosen = self._coordinator, candidates[0]
        if coordinator is not None:
            candidates = self._ready_to_begin(candidates)
            answer = coordinator.place(wanted, candidates)
            if answer in candidates:
                chosen = answer
            else:
                # It is being restarted, or slow: what this process has on each must do.
                chosen = min(candidates, key=lambda one: (self.clients[one].running(), one))
                coordinator.moved(wanted, chosen)

        def ended(tokens: int | None) -> None:
            if coordinator is not None:
                coordinator.ended(wanted.request_id, tokens)

        return Placement(
            self.clients[chosen],
            on_first=(lambda name: None) if coordinator is None else coordinator.started,
            elsewhere=partial(self._place, wanted, tried | {chosen}),
            ended=ended,
        )

    def _has_adapters(self, replica: int, wanted: wire.Wanted) -> bool:
        ready = self.clients[replica].ready
        return ready is not None and ready.adapters.keys() >= {*wanted.adapters} - {""}

    def _ready_to_begin(self, replicas: list[int]) -> list[int]:
        """Those of them, if any, that begin requests soon: that are not paused, and do not hang as
        far as is known."""
        lively = [one for one in replicas if self.clients[one].silence() < QUIET_SECONDS]
        unpaused = [one for one in lively if self.clients[one].state == "ok"]
        return unpaused or lively or replicas

    def _ask_each(
        self, kind: type[wire.AnyQuery], *arguments: Any, timeout: float | None
    ) -> tuple[dict[int, dict[str, Any]], dict[int, QueryFailed], dict[int, str]]:
        """By replica, what those that are there answered and refused, and why others did not
        answer."""
        pending = {
            replica: client.begin(kind, *arguments)
            for replica, client in enumerate(self.clients)
            if client.ready is not None
        }
        deadline = None if timeout is None else time.monotonic() + timeout
        results, refusals, silent = {}, {}, {}
        for replica, answer in pending.items():
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                results[replica] = answer.result(left)
            except TimeoutError:
                answer.cancel()
                silent[replica] = BUSY
            except EngineUnavailable as error:
                silent[replica] = str(error)
            except QueryFailed as error:
                refusals[replica] = error
        return results, refusals, silent


def _takes_requests(client: EngineClient) -> bool:
    try:
        client.check()
    except EngineUnavailable:
        return False
    return True


def _all_of(replicas: Sequence[wire.EngineReady]) -> wire.EngineReady:
    """The one that serves the shortest sequences, with the adapters of all."""
    shortest = min(replicas, key=attrgetter("max_seq_length"))
    folders = {name: folder for one in replicas for name, folder in one.adapters.items()}
    return shortest if folders == shortest.adapters else replace(shortest, adapters=folders)


def _as_one(refusals: dict[int, QueryFailed], succeeded: list[int]) -> QueryFailed:
    replica, first = next(iter(refusals.items()))
    if not succeeded and len({str(refusal) for refusal in refusals.values()}) == 1:
        return first
    return QueryFailed(f"Replica {replica}: {first}{_done_on(succeeded)}", first.status)


def _done_on(replicas: list[int]) -> str:
    return f" It is done on replica {', '.join(map(str, replicas))}." if replicas else ""


def sum_stats(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of at least one engine's stats(), or results of a query: counters, gauges and histograms are
    added up.

    `paused` is true if all of them are, `epoch` is the lowest, `started` the earliest. A key that
    only some have is added up over those.
    """
    names = dict.fromkeys(name for stats in each for name in stats)
    return {name: _sum(name, [stats[name] for stats in each if name in stats]) for name in names}


def _sum(name: str, values: list[Any]) -> Any:
    first = values[0]
    if name in _LOWEST:
        return min(values)
    if isinstance(first, bool):
        return all(values)
    if isinstance(first, Mapping):
        return _merged(values) if "buckets" in first else sum_stats(values)
    if isinstance(first, (list, tuple)):
        return _sum_pairs(values)
    if isinstance(first, str):
        return ", ".join(dict.fromkeys(values))
    return sum(values)


def _sum_pairs(lists: Sequence[Sequence[Any]]) -> list[Any]:
    """[[label, number], ...] by label, in the first one's order; other lists one after another."""
    rows = [row for one in lists for row in one]
    if not all(isinstance(row, (list, tuple)) and len(row) == 2 for row in rows):
        return rows
    totals: dict[Any, Any] = {}
    for label, number in rows:
        totals[label] = totals.get(label, 0) + number
    return [[label, number] for label, number in totals.items()]


def _merged(histograms: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What one histogram with all of these observations says; they have the same bounds."""
    bounds = [bound for bound, _ in histograms[0]["buckets"]]
    merged = Histogram(bounds)
    for one in histograms:
        cumulative = [count for _, count in one["buckets"]]
        merged.add_counts(np.diff([0, *cumulative, one["count"]]), one["sum"])
    return merged.as_dict()
