"""KVEventSubscriber: one replica's CacheContents, kept up to date."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import zmq

from megatron_hybrid.kv_events.contents import CacheContents
from megatron_hybrid.kv_events.messages import decode_batch
from megatron_hybrid.kv_events.publisher import HEARTBEAT_SECONDS, SEQUENCE_BYTES

ANSWER_SECONDS = 2.0  # after that a replay is asked for again
SILENT_SECONDS = 3 * HEARTBEAT_SECONDS  # after that a replica may be gone


class KVEventSubscriber:
    """Call `receive` often, at least once a second, from one thread.

    It may be made before the publisher is there, and lives through its restarts. hwm: batches that
    wait here to be read; those that are lost beyond it are asked for again.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str,
        *,
        hwm: int = 100_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.contents = CacheContents()
        self._replay_endpoint = replay_endpoint
        self._clock = clock
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.set_hwm(hwm)
        self._sub.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._sub.subscribe(b"")
        self._sub.connect(endpoint)
        self._dealer: zmq.Socket[bytes] | None = None
        self._next: int | None = None  # sequence number; None before the first answer
        self._waiting: list[tuple[int, bytes]] = []  # while a replay is under way
        self._asked_at: float | None = None
        self._heard_at = -float("inf")
        self._ask(0)

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """To poll for input before `receive`. Others after each call of it."""
        return [self._sub] if self._dealer is None else [self._sub, self._dealer]

    @property
    def is_current(self) -> bool:
        """Whether `contents` is what the replica has, as far as one can know: nothing is known to
        be missing, and it was heard of in the last three seconds."""
        silent = self._clock() - self._heard_at > SILENT_SECONDS
        return self._next is not None and self._asked_at is None and not silent

    def receive(self) -> bool:
        """Read everything that is there, without waiting; whether there was anything."""
        heard = False
        while self._sub.poll(0):
            frames = self._sub.recv_multipart()
            if len(frames) == 3 and len(frames[1]) == SEQUENCE_BYTES:
                heard = True
                self._take(int.from_bytes(frames[1], "big"), frames[2])
        while self._dealer is not None and self._dealer.poll(0):
            heard = True
            self._take_replayed(self._dealer.recv_multipart())
        if heard:
            self._heard_at = self._clock()
        if self._asked_at is not None and self._clock() - self._asked_at > ANSWER_SECONDS:
            self._ask(0 if self._next is None else self._next)
        return heard

    def close(self) -> None:
        """Give up the sockets."""
        self._sub.close(0)
        self._stop_asking()

    def _take(self, sequence: int, payload: bytes) -> None:
        """A batch as it was published."""
        if self._asked_at is not None:
            self._waiting.append((sequence, payload))
        elif sequence == self._next:
            self._apply(sequence, payload)
        else:
            self._ask(0 if self._next is None else self._next)

    def _take_replayed(self, frames: list[bytes]) -> None:
        """Part of an answer: [b"", topic, sequence number, payload]; an empty payload ends it."""
        if len(frames) < 3:
            return
        if frames[-1]:
            self._apply(int.from_bytes(frames[-2], "big"), frames[-1])
            self._asked_at = self._clock()
            return
        self._stop_asking()
        waiting, self._waiting = self._waiting, []
        for sequence, payload in waiting:
            if self._asked_at is not None or self._next is None or sequence >= self._next:
                self._take(sequence, payload)

    def _apply(self, sequence: int, payload: bytes) -> None:
        try:
            events = decode_batch(payload).events
        except msgspec.DecodeError:
            return  # not one of ours; the gap that it leaves is noticed
        self.contents.apply(events)
        self._next = sequence + 1

    def _ask(self, sequence: int) -> None:
        """For what was sent from that number on. Over a new connection, so that an answer that
        comes late after all is not taken for this one's."""
        self._stop_asking()
        self._waiting.clear()  # the answer has these, too
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.set_hwm(0)
        self._dealer.connect(self._replay_endpoint)
        self._dealer.send_multipart((b"", sequence.to_bytes(SEQUENCE_BYTES, "big")))
        self._asked_at = self._clock()

    def _stop_asking(self) -> None:
        self._asked_at = None
        if self._dealer is not None:
            self._dealer.close(0)
            self._dealer = None
