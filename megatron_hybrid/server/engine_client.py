"""The front end's side of the engine: thread-safe, one socket, one thread that owns it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.request import RequestEvent
from megatron_hybrid.server import messages as wire
from megatron_hybrid.server.subscription import EngineUnavailable, Subscription, TokenObserver

logger = logging.getLogger(__name__)

# A step may compile kernels for minutes; past this long without a word the engine counts as hung.
STALLED_SECONDS = 600.0
QUERY_SECONDS = 60.0  # a step may take that long


class QueryFailed(RuntimeError):
    """The engine refused a query; `status` is the HTTP status that fits."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class _Registered:
    """A request that runs: who waits for its events, and for which of its choices."""

    subscription: Subscription
    open: set[int]


class EngineClient:
    """Submits requests to the engine at `endpoint`; hands events to whoever waits for them."""

    def __init__(self, endpoint: str) -> None:
        self.ready: wire.EngineReady | None = None
        self.on_ready: Callable[[], None] = lambda: None
        self.observer: TokenObserver | None = None
        self._down: str | None = None
        self._heard = time.monotonic()
        self._lock = threading.Lock()
        self._requests: dict[str, _Registered] = {}
        self._queries: dict[int, queue.SimpleQueue[wire.Result | None]] = {}
        self._query_ids = itertools.count()
        self._outgoing: queue.SimpleQueue[wire.Command] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._closing = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self._thread = threading.Thread(target=self._run, name="engine-client", daemon=True)
        self._thread.start()

    def join(self, url: str) -> None:
        """Tell the engine that this front end listens at `url`; `on_ready` is called in answer."""
        self.send(wire.Join(url))

    def subscribe(self, *, whole: bool) -> Subscription:
        self.check()
        return Subscription(self, whole=whole)

    def check(self) -> wire.EngineReady:
        """What the engine said of itself; EngineUnavailable unless it can take requests."""
        if self._down is not None:
            raise EngineUnavailable(self._down)
        if self.ready is None:
            raise EngineUnavailable("The engine is still loading the model.")
        silence = time.monotonic() - self._heard
        if silence > STALLED_SECONDS:
            raise EngineUnavailable(f"The engine has not answered for {silence:.0f} seconds.")
        return self.ready

    def waiting(self) -> int:
        """Engine requests that have not produced anything yet."""
        with self._lock:
            return sum(not known.subscription.started for known in self._requests.values())

    def running(self) -> int:
        with self._lock:
            return len(self._requests)

    def ask(
        self, kind: type[wire.AnyQuery], *arguments: Any, timeout: float | None = QUERY_SECONDS
    ) -> dict[str, Any]:
        """The result of a query of this kind; None: wait for it as long as the engine lives.

        Raises EngineUnavailable if the engine does not answer, QueryFailed if it refuses.
        """
        self.check()
        answer: queue.SimpleQueue[wire.Result | None] = queue.SimpleQueue()
        query_id = next(self._query_ids)
        with self._lock:
            self._queries[query_id] = answer
        self.send(kind(query_id, *arguments))
        try:
            result = answer.get(timeout=timeout)
        except queue.Empty:
            raise EngineUnavailable("The engine is busy and did not answer in time.") from None
        finally:
            with self._lock:
                self._queries.pop(query_id, None)
        if result is None:
            self.check()
            raise EngineUnavailable("The engine has ended.")
        if result.error is not None:
            raise QueryFailed(result.error, result.status)
        return result.values

    def abort(self, request_id: str) -> int:
        """Abort all answers of one HTTP request, which end with FinishReason.ABORT; how many."""
        return int(self.ask(wire.AbortAnswers, request_id)["aborted"])

    def reset_prefix_cache(self) -> None:
        self.ask(wire.ResetPrefixCache)

    def stats(self) -> dict[str, Any]:
        """The engine's counters."""
        return self.ask(wire.GetStats, timeout=2.0)

    def engine_ended(self, reason: str) -> None:
        """Fail what is under way and whatever comes, with this reason."""
        with self._lock:
            if self._down is not None:
                return
            self._down = reason
            lost = list(self._requests.values())
            self._requests.clear()
            queries = list(self._queries.values())
        for known in lost:
            known.subscription.deliver(EngineUnavailable(reason))
        for answer in queries:
            answer.put(None)

    def close(self) -> None:
        self._closing = True
        self._wake()
        self._thread.join(timeout=2.0)

    def register(self, request_id: str, choices: int, subscription: Subscription) -> None:
        """Hand the events of this request's choices to the subscription, until each has ended."""
        with self._lock:
            if request_id in self._requests:
                raise InvalidRequestError("request_id", f"request_id {request_id!r} is in use.")
            if self._down is None:
                self._requests[request_id] = _Registered(subscription, set(range(choices)))
                return
        raise EngineUnavailable(self._down)

    def forget(self, request_id: str, index: int) -> None:
        """Drop whatever still comes for this choice."""
        with self._lock:
            self._end_choice(request_id, index)

    def send(self, command: wire.Command) -> None:
        self._outgoing.put(command)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes the thread just as well
            os.write(self._wake_write, b"\0")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        try:
            while not self._closing:
                ready = dict(poller.poll(1000))
                if self._wake_read in ready:
                    os.read(self._wake_read, 4096)
                self._flush_outgoing()
                while self._socket.poll(0):
                    self._heard = time.monotonic()
                    for reply in wire.decode_replies(self._socket.recv()):
                        self._dispatch(reply)
                self._check_stall()
        except Exception:
            logger.exception("The connection to the engine broke.")
            self.engine_ended("The connection to the engine broke; the server's log says why.")
        finally:
            self._socket.close(linger=0)
            self._context.term()

    def _flush_outgoing(self) -> None:
        commands = []
        try:
            while True:
                commands.append(self._outgoing.get_nowait())
        except queue.Empty:
            pass
        if commands:
            self._socket.send(wire.encode(commands))

    def _check_stall(self) -> None:
        silence = time.monotonic() - self._heard
        if self.ready is not None and silence > STALLED_SECONDS:
            self.engine_ended(f"The engine has not answered for {silence:.0f} seconds.")

    def _dispatch(self, reply: wire.AnyReply) -> None:
        if isinstance(reply, wire.Events):
            for event in reply.events:
                self._deliver(event)
        elif isinstance(reply, wire.Refused):
            with self._lock:
                known = self._requests.pop(reply.request_id, None)
            if known is not None:
                error = InvalidRequestError(reply.field, reply.message, reply.status)
                known.subscription.deliver(error)
        elif isinstance(reply, wire.Result):
            with self._lock:
                answer = self._queries.get(reply.query_id)
            if answer is not None:
                answer.put(reply)
        elif isinstance(reply, wire.EngineReady):
            self.ready = reply
            self.on_ready()
        elif isinstance(reply, wire.EngineEnded):
            self.engine_ended(reply.reason)

    def _deliver(self, event: RequestEvent) -> None:
        with self._lock:
            known = self._requests.get(event.request_id)
            if known is None or event.index not in known.open:
                return  # nobody waits for it any more
            if event.finish_reason is not None:
                self._end_choice(event.request_id, event.index)
        known.subscription.deliver(event)

    def _end_choice(self, request_id: str, index: int) -> None:
        """With its last choice the request is forgotten. Under the lock."""
        known = self._requests.get(request_id)
        if known is not None:
            known.open.discard(index)
            if not known.open:
                del self._requests[request_id]
