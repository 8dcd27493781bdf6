"""The tokens of answers that were given, so that the next turn's prompt holds these very tokens.

A chat comes back as text, and the tokens of a text need not be those that were sampled: then the
cached prefix would end where the first answer began. The memory lives in the engine process, where
all front ends find it.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from megatron_hybrid.server.link.memory_socket import MemoryClient, MemoryServer
from megatron_hybrid.text.answer_places import GeneratedAnswer

MAX_TOKENS = 16 * 2**20  # 64 MiB of ids, and about as much text
ENTRY_TOKENS = 64  # what an entry costs besides its tokens
ENDPOINT_NAME = "answers"
KEY_BYTES = 16
# An answer that isn't found costs the computation of all that follows it, which is more than a busy
# machine makes this wait.
LOOKUP_SECONDS = 1.0


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
    """Sent by a front end before it makes a prompt of a chat; answered with an answer for each key,
    None where there is none."""

    keys: list[bytes]


_encode = msgspec.msgpack.Encoder().encode
_decode_command = msgspec.msgpack.Decoder(Remember | Lookup).decode
_decode_found = msgspec.msgpack.Decoder(list[Stored | None]).decode


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


class AnswerMemoryServer(MemoryServer):
    """Serves one memory of answers."""

    def __init__(self, endpoint: str) -> None:
        memory = AnswerMemory()

        def serve(payload: bytes) -> bytes | None:
            command = _decode_command(payload)
            if isinstance(command, Remember):
                memory.remember(command.key, command.answer)
                return None
            return _encode(memory.find(command.keys))

        super().__init__(endpoint, "answers", serve)


class AnswerMemoryClient(MemoryClient):
    """A front end's connection to it."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint, LOOKUP_SECONDS)

    def remember(self, key: bytes, token_ids: Sequence[int], text: str, thoughts: int = 0) -> None:
        """Send an answer, as GeneratedAnswer has it; it is dropped if the memory does not read."""
        ids = array("I", token_ids).tobytes()
        self.tell(_encode(Remember(key, Stored(ids, text, thoughts))))

    def find(self, keys: Sequence[bytes]) -> list[GeneratedAnswer | None]:
        """What the memory holds; nothing if it does not answer soon."""
        answer = self.ask(_encode(Lookup(list(keys)))) if keys else None
        if answer is None:
            return [None] * len(keys)
        return [None if one is None else one.unpacked() for one in _decode_found(answer)]


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
