"""What every deployment of the reference model answers, whoever stands before its engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_hybrid import LLM, SamplingParams


def check_chat(answer: dict[str, Any], llm: LLM, question: str) -> None:
    """A greedy answer to the question is the one that `llm` gives."""
    (expected,) = llm.chat([{"role": "user", "content": question}], SamplingParams(temperature=0))
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == expected.text and choice["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    assert answer["usage"]["completion_tokens"] == len(expected.token_ids)


def check_stream(chunks: Sequence[dict[str, Any]], whole: dict[str, Any]) -> None:
    """The pieces of a stream, and its usage, are those of the whole answer."""
    *spoken, last = chunks
    pieces = [choice["delta"].get("content") for one in spoken for choice in one["choices"]]
    assert "".join(filter(None, pieces)) == whole["choices"][0]["message"]["content"]
    assert len(pieces) > 5
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
