"""Log-probabilities and greedy tokens of the engine beside transformers', or, where there is no
such model, of each way beside the cold one.

How far off is too far? Two programs never agree to the last bit: in 16 bits, or with inputs that a
format rounds, transformers itself is off from what it gives in float32 with exact inputs. That is
measured on the same tokens, and the engine may be off a small multiple of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_hybrid.verify.report import Check, differs, not_checked, ok
from megatron_hybrid.verify.ways import Answer, Row, Way

Truth = Mapping[tuple[int, ...], Tensor]  # log-probabilities [tokens, vocabulary] of a sequence

TIMES_USUAL = 2.0  # of the root mean square over all positions
TIMES_WORST = 3.0  # of the position that is off most
FLOOR = 5e-6  # of the largest log-probability: what sums in another order make in float32
OF_STATES = 0.03  # of the log-probabilities' spread: states that are rounded where they are kept
# Without transformers: how far two ways may be apart, in exact arithmetic and in rounded.
APART_EXACT, APART_ROUNDED = 5e-3, 0.5


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far the engine may be off: `usual` as a root mean square, `worst` at any position."""

    usual: float
    worst: float
    theirs: float  # what transformers is off itself, as a root mean square

    def with_states(self, spread: float) -> Bounds:
        """Where a state was rounded once more."""
        more = OF_STATES * spread
        return Bounds(self.usual + more, self.worst + 3 * more, self.theirs)


class Comparison:
    """`exact`: transformers in float32, with exact inputs; `usual`: as the engine computes, None
    where that is the same. `rounds_states`: cached states, or all of them."""

    def __init__(
        self,
        ways: list[Way],
        exact: Truth,
        usual: Truth | None,
        rounds_states: str = "",
    ) -> None:
        self._exact, self._rounds_states = exact, rounds_states
        answers = [answer for way in ways for answer in way.answers]
        largest = max(float(rows.abs().max()) for rows in exact.values())
        self._spread = max(float(rows.std(-1).mean()) for rows in exact.values())
        theirs = [0.0]
        if usual is not None:
            theirs = [
                _mean_square(row, exact[a.tokens], _at(usual[a.tokens], row))
                for a in answers
                for row in a.rows
            ] or theirs
        floor, own = FLOOR * largest, math.sqrt(_mean(theirs))
        self._bounds = Bounds(
            max(TIMES_USUAL * own, floor),
            max(TIMES_WORST * math.sqrt(max(theirs)), 4 * floor),
            own,
        )

    def of(self, way: Way) -> list[Check]:
        """Of one way: its log-probabilities, and its greedy tokens."""
        logits, tokens = f"logits, {way.name}", f"greedy tokens, {way.name}"
        if not way.answers:
            return [not_checked(logits, way.why), not_checked(tokens, way.why)]
        if not any(answer.rows for answer in way.answers):
            return [differs(logits, f"{way.problem}."), not_checked(tokens, "there are none.")]
        rounded = self._rounds_states == "all" or (self._rounds_states and way.reads_states)
        bounds = self._bounds.with_states(self._spread) if rounded else self._bounds
        return [self._logits(logits, way, bounds), self._tokens(tokens, way, bounds)]

    def _logits(self, name: str, way: Way, bounds: Bounds) -> Check:
        squares = {
            (answer.prompt, row.position): _mean_square(
                row, self._exact[answer.tokens], torch.tensor(row.logprobs)
            )
            for answer in way.answers
            for row in answer.rows
        }
        usual = math.sqrt(_mean(list(squares.values())))
        at = max(squares, key=lambda one: _large_if_nan(squares[one]))
        worst = math.sqrt(squares[at])
        figures = {
            "positions": len(squares),
            "root_mean_square": usual,
            "worst": worst,
            "allowed": bounds.usual,
            "allowed_at_worst": bounds.worst,
            "transformers_own": bounds.theirs,
        }
        said = (
            f"log-probabilities are off by {usual:.2g} from transformers' (root mean square over "
            f"{len(squares)} positions), at worst {worst:.2g} (token {at[1] + 1} of prompt {at[0]})"
        )
        if usual <= bounds.usual and worst <= bounds.worst:
            if way.problem:
                return differs(name, f"{way.problem}.", **figures)
            return ok(
                name, f"{said}; allowed are {bounds.usual:.2g} and {bounds.worst:.2g}.", **figures
            )
        own = f" Transformers itself is off by {bounds.theirs:.2g} as the engine computes."
        return differs(
            name,
            f"{said}, where {bounds.usual:.2g} and {bounds.worst:.2g} are allowed."
            + (own if bounds.theirs else ""),
            **figures,
        )

    def _tokens(self, name: str, way: Way, bounds: Bounds) -> Check:
        count = near = 0
        wrong: list[tuple[Answer, int, float]] = []
        for answer in way.answers:
            for position, token in _answered(answer):
                row = self._exact[answer.tokens][position]
                margin = float(row.max() - row[token])
                count += 1
                if margin > 2 * bounds.worst:
                    wrong.append((answer, position, margin))
                elif margin > 0:
                    near += 1
        figures = {"tokens": count, "near_ties": near, "others": len(wrong)}
        ties = f"; {near} are near ties (as likely, within the error)" if near else ""
        if not wrong:
            same = f"{count - near} of {count} are transformers'{ties}."
            return ok(name, same, **figures)
        answer, position, margin = wrong[0]
        return differs(
            name,
            f"{len(wrong)} of {count} are not transformers'{ties}. First: token {position + 2} "
            f"of prompt {answer.prompt} with its answer, where transformers' is likelier by "
            f"{margin:.2g} (log-probability).",
            **figures,
        )


