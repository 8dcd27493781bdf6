"""The tokens of answers that were given, so that the next turn's prompt holds these very tokens.

A chat comes back as text, and the tokens of a text need not be those that were sampled: then the
cached prefix would end where the first answer began. The memory lives in the engine process, where
all front ends find it; it has a thread and a socket of its own, so that nobody waits for a step.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import zmq

from megatron_hybrid.server.link.sockets import zmq_module
from megatron_hybrid.text.answer_places import GeneratedAnswer

logger = logging.getLogger(__name__)

MAX_TOKENS = 16 * 2**20  # 64 MiB of ids, and about as much text
ENTRY_TOKENS = 64  # what an entry costs besides its tokens
ENDPOINT_NAME = "answers"
KEY_BYTES = 16
LOOKUP_SECONDS = 0.2  # an answer that isn't found costs time, not correctness
PAUSE_SECONDS = 1.0  # without lookups, after one that nobody answered


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """An answer on the wire: its ids as 32-bit numbers, their text, and how much of that was only
    thought."""

    ids: bytes
    text: str
    thoughts: int = 0

    def unpacked(self) -> GeneratedAnswer:
        """As whoever made it had it."""
        ids = memoryview(self.ids).cast("I").tolist()
        return GeneratedAnswer(ids, self.text, self.thoughts)


class Remember(msgspec.Struct, frozen=True, tag=True):
    """Sent by a front end when an answer is complete."""

    key: bytes
    answer: Stored


class Lookup(msgspec.Struct, frozen=True, tag=True):
    """Sent by a front end before it makes a prompt of a chat; answered with Found."""

    lookup_id: int
    keys: list[bytes]


class Found(msgspec.Struct, frozen=True):
    """An answer for each key of a Lookup, None where there is none."""

    lookup_id: int
    answers: list[Stored | None]


_encode = msgspec.msgpack.Encoder().encode
_decode_command = msgspec.msgpack.Decoder(Remember | Lookup).decode
_decode_found = msgspec.msgpack.Decoder(Found).decode


class AnswerMemory:
    """Answers by key; the least recently used go first when there are more than `max_tokens`."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._answers: OrderedDict[bytes, Stored] = OrderedDict()
        self.tokens = 0  # what is held, entries' own cost included

    def __len__(self) -> int:
        return len(self._answers)

    def remember(self, key: bytes, answer: Stored) -> None:
        """Keep it in place of what the key had; forgets the oldest ones until all fit."""
        self._forget(key)
        self._answers[key] = answer
        self.tokens += _cost(answer)
        while self.tokens > self._max_tokens:
            self._forget(next(iter(self._answers)))

    def find(self, keys: Sequence[bytes]) -> list[Stored | None]:
        """What is held of these; counts as a use."""
        for key in keys:
            if key in self._answers:
                self._answers.move_to_end(key)
        return [self._answers.get(key) for key in keys]

    def _forget(self, key: bytes) -> None:
        answer = self._answers.pop(key, None)
        if answer is not None:
            self.tokens -= _cost(answer)


def _cost(answer: Stored) -> int:
    # A text may be longer than its ids: characters of one token, of four bytes each.
    return ENTRY_TOKENS + max(len(answer.ids), len(answer.text)) // 4


class AnswerMemoryServer:
    """Serves one memory at `endpoint` in a thread, until it is closed."""

    def __init__(self, endpoint: str) -> None:
        self._memory = AnswerMemory()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)
        threading.Thread(target=self._run, name="answers", daemon=True).start()

    def close(self) -> None:
        """End the thread and close its socket."""
        self._context.term()  # which waits until the thread has seen it

    def _run(self) -> None:
        with self._socket, contextlib.suppress(zmq.ContextTerminated):
            while True:
                client, payload = self._socket.recv_multipart()
                try:
                    self._serve(client, payload)
                except zmq.ContextTerminated:
                    raise
                except Exception:  # the memory is a help: whoever asks goes on without it
                    logger.exception("The memory of answers could not serve a front end.")

    def _serve(self, client: bytes, payload: bytes) -> None:
        command = _decode_command(payload)
        if isinstance(command, Remember):
            self._memory.remember(command.key, command.answer)
        else:
            found = Found(command.lookup_id, self._memory.find(command.keys))
            self._socket.send_multipart([client, _encode(found)])


