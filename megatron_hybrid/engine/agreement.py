"""Agreement: what ranks that decide alike have to know of one another before they go on.

Each copies and reads its own part of what is cached, in its own time. Something has ended when it
has on every rank, and what one of them alone knows (the time, what a store has) is the first's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Ranks(Protocol):
    """A RankGroup."""

    @property
    def is_first(self) -> bool:
        """Whether this one is number 0."""

    def maxima(self, values: Sequence[int]) -> list[int]:
        """The largest of the ranks' first values, of their second ones, and so on."""

    def broadcast_object(self, value: T | None) -> T:
        """The first rank's, on every one."""


class Alone:
    """Of one rank."""

    is_first = True

    def maxima(self, values: Sequence[int]) -> list[int]:
        """They are."""
        return list(values)

    def broadcast_object(self, value: T | None) -> T:
        """It has it."""
        assert value is not None
        return value


class Agreement:
    """All ranks make the same calls, in the same order. Nothing waits for a device."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        """None: this one is alone."""
        self._ranks: Ranks = Alone() if ranks is None else ranks

    @property
    def is_first(self) -> bool:
        """Whether this rank's word counts in `of_first`."""
        return self._ranks.is_first

    def least(self, values: Sequence[int]) -> list[int]:
        """The smallest of the ranks' first values, of their second ones, and so on."""
        return [-value for value in self._ranks.maxima([-value for value in values])]

    def of_first(self, value: T) -> T:
        """What the first rank has."""
        return self._ranks.broadcast_object(value)
