"""Where one HTTP request goes, as a front-end worker sees it: which replica's client takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_hybrid.server.link.engine_client import EngineClient


@dataclass(frozen=True, slots=True)
class Wanted:
    """An HTTP request before it has a place. All its prompts go to one replica: they are let in or
    refused together, and choices of one prompt share what it costs."""

    request_id: str
    prompts: Sequence[Sequence[int]]
    choices: int  # of each prompt
    max_tokens: int | None  # of each choice
    cache_salt: str

    @property
    def answers(self) -> int:
        return len(self.prompts) * self.choices


class Placement:
    """A request's place. This one is for a server with one engine: there is nothing to keep.

    on_first: to be called with the id of each engine request when its first event comes.
    """

    on_first: Callable[[str], None] | None = None

    def __init__(self, client: EngineClient) -> None:
        self.client = client

    def elsewhere(self) -> Placement | None:
        """A place on a replica that has not been tried, after this one took nothing; None if there
        is none."""
        return None

    def ended(self, tokens: int | None) -> None:
        """The request gives up its place; all its answers together had so many tokens, None if
        they did not come to their end."""
