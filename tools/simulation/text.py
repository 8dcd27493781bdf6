"""Tokens that cost nothing: every text is a slice of one long random array."""

from __future__ import annotations

from random import Random

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

VOCAB_SIZE = 131_072
CORPUS_TOKENS = 1 << 21  # so many different texts that two hardly ever begin at the same place


class Corpus:
    """Hands out texts as views: an open session holds a few of these and no tokens of its own."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._tokens: Tokens = rng.integers(0, VOCAB_SIZE, CORPUS_TOKENS, dtype=np.int32)

    def text(self, rng: Random, length: int) -> Tokens:
        """`length` tokens from a random place."""
        start = int(rng.random() * (CORPUS_TOKENS - length))
        return self._tokens[start : start + length]

    @staticmethod
    def unique(number: int) -> Tokens:
        """One token that no other text holds: what follows it is shared with nobody by chance."""
        return np.asarray([VOCAB_SIZE + number], dtype=np.int32)


# What a chat template puts before an answer.
GENERATION_PROMPT: Tokens = np.arange(4, dtype=np.int32)


class Context:
    """A prompt under construction: its parts and where its messages end.

    Copies share the parts; branching off is a copy or `truncate`.
    """

    __slots__ = ("ends", "length", "parts")

    def __init__(
        self, parts: tuple[Tokens, ...] = (), ends: tuple[int, ...] = (), length: int = 0
    ) -> None:
        self.parts = parts
        self.ends = ends
        self.length = length

    def message(self, *texts: Tokens) -> Context:
        """This context and one more message."""
        length = self.length + sum(map(len, texts))
        return Context((*self.parts, *texts), (*self.ends, length), length)

    def prefill(self, *texts: Tokens) -> Context:
        """This context and the beginning of a message that goes on."""
        length = self.length + sum(map(len, texts))
        return Context((*self.parts, *texts), self.ends, length)

    def answered(self, answer: Tokens) -> Context:
        """This context, the generation prompt and the answer, as the next turn repeats them."""
        return self.message(GENERATION_PROMPT, answer)