class AnswerMemoryClient:
    """A front end's connection to the memory at `endpoint`; safe in threads and in greenlets, but
    greenlets' and other threads' calls must not be mixed."""

    def __init__(self, endpoint: str) -> None:
        self._lock = threading.Lock()
        self._lookup_ids = itertools.count()
        self._silent_until = 0.0
        self._context: Any = zmq_module().Context()
        self._socket: Any = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)

    def remember(self, key: bytes, token_ids: Sequence[int], text: str, thoughts: int = 0) -> None:
        """Send an answer, as GeneratedAnswer has it; it is dropped if the memory does not read."""
        with self._lock:
            self._send(Remember(key, Stored(array("I", token_ids).tobytes(), text, thoughts)))

    def find(self, keys: Sequence[bytes]) -> list[GeneratedAnswer | None]:
        """What the memory holds; nothing if it does not answer soon."""
        nothing: list[GeneratedAnswer | None] = [None] * len(keys)
        if not keys or time.monotonic() < self._silent_until:
            return nothing
        with self._lock:
            if time.monotonic() < self._silent_until:  # who had the lock has found out
                return nothing
            lookup_id = next(self._lookup_ids)
            deadline = time.monotonic() + LOOKUP_SECONDS
            if not self._send(Lookup(lookup_id, list(keys))):
                return nothing
            while (left := deadline - time.monotonic()) > 0:
                if not self._socket.poll(max(1, int(1000 * left))):
                    break
                found = _decode_found(self._socket.recv())
                if found.lookup_id == lookup_id:  # else: an answer that came too late
                    return [None if one is None else one.unpacked() for one in found.answers]
            self._silent_until = time.monotonic() + PAUSE_SECONDS
        return nothing

    def close(self) -> None:
        """End the connection."""
        with self._lock:
            self._socket.close(linger=0)
            self._context.term()

    def _send(self, command: Remember | Lookup) -> bool:
        try:
            self._socket.send(_encode(command), zmq.DONTWAIT)
        except zmq.Again:  # a full queue: the engine is gone, or stands still
            return False
        return True


class Asked(NamedTuple):
    """An assistant's message in a chat: its number, and the key under which it may be known."""

    number: int
    key: bytes


class ChatKeys:
    """Keys of a chat's answers: what was said up to each of them, in its salt's own world."""

    def __init__(self, cache_salt: str, messages: Sequence[Mapping[str, Any]]) -> None:
        self._said = _digest(b"", cache_salt)
        self.asked: list[Asked] = []
        for number, message in enumerate(messages):
            self._said = _digest(self._said, canonical(message))
            if message["role"] == "assistant":
                self.asked.append(Asked(number, self._said))

    def key_of(self, answer: Mapping[str, Any]) -> bytes:
        """The key of this answer to the whole chat."""
        return _digest(self._said, canonical({"role": "assistant", **answer}))


def canonical(message: Mapping[str, Any]) -> str:
    """A message as one text, whichever way a client spells it: parts or a string, arguments with
    other spaces, ids of calls that it made up anew; with its thoughts or without."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        # What is wrong with a part is said where the prompt is made.
        parts = (part.get("text") if isinstance(part, Mapping) else None for part in content)
        content = "\n".join(map(str, parts))
    plain: dict[str, Any] = {"role": message["role"], "content": content}
    if message.get("name"):
        plain["name"] = message["name"]
    if message.get("tool_calls"):
        plain["tool_calls"] = [
            [call["function"]["name"], _as_object(call["function"]["arguments"])]
            for call in message["tool_calls"]
        ]
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _digest(said: bytes, text: str) -> bytes:
    """Of all that was said before and of this text."""
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES, key=said).digest()
