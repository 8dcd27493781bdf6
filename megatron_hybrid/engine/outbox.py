"""Events of requests that are to be handed out."""

from __future__ import annotations

from megatron_hybrid.engine.tracked_request import TrackedRequest
from megatron_hybrid.request import RequestEvent

_Last = tuple[TrackedRequest, RequestEvent]


class Outbox:
    """In their order. The last event of a request that wants its experts is handed out a step
    later: they come from the device behind the step in flight, for which nobody waits here."""

    def __init__(self) -> None:
        self._events: list[RequestEvent] = []
        self._late: list[_Last] = []
        self._next: list[_Last] = []  # that are late from the next `take` on

    def __bool__(self) -> bool:
        return bool(self._events or self._late or self._next)

    def append(self, event: RequestEvent) -> None:
        """One that is not the last of its request."""
        self._events.append(event)

    def append_last(self, request: TrackedRequest, event: RequestEvent) -> None:
        """The last one of its request."""
        if request.routed is None or event.error is not None:
            self._events.append(event)
        elif request.routed.is_here:
            self._events.append(_with_experts(request, event))
        else:
            self._next.append((request, event))

    def take(self) -> list[RequestEvent]:
        """Those that are due, once each."""
        late = [_with_experts(request, event) for request, event in self._late]
        events, self._events = self._events, []
        self._late, self._next = self._next, []
        return late + events if late else events


def _with_experts(request: TrackedRequest, event: RequestEvent) -> RequestEvent:
    assert request.routed is not None
    event.routed_experts, request.routed = request.routed.result(request.num_tokens), None
    return event
