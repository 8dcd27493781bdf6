"""The requests in one rank's engine, and whose they are: taken, refused, aborted, answered."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.request import FinishReason, RequestEvent
from megatron_hybrid.server.link import messages as wire

if TYPE_CHECKING:  # torch takes seconds, during which the front end already starts
    from megatron_hybrid.engine.engine import DynamicInferenceEngine

logger = logging.getLogger(__name__)

Send = Callable[[bytes, wire.Reply], None]  # to a front end, by its name


@dataclass(slots=True)
class _Owned:
    """A request that runs: who asked for it, and which of its answers have not ended."""

    client: bytes  # b"" on ranks that have no front end
    open: set[int]
    called: str  # by the client


@dataclass(slots=True)
class _Delayed:
    """A request whose grammar is being compiled, or for which the tokenizer is read, or whose
    prompt is still computed by another server; and what was aborted of it meanwhile."""

    client: bytes
    request: wire.AddRequest
    aborts: list[wire.AbortRequest] = field(default_factory=list)


@dataclass(eq=False)
class RunningRequests:
    """What front ends have asked of `engine`. All that is decided here follows from the commands
    and from the engine's state, so every rank decides alike."""

    engine: DynamicInferenceEngine
    send: Send
    max_queue: int  # answers that may wait
    # Whether another server goes on, which may read what is computed as soon as it is: so clients
    # get an event without tokens when a request is taken.
    hands_over: bool = False
    _owned: dict[str, _Owned] = field(default_factory=dict)
    _delayed: dict[str, _Delayed] = field(default_factory=dict)  # theirs are owned already
    _turned_away: tuple[str, str] = "", ""  # the HTTP request that was refused last, and why

    def __len__(self) -> int:
        return len(self._owned)

    @property
    def are_delayed(self) -> bool:
        """Whether a request waits for what is made beside the engine."""
        return bool(self._delayed)

    def add(self, client: bytes, command: wire.AddRequest) -> None:
        """Take a request, or tell its client why not."""
        if (no_room := self._no_room(command)) is not None:
            self.send(client, wire.Refused(command.request_id, "", no_room, 429))
        elif not command.params.reads_answer and not command.prefilling:
            self._submit(client, command)
        else:
            # At the next turn at the earliest, when the first rank has seen that it is compiled:
            # the ranks' threads need not be equally fast.
            self.engine.begin_grammar(command.params)
            self._read_ahead(command)
            self._delayed[command.request_id] = _Delayed(client, command)
            self._own(client, command)

    def prepared(self) -> list[wire.Command]:
        """For the requests that need not be delayed any more; every rank takes them at the same
        turn."""
        return [
            wire.Prepared(name)
            for name, delayed in self._delayed.items()
            if self.engine.begin_grammar(delayed.request.params)
            and self.engine.context.transfers.is_read_ahead(name)
        ]

    def go_on(self, request_id: str) -> None:
        """What a request has waited for is there."""
        delayed = self._delayed.pop(request_id, None)
        if delayed is None:  # a step has failed, and with it everything
            return
        del self._owned[request_id]
        self._submit(delayed.client, delayed.request)
        for abort in delayed.aborts:
            self.abort(abort)

    def abort(self, command: wire.AbortRequest) -> None:
        """End answers of a request; their last events say so."""
        if command.request_id in self._delayed:
            self._delayed[command.request_id].aborts.append(command)
            self.engine.context.transfers.stop_reading_ahead(command.request_id)
        else:
            self.engine.abort(command.request_id, command.index, command.reason)

    def abort_all_of(self, http_request: str) -> int:
        """End one HTTP request, whose prompts are engine requests named `<its id>-<number>`, or one
        that its client calls so; how many answers that were."""
        names = [
            name
            for name, owned in self._owned.items()
            if http_request in (name, name.rpartition("-")[0])
            # SGLang's trainers call the prompts of a batch `<the batch's name>_<number>`.
            or http_request in (owned.called, owned.called.rpartition("_")[0])
        ]
        return self._abort_each(names)

    def abort_everything(self) -> int:
        """End every request; how many answers that were."""
        return self._abort_each(list(self._owned))

    def _abort_each(self, names: list[str]) -> int:
        answers = sum(len(self._owned[name].open) for name in names)
        for name in names:
            self.abort(wire.AbortRequest(name))
        return answers

    def orphans(self, gone: set[bytes]) -> list[str]:
        """The requests of clients that went away."""
        return [name for name, owned in self._owned.items() if owned.client in gone]

    def publish(self, events: Iterable[RequestEvent]) -> None:
        """Send each client the events of its requests, and forget those that have ended."""
        by_client: dict[bytes, list[RequestEvent]] = {}
        for event in events:
            owned = self._owned.get(event.request_id)
            if owned is None:
                continue  # already ended by an error; the engine's own last event comes later
            by_client.setdefault(owned.client, []).append(event)
            if event.finish_reason is not None:
                owned.open.discard(event.index)
                if not owned.open:
                    del self._owned[event.request_id]
        for client, client_events in by_client.items():
            self.send(client, wire.Events(client_events))

    def fail_all(self, reason: str) -> None:
        """End every request with an error, in the engine and for its client."""
        lost = list(self._owned)
        for name in self._delayed:
            self.engine.context.transfers.stop_reading_ahead(name)
        self._delayed.clear()
        self.publish([event for name in lost for event in self._failures(name, reason)])
        for request_id in lost:
            self.engine.abort(request_id)

    def _submit(self, client: bytes, command: wire.AddRequest) -> None:
        try:
            self.engine.add_request(
                command.request_id,
                np.frombuffer(command.prompt, dtype=np.int32),
                command.params,
                cache_salt=command.cache_salt,
                adapter=command.adapter,
                priority=command.priority,
                cache_checkpoints=command.cache_checkpoints,
                message_ends=command.message_ends,
                arrived=command.arrived,
                prefilled_by=command.prefilled_by,
            )
        except InvalidRequestError as error:
            self.send(
                client, wire.Refused(command.request_id, error.field, str(error), error.status)
            )
        except Exception as error:  # it concerns nobody else; every rank has it
            logger.exception("A request could not be added.")
            self.engine.abort(command.request_id)
            reason = f"The engine could not take the request: {type(error).__name__}: {error}"
            self._own(client, command)
            self.publish(self._failures(command.request_id, reason))
        else:
            self._own(client, command)
            if self.hands_over:
                self.publish([RequestEvent(command.request_id)])

    def _read_ahead(self, command: wire.AddRequest) -> None:
        """Of a prompt that another server computes; with an adapter it has other keys there."""
        if command.prefilling and not command.adapter:
            self.engine.context.transfers.read_ahead(
                command.request_id,
                np.frombuffer(command.prompt, dtype=np.int32),
                command.cache_salt,
                command.prefilled_by,
                command.prefilling,
            )

    def _own(self, client: bytes, command: wire.AddRequest) -> None:
        open_answers = set(range(command.params.n))
        self._owned[command.request_id] = _Owned(client, open_answers, command.called)

    def _failures(self, request_id: str, reason: str) -> list[RequestEvent]:
        """The last event of each of a request's answers that have not ended."""
        return [
            RequestEvent(request_id, index, finish_reason=FinishReason.ERROR, error=reason)
            for index in sorted(self._owned[request_id].open)
        ]

    def _no_room(self, command: wire.AddRequest) -> str | None:
        """Why the queue does not take it."""
        http_request = command.request_id.rpartition("-")[0]
        if command.answers == 0:
            return self._turned_away[1] if self._turned_away[0] == http_request else None
        waiting = self.engine.num_waiting + len(self._delayed)
        # A request with more answers than the queue has places runs when nobody else waits.
        if not waiting or waiting + command.answers <= self.max_queue:
            return None
        message = (
            f"{waiting} answers are waiting and this request asks for {command.answers}; the "
            f"limit is {self.max_queue} (--max-queue). Try again later."
        )
        self._turned_away = http_request, message
        return message
