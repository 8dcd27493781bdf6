"""What was compared, bit by bit, and what differs."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from exactness.sessions import Item, Session
from exactness.sessions import as_prompt as as_prompt_session
from exactness.texts import Bits, Result, Texts, bits_of
from megatron_hybrid.request import SamplingParams

KINDS = ("sampled", "prompt", "scored")
MOST_KEPT = 10  # differences of a way that are described one by one
ALONE = "alone, as a prompt"
BY_ENGINE, BY_CONDITION = "engine", "condition"


@dataclass(frozen=True)
class Difference:
    """A token whose log-probability is not the one that it has alone, or that is another one."""

    way: str
    session: int
    request: str
    index: int
    position: int  # in prompt and answer together
    kind: str
    token: int
    token_alone: int
    bits: int  # of the token that was chosen
    bits_alone: int
    chosen: str = ""  # how tokens were

    def __str__(self) -> str:
        own, alone = (
            f"{float(np.uint32(bits).view(np.float32)):.9g} ({bits:08x})"
            for bits in (self.bits, self.bits_alone)
        )
        where = f"{self.way}, session {self.session}, request {self.request}, answer {self.index}, "
        where += f"position {self.position} ({self.kind}): "
        if self.token != self.token_alone:
            return (
                f"{where}token {self.token}, of log-probability {own}, alone {self.token_alone}, "
                f"of {alone}; {self.chosen}"
            )
        return where + f"log-probability {own}, alone {alone}"


@dataclass
class Comparison:
    """Counts by (group, name, kind): each log-probability counts once in a way, and in each
    condition that holds for it."""

    compared: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    differing: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)  # by way
    differences: list[Difference] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def total(self, kind: str | None = None, way: str | None = None) -> int:
        """Log-probabilities compared, of all kinds and ways if none is named."""
        return self._sum(self.compared, kind, way)

    def total_differing(self, kind: str | None = None, way: str | None = None) -> int:
        """Those that differ."""
        return self._sum(self.differing, kind, way)

    @staticmethod
    def _sum(counts: Counter[tuple[str, str, str]], kind: str | None, way: str | None) -> int:
        return sum(
            count
            for (group, name, one), count in counts.items()
            if group == BY_ENGINE and kind in (None, one) and way in (None, name)
        )

    def add_texts(self, texts: Texts) -> None:
        """Answers alone, computed as a prompt, beside what they were sampled with."""
        for asked, index, as_prompt in texts.as_prompts:
            answer, first = asked.answers[index], len(asked.prompt)
            (item,) = as_prompt_session(asked, index).items
            self._add(ALONE, 0, item, index, "scored", first, answer.tokens[first:],
                      as_prompt[first:], [])  # fmt: skip
        self.requests[ALONE] += len(texts.as_prompts)

    def add(self, way: str, session: Session, results: dict[tuple[Item, int], Result]) -> None:
        """What an engine gave in a session."""
        alone = len(session.items) == 1
        for (item, index), result in results.items():
            self.requests[way] += 1
            if (why := _unfinished(item, index, result)) is not None:
                where = f"{way}, session {session.number}, request {item.id}, answer {index}"
                self.failures.append(f"{where}: {why}")
            conditions = [session.kind, *_conditions(item, result)]
            if not alone and item.arrives > 0:
                conditions.append("came while others ran")
            length = len(item.prompt)
            if result.tokens:
                self._add(way, session.number, item, index, "sampled", length, result.tokens,
                          bits_of(result.logprobs), conditions)  # fmt: skip
            entries = result.prompt_logprobs
            if entries is None:
                continue
            first, known = item.first, bits_of(entries)
            if first == 0:
                first, known = 1, known[1:]
            cut = max(0, len(item.asked.prompt) - first)
            for kind, start, stop in (("prompt", 0, cut), ("scored", cut, len(known))):
                if known[start:stop].size:
                    tokens = item.prompt[first + start : first + stop]
                    self._add(way, session.number, item, index, kind, first + start, tokens,
                              known[start:stop], conditions)  # fmt: skip

    def _add(
        self,
        way: str,
        session: int,
        item: Item,
        index: int,
        kind: str,
        first: int,
        tokens: list[int],
        bits: Bits,
        conditions: list[str],
    ) -> None:
        """Tokens from position `first` on. What follows another token than the one alone has
        another past, and is not compared."""
        all_tokens, all_bits = item.known(index)
        count = min(len(tokens), len(bits))
        known = np.asarray(all_tokens[first : first + count])
        own = np.asarray(tokens[: len(known)])
        differs = (own != known) | (bits[: len(known)] != all_bits[first : first + len(known)])
        wrong = np.flatnonzero(own != known)
        if len(wrong):
            differs = differs[: wrong[0] + 1]
        number = int(differs.sum())
        groups = [(BY_ENGINE, way), *((BY_CONDITION, one) for one in dict.fromkeys(conditions))]
        for group, name in groups:
            self.compared[group, name, kind] += len(differs)
            self.differing[group, name, kind] += number
        kept = sum(one.way == way for one in self.differences)
        for at in np.flatnonzero(differs)[: MOST_KEPT - kept]:
            place = first + int(at)
            self.differences.append(
                Difference(way, session, item.id, index, place, kind, int(own[at]),
                           all_tokens[place], int(bits[at]), int(all_bits[place]),
                           _how_chosen(item.asked.params))
            )  # fmt: skip

    def table(self) -> str:
        """A line for each engine and for each condition."""
        lines = []
        for group, title in ((BY_ENGINE, "engine"), (BY_CONDITION, "condition")):
            names = list(dict.fromkeys(name for one, name, _ in self.compared if one == group))
            if not names:
                continue
            head = "".join(f"{kind:>12}{'differ':>8}" for kind in KINDS)
            lines.append(f"{title:<44}{head}")
            for name in names if group == BY_ENGINE else sorted(names):
                cells = "".join(
                    f"{self.compared[group, name, kind]:>12,}"
                    f"{self.differing[group, name, kind]:>8,}"
                    for kind in KINDS
                )
                lines.append(f"{name:<44}{cells}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        groups: dict[str, dict[str, Any]] = {BY_ENGINE: {}, BY_CONDITION: {}}
        for (group, name, kind), count in self.compared.items():
            row = groups[group].setdefault(name, {})
            row[kind] = {"compared": count, "differing": self.differing[group, name, kind]}
        return {
            "compared": {"all": self.total(), **{kind: self.total(kind) for kind in KINDS}},
            "differing": {
                "all": self.total_differing(),
                **{kind: self.total_differing(kind) for kind in KINDS},
            },
            "by_engine": groups[BY_ENGINE],
            "by_condition": groups[BY_CONDITION],
            "differences": [asdict(one) for one in self.differences],
            "failures": self.failures,
        }


def _how_chosen(params: SamplingParams) -> str:
    if params.greedy:
        return "greedy"
    names = ("temperature", "top_k", "top_p", "min_p")
    return "drawn with " + ", ".join(f"{name} {getattr(params, name):g}" for name in names)


def _unfinished(item: Item, index: int, result: Result) -> str | None:
    """What of an answer is not there, so that it can't be compared."""
    if result.error is not None:
        return result.error
    if item.aborted is not None:
        return None
    if len(result.tokens) != item.params.max_tokens or len(result.logprobs) != len(result.tokens):
        return f"{len(result.tokens)} tokens of {item.params.max_tokens} were answered"
    if item.params.prompt_logprobs is not None and index == 0:
        wanted, known = len(item.prompt) - item.first, len(result.prompt_logprobs or [])
        if wanted != known:
            return f"{known} log-probabilities of {wanted} of the prompt were given"
    return None


def _conditions(item: Item, result: Result) -> list[str]:
    """What holds for a request, besides its session."""
    params = item.params
    found = ["some of it cached" if result.cached_tokens else "nothing of it cached"]
    found.append(f"turn {item.asked.turn + 1} of a conversation")
    found.append(item.style.value)
    if params.max_tokens:
        found.append("greedy" if params.greedy else "drawn with a seed")
    if params.n > 1:
        found.append("one of n answers")
    if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
        found.append("top_k, top_p or min_p")
    if result.preemptions:
        found.append("preempted")
    if item.aborted is not None:
        found.append("aborted, up to there")
    return found
