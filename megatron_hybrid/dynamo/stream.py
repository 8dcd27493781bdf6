"""Events of the engine in the worker's event loop: the link's thread hands them over together."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from megatron_hybrid.request import RequestEvent
from megatron_hybrid.server.link.subscription import Delivery


class EventStream:
    """One request's events, in order. It is a Receiver of the engine's client."""

    def __init__(self, handover: Handover) -> None:
        self._handover = handover
        self.queue: asyncio.Queue[Delivery] = asyncio.Queue()

    def deliver(self, item: Delivery) -> None:
        """In the link's thread."""
        self._handover.put(self, item)

    async def next(self) -> RequestEvent:
        """Raises what ends the request instead: InvalidRequestError or EngineUnavailable."""
        item = await self.queue.get()
        if not isinstance(item, RequestEvent):
            raise item
        return item


class Handover:
    """From the link's thread to the event loop, which is woken once for all that is there."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[tuple[EventStream, Delivery]] = deque()
        self._is_due = False

    def put(self, stream: EventStream, item: Delivery) -> None:
        """In the link's thread."""
        self._items.append((stream, item))
        if not self._is_due:
            self._is_due = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._hand_over)

    def _hand_over(self) -> None:
        self._is_due = False  # first: what comes from now on wakes the loop again
        while self._items:
            stream, item = self._items.popleft()
            stream.queue.put_nowait(item)
