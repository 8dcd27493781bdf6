"""What ingress, router and replicas say to one another."""

from __future__ import annotations

from typing import NamedTuple

EVENTS = "text/event-stream"
# Ray's gRPC takes 4 MiB for a message; what is larger goes in pieces, or through its object store.
MOST_BYTES = 2 << 20


class Asked(NamedTuple):
    """A client's request. name: its own, among all. path: with the query. The headers' names are in
    lower case."""

    name: str
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def route(self) -> str:
        """The path alone."""
        return self.path.partition("?")[0]


class Head(NamedTuple):
    """The first thing that comes back, with the body if it is no stream; more bytes may follow."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes = b""

    @property
    def is_stream(self) -> bool:
        """Whether events follow, one after the other."""
        kinds = [value for name, value in self.headers if name.lower() == "content-type"]
        return any(kind.startswith(EVENTS) for kind in kinds)


class Whole(NamedTuple):
    """An answer in one piece."""

    replica: str
    status: int
    headers: list[tuple[str, str]]
    body: bytes


class Price(NamedTuple):
    """Of a request on a replica. delay: by how much later all answers together would be done, in
    tokens; answers: that run there; blocks: that are cached there."""

    skips: int
    tokens: int
    delay: float
    blocks: int
    answers: int
