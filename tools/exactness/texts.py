"""What is asked of every engine: random requests that share beginnings, go on as conversations and
fork; and their log-probabilities when each is computed alone and without a cache."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from exactness.ranks import goes_on
from megatron_hybrid.engine.engine import DynamicInferenceEngine
from megatron_hybrid.request import RequestEvent, SamplingParams, TokenLogprob
from megatron_hybrid.scoring import params_behind

Bits = npt.NDArray[np.uint32]  # of float32

UNIT = 16  # tokens: what kernels' grids are multiples of
SPECIAL = 16  # tokens that come first in many vocabularies
MOST_CHOICES = 4
MOST_TURNS = 3
LEAST_REQUESTS = 8


class ExactnessError(RuntimeError):
    """An engine did not answer what it was asked, so that there is nothing to compare."""


def bits_of(entries: Iterable[TokenLogprob | None]) -> Bits:
    """Of the log-probability of each token; None, which a prompt's first one has, gives 0."""
    values = [0.0 if entry is None else entry.logprob for entry in entries]
    return np.asarray(values, dtype=np.float32).view(np.uint32)


def params_of_prompt() -> SamplingParams:
    """What a request asks for that is a prompt, of which all log-probabilities are wanted."""
    return params_behind(0)


@dataclass(frozen=True)
class Answer:
    """One of a request's n, alone: prompt and answer, and the bits of each token's log-probability;
    those of the answer are what it was sampled with."""

    tokens: list[int]
    bits: Bits  # [tokens]; nothing at the first one


@dataclass(frozen=True)
class Asked:
    """A request, and what it gives alone."""

    name: str
    prompt: list[int]
    params: SamplingParams
    turn: int  # of its conversation, from 0
    answers: list[Answer]

    @property
    def sampled(self) -> int:
        """Tokens of all its answers."""
        return sum(len(answer.tokens) - len(self.prompt) for answer in self.answers)


