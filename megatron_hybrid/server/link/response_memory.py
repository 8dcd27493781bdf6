"""Responses that were stored, for /v1/responses: to be read again, and to be gone on with.

The memory lives where the answers' memory does, so that every worker finds what another one has
stored. Each response has only its own items: what came before them is that of the response that it
went on from.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from megatron_hybrid.errors import RequestError
from megatron_hybrid.server.link.memory_socket import MemoryClient, MemoryServer
from megatron_hybrid.server.options import ServerOptions

RESPONSES = "responses"  # the name of its socket
ENTRY_BYTES = 512  # what an entry costs besides its texts
ANSWER_SECONDS = 2.0
_GB, _HOUR = 10**9, 3600.0


class StoreUnavailable(RequestError):
    """The memory of responses does not answer."""

    status, code = 503, "responses_unavailable"


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """A response. owner: whose it is. previous: the id of the one that it goes on from, or "".
    items, body: the input's items and the response itself, as JSON."""

    owner: bytes
    previous: str
    items: bytes
    body: bytes


class Keep(msgspec.Struct, frozen=True, tag=True):
    """Store a response; answered with true."""

    name: str
    response: Stored


class Find(msgspec.Struct, frozen=True, tag=True):
    """Answered with a response for each name, None where this owner has none."""

    names: list[str]
    owner: bytes


class FindChain(msgspec.Struct, frozen=True, tag=True):
    """Answered with what the response goes on from, the oldest first, and itself; None if any of
    them is not there."""

    name: str
    owner: bytes


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Answered with whether there was one."""

    name: str
    owner: bytes


Command = Keep | Find | FindChain | Forget
_encode = msgspec.msgpack.Encoder().encode
_decode_command = msgspec.msgpack.Decoder(Command).decode
_decode_found = msgspec.msgpack.Decoder(list[Stored | None]).decode
_decode_chain = msgspec.msgpack.Decoder(list[Stored] | None).decode
_decode_done = msgspec.msgpack.Decoder(bool).decode


class ResponseMemory:
    """Responses by id, in the order of their last use. The least recently used go first when there
    are more than `max_bytes`; each goes when nobody has asked for it for `seconds`. Who asks for a
    response uses all that it goes on from, too."""

    def __init__(
        self, max_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._clock = clock
        self._responses: OrderedDict[str, Stored] = OrderedDict()
        self._used: dict[str, float] = {}
        self.bytes = 0  # what is held, entries' own cost included

    def __len__(self) -> int:
        return len(self._responses)

    def keep(self, name: str, response: Stored) -> None:
        """Hold it; others go until all fit. What does not fit by itself is not held."""
        self._drop_old()
        if _cost(response) > self._max_bytes:
            return
        self._responses[name] = response
        self.bytes += _cost(response)
        self._use(name)
        self.chain(response.previous, response.owner)
        while self.bytes > self._max_bytes:
            self._drop(next(iter(self._responses)))

    def find(self, name: str, owner: bytes) -> Stored | None:
        """This owner's response; counts as a use."""
        self.chain(name, owner)
        response = self._responses.get(name)
        return response if response is not None and response.owner == owner else None

    def chain(self, name: str, owner: bytes) -> list[Stored] | None:
        """This owner's response after those that it goes on from; counts as a use of them all."""
        self._drop_old()
        found: list[Stored] = []
        while name:
            response = self._responses.get(name)
            if response is None or response.owner != owner:
                return None
            found.append(response)
            self._use(name)  # the newest first: it goes first, and others may share the older ones
            name = response.previous
        return found[::-1]

    def forget(self, name: str, owner: bytes) -> bool:
        """Drop this owner's response; whether there was one."""
        found = self.find(name, owner) is not None
        if found:
            self._drop(name)
        return found

    def _use(self, name: str) -> None:
        self._responses.move_to_end(name)
        self._used[name] = self._clock()

    def _drop_old(self) -> None:
        limit = self._clock() - self._seconds
        while self._responses and self._used[oldest := next(iter(self._responses))] < limit:
            self._drop(oldest)

    def _drop(self, name: str) -> None:
        self.bytes -= _cost(self._responses.pop(name))
        del self._used[name]


def _cost(response: Stored) -> int:
    return ENTRY_BYTES + len(response.items) + len(response.body)


class ResponseMemoryServer(MemoryServer):
    """Serves one memory of responses."""

    def __init__(self, endpoint: str, max_bytes: int, seconds: float) -> None:
        memory = ResponseMemory(max_bytes, seconds)

        def serve(payload: bytes) -> bytes:
            command: Command = _decode_command(payload)
            match command:
                case Keep():
                    memory.keep(command.name, command.response)
                    return _encode(True)
                case Find():
                    return _encode([memory.find(name, command.owner) for name in command.names])
                case FindChain():
                    return _encode(memory.chain(command.name, command.owner))
                case Forget():
                    return _encode(memory.forget(command.name, command.owner))

        super().__init__(endpoint, RESPONSES, serve)


def serve_responses(endpoint: str, options: ServerOptions) -> ResponseMemoryServer | None:
    """The memory that the options ask for, if any."""
    if not options.stores_responses:
        return None
    size, seconds = options.responses_store_gb * _GB, options.responses_store_hours * _HOUR
    return ResponseMemoryServer(endpoint, int(size), seconds)


class ResponseMemoryClient(MemoryClient):
    """A front end's connection to it. Every call raises StoreUnavailable if nobody answers."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint, ANSWER_SECONDS)

    def keep(self, name: str, response: Stored) -> None:
        """Store a response; from then on everybody finds it."""
        self._answer(Keep(name, response))

    def find(self, names: Sequence[str], owner: bytes) -> list[Stored | None]:
        """A response for each name, None where this owner has none."""
        return _decode_found(self._answer(Find(list(names), owner)))

    def find_chain(self, name: str, owner: bytes) -> list[Stored] | None:
        """What the response goes on from, the oldest first, and itself; None if any of them is not
        there for this owner."""
        return _decode_chain(self._answer(FindChain(name, owner)))

    def forget(self, name: str, owner: bytes) -> bool:
        """Drop a response; whether there was one."""
        return _decode_done(self._answer(Forget(name, owner)))

    def _answer(self, command: Command) -> bytes:
        answer = self.ask(_encode(command))
        if answer is None:
            raise StoreUnavailable("The memory of responses does not answer. Try again later.")
        return answer
