"""What a request may ask for of penalties, biases, lengths and grammars."""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
import pytest

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.request import (
    MAX_LOGIT_BIASES,
    MIN_TOP_P,
    Grammar,
    SamplingParams,
    ThinkingBudget,
)
from megatron_hybrid.request_checks import validate_prompt

THINKING = ThinkingBudget(5, ("<think>",), ("</think>",), (1, 2), opened=False)


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("presence_penalty", [-2, 0.0, 2.0], [-2.1, 2.1, "1", True, None, float("nan")]),
        ("frequency_penalty", [-2, 0.0, 2.0], [-2.1, 2.1, "1", True, None, float("inf")]),
        ("repetition_penalty", [0.01, 1, 100.0], [0, -1.0, 100.5, "1", None, 1e-300, 1e-38]),
        ("top_p", [MIN_TOP_P, 1e-9, 1], [0.0, 1e-300, 1.5, float("nan"), "1", None]),
        ("temperature", [0, 1e-300, 100], [-0.1, 10**400, "1", True, None, [1]]),
        ("seed", [None, -(2**63), 2**64 - 1], [2**64, 1.0, True, "1", 10**5000]),
        ("stop", ["zebra", ["a", "b"], None], [5, b"a", {"a": 1}, ["a", 5], "", [""], "\ud800"]),
        ("stop_token_ids", [[1, 2], {1}, range(3), None], [5, "12", [1.5], [True], [-1], {1: 2}]),
        ("ignore_eos", [True, np.bool_(True)], [1, "yes", None]),
        ("grammar", [None], ["a", {"type": "json_object"}]),
        ("min_tokens", [0, 1, 128], [-1, 129, 1.0, True, None]),
        (
            "thinking_token_budget",
            [None, 0, 2**31 - 1, np.int64(5), THINKING],
            [
                -1,
                2**31,
                1.5,
                True,
                "5",
                replace(THINKING, tokens=-1),
                replace(THINKING, begin=("",)),
                replace(THINKING, end=()),
                replace(THINKING, close=()),
                replace(THINKING, close=(-1,)),
            ],
        ),
        ("allowed_token_ids", [[1, 2], {1}, None], [5, "12", [1.5], [-1], [None], range(4097)]),
        (
            "bad_words",
            ["cat", ["cat", "two words"], [[5], (6, 7), "a"], [range(32)], None],
            [
                5,
                b"a",
                {"a": 1},
                [5],
                [[]],
                "",
                [""],
                [[-1]],
                [[1.5]],
                ["\ud800"],
                [range(33)],
                ["a" * 257],
                [[1]] * 1025,
            ],
        ),
        (
            "logit_bias",
            [(), ((0, 100), (7, -100.0)), {5: 1.0}, [[5, 1]], None],
            [
                ((-1, 0.0),),
                ((1.0, 0.0),),
                {"5": 1.0},
                {5: None},
                {5: True},
                5,
                "ab",
                [5],
                [(1, 2.0, 3)],
                ((1, 100.5),),
                ((1, "a"),),
                ((1, 2.0), (1, 3.0)),
                tuple((i, 0.0) for i in range(MAX_LOGIT_BIASES + 1)),
            ],
        ),
    ],
)
def test_values_are_taken_or_refused_by_name(field, good, bad):
    for value in good:
        SamplingParams(**{field: value}).validate()
    for value in bad:
        with pytest.raises(InvalidRequestError, match=field) as caught:
            SamplingParams(**{field: value}).validate()
        assert caught.value.field == field


