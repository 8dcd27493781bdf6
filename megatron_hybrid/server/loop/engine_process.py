"""The loop of the engine process: take commands, step, send events.

Under model parallelism every rank runs this loop on the same commands. The first rank reads them
from its socket and broadcasts the list of each step; the others pass no socket.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import zmq

from megatron_hybrid.errors import DeviceLostError, InvalidRequestError
from megatron_hybrid.request import FinishReason, RequestEvent, SamplingParams
from megatron_hybrid.server.link import messages as wire
from megatron_hybrid.server.loop import engine_control
from megatron_hybrid.server.loop.engine_control import EngineControl

if TYPE_CHECKING:  # torch takes seconds, during which the front end already starts
    from megatron_hybrid.execution.lockstep import Lockstep
    from megatron_hybrid.server.loop.waker import Waker

logger = logging.getLogger(__name__)

IDLE_POLL_SECONDS = 0.5  # how soon an idle loop notices a signal; also the other ranks' heartbeat
HEARTBEAT_SECONDS = 1.0  # also how soon requests of a front-end worker that died are aborted
DRAIN_POLL_SECONDS = 0.05
GRAMMAR_POLL_SECONDS = 0.005  # while one is being compiled
COMMANDS_AT_ONCE = 128  # taken in one turn, which decodes wait for
BYTES_A_COMMAND = 65_536  # of a prompt: it counts once more for so many
MAX_FAILED_STEPS = 2  # in a row; a second one says that the first was no accident


class Engine(engine_control.Engine, Protocol):
    """What the loop needs of DynamicInferenceEngine."""

    @property
    def max_seq_length(self) -> int: ...

    @property
    def max_seq_length_flag(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | npt.NDArray[np.int32],
        params: SamplingParams,
        *,
        cache_salt: str = "",
        priority: int = 0,
        cache_checkpoints: Sequence[int] = (),
        message_ends: Sequence[int] = (),
        arrived: float | None = None,
    ) -> None: ...

    def begin_grammar(self, params: SamplingParams) -> bool: ...

    def abort(
        self,
        request_id: str,
        index: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
    ) -> None: ...

    @property
    def num_waiting(self) -> int:
        """Answers that have not begun."""

    def has_work(self) -> bool: ...

    def step(self) -> list[RequestEvent]: ...

    def stats(self) -> dict[str, Any]: ...

    def reset_prefix_cache(self) -> None: ...


@dataclass(slots=True)
class _Delayed:
    """A request whose grammar is being compiled, and what was aborted of it meanwhile."""

    client: bytes
    request: wire.AddRequest
    aborts: list[wire.AbortRequest] = field(default_factory=list)


Broadcast = Callable[[list[wire.Command]], list[wire.Command]]


@dataclass(slots=True)
class _Owned:
    """A request that runs: who asked for it, and which of its choices have not ended."""

    client: bytes  # b"" on the other ranks
    open: set[int]


class EngineLoop:
    """One rank's engine and, on the first rank, the socket to the front ends.

    broadcast: hands the first rank's list to every rank of the group; None for a single rank.
    front_end_failure: says why the front end is gone, or None while it is there.
    max_queue: answers that may wait; every rank must be given the same.
    on_join: called with the URL of each front end that has begun to take requests for this engine.
    cache: what the coordinator of several replicas needs to know of this one's.
    publish_cache: called when what the prefix cache holds may have changed; must not wait.
    lockstep, waker: of a replica that steps together with others; only first ranks have wakers.
    on_turn: called at the beginning of each turn.
    """

    def __init__(
        self,
        engine: Engine,
        socket: zmq.Socket[bytes] | None,
        *,
        broadcast: Broadcast | None = None,
        front_end_failure: Callable[[], str | None] = lambda: None,
        on_join: Callable[[str], None] = lambda url: None,
        max_queue: int = 1_000_000,
        cache: wire.CacheSizes = wire.NO_CACHE,
        publish_cache: Callable[[], None] = lambda: None,
        lockstep: Lockstep | None = None,
        waker: Waker | None = None,
        on_turn: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._socket = socket
        self._broadcast = broadcast
        self._front_end_failure = front_end_failure
        self._on_join = on_join
        self._max_queue = max_queue
        self._cache = cache
        self._publish_cache = publish_cache
        self._clients: set[bytes] = set()
        self._owned: dict[str, _Owned] = {}
        self._delayed: dict[str, _Delayed] = {}  # theirs are owned already
        self._backlog: deque[tuple[bytes, wire.Command]] = deque()  # for later turns
        self._senders: deque[bytes] = deque()  # of requests and queries that are not applied yet
        self._turned_away = "", ""  # the HTTP request that was refused last, and why
        self._failed_steps = 0
        self.failure: Exception | None = None  # of the last step that failed
        self._last_heartbeat = 0.0
        self._is_alone = broadcast is None and lockstep is None
        self._lockstep = lockstep
        self._waker = waker
        self._on_turn = on_turn
        self._stop_requested = False
        self._has_ended = False  # nobody needs this replica any more
        self._drain_until: float | None = None
        self._drains_apart = False  # while other replicas go on behind the same front end
        self._told: set[bytes] = set()  # clients that know of it
        self._left: set[bytes] = set()  # those whose last request is here
        self._unreachable: list[bytes] = []  # clients that went away since the last turn
        self._control = EngineControl(engine, self._send, lockstep)

    def request_stop(self) -> None:
        """End the loop at its next turn; safe in a signal handler and in any thread."""
        self._stop_requested = True

    def request_drain(self, seconds: float, *, apart: bool = False) -> None:
        """End the loop when the front end has gone, which it does when its last client has its
        answer, or after that time; safe in a signal handler. `apart`: the front end stays for
        other replicas, so end when it sends us no more requests and none is left."""
        self._drains_apart = apart
        self._drain_until = time.monotonic() + seconds

    def run(self) -> int:
        """Serve until stopped; the exit code is 0, or 1 when the engine cannot go on."""
        reason = "The server is shutting down."
        exit_code = 0
        while True:
            self._on_turn()
            commands = self._receive() if self._socket is not None else []
            if self._broadcast is not None:
                commands = self._broadcast(commands)
            if self._ends_with(commands):
                break
            for command in commands:
                self._apply(command)
            if (self._lockstep is not None or self._engine.has_work()) and not self._step():
                reason = "The engine failed and cannot go on; its log says why."
                exit_code = 1
                break
            if self._lockstep is not None and self._lockstep.is_stopping:
                break
            self._control.proceed()
            self._publish_cache()  # what commands changed, or a step that failed
            failure = self._keep_contact()
            if self._drain_until is not None:
                is_late = time.monotonic() > self._drain_until
                if failure is not None or is_late:
                    self._stop_requested = True
                elif self._drains_apart and self._has_drained():
                    self._has_ended = True
            elif failure is not None:
                logger.error("%s", failure)
                exit_code = 1
                self._stop_requested = True  # also ends the other ranks, at their next turn
        self._send_all(wire.EngineEnded(reason))
        return exit_code

    def _receive(self) -> list[wire.Command]:
        """The front ends' commands for this step; blocks for a while if there is nothing to do."""
        assert self._socket is not None
        if self._stop_requested or self._has_ended:
            return [wire.Stop(at_once=self._stop_requested)]
        idle_seconds = IDLE_POLL_SECONDS if self._drain_until is None else DRAIN_POLL_SECONDS
        if self._delayed:
            idle_seconds = GRAMMAR_POLL_SECONDS
        self._backlog.extend((b"", command) for command in self._abort_orphans())
        shared = self._grammars_that_are_ready()
        is_busy = shared or self._backlog or self._engine.has_work()
        timeout = 0 if is_busy else int(1000 * idle_seconds)
        sleeps = timeout > 0
        if self._waker is not None and sleeps:
            self._waker.wait(self._socket, timeout)
            timeout = 0
        for _ in range(COMMANDS_AT_ONCE):
            if not self._socket.poll(timeout):
                break
            timeout = 0
            client, payload = self._socket.recv_multipart()
            for command in wire.decode_commands(payload):
                if isinstance(command, wire.GetStats):
                    self._send(client, wire.Result(command.query_id, self._engine.stats()))
                else:
                    self._backlog.append((client, command))
        shared += self._take()
        if self._waker is not None and sleeps and shared:
            self._waker.wake_others()
        return shared

    def _take(self) -> list[wire.Command]:
        """As much of the backlog as one turn has room for; what every rank does is returned."""
        shared: list[wire.Command] = []
        room = COMMANDS_AT_ONCE
        while self._backlog and room > 0:
            client, command = self._backlog.popleft()
            room -= 1
            if isinstance(command, wire.Join):
                self._clients.add(client)
                self._told.discard(client)
                self._left.discard(client)
                self._send(client, self._ready())
            elif isinstance(command, wire.Left):
                self._left.add(client)
            elif isinstance(command, wire.Joined):
                self._on_join(command.url)
            else:
                if isinstance(command, wire.AddRequest):
                    room -= len(command.prompt) // BYTES_A_COMMAND
                if isinstance(command, wire.AddRequest | wire.Query):
                    self._senders.append(client)
                shared.append(command)
        return shared

    def _ends_with(self, commands: list[wire.Command]) -> bool:
        """Whether this replica ends now; one in lockstep does when the others do too."""
        stops = [command for command in commands if isinstance(command, wire.Stop)]
        if not stops or self._lockstep is None:
            return bool(stops)
        self._lockstep.may_stop = True
        self._lockstep.must_stop = any(stop.at_once for stop in stops)
        return False

    def _has_drained(self) -> bool:
        """Whether no request is here, and none can come any more."""
        for client in self._clients - self._told:
            self._told.add(client)
            self._send(client, wire.Draining())
        return self._clients <= self._left and not self._owned

    def _abort_orphans(self) -> list[wire.Command]:
        """For the requests of clients that went away: those of a front-end worker that died."""
        if not self._unreachable:
            return []
        gone = set(self._unreachable)
        self._unreachable.clear()
        self._clients -= gone
        return [
            wire.AbortRequest(name) for name, owned in self._owned.items() if owned.client in gone
        ]

    def _grammars_that_are_ready(self) -> list[wire.Command]:
        """For the requests that waited for one; every rank takes them at the same turn."""
        return [
            wire.GrammarReady(name)
            for name, delayed in self._delayed.items()
            if self._engine.begin_grammar(delayed.request.params)
        ]

    def _ready(self) -> wire.EngineReady:
        engine = self._engine
        return wire.EngineReady(
            engine.max_seq_length,
            engine.vocab_size,
            engine.eos_token_ids,
            os.getpid(),
            self._max_queue,
            self._cache,
            engine.max_seq_length_flag,
        )

    def _apply(self, command: wire.Command) -> None:
        if isinstance(command, wire.AddRequest):
            self._add(command)
        elif isinstance(command, wire.GrammarReady):
            self._go_on(command.request_id)
        elif isinstance(command, wire.AbortRequest):
            self._abort(command)
        elif isinstance(command, wire.Query):
            self._answer(command)

    def _answer(self, query: wire.Query) -> None:
        """Do what every rank does, and tell the first rank's client."""
        client = self._senders.popleft() if self._senders else b""
        values: dict[str, Any] = {}
        if isinstance(query, wire.ResetPrefixCache):
            self._engine.reset_prefix_cache()
        elif isinstance(query, wire.Pause | wire.Resume | wire.UpdateWeights):
            self._control.take(client, query)  # which answers
            return
        elif isinstance(query, wire.AbortAnswers):
            values = {"aborted": self._abort_answers(query.request_id)}
        self._send(client, wire.Result(query.query_id, values))

    def _abort_answers(self, request_id: str) -> int:
        """Of one HTTP request, whose prompts are engine requests named `<its id>-<number>`."""
        found = {
            name: len(owned.open)
            for name, owned in self._owned.items()
            if request_id in (name, name.rpartition("-")[0])
        }
        for name in found:
            self._abort(wire.AbortRequest(name))
        return sum(found.values())

    def _add(self, command: wire.AddRequest) -> None:
        client = self._senders.popleft() if self._senders else b""
        if (no_room := self._no_room(command)) is not None:
            self._send(client, wire.Refused(command.request_id, "", no_room, 429))
        elif command.params.grammar is None:
            self._submit(client, command)
        else:
            # At the next turn at the earliest, when the first rank has seen that it is compiled:
            # the ranks' threads need not be equally fast.
            self._engine.begin_grammar(command.params)
            self._delayed[command.request_id] = _Delayed(client, command)
            self._own(client, command)

    def _go_on(self, request_id: str) -> None:
        """A request's grammar is there."""
        delayed = self._delayed.pop(request_id, None)
        if delayed is None:  # a step has failed, and with it everything
            return
        del self._owned[request_id]
        self._submit(delayed.client, delayed.request)
        for abort in delayed.aborts:
            self._abort(abort)

    def _abort(self, command: wire.AbortRequest) -> None:
        if command.request_id in self._delayed:
            self._delayed[command.request_id].aborts.append(command)
        else:
            self._engine.abort(command.request_id, command.index, command.reason)

    def _submit(self, client: bytes, command: wire.AddRequest) -> None:
        try:
            self._engine.add_request(
                command.request_id,
                np.frombuffer(command.prompt, dtype=np.int32),
                command.params,
                cache_salt=command.cache_salt,
                priority=command.priority,
                cache_checkpoints=command.cache_checkpoints,
                message_ends=command.message_ends,
                arrived=command.arrived,
            )
        except InvalidRequestError as error:
            self._send(
                client, wire.Refused(command.request_id, error.field, str(error), error.status)
            )
        except Exception as error:  # it concerns nobody else; every rank has it
            logger.exception("A request could not be added.")
            self._engine.abort(command.request_id)
            reason = f"The engine could not take the request: {type(error).__name__}: {error}"
            self._own(client, command)
            self._publish(self._failures(command.request_id, reason))
        else:
            self._own(client, command)

    def _own(self, client: bytes, command: wire.AddRequest) -> None:
        self._owned[command.request_id] = _Owned(client, set(range(command.params.n)))

    def _failures(self, request_id: str, reason: str) -> list[RequestEvent]:
        """The last event of each of a request's choices that have not ended."""
        return [
            RequestEvent(request_id, index, finish_reason=FinishReason.ERROR, error=reason)
            for index in sorted(self._owned[request_id].open)
        ]

    def _no_room(self, command: wire.AddRequest) -> str | None:
        """Why the queue does not take it; the same on every rank."""
        http_request = command.request_id.rpartition("-")[0]
        if command.answers == 0:
            return self._turned_away[1] if self._turned_away[0] == http_request else None
        waiting = self._engine.num_waiting + len(self._delayed)
        # A request with more answers than the queue has places runs when nobody else waits.
        if not waiting or waiting + command.answers <= self._max_queue:
            return None
        message = (
            f"{waiting} answers are waiting and this request asks for {command.answers}; the "
            f"limit is {self._max_queue} (--max-queue). Try again later."
        )
        self._turned_away = http_request, message
        return message

    def _step(self) -> bool:
        """One engine step and its events; False when the engine cannot go on."""
        try:
            events = self._engine.step()
        except Exception as error:
            logger.exception("The engine's step failed.")
            self._fail_all(f"The engine failed in a step: {type(error).__name__}: {error}")
            self._failed_steps += 1
            self.failure = error
            # Other ranks may wait in a collective that this one has left: there is no going on.
            sound = self._is_alone and not isinstance(error, DeviceLostError)
            return sound and self._failed_steps < MAX_FAILED_STEPS
        self._failed_steps = 0
        self._publish_cache()  # first: who sees the answer may ask again at once
        self._publish(events)
        return True

    def _fail_all(self, reason: str) -> None:
        """End every request with an error, in the engine and for its client."""
        lost = list(self._owned)
        self._delayed.clear()
        self._publish([event for name in lost for event in self._failures(name, reason)])
        for request_id in lost:
            self._engine.abort(request_id)

    def _publish(self, events: list[RequestEvent]) -> None:
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
            self._send(client, wire.Events(client_events))

    def _keep_contact(self) -> str | None:
        """Send a heartbeat when one is due; why the front end is gone, if it is."""
        if self._socket is None:
            return None
        now = time.monotonic()
        interval = HEARTBEAT_SECONDS if self._drain_until is None else DRAIN_POLL_SECONDS
        if now - self._last_heartbeat < interval:
            return None
        self._last_heartbeat = now
        self._send_all(wire.Heartbeat(self._engine.is_paused))
        return self._front_end_failure()

    def _send_all(self, reply: wire.Reply) -> None:
        for client in list(self._clients):
            self._send(client, reply)

    def _send(self, client: bytes, reply: wire.Reply) -> None:
        if self._socket is None:
            return
        try:
            self._socket.send_multipart([client, wire.encode([reply])])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._unreachable.append(client)
