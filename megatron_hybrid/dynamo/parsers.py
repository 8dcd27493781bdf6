"""Dynamo's names of the formats in which models write calls and thoughts."""

from __future__ import annotations

from megatron_hybrid.server.http.tool_calls.formats import choose_format
from megatron_hybrid.text.reasoning import choose
from megatron_hybrid.text.tokenizer import Tokenizer

TOOL_CALLS = {
    "pythonic": "pythonic",
    "nemotron_json": "nemotron_deci",
    "jamba": "jamba",
    "xml": "qwen3_coder",
    "hermes": "hermes",
    "llama3_json": "llama3_json",
}
THOUGHTS = {"granite": "granite", "qwen3": "qwen3", "deepseek_r1": "deepseek_r1"}


def parsers_of(tokenizer: Tokenizer) -> tuple[str | None, str | None]:
    """Of tool calls and of thoughts, as the chat template shows them; None where it shows none."""
    calls, thoughts = choose_format(tokenizer), choose(tokenizer.chat_template)
    return (
        None if calls is None else TOOL_CALLS[calls.name],
        None if thoughts is None else THOUGHTS[thoughts.name],
    )
