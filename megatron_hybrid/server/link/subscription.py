"""One HTTP request's view of the engine: what it submitted, and the events that came back."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Protocol

from megatron_hybrid.errors import InvalidRequestError, RequestError
from megatron_hybrid.request import FinishReason, RequestEvent
from megatron_hybrid.server.link import messages as wire

if TYPE_CHECKING:
    from megatron_hybrid.server.link.engine_client import EngineClient


class EngineUnavailable(RequestError):
    """The engine is loading, hung or gone; the message says which."""

    status, code = 503, "engine_unavailable"


class Overloaded(RequestError):
    """Too many requests are waiting or open; the client may try again."""

    status, kind, code = 429, "rate_limit_error", "queue_full"


Delivery = RequestEvent | InvalidRequestError | Overloaded | EngineUnavailable
AnswerKey = tuple[str, int]  # an engine request's id, and which of its answers


class Receiver(Protocol):
    """Who waits for the events of engine requests."""

    def deliver(self, item: Delivery) -> None:
        """Called by the client's thread, which must not be kept waiting."""


@dataclass(eq=False)
class Subscription:
    """The events of one HTTP request's engine requests, in the order of their arrival."""

    client: EngineClient
    _: KW_ONLY
    # Deliver an answer's events as one, when it has ended; what nobody looks at earlier need not
    # wake a thread at every step.
    whole: bool
    # called with the id of each engine request when its first event comes, in the client's thread
    on_first: Callable[[str], None] = lambda name: None
    first_event: float | None = None  # with tokens, or the last: when it came, by `time.monotonic`
    fingerprint: wire.Fingerprint | None = None  # of what has computed it
    handover_address: str = ""  # where that replica hands over what it has computed
    open_answers: set[AnswerKey] = field(default_factory=set)
    _begun: set[str] = field(default_factory=set)  # engine requests of which an event has come
    _partial: dict[AnswerKey, RequestEvent] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Looked up now: where gevent has patched the process it is gevent's.
        self._queue: queue.SimpleQueue[Delivery] = queue.SimpleQueue()

    def add(self, request: wire.AddRequest) -> None:
        """Submit a request, whose events come here."""
        self.client.submit(request, self)
        self.open_answers.update((request.request_id, i) for i in range(request.params.n))

    def next(self, timeout: float) -> list[RequestEvent]:
        """The events so far, at least one unless `timeout` seconds pass without any.

        Raises InvalidRequestError if the engine refuses a request, Overloaded if it has no room
        for it, EngineUnavailable if it dies.
        """
        events: list[RequestEvent] = []
        try:
            events.append(self._checked(self._queue.get(timeout=timeout)))
            while True:
                events.append(self._checked(self._queue.get_nowait()))
        except queue.Empty:
            return events

    def abort(
        self, request_id: str, index: int, reason: FinishReason, *, waits: bool = False
    ) -> None:
        """Stop caring for one answer, unless somebody `waits` for its last event, and let the
        engine know why."""
        if (request_id, index) in self.open_answers:
            if not waits:
                self._forget(request_id, index)
            self.client.send(wire.AbortRequest(request_id, index, reason))

    def close(self) -> None:
        """Abort whatever has not ended."""
        requests = {request_id for request_id, _ in self.open_answers}
        for request_id, index in list(self.open_answers):
            self._forget(request_id, index)
        for request_id in requests:
            self.client.send(wire.AbortRequest(request_id))

    def deliver(self, item: Delivery) -> None:
        """Called by the client's thread."""
        if isinstance(item, RequestEvent) and item.request_id not in self._begun:
            self._begun.add(item.request_id)
            if self.fingerprint is None:
                self.fingerprint = self.client.fingerprint
                if (ready := self.client.ready) is not None:
                    self.handover_address = ready.handover_address
            self.on_first(item.request_id)
        if self.first_event is None and isinstance(item, RequestEvent) and item.has_news:
            self.first_event = time.monotonic()
        if isinstance(item, RequestEvent) and self.whole:
            key = (item.request_id, item.index)
            earlier = self._partial.pop(key, None)
            if earlier is not None and earlier.weight_version != item.weight_version:
                self._queue.put(earlier)  # whose tokens are of other weights
                earlier = None
            item = _merge(earlier, item)
            if item.finish_reason is None:
                self._partial[key] = item
                return
        self._queue.put(item)

    def _checked(self, item: Delivery) -> RequestEvent:
        if not isinstance(item, RequestEvent):
            raise item
        if item.finish_reason is not None:
            self.open_answers.discard((item.request_id, item.index))
        return item

    def _forget(self, request_id: str, index: int) -> None:
        self.open_answers.discard((request_id, index))
        self.client.forget(request_id, index)


def _merge(earlier: RequestEvent | None, event: RequestEvent) -> RequestEvent:
    if earlier is None:
        return event
    earlier.token_ids += event.token_ids  # in place: an answer may have very many
    event.token_ids = earlier.token_ids
    if earlier.logprobs is not None:
        earlier.logprobs += event.logprobs or []
        event.logprobs = earlier.logprobs
    event.prompt_logprobs = earlier.prompt_logprobs or event.prompt_logprobs
    event.prompt_tokens = max(earlier.prompt_tokens, event.prompt_tokens)
    event.cached_tokens = max(earlier.cached_tokens, event.cached_tokens)
    if earlier.prefill_seconds is not None:
        event.queue_seconds = earlier.queue_seconds
        event.prefill_seconds = earlier.prefill_seconds
    return event
