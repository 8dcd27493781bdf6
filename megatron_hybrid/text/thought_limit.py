"""When an answer's thoughts have used their budget up, and the mark that ends them then."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_hybrid.request import SamplingParams, ThinkingBudget
from megatron_hybrid.text.grammar import Grammars, no_tokenizer

NEVER = 2**62  # more tokens than any answer has


class ThoughtLimit:
    """One answer's. `look_at`: how long the answer is when `force` has to be asked what comes
    next."""

    def __init__(self, budget: ThinkingBudget, text_of: Callable[[Sequence[int]], str]) -> None:
        """text_of: what tokens say, special ones too."""
        self._budget = budget
        self._text_of = text_of
        self.look_at = budget.tokens + (not budget.opened)  # a mark is one token at least
        self._closed_at: int | None = None  # where the forced mark begins

    def force(self, answer: Sequence[int]) -> int | None:
        """The token that has to come behind this answer, which is `look_at` tokens long or longer;
        None: any may. It can be asked again."""
        if self._closed_at is None:
            if not self._is_used_up(answer):
                return None
            self._closed_at = len(answer)
        place = len(answer) - self._closed_at
        if place < len(self._budget.close):
            return self._budget.close[place]
        self.look_at = NEVER
        return None

    def _is_used_up(self, answer: Sequence[int]) -> bool:
        """Whether the answer still thinks, and may not any more. Sets `look_at`."""
        begin = self._begin_of_thoughts(answer)
        if begin is None:
            return False
        thoughts = self._text_of(answer[begin:])
        if any(mark in thoughts for mark in self._budget.end):
            self.look_at = NEVER
            return False
        self.look_at = begin + self._budget.tokens
        return len(answer) >= self.look_at

    def _begin_of_thoughts(self, answer: Sequence[int]) -> int | None:
        """How many tokens come before them. None, and `look_at` is set: that is not known yet, or
        there are none."""
        marks = self._budget.begin
        if self._budget.opened:
            return 0
        for count in range(1, len(answer) + 1):
            text = self._text_of(answer[:count]).lstrip()
            if text.startswith(marks):
                return count
            if not any(mark.startswith(text) for mark in marks):
                self.look_at = NEVER
                return None
        self.look_at = len(answer) + 1
        return None


def limit_of(params: SamplingParams, grammars: Grammars | None) -> ThoughtLimit | None:
    """Of an answer with these params; None: it has none. grammars: the model's, None where it has
    no tokenizer. Raises InvalidRequestError if one is needed."""
    budget = params.thinking_token_budget
    if not isinstance(budget, ThinkingBudget):
        return None
    if grammars is None:
        raise no_tokenizer("thinking_token_budget")
    return ThoughtLimit(budget, grammars.reader())
