"""Where in the model a log-probability begins to differ: its request alone and the session in
which it differs are computed again, both watched, and the first operation is sought that does not
give the same row for a token.

"First" is meant in the order of the model: what an operation gives depends on what the ones before
it gave for this token and for those before it. So all tokens up to the one that differs count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from exactness.comparison import Difference
from exactness.ranks import gathered
from exactness.sessions import Item, Session
from exactness.texts import Alone, params_of_prompt
from exactness.watching import (
    Call,
    Key,
    Recorder,
    common_tokens,
    watched_kernels,
    watched_steps,
)
from exactness.ways import ALONE, Engines, Way
from megatron_hybrid.engine.engine import DynamicInferenceEngine

_NONE = 1 << 60  # behind all operations


@dataclass(frozen=True)
class Place:
    """The first operation that differs, for the first token for which it does."""

    block: str
    operation: str
    position: int
    largest: float  # difference of two numbers of the row
    entries: tuple[int, int]  # that differ, of how many
    alone: Call | None
    other: Call | None
    rank: int = 0

    def __str__(self) -> str:
        lines = [
            f"first different: {self.operation}, in {self.block}, of the token at position "
            f"{self.position}" + (f" (rank {self.rank})" if self.rank else ""),
            f"  {self.entries[0]} of {self.entries[1]} numbers differ, by {self.largest:.6g} at "
            "most",
        ]
        for name, call in (("alone", self.alone), ("there", self.other)):
            if call is not None:
                lines.append(f"  {name}: {call.step}; called with {', '.join(call.shapes)}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        calls = {"alone": self.alone, "other": self.other}
        return {
            "block": self.block,
            "operation": self.operation,
            "position": self.position,
            "rank": self.rank,
            "largest_difference": self.largest,
            "numbers_that_differ": self.entries[0],
            "numbers": self.entries[1],
            **{
                name: None if call is None else {"shapes": call.shapes, "step": call.step}
                for name, call in calls.items()
            },
        }


@dataclass(frozen=True)
class Located:
    """place: None where nothing differs. operations, tokens: that were compared."""

    place: Place | None
    operations: int
    tokens: int

    def __str__(self) -> str:
        if self.place is not None:
            return str(self.place)
        return (
            f"no operation differs: {self.operations} of them were compared, for {self.tokens} "
            "tokens, without CUDA graphs"
        )


def locate(
    engines: Engines, way: Way, session: Session, item: Item, index: int, position: int
) -> Located:
    """What differs before the log-probability of the token at this position, in a session of a way
    in which it was computed. All ranks make this call."""
    index = item.index or index
    text = item.asked.answers[index].tokens[: max(position, 1)]
    search = _Search(engines, way, session, item, index, text)
    alone, other = search.record(alone=True), search.record(alone=False)
    order = list(alone.found)
    first = _first(order, alone, other)
    firsts = gathered(first)
    rank = min(range(len(firsts)), key=lambda i: firsts[i])
    compared = sum(bool(alone.found[key].keys() & other.found.get(key, {})) for key in order)
    tokens = len({at for found in other.found.values() for at in found})
    number, at = firsts[rank]
    if number == _NONE:
        return Located(None, compared, tokens)
    # The ranks may watch different operations, of stages of a pipeline.
    key = gathered(order[number] if number < len(order) else None)[rank]
    place = search.look_at(key, at, rank)
    return Located(gathered(place)[rank], compared, tokens)


def of_difference(
    engines: Engines, way: Way | None, session: Session, difference: Difference
) -> Located:
    """The same of what was found to differ."""
    for item in session.items:
        if item.id == difference.request:
            return locate(
                engines, way or ALONE, session, item, difference.index, difference.position
            )
    raise ValueError(f"session {session.number} has no request {difference.request}")


def _first(order: list[Key], alone: Recorder, other: Recorder) -> tuple[int, int]:
    """The number of the first operation that differs, and the first position at which it does."""
    for number, key in enumerate(order):
        own, others = alone.found[key], other.found.get(key, {})
        differing = [at for at in own.keys() & others.keys() if own[at] != others[at]]
        if differing:
            return number, min(differing)
    return _NONE, 0


@dataclass(frozen=True)
class _Search:
    """What is computed again and again."""

    engines: Engines
    way: Way
    session: Session
    item: Item
    index: int
    text: list[int]

    def record(self, *, alone: bool, only: tuple[Key, int] | None = None) -> Recorder:
        """Of the request alone, as its bits came about: from a prompt, or as it was answered; or of
        the session."""
        asked, as_prompt = self.item.asked, len(self.text) < len(self.item.asked.prompt)
        if alone:
            answers = [asked.answers[self.index]] if as_prompt else asked.answers
            texts = {("alone", i): answer.tokens for i, answer in enumerate(answers)}
        else:
            texts = {
                (item.id, i): item.known(i)[0]
                for item in self.session.items
                for i in range(item.params.n)
            }
        common = {key: common_tokens(tokens, self.text) for key, tokens in texts.items()}
        recorder = Recorder(self.text, common, only)

        def work(engine: DynamicInferenceEngine) -> None:
            with watched_steps(engine, recorder):
                if not alone:
                    self.session.run(engine)
                elif as_prompt:
                    Alone(engine).run(answers[0].tokens, params_of_prompt())
                else:
                    Alone(engine).run(asked.prompt, asked.params)

        with watched_kernels(self.engines.model, recorder):
            self.engines.use(ALONE if alone else self.way, work, eager=True)
        return recorder

    def look_at(self, key: Key, position: int, rank: int) -> Place:
        """Both rows of an operation."""
        alone = self.record(alone=True, only=(key, position)).calls
        others = self.record(alone=False, only=(key, position)).calls
        own = alone[0] if alone else None
        other = others[0] if others else None
        if own is not None:  # it may have been computed several times
            other = next((c for c in others if not _equal(c.row, own.row)), other)
        largest, entries = 0.0, (0, 0)
        if own is not None and other is not None and own.row.shape == other.row.shape:
            a, b = own.row.double(), other.row.double()
            largest = float((a - b).abs().max()) if a.numel() else 0.0
            entries = int((a != b).sum()), a.numel()
        block, operation, number = key
        name = operation if number == 0 else f"{operation}, call {number + 1}"
        return Place(block, name, position, largest, entries, own, other, rank)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)
