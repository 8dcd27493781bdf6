"""KVEventPublisher: sends the events of one replica, from a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue

import zmq

from megatron_hybrid.cache.changes import Change
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.kv_events.config import KVEventsConfig
from megatron_hybrid.kv_events.contents import CacheContents
from megatron_hybrid.kv_events.messages import Event, EventBatch, encode_batch, events_of

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
CLOSE_SECONDS = 2.0


class KVEventPublisher:
    """A PUB socket for batches, and a ROUTER for those who missed some, as vLLM has them.

    endpoints, replay_endpoints: for zmq; an endpoint with a wildcard or an ipc path is bound, any
    other one connected to (vLLM's rule). Raises ConfigurationError when one can't be had.
    config: the topic, how many batches are kept for replay, and how many for a subscriber that does
    not read, before it loses some; nobody else notices. replica: goes with every batch.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        replay_endpoints: Sequence[str],
        config: KVEventsConfig,
        *,
        replica: int = 0,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._pub = context.socket(zmq.PUB)
        self._pub.set_hwm(config.hwm)
        self._pub.setsockopt(zmq.LINGER, 200)
        self._replay = context.socket(zmq.ROUTER)
        self._replay.set_hwm(0)  # a replay is bounded by the buffer, and useless with holes
        self._replay.setsockopt(zmq.LINGER, 200)
        for socket, names in ((self._pub, endpoints), (self._replay, replay_endpoints)):
            for endpoint in names:
                _attach(socket, endpoint, always_bind=socket is self._replay)
        # what wakes the thread, which owns all sockets but `_bell` from now on
        self._bell = context.socket(zmq.PAIR)
        self._woken = context.socket(zmq.PAIR)
        self._woken.bind(f"inproc://kv-events-{id(self)}")
        self._bell.connect(f"inproc://kv-events-{id(self)}")
        self._queue: SimpleQueue[list[Change] | None] = SimpleQueue()
        self._topic = config.topic.encode()
        self._replica = replica
        self._heartbeat_seconds = heartbeat_seconds
        # Of the next batch. The first one is a time, in microseconds: those of a restarted engine
        # are greater, so a subscriber that compares numbers sees that it missed something.
        self._sequence = time.time_ns() // 1000
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        # for snapshots; nobody can ask for one without an endpoint
        self._contents = CacheContents(keeps_tokens=True) if replay_endpoints else None
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, changes: list[Change]) -> None:
        """Send one step's changes soon. Never waits. From one thread only."""
        if changes:
            self._queue.put(changes)
            self._ring()

    def close(self) -> None:
        """Send what is left and end the thread. Twice is once."""
        if self._bell.closed:
            return
        self._queue.put(None)
        self._ring()
        self._thread.join(CLOSE_SECONDS)
        self._bell.close(0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        poller.register(self._replay, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(int(1000 * self._heartbeat_seconds)))
            try:
                if not ready:
                    self._send([])
                if self._woken in ready and self._drain():
                    break
                if self._replay in ready:
                    self._serve_replay()
            except Exception:  # a thread that ends would leave every router with what it has
                logger.exception("KV events were lost; a replay begins with a snapshot.")
                self._buffer.clear()
        for socket in (self._pub, self._replay, self._woken):
            socket.close()

    def _drain(self) -> bool:
        """Send everything that is queued; whether it is time to end."""
        while self._woken.poll(0):
            self._woken.recv()
        while not self._queue.empty():
            changes = self._queue.get()
            if changes is None:
                return True
            self._send(events_of(changes))
        return False

    def _send(self, events: list[Event]) -> None:
        sequence, self._sequence = self._sequence, self._sequence + 1
        if self._contents is not None:
            self._contents.apply(events)
        payload = self._encode(events)
        self._buffer.append((sequence, payload))
        self._pub.send_multipart((self._topic, _bytes(sequence), payload))

    def _encode(self, events: list[Event]) -> bytes:
        return encode_batch(EventBatch(time.time(), events, self._replica))

    def _serve_replay(self) -> None:
        """Answer one request with batches as they were published; an empty payload ends them.

        vLLM 0.25 and before left the topic out, and so do others: readers take the last two frames.
        """
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != SEQUENCE_BYTES:
            logger.warning("A replay request of %d frames is no sequence number.", len(frames))
            return
        client, delimiter, first = frames[0], frames[1], int.from_bytes(frames[2], "big")
        for sequence, payload in self._batches_from(first):
            self._replay.send_multipart((client, delimiter, self._topic, _bytes(sequence), payload))
        self._replay.send_multipart((client, delimiter, b"", END_OF_REPLAY, b""))

    def _batches_from(self, first: int) -> list[tuple[int, bytes]]:
        if self._buffer and self._buffer[0][0] <= first <= self._sequence:
            return [batch for batch in self._buffer if batch[0] >= first]
        assert self._contents is not None, "a request came without an endpoint"
        portions = []
        for events in self._contents.snapshot():
            portions.append(self._encode(events))
            time.sleep(0)  # the engine's thread waits for nobody's snapshot
        # They end with the number of the last batch, and each has one of its own: there are
        # subscribers that drop what they think they know.
        return list(enumerate(portions, self._sequence - len(portions)))

    def _ring(self) -> None:
        with contextlib.suppress(zmq.Again):  # a thousand rings are waiting to be heard
            self._bell.send(b"", zmq.NOBLOCK)


def _attach(socket: zmq.Socket[bytes], endpoint: str, *, always_bind: bool) -> None:
    binds = always_bind or endpoint.startswith(("ipc://", "inproc://", "tcp://0.0.0.0:"))
    try:
        if binds or "*" in endpoint or "::" in endpoint:
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigurationError(
            f"KV events can't be published at {endpoint}: {error}. Another endpoint is set with "
            "--kv-events-config."
        ) from None


def _bytes(sequence: int) -> bytes:
    return sequence.to_bytes(SEQUENCE_BYTES, "big")