def test_what_is_given_in_other_ways_is_the_same():
    plain = SamplingParams(
        temperature=0.5, top_k=4, n=2, seed=7, ignore_eos=True, stop=("zebra",),
        stop_token_ids=(1, 2), logit_bias=((5, 1.5), (6, -1.0)),
    )  # fmt: skip
    given = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(4), n=np.uint8(2), seed=np.array(7),
        ignore_eos=np.bool_(True), stop="zebra", stop_token_ids=np.array([1, 2]),
        logit_bias={np.int64(5): np.float32(1.5), 6: -1.0},
    )  # fmt: skip
    assert given == plain and hash(given) == hash(plain)
    numbers = (given.temperature, given.top_k, given.n, given.seed, *given.logit_bias[0])
    assert [type(number) for number in numbers] == [float, int, int, int, int, float]


BAD_PROMPTS = [
    [1.5], [1.7, 2], [True], [1, True], ["1"], [[1]], [None], 5, None, "12", [2**70], np.array(5),
    [2**31], [-(2**31) - 1], array("d", [1.0]), array("q", [2**40]), np.array([2**40]),
]  # fmt: skip


@pytest.mark.parametrize("prompt", BAD_PROMPTS)
def test_a_prompt_holds_whole_numbers(prompt):
    with pytest.raises(InvalidRequestError, match="prompt") as caught:
        validate_prompt(prompt, 100, 100)
    assert caught.value.field == "prompt"


def test_a_prompt_may_be_numpys():
    validate_prompt(np.array([1, 2]), 100, 100)
    validate_prompt([np.int64(1), 2], 100, 100)


@pytest.mark.parametrize("given", [[1, 99], (1, 99), array("i", [1, 99]), array("B", [1, 99])])
def test_a_prompt_is_given_as_an_array(given):
    assert validate_prompt(given, 100, 100).tolist() == [1, 99]


@pytest.mark.parametrize("text", [5, None, "\ud800", "x" * 2**21])
def test_a_grammar_is_a_text_of_some_size(text):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(grammar=Grammar("regex", text)).validate()
    assert caught.value.field == "response_format"


def test_a_grammar_needs_a_known_kind():
    SamplingParams(grammar=Grammar("regex", "a")).validate()
    with pytest.raises(InvalidRequestError, match="'xml'") as caught:
        SamplingParams(grammar=Grammar("xml", "a")).validate()
    assert caught.value.field == "response_format"


def test_a_bias_names_ids_that_the_model_knows():
    params = SamplingParams(logit_bias=((9, 1.0),))
    params.validate_vocabulary(10)
    with pytest.raises(InvalidRequestError, match="token id 9; the model knows 0 to 8"):
        params.validate_vocabulary(9)


@pytest.mark.parametrize(
    ("field", "value"), [("allowed_token_ids", (3, 9)), ("bad_words", ((3, 9), (1,)))]
)
def test_other_ids_have_to_be_known_too(field, value):
    params = SamplingParams(**{field: value})
    params.validate_vocabulary(10)
    with pytest.raises(InvalidRequestError, match="token id 9; the model knows 0 to 8") as caught:
        params.validate_vocabulary(9)
    assert caught.value.field == field


def test_words_that_are_still_texts_reach_no_engine():
    params = SamplingParams(bad_words=((1,), "cat"))
    params.validate()
    with pytest.raises(InvalidRequestError, match="bad_words holds text"):
        params.validate_vocabulary(10)


def test_allowed_ids_and_a_grammar_do_not_go_together():
    params = SamplingParams(allowed_token_ids=(1,), grammar=Grammar("regex", "a", "guided_regex"))
    with pytest.raises(InvalidRequestError, match="does not go with guided_regex") as caught:
        params.validate()
    assert caught.value.field == "allowed_token_ids"


def test_only_what_changes_logits_adjusts_them():
    assert not SamplingParams(temperature=0.3, top_k=5, stop_token_ids=(1,)).adjusts_logits
    for options in (
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 0.9},
        {"logit_bias": ((1, 0.0),)},
        {"allowed_token_ids": (1,)},
        {"bad_words": ((1, 2),)},
        {"min_tokens": 1},
        {"grammar": Grammar("regex", "a")},
    ):
        assert SamplingParams(**options).adjusts_logits
