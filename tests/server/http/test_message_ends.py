"""Where the messages of a chat end in its prompt, for templates of many styles."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hybrid import reference_model
from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.text.detokenizer import bytes_of_token
from megatron_hybrid.text.tokenizer import LAST_ENDS, Tokenizer
from tests.text import chat_templates as templates
from tests.text.chat_templates import with_template
from tests.text.make_tokenizers import byte_level, metaspace, sentencepiece_style

Chat = list[dict[str, Any]]
SYSTEM = {"role": "system", "content": "Be brief, café 日本."}
QUESTION = {"role": "user", "content": "Who are you? 😀"}
ANSWER = {"role": "assistant", "content": "A fox."}
THOUGHT = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nA fox."}
AGAIN = {"role": "user", "content": "What?"}

CHATML_SYSTEM = "<|im_start|>system\nBe brief, café 日本.<|im_end|>\n"
CHATML_QUESTION = "<|im_start|>user\nWho are you? 😀<|im_end|>\n"
CHATML_ANSWER = "<|im_start|>assistant\nA fox.<|im_end|>\n"
CHATML_AGAIN = "<|im_start|>user\nWhat?<|im_end|>\n"


def begins(*pieces: str) -> list[str]:
    """The first piece, the first two, and so on."""
    return ["".join(pieces[:count]) for count in range(1, len(pieces) + 1)]


def texts_before_the_ends(tokenizer: Tokenizer, messages: Chat, **arguments: Any) -> list[str]:
    ids, ends, _ = tokenizer.encode_chat_with_ends(messages, arguments)
    assert ids == tokenizer.encode_chat(messages, arguments)
    return [tokenizer.decode(ids[:end], skip_special_tokens=False) for end in ends]


def test_chatml_has_every_end() -> None:
    tokenizer = with_template(templates.CHATML)
    assert texts_before_the_ends(tokenizer, [SYSTEM, QUESTION, ANSWER, AGAIN]) == begins(
        CHATML_SYSTEM, CHATML_QUESTION, CHATML_ANSWER, CHATML_AGAIN
    )
    added = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    assert texts_before_the_ends(tokenizer, [QUESTION]) == [added + CHATML_QUESTION]


def test_llama_3_has_every_end() -> None:
    tokenizer = with_template(templates.LLAMA_3)
    assert texts_before_the_ends(tokenizer, [SYSTEM, QUESTION, ANSWER, AGAIN]) == begins(
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
        "Be brief, café 日本.<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\nWho are you? 😀<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\nA fox.<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\nWhat?<|eot_id|>",
    )


def test_an_answer_whose_thoughts_are_cut_from_the_history_has_no_end() -> None:
    tokenizer = with_template(templates.STRIPS_THINKING)
    for answer in (ANSWER, THOUGHT):
        system, question, _, again = begins(
            CHATML_SYSTEM, CHATML_QUESTION, CHATML_ANSWER, CHATML_AGAIN
        )
        messages = [SYSTEM, QUESTION, answer, AGAIN]
        assert texts_before_the_ends(tokenizer, messages) == [system, question, again]


def test_thoughts_after_the_last_question_are_part_of_the_end() -> None:
    tokenizer = with_template(templates.STRIPS_THINKING)
    assert texts_before_the_ends(tokenizer, [QUESTION, THOUGHT]) == begins(
        CHATML_QUESTION, f"<|im_start|>assistant\n{THOUGHT['content']}<|im_end|>\n"
    )


def test_a_template_without_a_system_role_has_the_other_ends() -> None:
    tokenizer = with_template(templates.NO_SYSTEM_ROLE)
    assert texts_before_the_ends(tokenizer, [QUESTION, ANSWER, AGAIN]) == begins(
        "<start_of_turn>user\nWho are you? 😀<end_of_turn>\n",
        "<start_of_turn>model\nA fox.<end_of_turn>\n",
        "<start_of_turn>user\nWhat?<end_of_turn>\n",
    )
    with pytest.raises(InvalidRequestError, match="System role not supported"):
        tokenizer.encode_chat_with_ends([SYSTEM, QUESTION])


def test_a_system_message_that_moves_to_the_last_question_has_no_end() -> None:
    tokenizer = with_template(templates.SYSTEM_IN_LAST_QUESTION)
    start, system = "<|begin_of_text|>", SYSTEM["content"]
    first = "[INST] Who are you? 😀 [/INST]"
    assert texts_before_the_ends(tokenizer, [SYSTEM, QUESTION, ANSWER, AGAIN]) == [
        f"{start}{first} A fox.<eos>",
        f"{start}{first} A fox.<eos>[INST] {system}\n\nWhat? [/INST]",
    ]
    assert texts_before_the_ends(tokenizer, [QUESTION, ANSWER, AGAIN]) == begins(
        start + first, " A fox.<eos>", "[INST] What? [/INST]"
    )


def test_a_template_that_refuses_parts_of_a_chat_has_no_ends() -> None:
    tokenizer = with_template(templates.REFUSES_PARTS)
    assert texts_before_the_ends(tokenizer, [SYSTEM, QUESTION, ANSWER, AGAIN]) == []


def test_the_reference_model_has_every_end() -> None:
    tokenizer = Tokenizer.load(reference_model.path())
    assert texts_before_the_ends(tokenizer, [SYSTEM, QUESTION, ANSWER, AGAIN]) == begins(
        "<|system|>Be brief, café 日本.<|end|>",
        "<|user|>Who are you? 😀<|end|>",
        "<|assistant|>A fox.<|end|>",
        "<|user|>What?<|end|>",
    )


def test_template_arguments_and_parts_of_text_count(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "you"}]
    messages = [SYSTEM, {"role": "user", "content": parts}]
    assert texts_before_the_ends(tokenizer, messages, greeting="Sure:") == begins(
        "<|system|>Be brief, café 日本.<eos>", "<|user|>Hello\nyou<eos>"
    )


def test_a_long_chat_costs_a_bounded_number_of_renderings(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = with_template(templates.CHATML)
    rendered: list[int] = []
    render = tokenizer._hf.apply_chat_template

    def counting(messages: Chat, **options: Any) -> Any:
        rendered.append(len(messages))
        return render(messages, **options)

    monkeypatch.setattr(tokenizer._hf, "apply_chat_template", counting)
    messages = [SYSTEM, *[QUESTION, ANSWER] * 20, AGAIN]
    texts = texts_before_the_ends(tokenizer, messages)
    assert len(texts) == 1 + LAST_ENDS
    assert texts[0] == CHATML_SYSTEM
    assert texts[-1].endswith(CHATML_ANSWER + CHATML_AGAIN)
    assert rendered == [42, 1, *range(36, 43), 42]  # the last one is encode_chat's


def test_an_end_inside_a_token_is_the_one_before_that_token() -> None:
    tokenizer = with_template("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert len(tokenizer.encode(" 12345")) == 1

    def chat(*contents: str) -> Chat:
        return [{"role": "user", "content": content} for content in contents]

    assert texts_before_the_ends(tokenizer, chat("x 12", "345")) == ["x", "x 12345"]
    assert texts_before_the_ends(tokenizer, chat(" 12", "345", "!")) == [" 12345", " 12345!"]


contents = st.text(alphabet="ab 12é日😀\n.<|>", max_size=12)


@settings(max_examples=150, deadline=None)
@given(
    make=st.sampled_from([byte_level, sentencepiece_style, metaspace]),
    contents=st.lists(contents, min_size=1, max_size=12),
    plain=st.booleans(),
)
def test_any_chat_keeps_its_tokens_and_has_ascending_ends(
    make: Any, contents: list[str], plain: bool
) -> None:
    hf = make()
    if plain:  # nothing between the messages, so that tokens reach across their ends
        hf.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer = Tokenizer(hf)
    messages = [{"role": "user", "content": content} for content in contents]
    ids, ends, _ = tokenizer.encode_chat_with_ends(messages)
    assert ids == tokenizer.encode_chat(messages)
    assert list(ends) == sorted({*ends})
    assert len(ends) <= 1 + LAST_ENDS
    assert all(0 < end <= len(ids) for end in ends)
    if plain and make is byte_level:
        parts = [part.encode() for part in begins(*contents)]
        lengths = list(accumulate(len(bytes_of_token(tokenizer, token)) for token in ids))
        # The tokens before an end lie before the end of some message, and the next one does not.
        for end in ends:
            after = lengths[end] if end < len(ids) else len(parts[-1]) + 1
            assert any(lengths[end - 1] <= len(part) < after for part in parts)
