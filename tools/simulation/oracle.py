"""The upper bound: unlimited memory, reuse at every token, everything known from admission on.

A radix tree over the parts that requests are made of. Edges are views of those parts, so the
tree holds no tokens of its own, and a turn that repeats its session's parts compares no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simulation.text import Tokens


class _Edge:
    """Some tokens and what follows them, by first token."""

    __slots__ = ("following", "tokens")

    def __init__(self, tokens: Tokens, following: dict[int, _Edge]) -> None:
        self.tokens = tokens
        self.following = following


class Oracle:
    """Remembers every token of every sequence. O(parts of a prompt) for a request."""

    def __init__(self) -> None:
        self._root: dict[int, _Edge] = {}

    def admit(self, prompt: Sequence[Tokens], answers: Sequence[Tokens] = ()) -> int:
        """How many of a prompt's tokens need no computing; remembers it and its answers.

        A prompt that is wholly known needs none: its last logits are known too. An answer's last
        token is sampled and never fed, so nothing is known of it.
        """
        known, following = self._follow(self._root, prompt)
        for answer in answers:
            self._follow(following, [answer[:-1]])
        return known

    @staticmethod
    def _follow(
        following: dict[int, _Edge], texts: Sequence[Tokens]
    ) -> tuple[int, dict[int, _Edge]]:
        """Walk along `texts`, adding what is missing: tokens that were there, and the way on."""
        known = 0
        for text in texts:
            position, length = 0, len(text)
            while position < length:
                edge = following.get(int(text[position]))
                if edge is None:
                    edge = _Edge(text[position:] if position else text, {})
                    following[int(text[position])] = edge
                    following = edge.following
                    break
                common = _common_prefix(edge.tokens, text[position:] if position else text)
                known += common
                position += common
                if common < len(edge.tokens):  # split it: somebody leaves or ends here
                    rest = edge.tokens[common:]
                    edge.following = {int(rest[0]): _Edge(rest, edge.following)}
                    edge.tokens = edge.tokens[:common]
                following = edge.following
        return known, following


def _common_prefix(a: Tokens, b: Tokens) -> int:
    """Leading tokens that are the same."""
    if a is b:
        return len(a)
    length = min(len(a), len(b))
    a, b = a[:length], b[:length]
    if a.tobytes() == b.tobytes():
        return length
    return int(np.argmax(a != b))
