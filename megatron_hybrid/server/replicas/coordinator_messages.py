"""What front-end workers and the coordinator say to each other, over ZMQ in msgpack.

The coordinator binds a ROUTER, each worker connects a DEALER. As between workers and engines, both
directions carry lists.
"""

from __future__ import annotations

import msgspec


class Command(msgspec.Struct, tag=True, frozen=True):
    """Sent by a worker."""


class Place(Command, frozen=True):
    """Which of `replicas` shall take this HTTP request? Answered with Placed; from then on the
    request counts there until Ended. `prompts`: ids as 32-bit little-endian numbers. See Wanted for
    the rest."""

    place_id: int
    request_id: str
    prompts: list[bytes]
    n: int
    max_tokens: int | None
    cache_salt: str
    replicas: list[int]


class Moved(Command, frozen=True):
    """The request went to this replica, whatever was answered; nothing else is known of it if
    nothing was asked."""

    request_id: str
    replica: int
    answers: int


class Started(Command, frozen=True):
    """A prompt, called as its engine request `<id>-<number>`, has been computed."""

    request_id: str


class Ended(Command, frozen=True):
    """The HTTP request is over; its answers together had `tokens` tokens, None if they did not come
    to their end."""

    request_id: str
    tokens: int | None


class Reply(msgspec.Struct, tag=True, frozen=True):
    """Sent by the coordinator."""


class Placed(Reply, frozen=True):
    """The answer to Place."""

    place_id: int
    replica: int


class Ping(Reply, frozen=True):
    """Says nothing: that it cannot be delivered shows that a worker is gone."""


AnyCommand = Place | Moved | Started | Ended
AnyReply = Placed | Ping

encode = msgspec.msgpack.Encoder().encode
decode_commands = msgspec.msgpack.Decoder(list[AnyCommand]).decode
decode_replies = msgspec.msgpack.Decoder(list[AnyReply]).decode
