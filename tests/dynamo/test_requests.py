"""What Dynamo's front end sends, as the engine takes it. The requests are those of 1.6.1."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_hybrid import reference_model
from megatron_hybrid.dynamo.parsers import THOUGHTS, TOOL_CALLS, parsers_of
from megatron_hybrid.dynamo.requests import RequestReader
from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.request import Grammar, SamplingParams, ThinkingBudget, Unasked
from megatron_hybrid.server.http.tool_calls import formats
from megatron_hybrid.server.link import messages as wire
from megatron_hybrid.server.options import ParseOptions
from megatron_hybrid.text import reasoning
from megatron_hybrid.text.tokenizer import Tokenizer

PROMPT = [7, 8, 9]
THINKS = reasoning.choose("</think>")


def sent(**changes: dict[str, Any]) -> dict[str, Any]:
    """A request with everything left open, as it comes of a chat that has only messages."""
    request: dict[str, Any] = {
        "token_ids": list(PROMPT),
        "model": "reference_model",
        "annotations": [],
        "eos_token_ids": [1],
        "routing": {"dp_rank": 0},
        "sampling_options": dict.fromkeys(
            "best_of frequency_penalty guided_decoding include_stop_str_in_output length_penalty "
            "min_p n presence_penalty repetition_penalty seed temperature top_k top_p "
            "use_beam_search".split()
        ),
        "stop_conditions": {
            **dict.fromkeys(
                "ignore_eos max_thinking_tokens max_tokens min_tokens stop stop_token_ids "
                "stop_token_ids_visible".split()
            ),
            "stop_token_ids_hidden": [1],
        },
        "output_options": dict.fromkeys(
            "formatted_prompt logprobs prompt_logprobs return_tokens_as_token_ids "
            "skip_special_tokens".split()
        ),
        "router_config_override": None,
    }
    for part, values in changes.items():
        request[part] = {**request.get(part, {}), **values}
    return request


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(reference_model.path())


@pytest.fixture
def reader(tokenizer: Tokenizer) -> RequestReader:
    return RequestReader(tokenizer, None, ParseOptions())


def read(reader: RequestReader, request: dict[str, Any], **how: Any) -> wire.AddRequest:
    return reader.read(request, "id-0", arrived=5.0, **how)


def test_what_is_left_open_is_as_openai_has_it(reader: RequestReader) -> None:
    assert read(reader, sent()) == wire.AddRequest(
        "id-0",
        wire.packed(PROMPT),
        SamplingParams(max_tokens=None, stop_token_ids=(1,)),
        arrived=5.0,
    )


def test_what_is_left_open_is_as_the_model_has_it(tokenizer: Tokenizer) -> None:
    defaults = (("temperature", 0.6), ("top_k", 20), ("max_tokens", 300))
    reader = RequestReader(tokenizer, None, ParseOptions(sampling_defaults=defaults))
    params = read(reader, sent(sampling_options={"top_k": 5})).params
    assert (params.temperature, params.top_k, params.max_tokens) == (0.6, 5, 300)
    assert isinstance(params.max_tokens, Unasked)
    assert read(reader, sent(stop_conditions={"max_tokens": 400})).params.max_tokens == 400


def test_every_field_of_sampling_reaches_the_engine(reader: RequestReader) -> None:
    sampling: dict[str, Any] = {
        "frequency_penalty": 0.25, "presence_penalty": 0.5, "repetition_penalty": 1.5,
        "temperature": 0.75, "top_p": 0.5, "top_k": 5, "min_p": 0.125, "seed": 7, "n": 1,
    }  # fmt: skip
    stops = {
        "max_tokens": 9, "min_tokens": 2, "ignore_eos": True, "stop": ["text"],
        "stop_token_ids": [3, 4], "stop_token_ids_hidden": [4, 1], "stop_token_ids_visible": [5],
    }  # fmt: skip
    output = {"logprobs": 2, "prompt_logprobs": 1, "skip_special_tokens": False}
    request = sent(sampling_options=sampling, stop_conditions=stops, output_options=output)
    assert read(reader, request).params == SamplingParams(
        **sampling,
        max_tokens=9,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=(3, 4, 1, 5),
        logprobs=2,
        prompt_logprobs=1,
    )


@pytest.mark.parametrize(
    ("guided", "grammar"),
    [
        ({"regex": "a+", "backend": "xgrammar"}, Grammar("regex", "a+")),
        ({"choice": ["a", "b"]}, Grammar("regex", "a|b")),
        ({"json": {"type": "boolean"}}, Grammar("json_schema", '{"type": "boolean"}')),
        ({"grammar": 'root ::= "a"'}, Grammar("lark", 'start: "a"')),
    ],
)
def test_guided_decoding_is_a_grammar(
    reader: RequestReader, guided: dict[str, Any], grammar: Grammar
) -> None:
    found = read(reader, sent(sampling_options={"guided_decoding": guided})).params.grammar
    assert found is not None and found.kind == grammar.kind
    if grammar.kind != "lark":
        assert found.text == grammar.text


def test_a_forced_call_is_a_structural_tag(reader: RequestReader) -> None:
    """As the front end asks for one with its parser `hermes`."""
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    content = {"type": "json_schema", "json_schema": schema, "style": "json"}
    tag = {
        "type": "tag", "begin": '<tool_call>\n{"name": "f", "arguments": ', "content": content,
        "end": "}\n</tool_call>",
    }  # fmt: skip
    form = {
        "type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [tag],
        "at_least_one": True, "stop_after_first": True,
    }  # fmt: skip
    guided = {"structural_tag": {"type": "structural_tag", "format": form}}
    found = read(reader, sent(sampling_options={"guided_decoding": guided})).params.grammar
    assert found is not None and found.kind == "structural_tag"


def test_salt_and_priority_come_from_routing(reader: RequestReader) -> None:
    add = read(reader, sent(routing={"cache_salt": "a", "priority": 4}))
    assert (add.cache_salt, add.priority) == ("a", -4)  # Dynamo's greater ones run first
    assert read(reader, sent(extra_args={"nvext": {"cache_salt": "b"}})).cache_salt == "b"
    assert read(reader, sent(), probe=True).cache_salt == "health check"


def test_packed_ids_are_taken_as_they_are(reader: RequestReader) -> None:
    assert read(reader, {**sent(), "token_ids": wire.packed(PROMPT)}).prompt == wire.packed(PROMPT)


def test_messages_end_with_what_ends_an_answer(reader: RequestReader, tokenizer: Tokenizer) -> None:
    chat = [
        {"role": "system", "content": "You are kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "And?"},
    ]
    encoded = tokenizer.encode_chat_with_ends(chat)
    request = {**sent(), "token_ids": encoded.token_ids}
    ends = read(reader, request).message_ends
    assert ends == encoded.message_ends and len(ends) == 4
    assert read(reader, {**request, "eos_token_ids": []}).message_ends == ()


@pytest.mark.parametrize(
    ("part", "values", "words"),
    [
        ("sampling_options", {"n": 2}, "n is 2"),
        ("sampling_options", {"use_beam_search": True}, "use_beam_search"),
        ("sampling_options", {"length_penalty": 0.5}, "length_penalty"),
        ("sampling_options", {"temperature": -1.0}, "temperature"),
        ("sampling_options", {"of_tomorrow": 1}, "of_tomorrow"),
        ("sampling_options", {"guided_decoding": {"regex": "("}}, "structured_outputs.regex"),
        ("sampling_options", {"guided_decoding": {"whitespace_pattern": " "}}, "whitespace"),
        ("stop_conditions", {"max_thinking_tokens": 3}, "marks its thoughts"),
        ("stop_conditions", {"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ("output_options", {"logprobs": 50}, "logprobs"),
        ("routing", {"lora_name": "x"}, "lora_name"),
        ("routing", {"cache_salt": 3}, "cache_salt is 3"),
        ("multi_modal_data", {"image_url": []}, "multi_modal_data can't be served"),
        ("prefill_result", {"disaggregated_params": {}}, "unless --role is decode; it is both"),
        ("bootstrap_info", {"bootstrap_host": "a"}, "bootstrap_info can't be served"),
    ],
)
def test_what_can_not_be_served_is_refused_by_name(
    reader: RequestReader, part: str, values: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        read(reader, sent(**{part: values}))
    assert words in str(refusal.value)


def test_a_decode_worker_goes_on_from_where_the_front_end_says(tokenizer: Tokenizer) -> None:
    reader = RequestReader(tokenizer, None, ParseOptions(), role="decode")
    result = {"disaggregated_params": {"peer": "10.0.0.1:7001"}, "prompt_tokens_details": None}
    add = read(reader, sent(prefill_result=result, stop_conditions={"max_tokens": 9}))
    assert (add.prefilled_by, add.params.max_tokens) == ("10.0.0.1:7001", 9)
    for without in ({}, {"prefill_result": {"disaggregated_params": None}}):
        assert read(reader, sent(**without)).prefilled_by == ""
    with pytest.raises(InvalidRequestError, match="the peer 7; it must be the text"):
        read(reader, sent(prefill_result={"disaggregated_params": {"peer": 7}}))


def test_a_prefill_worker_computes_the_prompt_alone(tokenizer: Tokenizer) -> None:
    reader = RequestReader(tokenizer, THINKS, ParseOptions(), role="prefill")
    stops = {"max_tokens": 300, "min_tokens": 20, "max_thinking_tokens": 5}
    guided = {"guided_decoding": {"regex": "a+"}, "temperature": 0.5}
    params = read(reader, sent(stop_conditions=stops, sampling_options=guided)).params
    assert params == SamplingParams(
        temperature=0.5, max_tokens=1, min_tokens=1, stop_token_ids=(1,)
    )
    with pytest.raises(InvalidRequestError, match="it is prefill"):
        read(reader, sent(prefill_result={"disaggregated_params": {"peer": "a"}}))


def test_thoughts_end_with_their_budget_and_come_before_a_grammar(tokenizer: Tokenizer) -> None:
    reader = RequestReader(tokenizer, THINKS, ParseOptions())
    params = read(reader, sent(stop_conditions={"max_thinking_tokens": 5})).params
    budget = params.thinking_token_budget
    assert isinstance(budget, ThinkingBudget) and budget.tokens == 5 and not budget.opened
    guided = {"guided_decoding": {"regex": "a+"}}
    opened = tokenizer.encode("Why? <think>", add_special_tokens=False)
    grammar = read(reader, {**sent(sampling_options=guided), "token_ids": opened}).params.grammar
    assert grammar is not None and grammar.kind == "lark" and "thoughts" in grammar.text
    closed = tokenizer.encode("Why? <think></think>", add_special_tokens=False)
    for ids in (closed, wire.packed(closed)):
        after = read(reader, {**sent(sampling_options=guided), "token_ids": ids}).params.grammar
        assert after == Grammar("regex", "a+", "structured_outputs.regex")


def test_formats_of_chat_templates_have_names_in_dynamo(tokenizer: Tokenizer) -> None:
    assert set(TOOL_CALLS) == set(formats.NAMES) and set(THOUGHTS) == set(reasoning.NAMES)
    assert parsers_of(tokenizer) == ("hermes", None)
