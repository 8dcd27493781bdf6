"""The loop of the engine process: take commands, step, send events.

Under model parallelism every rank runs this loop on the same commands. The first rank reads them
from its socket and broadcasts the list of each step; the others pass no socket.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

import zmq

from megatron_hybrid.errors import DeviceLostError
from megatron_hybrid.server.link import messages as wire
from megatron_hybrid.server.link.sockets import send
from megatron_hybrid.server.loop.engine_control import EngineControl
from megatron_hybrid.server.loop.running_requests import RunningRequests

if TYPE_CHECKING:  # torch takes seconds, during which the front end already starts
    from megatron_hybrid.engine.engine import DynamicInferenceEngine
    from megatron_hybrid.server.loop.waker import Waker

logger = logging.getLogger(__name__)

IDLE_POLL_SECONDS = 0.5  # how soon an idle loop notices a signal; also the other ranks' heartbeat
HEARTBEAT_SECONDS = 1.0  # also how soon requests of a front-end worker that died are aborted
DRAIN_POLL_SECONDS = 0.05
PREPARED_POLL_SECONDS = 0.005  # while a grammar is compiled, or a prompt elsewhere
HANDOVER_POLL_SECONDS = 0.01  # other servers may ask for what was computed before
COMMANDS_AT_ONCE = 128  # taken in one turn, which decodes wait for
BYTES_A_COMMAND = 65_536  # of a prompt: it counts once more for so many
MAX_FAILED_STEPS = 2  # in a row; a second one says that the first was no accident


Broadcast = Callable[[list[wire.Command]], list[wire.Command]]


@dataclass(eq=False)
class EngineLoop:
    """One rank's engine and, on the first rank, the socket to the front ends."""

    engine: DynamicInferenceEngine
    socket: zmq.Socket[bytes] | None
    _: KW_ONLY
    broadcast: Broadcast | None = None  # the first rank's list to all of the group; None: alone
    # says why the front end is gone, or None while it is there
    front_end_failure: Callable[[], str | None] = lambda: None
    # called with the URL of each front end that has begun to take requests for this engine
    on_join: Callable[[str], None] = lambda url: None
    max_queue: int = 1_000_000  # answers that may wait; every rank must be given the same
    cache: wire.CacheSizes = wire.NO_CACHE  # what a coordinator needs to know of it
    handover_address: str = ""  # of an engine that only computes prompts: where others get them
    # called when what the prefix cache holds may have changed; must not wait
    publish_cache: Callable[[], None] = lambda: None
    waker: Waker | None = None  # of a first rank whose replica steps together with others
    on_turn: Callable[[], None] = lambda: None  # called at the beginning of each turn

    def __post_init__(self) -> None:
        self.failure: Exception | None = None  # of the last step that failed
        self._clients: set[bytes] = set()
        self._requests = RunningRequests(
            self.engine, self._send, self.max_queue, hands_over=bool(self.handover_address)
        )
        self._control = EngineControl(
            self.engine,
            self._send,
            lambda: self._send_all(self._fingerprint()),
            lambda: self._send_all(
                wire.Adapters(self.engine.adapter_folders, self.engine.adapter_keys)
            ),
        )
        self._backlog: deque[tuple[bytes, wire.Command]] = deque()  # for later turns
        self._senders: deque[bytes] = deque()  # of requests and queries that are not applied yet
        self._failed_steps = 0
        self._uses_idle_time = False
        self._last_heartbeat = 0.0
        self._lockstep = self.engine.lockstep
        self._stop_requested = False
        self._has_ended = False  # nobody needs this replica any more
        self._drain_until: float | None = None
        self._drains_apart = False  # while other replicas go on behind the same front end
        self._told: set[bytes] = set()  # clients that know of it
        self._left: set[bytes] = set()  # those whose last request is here
        self._unreachable: list[bytes] = []  # clients that went away since the last turn

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
            self.on_turn()
            commands = self._receive() if self.socket is not None else []
            if self.broadcast is not None:
                commands = self.broadcast(commands)
            if self._ends_with(commands):
                break
            for command in commands:
                self._apply(command)
            if (self._lockstep is not None or self.engine.has_work()) and not self._step():
                reason = "The engine failed and cannot go on; its log says why."
                exit_code = 1
                break
            if self._lockstep is not None and self._lockstep.is_stopping:
                break
            self._uses_idle_time = not self.engine.has_work() and self.engine.use_idle_time()
            self._control.proceed()
            self.publish_cache()  # what commands changed, or a step that failed
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
        assert self.socket is not None
        if self._stop_requested or self._has_ended:
            return [wire.Stop(at_once=self._stop_requested)]
        idle_seconds = IDLE_POLL_SECONDS if self._drain_until is None else DRAIN_POLL_SECONDS
        if self._requests.are_delayed:
            idle_seconds = PREPARED_POLL_SECONDS
        elif self.handover_address:
            idle_seconds = HANDOVER_POLL_SECONDS
        self._backlog.extend((b"", command) for command in self._abort_orphans())
        shared = self._requests.prepared()
        is_busy = shared or self._backlog or self.engine.has_work() or self._uses_idle_time
        timeout = 0 if is_busy else int(1000 * idle_seconds)
        sleeps = timeout > 0
        if self.waker is not None and sleeps:
            self.waker.wait(self.socket, timeout)
            timeout = 0
        for _ in range(COMMANDS_AT_ONCE):
            if not self.socket.poll(timeout):
                break
            timeout = 0
            client, payload = self.socket.recv_multipart()
            for command in wire.decode_commands(payload):
                if isinstance(command, wire.GetStats):
                    self._send(client, wire.Result(command.query_id, self.engine.stats()))
                else:
                    self._backlog.append((client, command))
        shared += self._take()
        if self.waker is not None and sleeps and shared:
            self.waker.wake_others()
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
                self._send(client, self._fingerprint())
                self._send(client, self._ready())
            elif isinstance(command, wire.Left):
                self._left.add(client)
            elif isinstance(command, wire.Joined):
                self.on_join(command.url)
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
        return self._clients <= self._left and not self._requests

    def _abort_orphans(self) -> list[wire.Command]:
        """For the requests of clients that went away: those of a front-end worker that died."""
        if not self._unreachable:
            return []
        gone = set(self._unreachable)
        self._unreachable.clear()
        self._clients -= gone
        return [wire.AbortRequest(name) for name in self._requests.orphans(gone)]

    def _ready(self) -> wire.EngineReady:
        engine = self.engine
        return wire.EngineReady(
            engine.max_seq_length,
            engine.vocab_size,
            engine.eos_token_ids,
            os.getpid(),
            self.max_queue,
            self.cache,
            engine.max_seq_length_flag,
            self.handover_address,
            engine.adapter_folders,
            engine.adapter_keys,
        )

    def _fingerprint(self) -> wire.Fingerprint:
        weights = self.engine.weights
        known = weights.fingerprint
        return wire.Fingerprint(known.short, known.parts, weights.version, self.engine.epoch)

    def _apply(self, command: wire.Command) -> None:
        """What every rank does; the first one's client is answered."""
        client = b""
        if isinstance(command, wire.AddRequest | wire.Query) and self._senders:
            client = self._senders.popleft()
        match command:
            case wire.AddRequest():
                self._requests.add(client, command)
            case wire.Prepared(request_id):
                self._requests.go_on(request_id)
            case wire.AbortRequest():
                self._requests.abort(command)
            case wire.ResetPrefixCache(query_id, if_idle):
                self._send(client, self._reset_cache(query_id, if_idle))
            case wire.AbortAnswers(query_id, http_request):
                values = {"aborted": self._requests.abort_all_of(http_request)}
                self._send(client, wire.Result(query_id, values))
            case wire.AbortAll(query_id):
                values = {"aborted": self._requests.abort_everything()}
                self._send(client, wire.Result(query_id, values))
            case _ if isinstance(command, wire.ControlQuery):
                self._control.take(client, command)  # which answers

    def _reset_cache(self, query_id: int, if_idle: bool) -> wire.Result:
        at_rest = self.engine.is_paused and self.engine.is_quiet
        if if_idle and self._requests and not at_rest:
            error = f"{len(self._requests)} requests run or wait, so the cache was not flushed."
            return wire.Result(query_id, error=error, status=400)
        self.engine.reset_prefix_cache()
        return wire.Result(query_id)

    def _step(self) -> bool:
        """One engine step and its events; False when the engine cannot go on."""
        try:
            events = self.engine.step()
        except Exception as error:
            logger.exception("The engine's step failed.")
            self._requests.fail_all(f"The engine failed in a step: {type(error).__name__}: {error}")
            self._failed_steps += 1
            self.failure = error
            # Other ranks may wait in a collective that this one has left: there is no going on.
            is_alone = self.broadcast is None and self._lockstep is None
            sound = is_alone and not isinstance(error, DeviceLostError)
            return sound and self._failed_steps < MAX_FAILED_STEPS
        self._failed_steps = 0
        self.publish_cache()  # first: who sees the answer may ask again at once
        self._requests.publish(events)
        return True

    def _keep_contact(self) -> str | None:
        """Send a heartbeat when one is due; why the front end is gone, if it is."""
        if self.socket is None:
            return None
        now = time.monotonic()
        interval = HEARTBEAT_SECONDS if self._drain_until is None else DRAIN_POLL_SECONDS
        if now - self._last_heartbeat < interval:
            return None
        self._last_heartbeat = now
        self._send_all(wire.Heartbeat(self.engine.is_paused))
        return self.front_end_failure()

    def _send_all(self, reply: wire.Reply) -> None:
        for client in list(self._clients):
            self._send(client, reply)

    def _send(self, client: bytes, reply: wire.Reply) -> None:
        if self.socket is not None and not send(self.socket, client, reply):
            self._unreachable.append(client)
