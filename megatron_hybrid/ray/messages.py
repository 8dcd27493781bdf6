"""What ingress, router and replicas say to one another."""

from __future__ import annotations

from typing import NamedTuple


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
    """The first thing that comes back; bytes follow."""

    status: int
    headers: list[tuple[str, str]]


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
