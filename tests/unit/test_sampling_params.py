"""What a request may ask for of penalties, biases, lengths and grammars."""

from __future__ import annotations

import pytest

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.request import MAX_LOGIT_BIASES, Grammar, SamplingParams


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("presence_penalty", [-2, 0.0, 2.0], [-2.1, 2.1, "1", True, None, float("nan")]),
        ("frequency_penalty", [-2, 0.0, 2.0], [-2.1, 2.1, "1", True, None, float("inf")]),
        ("repetition_penalty", [0.01, 1, 100.0], [0, -1.0, 100.5, "1", None]),
        ("min_tokens", [0, 1, 128], [-1, 129, 1.0, True, None]),
        (
            "logit_bias",
            [(), ((0, 100), (7, -100.0))],
            [
                ((-1, 0.0),),
                ((1.0, 0.0),),
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


def test_only_what_changes_logits_adjusts_them():
    assert not SamplingParams(temperature=0.3, top_k=5, stop_token_ids=(1,)).adjusts_logits
    for options in (
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 0.9},
        {"logit_bias": ((1, 0.0),)},
        {"min_tokens": 1},
        {"grammar": Grammar("regex", "a")},
    ):
        assert SamplingParams(**options).adjusts_logits
