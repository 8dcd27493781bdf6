"""DeskServer: the thread to which servers that decode talk."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import zmq

from megatron_hybrid.disaggregation import messages as wire
from megatron_hybrid.disaggregation.desk import Desk, Wanted
from megatron_hybrid.errors import ConfigurationError

logger = logging.getLogger(__name__)

FLAG = "--disaggregation-listen"
MOST_WAIT = 30.0  # seconds
_WAITING_POLL, _IDLE_POLL = 2, 200  # milliseconds


@dataclass(slots=True)
class _Asked:
    client: bytes
    number: int
    wanted: Wanted
    until: float
    ticket: int = 0  # of Desk.want


class DeskServer:
    """At an address of this machine, until it is closed."""

    def __init__(
        self,
        address: str,
        desk: Desk,
        ranks: Sequence[wire.RankMemory],
        identity: Callable[[], wire.Identity],
    ) -> None:
        """address: HOST:PORT. ranks: whose memory is read, in their order. Raises
        ConfigurationError, if nobody can listen there."""
        self._desk, self._ranks, self._identity = desk, list(ranks), identity
        self.instance = uuid.uuid4().hex
        self._waiting: list[_Asked] = []
        self._seen_changes = 0
        self._ends = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MOST_BYTES)
        try:
            self._socket.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise ConfigurationError(
                f"{FLAG} is {address}, where nothing can listen: {error}. It must be HOST:PORT of "
                "this machine, and the port must be free."
            ) from error
        self._thread = threading.Thread(target=self._run, name="desk-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nobody is answered any more."""
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._ends.is_set():
                if self._socket.poll(_WAITING_POLL if self._waiting else _IDLE_POLL):
                    client, payload = self._socket.recv_multipart()[-2:]
                    self._answer(client, payload)
                self._look_again()
        except Exception:
            logger.exception("Nothing is handed over any more: others compute prompts themselves.")
        finally:
            self._context.destroy(0)

    def _answer(self, client: bytes, payload: bytes) -> None:
        try:
            question = wire.decode_question(payload)
        except msgspec.MsgspecError as error:
            logger.warning("%s: a message is none of this version's: %s", FLAG, error)
            return
        match question:
            case wire.Hello(number):
                self._send(client, wire.Welcome(number, self.instance, self._ranks))
            case wire.Done(_, lease):
                self._desk.give_back(lease)
            case wire.Find(number, identity, kv, ends, wait):
                self._look_for(client, number, identity, Wanted(kv, ends), wait)
            case wire.Follow(number, identity, kv, first, request, wait):
                self._look_for(client, number, identity, Wanted(kv, [], request, first), wait)

    def _look_for(
        self, client: bytes, number: int, identity: wire.Identity, wanted: Wanted, wait: float
    ) -> None:
        if reason := identity.why_not(self._identity()):
            self._send(client, wire.Nothing(number, reason))
            return
        asked = _Asked(client, number, wanted, time.monotonic() + min(wait, MOST_WAIT))
        if not self._offer(asked, [end for _, end in wanted.ends]):
            asked.ticket = self._desk.want(wanted)
            self._waiting.append(asked)

    def _look_again(self) -> None:
        now, changes = time.monotonic(), self._desk.num_changes
        is_late = any(now > asked.until for asked in self._waiting)
        if not is_late and changes == self._seen_changes:
            return
        self._seen_changes = changes
        waiting, self._waiting = self._waiting, []
        for asked in waiting:
            answer = self._desk.answer_to(asked.ticket)
            ends = [end for _, end in asked.wanted.ends]
            if self._offer(asked, ends if answer is None else [*ends, answer.part]):
                self._desk.was_answered(asked.ticket)
            elif (answer is None or not answer.is_final) and now <= asked.until:
                self._waiting.append(asked)
            else:
                self._desk.was_answered(asked.ticket)  # first, so that nothing is offered to nobody
                comes = answer is not None and answer.comes
                self._send(asked.client, wire.Nothing(asked.number, comes=comes))

    def _offer(self, asked: _Asked, ends: Iterable[bytes]) -> bool:
        """Whether there was something."""
        found = self._desk.lease(ends)
        if found is None:
            return False
        lease, (position, pages, state_pages, ending) = found
        self._send(
            asked.client,
            wire.Offered(asked.number, self.instance, lease, position, pages, state_pages, ending),
        )
        return True

    def _send(self, client: bytes, answer: wire.Message) -> None:
        self._socket.send_multipart([client, wire.encode(answer)])
