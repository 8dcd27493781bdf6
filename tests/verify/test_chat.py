"""Templates, end tokens, calls and thoughts that are right, and each thing that can be wrong."""

from __future__ import annotations

from megatron_hybrid import reference_model
from megatron_hybrid.text.tokenizer import Tokenizer
from megatron_hybrid.verify.chat import THOUGHT, check_chat
from megatron_hybrid.verify.report import Check, Outcome
from tests.text.chat_templates import (
    CHATML,
    LLAMA_3,
    NO_SYSTEM_ROLE,
    REFUSES_PARTS,
    STRIPS_THINKING,
    with_template,
)
from tests.text.thinking_templates import QWEN3_5

OK, DIFFERS, NOT_CHECKED = Outcome.OK, Outcome.DIFFERS, Outcome.NOT_CHECKED
# Qwen 3's calls and results.
WITH_TOOLS = r"""
{%- if tools -%}{{- '<|im_start|>system\nTools: ' -}}
{%- for tool in tools -%}{{- tool | tojson -}}{%- endfor -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' + message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments | tojson + '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
XML_CALLS = WITH_TOOLS.replace(
    """{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments | tojson + '}""",
    """<function=' + call.function.name + '>\\n' -}}
{%- for name, value in call.function.arguments.items() -%}
{{- '<parameter=' + name + '>\\n' + value | string + '\\n</parameter>\\n' -}}
{%- endfor -%}{{- '</function>""",
)


def checks(template: str, end: str = "<|im_end|>", **options: str) -> dict[str, Check]:
    tokenizer = with_template(template)
    token = tokenizer.token_id(end)
    assert token is not None
    found = check_chat(tokenizer, (token,), tokenizer.vocab_size, **options)
    return {check.name: check for check in found}


def outcomes(found: dict[str, Check]) -> dict[str, Outcome]:
    return {name: check.outcome for name, check in found.items() if name != "vocabulary"}


def test_common_templates_are_right() -> None:
    plain = {"chat template": OK, "end tokens": OK, "tool calls": NOT_CHECKED}
    assert outcomes(checks(CHATML)) == {**plain, "reasoning": NOT_CHECKED}
    assert outcomes(checks(LLAMA_3, "<|eot_id|>")) == {**plain, "reasoning": NOT_CHECKED}
    assert outcomes(checks(STRIPS_THINKING)) == {**plain, "reasoning": OK}
    found = checks(NO_SYSTEM_ROLE, "<end_of_turn>")
    assert outcomes(found) == {**plain, "reasoning": NOT_CHECKED}
    assert "no system message" in found["chat template"].says
    assert "not supported" in found["tool calls"].says


def test_a_template_that_refuses_earlier_answers() -> None:
    assert outcomes(checks(REFUSES_PARTS, "<eos>"))["chat template"] is OK
    silent = CHATML.replace("'<|im_start|>assistant\\n'", "''")
    found = checks(silent)["chat template"]
    assert found.outcome is DIFFERS and "announces" in found.says


def test_an_answer_that_would_go_on_behind_its_end() -> None:
    found = checks(CHATML, "<eos>")["end tokens"]
    assert found.outcome is DIFFERS
    assert "<|im_end|>" in found.says and "<eos>" in found.says
    tokenizer = with_template(CHATML)
    for eos, words in (((), "names none"), ((10**6,), "no tokens of the model")):
        said = {c.name: c for c in check_chat(tokenizer, eos, tokenizer.vocab_size)}["end tokens"]
        assert said.outcome is DIFFERS and words in said.says


def test_calls_are_read_back() -> None:
    for template, form in ((WITH_TOOLS, "hermes"), (XML_CALLS, "xml")):
        found = checks(template)["tool calls"]
        assert (found.outcome, form in found.says) == (OK, True), found.says
    tokenizer = Tokenizer.load(reference_model.path())
    of_ours = check_chat(tokenizer, (1,), tokenizer.vocab_size)
    assert {check.name: check for check in of_ours}["tool calls"].outcome is OK


def test_calls_in_another_form_than_the_parser_reads() -> None:
    found = checks(WITH_TOOLS, parser="xml")["tool calls"]
    assert found.outcome is DIFFERS and "not read back (format xml)" in found.says
    unknown = checks(WITH_TOOLS.replace("tool_call>", "invocation>"))["tool calls"]
    assert unknown.outcome is DIFFERS and "--tool-call-parser" in unknown.says
    no_result = WITH_TOOLS.replace(
        "{{- '<|im_start|>' + message.role",
        "{%- if message.role == 'tool' -%}{{- raise_exception('no') -}}{%- endif -%}"
        "{{- '<|im_start|>' + message.role",
    )
    found = checks(no_result)["tool calls"]
    assert found.outcome is DIFFERS and "what a function returned" in found.says


def test_thoughts_are_read_back() -> None:
    found = checks(QWEN3_5)["reasoning"]
    assert found.outcome is OK and "format qwen3" in found.says
    assert "begin in the prompt" in found.says and "enable_thinking" in found.says
    other = QWEN3_5.replace("</think>", "</thought>")
    assert "--reasoning-parser" in checks(other)["reasoning"].says
    odd = QWEN3_5.replace("message.reasoning_content.strip('\\n') +", "'x</think>' + '{}' +")
    found = checks(odd.replace("{}", THOUGHT))["reasoning"]
    assert found.outcome is DIFFERS and "read as 'x'" in found.says


def test_a_tokenizer_with_more_tokens_than_the_model() -> None:
    tokenizer = with_template(CHATML)
    (first, *_) = check_chat(tokenizer, (0,), 300)
    assert first.name == "vocabulary" and first.outcome is DIFFERS
