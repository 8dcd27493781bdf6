"""The coordinator: a process beside the front end that knows where requests are best placed.

Workers ask it for a place and tell it when prompts are computed and requests over; replicas publish
what they have cached (kv_events). It is asked once a request and stands on no token's way. Without
it, workers place by what each of them has running; restarted, it learns from the replicas what they
have, and of running requests as they end.

It also keeps the memories of answers and of stored responses, which shall survive any one replica.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from megatron_hybrid.kv_events import KVEventSubscriber
from megatron_hybrid.server.link import messages as wire
from megatron_hybrid.server.link.answer_memory import ENDPOINT_NAME, AnswerMemoryServer
from megatron_hybrid.server.link.engine_client import EngineClient
from megatron_hybrid.server.link.parent import end_with_parent
from megatron_hybrid.server.link.response_memory import RESPONSES, serve_responses
from megatron_hybrid.server.link.run_folder import RunFolder
from megatron_hybrid.server.link.sockets import bind_socket, send
from megatron_hybrid.server.log_format import set_up_logging
from megatron_hybrid.server.options import FrontEndSettings, ServerOptions
from megatron_hybrid.server.replicas.coordinator_client import COORDINATOR
from megatron_hybrid.server.replicas.placer import Placer
from megatron_hybrid.server.replicas.replica import PromptKeys

logger = logging.getLogger(__name__)

POLL_MILLISECONDS = 100  # how soon a replica's end is noticed
PING_SECONDS = 1.0  # how soon the requests of a worker that died stop counting


def main() -> int:
    """Run a coordinator with the settings on standard input, until its parent is gone."""
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=FrontEndSettings)
    text = f"%(asctime)s {COORDINATOR}: "
    set_up_logging(settings.options.log_format, COORDINATOR, text, logging.INFO)
    end_with_parent(int(sys.argv[1]))
    Coordinator(settings.options, RunFolder(Path(settings.folder))).run(lambda: False)
    return 0


class Coordinator:
    """The sockets around one Placer."""

    def __init__(self, options: ServerOptions, folder: RunFolder) -> None:
        self._policy = options.inference_dynamic_batching_prefix_caching_coordinator_policy
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = bind_socket(self._context, folder.endpoint(COORDINATOR))
        self._answers = AnswerMemoryServer(folder.endpoint(ENDPOINT_NAME))
        self._responses = serve_responses(folder.endpoint(RESPONSES), options)
        replicas = range(options.data_parallel_size)
        self._engines = [EngineClient(folder.engine_endpoint(replica)) for replica in replicas]
        self._folder = folder
        self._subscribers: dict[int, KVEventSubscriber] = {}  # by replica
        self._ready: list[wire.EngineReady | None] = [None] * len(replicas)
        self._starts = [0] * len(replicas)
        self.placer: Placer | None = None  # until a first replica has said what it is
        self._owners: dict[bytes, set[str]] = {}  # requests that count, by worker
        self._last_ping = 0.0

    def run(self, ends: Callable[[], bool]) -> None:
        """Serve until `ends` says so."""
        for engine in self._engines:
            engine.join("")
        try:
            while not ends():
                self._wait()
                self._look_at_engines()
                # Before the workers' commands: what a prompt has left is published before the
                # worker says that it is computed.
                for subscriber in self._subscribers.values():
                    subscriber.receive()
                if self.placer is not None:  # what workers say before is read then
                    self._receive()
                self._ping()
        finally:
            self.close()

    def close(self) -> None:
        """Give up all sockets."""
        for engine in self._engines:
            engine.close()
        for subscriber in self._subscribers.values():
            subscriber.close()
        self._answers.close()
        if self._responses is not None:
            self._responses.close()
        self._socket.close(linger=0)
        self._context.term()

    def _wait(self) -> None:
        """Until there is something to read, for POLL_MILLISECONDS at most."""
        poller = zmq.Poller()
        if self.placer is not None:
            poller.register(self._socket, zmq.POLLIN)
        for subscriber in self._subscribers.values():
            for socket in subscriber.sockets:
                poller.register(socket, zmq.POLLIN)
        poller.poll(POLL_MILLISECONDS)

    def _look_at_engines(self) -> None:
        """Take note of replicas that came and went."""
        for replica, engine in enumerate(self._engines):
            starts, ready = engine.starts, engine.ready
            if ready is self._ready[replica]:
                continue
            is_known = self._ready[replica] is not None
            goes_on = is_known and ready is not None and starts == self._starts[replica]
            if is_known and not goes_on:
                self._lose(replica)
            self._ready[replica], self._starts[replica] = ready, starts
            if ready is not None:
                if not goes_on:
                    self._begin(replica, ready)
                assert self.placer is not None, "a replica has begun"
                self.placer.replicas[replica].adapters = ready.adapter_keys

    def _lose(self, replica: int) -> None:
        assert self.placer is not None, "it was ready"
        self.placer.lose(replica)
        subscriber = self._subscribers.pop(replica, None)
        if subscriber is not None:
            subscriber.close()

    def _begin(self, replica: int, ready: wire.EngineReady) -> None:
        """A replica takes requests from now on."""
        if self.placer is None or not any(self._ready[:replica] + self._ready[replica + 1 :]):
            self.placer = Placer(self._policy, ready.cache, ready.max_queue)
        sizes = self.placer.sizes
        own, others = ((one.block_size, one.stored_as) for one in (ready.cache, sizes))
        if own != others:
            logger.warning(
                "Replica %d has blocks of %d tokens (%s) and others have blocks of %d (%s): what "
                "it has cached is not made use of.",
                replica,
                *own,
                *others,
            )
        elif ready.cache.block_size:
            # A new subscriber begins with all that the replica has.
            subscriber = KVEventSubscriber(
                self._folder.kv_events_endpoint(replica), self._folder.kv_replay_endpoint(replica)
            )
            self._subscribers[replica] = subscriber
            self.placer.replicas[replica].contents = subscriber.contents

    def _receive(self) -> None:
        while self._socket.poll(0):
            client, payload = self._socket.recv_multipart()
            try:
                for command in wire.decode_coordinator_commands(payload):
                    self._apply(client, command)
            except Exception:  # the worker places that request by itself
                logger.exception("The coordinator could not serve a worker.")

    def _apply(self, client: bytes, command: wire.CoordinatorCommand) -> None:
        assert self.placer is not None, "nothing is read before"
        owned = self._owners.setdefault(client, set())
        if isinstance(command, wire.Place):
            owned.add(command.wanted.request_id)
            replica = self._place(command.wanted, command.replicas)
            self._send(client, wire.Result(command.query_id, {"replica": replica}))
        elif isinstance(command, wire.Moved):
            owned.add(command.request_id)
            self.placer.move(command.request_id, command.replica, command.answers)
        elif isinstance(command, wire.Started):
            self.placer.start(command.request_id)
        else:
            owned.discard(command.request_id)
            self.placer.end(command.request_id, command.tokens)

    def _place(self, wanted: wire.Wanted, replicas: list[int]) -> int:
        assert self.placer is not None, "nothing is read before"
        sizes = self.placer.sizes
        block_size = sizes.block_size
        if not block_size:  # no prefix cache: one block, which nothing is ever found for
            block_size = 1 + max(map(len, wanted.prompts), default=0)
        adapters = wanted.adapters or [""] * len(wanted.prompts)
        prompts = [
            PromptKeys(data, block_size, wanted.cache_salt, sizes.stored_as, adapter)
            for data, adapter in zip(wanted.prompts, adapters, strict=True)
        ]
        return self.placer.place(wanted.request_id, prompts, wanted.n, wanted.max_tokens, replicas)

    def _ping(self) -> None:
        now = time.monotonic()
        if now - self._last_ping > PING_SECONDS:
            self._last_ping = now
            for client in list(self._owners):
                self._send(client, wire.Heartbeat())

    def _send(self, client: bytes, reply: wire.Reply) -> None:
        if not send(self._socket, client, reply):
            for request_id in self._owners.pop(client, ()):
                if self.placer is not None:
                    self.placer.end(request_id)


if __name__ == "__main__":
    sys.exit(main())
