"""When thoughts have to end, by an answer's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megatron_hybrid.request import ThinkingBudget
from megatron_hybrid.text.thought_limit import NEVER, ThoughtLimit

CLOSE = tuple(map(ord, "</t>"))


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


def written(limit: ThoughtLimit, wants: str) -> str:
    """The answer of a model that goes on with `wants` wherever it may choose. The limit is asked
    only when it wants to be, and says the same twice."""
    answer: list[int] = []
    said = iter(wants)
    while True:
        forced = None
        if len(answer) >= limit.look_at:
            forced = limit.force(answer)
            if len(answer) >= limit.look_at:
                assert limit.force(answer) == forced
        token = ord(next(said, "\0")) if forced is None else forced
        if not token:
            return text_of(answer)
        answer.append(token)


def limit(tokens: int, *, opened: bool) -> ThoughtLimit:
    budget = ThinkingBudget(tokens, ("<t>", "Now"), ("</t>", "end"), CLOSE, opened)
    return ThoughtLimit(budget, text_of)


@pytest.mark.parametrize(
    ("tokens", "opened", "wants", "expected"),
    [
        (4, True, "abcdefgh", "abcd</t>efgh"),
        (0, True, "abc", "</t>abc"),
        (0, False, "<t>abc", "<t></t>abc"),
        (4, False, " \n<t>abcdefgh", " \n<t>abcd</t>efgh"),
        (2, False, "Nowabc", "Nowab</t>c"),
        # They ended by themselves, at the last token that they could, too.
        (8, True, "ab</t>cdefghijk", "ab</t>cdefghijk"),
        (6, True, "ab</t>cdefgh", "ab</t>cdefgh"),
        (8, False, "<t>abcendabcdefg", "<t>abcendabcdefg"),
        # A mark that has only begun does not end them.
        (4, True, "ab</t>cd", "ab</</t>t>cd"),
        # No thoughts, as far as it goes.
        (2, False, "abcdefgh", "abcdefgh"),
        (2, False, "<tabcdef", "<tabcdef"),
        (0, False, "a<t>bcd", "a<t>bcd"),
        (0, False, " <", " <"),
        (3, False, "", ""),
    ],
)
def test_thoughts_end_at_their_budget(tokens: int, opened: bool, wants: str, expected: str) -> None:
    assert written(limit(tokens, opened=opened), wants) == expected


def test_an_answer_is_looked_at_when_it_may_have_used_its_budget_up() -> None:
    looks: list[int] = []

    def noted(token_ids: Sequence[int]) -> str:
        looks.append(len(token_ids))
        return text_of(token_ids)

    budget = ThinkingBudget(1000, ("<t>",), ("</t>",), CLOSE, opened=True)
    assert written(ThoughtLimit(budget, noted), "a" * 2000) == "a" * 1000 + "</t>" + "a" * 1000
    assert looks == [1000]
    one = ThoughtLimit(budget, noted)
    assert one.force([ord(letter) for letter in f"ab</t>{'a' * 994}"]) is None
    assert one.look_at == NEVER