def beside_cold(ways: list[Way], *, exact: bool) -> list[Check]:
    """Each way beside the first one, up to the first token that is another."""
    cold, *others = ways
    bound = APART_EXACT if exact else APART_ROUNDED
    if cold.problem:
        return [differs(cold.name, f"{cold.problem}.")]
    return [_beside(cold, way, bound) for way in others]


def _beside(cold: Way, way: Way, bound: float) -> Check:
    name = f"{way.name} beside cold"
    if not way.answers:
        return not_checked(name, way.why)
    if way.problem:
        return differs(name, f"{way.problem}.")
    apart, near = 0.0, 0
    for first, second in zip(cold.answers, way.answers, strict=True):
        ours = {row.position: row for row in first.rows}
        for position, token in _answered(second):
            row = ours[position]
            other = {r.position: r for r in second.rows}[position]
            known = dict(zip(row.token_ids, row.logprobs, strict=True))
            chosen = first.tokens[position + 1]
            if token != chosen:
                margin = known[chosen] - known.get(token, -math.inf)
                near += 1
                if margin > 2 * bound:
                    return differs(
                        name, f"another greedy token, by {margin:.2g} less likely.", margin=margin
                    )
                break
            theirs = dict(zip(other.token_ids, other.logprobs, strict=True))
            apart = max(apart, _large_if_nan(abs(known[token] - theirs[token])))
    figures = {"apart": apart, "near_ties": near}
    if apart > bound:
        said = (
            f"log-probabilities of the same tokens are {apart:.2g} apart; {bound:.2g} is allowed."
        )
        return differs(name, said, **figures)
    return ok(name, f"the same tokens, log-probabilities at most {apart:.2g} apart.", **figures)


def _answered(answer: Answer) -> Iterator[tuple[int, int]]:
    """Each token of an answer behind the position that it follows."""
    start = len(answer.tokens) - answer.answered
    for position in range(start - 1, len(answer.tokens) - 1):
        yield position, answer.tokens[position + 1]


def _at(rows: Tensor, row: Row) -> Tensor:
    return rows[row.position][row.token_ids]


def _mean_square(row: Row, exact: Tensor, found: Tensor) -> float:
    value = float((found - _at(exact, row)).square().mean())
    return math.inf if math.isnan(value) else value


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


def _large_if_nan(value: float) -> float:
    return math.inf if math.isnan(value) else value
