"""Where parts of messages end in a chat's prompt, for templates of many styles."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hybrid.text.answer_places import GeneratedAnswer
from megatron_hybrid.text.block_ends import BlockEnd
from megatron_hybrid.text.tokenizer import Tokenizer
from tests.text import chat_templates as templates
from tests.text import thinking_templates
from tests.text.chat_templates import with_template
from tests.text.make_tokenizers import byte_level, metaspace, sentencepiece_style

Chat = list[dict[str, Any]]
SYSTEM = {"role": "system", "content": "Be brief, café.\nIt is Monday."}
QUESTION = {"role": "user", "content": "Who are you? 😀\n\nQuick!"}
ANSWER = {"role": "assistant", "content": "A fox."}
AGAIN = {"role": "user", "content": "What?"}
CHAT = [SYSTEM, QUESTION, ANSWER, AGAIN]
ENDS = [BlockEnd(0, len("Be brief, café.")), BlockEnd(1, len("Who are you? 😀\n")), BlockEnd(3, 0)]


def texts_before(tokenizer: Tokenizer, messages: Chat, ends: list[BlockEnd]) -> list[str]:
    ids, _, found = tokenizer.encode_chat_with_ends(messages, block_ends=ends)
    assert ids == tokenizer.encode_chat(messages)
    return [tokenizer.decode(ids[:end], skip_special_tokens=False) for end in found]


@pytest.mark.parametrize(
    "template", [templates.CHATML, templates.LLAMA_3, thinking_templates.QWEN3]
)
def test_ends_are_found_inside_messages_and_before_them(template: str) -> None:
    tokenizer = with_template(template)
    system, question, again = texts_before(tokenizer, CHAT, ENDS)
    whole = tokenizer.render_chat(CHAT)
    assert whole.startswith(again) and again.startswith(question) and question.startswith(system)
    assert system.endswith("\nBe brief, café.")
    assert question.endswith("\nWho are you? 😀")  # without the white space that may be stripped
    assert whole[len(again) :].startswith("What?") and "A fox." in again


def test_ends_that_are_hidden_are_left_out_with_those_behind_them() -> None:
    # The system message moves into the last question.
    tokenizer = with_template(templates.SYSTEM_IN_LAST_QUESTION)
    assert texts_before(tokenizer, CHAT, [ENDS[1]])[0].endswith("[INST] Who are you? 😀")
    upper = with_template("{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    assert texts_before(upper, CHAT, ENDS) == []
    counting = with_template(
        "{% for m in messages %}{{ m.content | length }} {{ m.content }}{% endfor %}"
    )
    assert texts_before(counting, CHAT, ENDS) == []


def test_ends_lie_behind_the_tokens_that_were_generated() -> None:
    tokenizer = with_template(templates.CHATML)
    ids = [token_id for letter in "A fox." for token_id in tokenizer.encode(letter)]
    answers = {2: GeneratedAnswer(ids, "A fox.")}
    prompt = tokenizer.encode_chat_with_ends(CHAT, answers=answers, block_ends=ENDS)
    assert len(prompt.token_ids) > len(tokenizer.encode_chat(CHAT))
    last = tokenizer.decode(prompt.token_ids[: prompt.block_ends[-1]], skip_special_tokens=False)
    assert last.endswith("<|im_start|>user\n") and "A fox." in last


contents = st.text(alphabet="ab 12é日😀\n.<|>", max_size=12)


@settings(max_examples=100, deadline=None)
@given(
    make=st.sampled_from([byte_level, sentencepiece_style, metaspace]),
    contents=st.lists(contents, min_size=1, max_size=6),
    data=st.data(),
)
def test_any_ends_are_positions_in_the_same_tokens(
    make: Any, contents: list[str], data: st.DataObject
) -> None:
    tokenizer = Tokenizer(make())
    messages = [{"role": "user", "content": content} for content in contents]
    ends = [
        BlockEnd(number, data.draw(st.integers(0, len(contents[number]))))
        for number in data.draw(st.lists(st.integers(0, len(contents) - 1), max_size=4))
    ]
    ids, _, found = tokenizer.encode_chat_with_ends(messages, block_ends=ends)
    assert ids == tokenizer.encode_chat(messages)
    assert list(found) == sorted(set(found)) and len(found) <= len(ends)
    assert all(0 < end <= len(ids) for end in found)
