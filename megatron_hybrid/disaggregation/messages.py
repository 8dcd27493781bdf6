"""What servers that decode ask of servers that compute prompts, over ZMQ in msgpack.

The one that computed binds a ROUTER, each thread of the others connects a DEALER. Bytes of caches
do not go this way: they are read out of memory (remote_memory.py).
"""

from __future__ import annotations

import msgspec

from megatron_hybrid.cache.stored_prefixes import Ending

MOST_BYTES = 2**28  # of a message


class Identity(msgspec.Struct, frozen=True):
    """All that cached bytes depend on besides tokens."""

    model: str  # a digest of its configuration and of the types that are cached
    weights: str  # a digest; compared between ranks that split the model alike
    sizes: tuple[int, ...]  # of all kinds of groups of ranks
    epoch: int  # how often the weights were updated

    def why_not(self, other: Identity) -> str:
        """Why nothing of `other` is of use here; empty: it is."""
        if self.model != other.model:
            return "it has another model, or caches other types"
        if self.epoch != other.epoch:
            return f"its weights were updated {other.epoch} times, and {self.epoch} times here"
        if self.sizes == other.sizes and self.weights != other.weights:
            return "it has other weights"
        return ""


class Message(msgspec.Struct, tag=True, frozen=True):
    """`number`: of the question, which its answer has, too."""

    number: int


class Hello(Message, frozen=True):
    """Answered with Welcome."""


class Find(Message, frozen=True):
    """What has been computed of a prompt, at one of some places, of which the first one that is
    there is wanted. Answered with Offered or Nothing, after `wait` seconds at the latest."""

    identity: Identity
    kv: list[bytes]  # the keys of its full blocks
    ends: list[tuple[int, bytes]]  # positions, the furthest first, and their keys
    wait: float


class Follow(Message, frozen=True):
    """What there is of a prompt while a request computes it: KV, of more blocks than the first
    ones. Answered with Offered or Nothing, after `wait` seconds at the latest."""

    identity: Identity
    kv: list[bytes]  # the keys of its full blocks
    first: int
    request: str
    wait: float


Question = Hello | Find | Follow


class Done(Message, frozen=True):
    """What was offered is not read any more. Not answered."""

    lease: int


class RankMemory(msgspec.Struct, frozen=True):
    """Of one rank: see RemoteMemory and PageLayout."""

    metadata: bytes
    address: int  # of page 0
    layout: str


class Welcome(Message, frozen=True):
    """`instance`: another one after each start."""

    instance: str
    ranks: list[RankMemory]


class Offered(Message, frozen=True):
    """A prefix whose pages stay what they are until `Done`, and for LEASE_SECONDS at most.
    `ending`: None, if it is KV alone, of a prompt that is followed: behind the first blocks."""

    instance: str
    lease: int
    position: int
    pages: list[int]  # of all its KV
    state_pages: list[int]
    ending: Ending | None


class Nothing(Message, frozen=True):
    """`reason`: empty, if there is just nothing. `comes`: the request has not ended; ask again."""

    reason: str = ""
    comes: bool = False


LEASE_SECONDS = 60.0

encode = msgspec.msgpack.Encoder().encode
decode_question = msgspec.msgpack.Decoder(Question | Done).decode
decode_answer = msgspec.msgpack.Decoder(Welcome | Offered | Nothing).decode
