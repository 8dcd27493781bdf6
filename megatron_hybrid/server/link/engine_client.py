"""The front end's side of the engine: who waits for which events and answers. Thread-safe."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from megatron_hybrid.errors import InvalidRequestError, RequestError
from megatron_hybrid.request import RequestEvent
from megatron_hybrid.server.link import messages as wire
from megatron_hybrid.server.link.engine_link import EngineLink
from megatron_hybrid.server.link.subscription import (
    EngineUnavailable,
    Overloaded,
    Receiver,
)

# A step may compile kernels for minutes; past this long without a word the engine counts as hung.
STALLED_SECONDS = 600.0


class QueryFailed(RequestError):
    """The engine refused a query; `status` is the HTTP status that fits."""

    code = "refused_by_engine"

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
        self.kind = "invalid_request_error" if status < 500 else "server_error"


@dataclass(frozen=True, slots=True)
class Placement:
    """A request's place: the replica whose client takes it.

    on_first: to be called with the id of each engine request when its first event comes.
    elsewhere: a place on a replica that has not been tried, after this one took nothing; None if
    there is none. ended: to be called when the request gives up its place; all its answers together
    had so many tokens, None if they did not come to their end.
    """

    client: EngineClient
    on_first: Callable[[str], None]
    elsewhere: Callable[[], Placement | None]
    ended: Callable[[int | None], None]


@dataclass(slots=True)
class _Registered:
    """A request that runs: who waits for its events, and for which of its answers."""

    receiver: Receiver
    open: set[int]


class EngineClient:
    """Submits requests to the engine at `endpoint`; hands events to whoever waits for them.

    first_ready: set when the engine has answered for the first time; clients may share one.
    """

    def __init__(self, endpoint: str, first_ready: threading.Event | None = None) -> None:
        self.ready: wire.EngineReady | None = None
        self.starts = 0  # engines that were ever ready; one may say more than once what it is
        self.fingerprint: wire.Fingerprint | None = None  # of answers that begin now
        self.state = "loading"
        self._url = ""
        self._first_ready = threading.Event() if first_ready is None else first_ready
        self._down: str | None = None  # why there is no engine now
        self._heard = time.monotonic()
        self._lock = threading.Lock()
        self._requests: dict[str, _Registered] = {}
        self._queries: dict[int, Future[dict[str, Any]]] = {}
        self._query_ids = itertools.count()
        self._link = EngineLink(endpoint, self)

    def join(self, url: str) -> None:
        """Begin to look for the engine, and tell each that comes that we listen at `url`, unless
        that is ""."""
        self._url = url
        self._link.start()

    def check(self) -> wire.EngineReady:
        """What the engine said of itself; EngineUnavailable unless it can take requests."""
        if self._down is not None:
            raise EngineUnavailable(self._down)
        if self.state == "draining":  # it takes no more requests, and will end
            raise EngineUnavailable("The engine process is shutting down.")
        if self.ready is None:
            raise EngineUnavailable("The engine is still loading the model.")
        if self.is_stalled:
            raise EngineUnavailable(self._silent())
        return self.ready

    @property
    def is_stalled(self) -> bool:
        """Whether an engine that took requests has been silent for too long."""
        return self.ready is not None and self.silence() > STALLED_SECONDS

    def running(self) -> int:
        """Requests of this process that have not ended."""
        with self._lock:
            return len(self._requests)

    def begin(self, kind: type[wire.Query], *arguments: Any) -> Future[dict[str, Any]]:
        """Send a query of this kind. What comes back raises EngineUnavailable if the engine ends
        before it answers, QueryFailed if it refuses."""
        query_id = next(self._query_ids)
        answer: Future[dict[str, Any]] = Future()
        with self._lock:
            self._queries[query_id] = answer
        answer.add_done_callback(lambda _: self._queries.pop(query_id, None))
        self.send(kind(query_id, *arguments))
        return answer

    def close(self) -> None:
        """End the connection."""
        self._link.close()

    def submit(self, request: wire.AddRequest, receiver: Receiver) -> None:
        """Send a request, and hand the events of its answers to the receiver, until each has
        ended."""
        name = request.request_id
        with self._lock:
            if name in self._requests:
                raise InvalidRequestError("request_id", f"request_id {name!r} is in use.")
            if self._down is None and self.state != "draining":
                known = _Registered(receiver, set(range(request.params.n)))
                self._requests[name] = known
                self.send(request)  # under the lock, so that it comes before Left
                return
        raise EngineUnavailable(self._down or "The engine process is shutting down.")

    def forget(self, request_id: str, index: int) -> None:
        """Drop whatever still comes for this answer."""
        with self._lock:
            self._end_answer(request_id, index)

    def send(self, command: wire.Command) -> None:
        """Send a command; it is dropped while there is no engine."""
        self._link.send(command)

    # What the link says, in its thread; it must not be kept waiting.

    def connected(self) -> list[wire.Command]:
        """An engine process is there, though its model may still load; what to say to it first."""
        self._heard = time.monotonic()
        self._down = None
        self.state = "loading"
        return [wire.Join()]

    def received(self, replies: list[wire.AnyReply]) -> None:
        """The engine has said something."""
        self._heard = time.monotonic()
        for reply in replies:
            self._dispatch(reply)

    def lost(self) -> None:
        """The engine process is gone: fail what is under way and whatever comes until the next."""
        self._end("The engine process has ended; its log says why.")

    def tick(self) -> None:
        """Called once a second at least: fail what waits for an engine that hangs."""
        if self.is_stalled:
            for request_id in self._fail(self._silent()):
                self.send(wire.AbortRequest(request_id))

    def silence(self) -> float:
        """Seconds since the engine last said something."""
        return time.monotonic() - self._heard

    def _silent(self) -> str:
        return f"The engine has not answered for {self.silence():.0f} seconds."

    def _end(self, reason: str) -> None:
        with self._lock:
            if self._down is None:  # else the engine itself has said why it went
                self._down = reason
            self.ready = None
            self.state = "down"
        self._fail(self._down)

    def _fail(self, reason: str) -> list[str]:
        """End every request and query with this reason; the requests' ids."""
        with self._lock:
            lost = dict(self._requests)
            self._requests.clear()
            queries = list(self._queries.values())
        for known in lost.values():
            known.receiver.deliver(EngineUnavailable(reason))
        for answer in queries:
            with contextlib.suppress(InvalidStateError):  # nobody waits for it any more
                answer.set_exception(EngineUnavailable(reason))
        return list(lost)

    def _dispatch(self, reply: wire.AnyReply) -> None:
        if isinstance(reply, wire.Events):
            for event in reply.events:
                self._deliver(event)
        elif isinstance(reply, wire.Refused):
            with self._lock:
                known = self._requests.pop(reply.request_id, None)
            if known is not None:
                known.receiver.deliver(_refusal(reply))
        elif isinstance(reply, wire.Result):
            if (answer := self._queries.get(reply.query_id)) is not None:
                with contextlib.suppress(InvalidStateError):  # nobody waits for it any more
                    if reply.error is None:
                        answer.set_result(reply.values)
                    else:
                        answer.set_exception(QueryFailed(reply.error, reply.status))
        elif isinstance(reply, wire.Adapters):
            if self.ready is not None:
                folders, keys = reply.adapters, reply.adapter_keys
                self.ready = replace(self.ready, adapters=folders, adapter_keys=keys)
        elif isinstance(reply, wire.Fingerprint):
            self.fingerprint = reply
        elif isinstance(reply, wire.EngineReady):
            self.starts += 1
            self.ready = reply
            self.state = "ok"
            self._first_ready.set()
            if self._url:
                self.send(wire.Joined(self._url))
        elif isinstance(reply, wire.Heartbeat):
            if self.state != "draining":
                self.state = "paused" if reply.paused else "ok"
        elif isinstance(reply, wire.Draining):
            with self._lock:
                self.state = "draining"
                self.send(wire.Left())
        elif isinstance(reply, wire.EngineEnded):
            self._end(reply.reason)

    def _deliver(self, event: RequestEvent) -> None:
        with self._lock:
            known = self._requests.get(event.request_id)
            if known is None or event.index not in known.open:
                return  # nobody waits for it any more
            if event.finish_reason is not None:
                self._end_answer(event.request_id, event.index)
        known.receiver.deliver(event)

    def _end_answer(self, request_id: str, index: int) -> None:
        """With its last answer the request is forgotten. Under the lock."""
        known = self._requests.get(request_id)
        if known is not None:
            known.open.discard(index)
            if not known.open:
                del self._requests[request_id]


def _refusal(reply: wire.Refused) -> InvalidRequestError | Overloaded:
    if reply.status == 429:
        return Overloaded(reply.message)
    return InvalidRequestError(reply.field, reply.message, reply.status)
