"""Budgets of thoughts as a client gives them, and as the engine has to know them."""

from __future__ import annotations

from dataclasses import replace

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.request import SamplingParams, ThinkingBudget
from megatron_hybrid.text.reasoning import Opening, ReasoningFormat
from megatron_hybrid.text.tokenizer import Tokenizer

FIELD = "thinking_token_budget"


def with_marks(
    params: SamplingParams, form: ReasoningFormat | None, begins: Opening, tokenizer: Tokenizer
) -> SamplingParams:
    """The same with a budget that says what thoughts are; without one if there are to be none.

    form: of the model's thoughts. Raises InvalidRequestError where that is not known.
    """
    budget = params.thinking_token_budget
    if not isinstance(budget, int):
        return params
    if form is None:
        raise InvalidRequestError(
            FIELD,
            f"{FIELD} needs a model that marks its thoughts; this one's chat template shows no "
            "marks, or --reasoning-parser is none.",
        )
    held = None
    if begins is not Opening.CONTENT:
        # On a line of its own, as templates write it, so that the next turn finds the thoughts
        # again. Without a sentence that leads to it, which the model did not think.
        close = tuple(tokenizer.encode(f"\n{form.end[0]}", add_special_tokens=False))
        held = ThinkingBudget(budget, form.begin, form.end, close, begins is Opening.THOUGHTS)
    return replace(params, thinking_token_budget=held)