@dataclass
class Result:
    """What an engine has handed out for one answer of a request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    error: str | None = None

    def add(self, event: RequestEvent) -> None:
        """What one step did for it."""
        self.tokens += event.token_ids
        self.logprobs += event.token_logprobs()
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        self.error = event.error or self.error
        if event.finish_reason is not None:
            self.cached_tokens = event.cached_tokens
            self.preemptions = (event.counters or {}).get("preemptions", 0)


class Alone:
    """An engine that computes one request at a time, each from nothing."""

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self.engine = engine

    def run(self, prompt: Sequence[int], params: SamplingParams) -> list[Result]:
        """Of each of its n answers. Raises ExactnessError for one that was given up."""
        results = [Result() for _ in range(params.n)]
        self.engine.add_request("alone", prompt, params)
        while self.engine.has_work():
            for event in self.engine.step():
                results[event.index].add(event)
        for result in results:
            if result.error is not None:
                raise ExactnessError(f"A request alone was given up: {result.error}")
        return results


@dataclass(frozen=True)
class Sizes:
    """longest: tokens of prompt and answer together. vocabulary: token ids."""

    longest: int
    vocabulary: int

    @property
    def answer(self) -> int:
        """Tokens of an answer, usually at most."""
        return max(6, self.longest // 12)


class Texts:
    """Everything that is asked. Drawn with a seed: the same in every run and on every rank."""

    def __init__(self, sizes: Sizes, seed: int) -> None:
        self.sizes = sizes
        self.asked: list[Asked] = []
        # Answers whose tokens have other bits as a prompt, alone: the request, which one, the bits.
        self.as_prompts: list[tuple[Asked, int, Bits]] = []
        self._draw = np.random.default_rng([seed, 1])

    @property
    def sampled(self) -> int:
        """Tokens that were sampled alone."""
        return sum(asked.sampled for asked in self.asked)

    @property
    def positions(self) -> int:
        """Log-probabilities of different (tokens, position), at most."""
        return sum(len(answer.tokens) - 1 for asked in self.asked for answer in asked.answers)

    def learn(
        self, alone: Alone, sampled: int, positions: int, until: float = math.inf
    ) -> Iterator[Asked]:
        """Draw requests and compute each, until there are several, and as many sampled tokens and
        positions, or `until`, by time.monotonic on the first rank."""
        while (
            self.sampled < sampled or self.positions < positions or len(self.asked) < LEAST_REQUESTS
        ):
            if self.asked and not goes_on(until):
                return
            yield from self._conversation(alone)

    def _conversation(self, alone: Alone) -> Iterator[Asked]:
        """One or several turns; a turn may have several answers, of which any is gone on from."""
        draw, room = self._draw, self.sizes.longest
        text = self._beginning()
        for turn in range(int(draw.integers(1, MOST_TURNS + 1))):
            most = self.sizes.answer * (4 if draw.random() < 0.4 else 1)
            tokens = int(draw.integers(3, most + 1))
            if len(text) + tokens > room:
                return
            params = self._params(tokens)
            asked = self._ask(alone, list(text), params, turn)
            yield asked
            text = asked.answers[int(draw.integers(params.n))].tokens
            text = [*text, *self._words(int(draw.integers(1, max(2, room // 8))))]

    def _ask(self, alone: Alone, prompt: list[int], params: SamplingParams, turn: int) -> Asked:
        asked = Asked(str(len(self.asked)), prompt, params, turn, [])
        prompt_bits = None
        for index, result in enumerate(alone.run(prompt, params)):
            tokens, own = [*prompt, *result.tokens], bits_of(result.logprobs)
            (whole,) = alone.run(tokens, params_of_prompt())
            as_prompt = bits_of(whole.prompt_logprobs or [])
            if len(as_prompt) != len(tokens) or len(own) != len(result.tokens):
                raise ExactnessError("A request alone was not given all its log-probabilities.")
            # of all answers the same: what precedes them is
            prompt_bits = as_prompt[: len(prompt)] if prompt_bits is None else prompt_bits
            asked.answers.append(Answer(tokens, np.concatenate([prompt_bits, own])))
            self.as_prompts.append((asked, index, as_prompt))
        self.asked.append(asked)
        return asked

    def _beginning(self) -> list[int]:
        """Of a conversation: new, or another one's up to some place."""
        draw, text = self._draw, list[int]()
        if self.asked and draw.random() < 0.6:
            other = self.asked[int(draw.integers(len(self.asked)))]
            tokens = other.answers[0].tokens
            text = tokens[: self._length(min(len(tokens), self.sizes.longest // 2))]
        return [*text, *self._words(self._length(max(2, self.sizes.longest // 3)))]

    def _length(self, most: int) -> int:
        """1 to `most`, short ones as often as long ones; often at, or beside, a kernel's bounds."""
        length = int(np.exp(self._draw.uniform(0, np.log(most))) + 0.5)
        if self._draw.random() < 0.4:
            length += -length % UNIT + int(self._draw.integers(-1, 2))
        return min(max(length, 1), most)

    def _words(self, count: int) -> list[int]:
        """New tokens, or a few of them again and again, which drafts are found in."""
        draw, vocabulary = self._draw, self.sizes.vocabulary
        repeats = draw.random() < 0.4
        several = min(count, int(draw.integers(2, 9))) if repeats else count
        low = min(SPECIAL, vocabulary // 2)
        tokens = draw.integers(low, vocabulary, size=several).tolist()
        return (tokens * -(-count // several))[:count]

    def _params(self, tokens: int) -> SamplingParams:
        draw = self._draw
        values: dict[str, Any] = {"temperature": 0.0}
        if draw.random() < 0.6:
            values = {
                "temperature": float(draw.choice([0.3, 0.8, 1.0, 1.5])),
                "top_k": int(draw.choice([0, 0, 5, 40])),
                "top_p": float(draw.choice([1.0, 1.0, 0.7, 0.95])),
                "min_p": float(draw.choice([0.0, 0.0, 0.02])),
                "n": int(draw.choice([1, 1, 1, 2, MOST_CHOICES])),
            }
        seed = int(draw.integers(2**31))
        return SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=0, seed=seed, **values)
