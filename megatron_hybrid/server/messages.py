"""What the front end and the engine process say to each other, over ZMQ in msgpack.

The engine binds a ROUTER, each front end connects a DEALER. A front end sends commands; the
engine answers with replies. Both directions carry lists, so that a step costs one message.
"""

from __future__ import annotations

from typing import Any

import msgspec

from megatron_hybrid.request import RequestEvent, SamplingParams


class Command(msgspec.Struct, tag=True, frozen=True):
    """Sent by a front end."""


class Join(Command, frozen=True):
    """A front end is listening at `url`; answered with EngineReady as soon as the engine is."""

    url: str = ""


class AddRequest(Command, frozen=True):
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: str = ""
    priority: int = 0
    cache_checkpoints: tuple[int, ...] = ()
    message_ends: tuple[int, ...] = ()


class AbortRequest(Command, frozen=True):
    """End one choice of a request; without an index, all that have not ended."""

    request_id: str
    index: int | None = None


class ResetPrefixCache(Command, frozen=True):
    """Forget every cached prefix."""


class GetStats(Command, frozen=True):
    """Ask for the engine's counters; answered with Stats."""

    query_id: int


class Stop(Command, frozen=True):
    """Ends the engine loop; the first rank sends it to the others, never a front end."""


class Reply(msgspec.Struct, tag=True, frozen=True):
    """Sent by the engine process."""


class EngineReady(Reply, frozen=True):
    max_seq_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class Events(Reply, frozen=True):
    """One step's events for the requests of one front end."""

    events: list[RequestEvent]


class Refused(Reply, frozen=True):
    """The engine did not take a request: InvalidRequestError on the wire."""

    request_id: str
    field: str
    message: str
    status: int


class Stats(Reply, frozen=True):
    query_id: int
    values: dict[str, Any]


class Heartbeat(Reply, frozen=True):
    """The engine is alive and has nothing to say."""


class EngineEnded(Reply, frozen=True):
    """The last message: the engine process ends, and why."""

    reason: str


AnyCommand = Join | AddRequest | AbortRequest | ResetPrefixCache | GetStats
AnyReply = EngineReady | Events | Refused | Stats | Heartbeat | EngineEnded


def _plain(value: Any) -> Any:
    """Counters may be numpy numbers."""
    return value.item()


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
decode_commands = msgspec.msgpack.Decoder(list[AnyCommand]).decode
decode_replies = msgspec.msgpack.Decoder(list[AnyReply]).decode
