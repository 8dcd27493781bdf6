"""Thoughts and content are the same wherever an answer's tokens are divided between steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from megatron_hybrid.request import FinishReason, RequestEvent
from megatron_hybrid.server.http.choice import Choice
from megatron_hybrid.server.http.protocol.generation_request import parse_chat
from megatron_hybrid.text.reasoning import ReasoningSplitter, choose, opening_after
from megatron_hybrid.text.tokenizer import Tokenizer
from tests.text import thinking_templates as templates
from tests.text.chat_templates import SPECIAL_TOKENS
from tests.text.make_tokenizers import byte_level

THOUGHT, SAID = "Hm, é😀.\n\nSo a </thin or b?", "日本 fox:\n    </b>"
TO_OPENED = f"{THOUGHT}\n</think>\n\n{SAID}"
WRITTEN = f"<think>\n{TO_OPENED}"
FORMS = {
    "Qwen3": (templates.QWEN3, WRITTEN),
    "Qwen3.5": (templates.QWEN3_5, TO_OPENED),
    "Nemotron 3": (templates.NEMOTRON_3, TO_OPENED),
    "LFM2.5, Falcon-H1R": (templates.LFM2_5, WRITTEN),
    "DeepSeek-R1": (templates.DEEPSEEK_R1, TO_OPENED),
    "Granite 3.2": (
        templates.GRANITE,
        f"Here is my thought process:\n{THOUGHT}\nHere is my response:\n\n{SAID}",
    ),
}
REQUEST = parse_chat({"messages": [{"role": "user", "content": "Hello"}]})
MESSAGES = REQUEST.messages


def tokenizer_of(template: str, marks: bool) -> Tokenizer:
    """marks: they are special tokens."""
    hf = byte_level()
    hf.add_special_tokens({"additional_special_tokens": SPECIAL_TOKENS})
    if marks:
        hf.add_tokens(["<think>", "</think>"], special_tokens=True)
    hf.chat_template = template
    return Tokenizer(hf)


def in_bytes(tokenizer: Tokenizer, text: str) -> list[int]:
    """A token for each byte."""
    ((letters, _),) = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    ids = [tokenizer.token_id(letter) for letter in letters]
    return [one for one in ids if one is not None]


def read(tokenizer: Tokenizer, steps: Sequence[Sequence[int]]) -> tuple[str, str, int | None]:
    """Thoughts, content and how many tokens were thoughts, of what these steps give."""
    form = choose(tokenizer.chat_template)
    assert form is not None
    begins = opening_after(form, tokenizer.encode_chat(MESSAGES), tokenizer)
    marks = frozenset(filter(None, map(tokenizer.token_id, form.marks)))
    splitter = ReasoningSplitter(form, begins)
    choice = Choice(0, tokenizer, REQUEST.generation, visible_ids=marks, splitter=splitter)
    reasoning = content = ""
    for number, ids in enumerate(steps):
        reason = FinishReason.LENGTH if number == len(steps) - 1 else None
        delta = choice.advance(RequestEvent("a", 0, list(ids), reason))
        reasoning, content = reasoning + delta.reasoning, content + delta.text
    return reasoning, content, choice.reasoning_tokens


@pytest.mark.parametrize("kind", ["bytes", "tokens", "marks"])
@pytest.mark.parametrize("name", FORMS)
def test_fields_are_the_same_wherever_an_answer_is_divided(name: str, kind: str) -> None:
    template, text = FORMS[name]
    tokenizer = tokenizer_of(template, marks=kind == "marks")
    bytewise = kind == "bytes"
    ids = in_bytes(tokenizer, text) if bytewise else tokenizer.encode(text)
    assert not bytewise or len(ids) == len(text.encode())
    whole = read(tokenizer, [ids])
    assert whole[:2] == (THOUGHT, SAID)
    assert read(tokenizer, [[one] for one in ids]) == whole
    for at in range(1, len(ids)):
        assert read(tokenizer, [ids[:at], ids[at:]]) == whole, at
