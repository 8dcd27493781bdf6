"""Answers split into thoughts and content, in pieces of any size."""

from __future__ import annotations

import pytest

from megatron_hybrid.text.reasoning import (
    FORMATS,
    Opening,
    ReasoningSplitter,
    Split,
    choose,
    opening,
    opening_of_rest,
    split,
    with_thoughts_inside,
)

FORM = {form.name: form for form in FORMATS}
QWEN, GRANITE = FORM["qwen3"], FORM["granite"]
OPENED = Opening.THOUGHTS

# format, how the answer begins, its text, what it is
ANSWERS = [
    # Qwen3 writes both marks; Qwen3.5, Nemotron 3 and DeepSeek-R1 find the first in the prompt.
    ("qwen3", Opening.UNKNOWN, "<think>\nHm.\n</think>\n\nA fox.", ("Hm.", "A fox.")),
    ("qwen3", OPENED, "Hm.\n\nSo?\n</think>\n\nA fox.\n", ("Hm.\n\nSo?", "A fox.\n")),
    ("qwen3", OPENED, "\nHm.</think>A fox.", ("Hm.", "A fox.")),
    # Some write the mark though the prompt has it.
    ("qwen3", OPENED, "<think>\nHm.\n</think>\n\nA fox.", ("Hm.", "A fox.")),
    ("deepseek_r1", OPENED, "Hm é😀.\n</think>\n\n日本語", ("Hm é😀.", "日本語")),
    # Nemotron 3's, and everybody's empty thoughts.
    ("qwen3", Opening.UNKNOWN, "<think></think>A fox.", ("", "A fox.")),
    ("qwen3", Opening.UNKNOWN, "<think>\n\n</think>\n\nA fox.", ("", "A fox.")),
    # No thoughts: nothing is changed.
    ("qwen3", Opening.UNKNOWN, "\n A <think>fox</think>.", ("", "\n A <think>fox</think>.")),
    ("qwen3", Opening.UNKNOWN, " \n", ("", " \n")),
    ("qwen3", Opening.UNKNOWN, "<thinkers> think", ("", "<thinkers> think")),
    ("qwen3", Opening.UNKNOWN, "<thi", ("", "<thi")),
    ("qwen3", Opening.UNKNOWN, "", ("", "")),
    ("qwen3", Opening.CONTENT, "<think>Hm.</think> A", ("", "<think>Hm.</think> A")),
    # Thoughts that were cut off, also in the mark.
    ("qwen3", Opening.UNKNOWN, "<think>\nHm. \n", ("Hm.", "")),
    ("qwen3", OPENED, "Hm.\n</thi", ("Hm.\n</thi", "")),
    ("qwen3", OPENED, "<thi", ("<thi", "")),
    ("qwen3", OPENED, "Hm.\n</think>\n\n", ("Hm.", "")),
    # The first mark ends the thoughts, the others are text; so is what only begins like a mark.
    (
        "qwen3",
        OPENED,
        "a < b, </b>, `</thin`\n</think>\n\n```html\n<think>x</think>\n```",
        ("a < b, </b>, `</thin`", "```html\n<think>x</think>\n```"),
    ),
    # The first line's indentation is content.
    ("qwen3", OPENED, "Hm.</think> \n\n    return 1\n", ("Hm.", "    return 1\n")),
    ("qwen3", OPENED, "Hm.</think> A", ("Hm.", "A")),
    (
        "granite",
        Opening.UNKNOWN,
        "Here is my thought process:\nHm. Here is my\n\nHere is my response:\n\nA fox.",
        ("Hm. Here is my", "A fox."),
    ),
    (
        "granite",
        Opening.UNKNOWN,
        "Here's my thought process: Hm.\nHere's my response: A. Here is my response: B",
        ("Hm.", "A. Here is my response: B"),
    ),
    ("granite", Opening.UNKNOWN, "Here is a fox.", ("", "Here is a fox.")),
]


def in_pieces(splitter: ReasoningSplitter, pieces: list[str]) -> Split:
    parts = [splitter.push(piece) for piece in pieces] + [splitter.flush()]
    return Split("".join(one.reasoning for one in parts), "".join(one.content for one in parts))


@pytest.mark.parametrize(("name", "begins", "text", "expected"), ANSWERS)
def test_an_answer_is_split_the_same_wherever_it_is_cut(
    name: str, begins: Opening, text: str, expected: tuple[str, str]
) -> None:
    form = FORM[name]
    assert split(form, text, begins) == expected
    assert in_pieces(ReasoningSplitter(form, begins), list(text)) == expected
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            pieces = [text[:first], text[first:second], text[second:]]
            assert in_pieces(ReasoningSplitter(form, begins), pieces) == expected


@pytest.mark.parametrize(("name", "begins", "text", "expected"), ANSWERS)
def test_where_the_content_begins_is_known(
    name: str, begins: Opening, text: str, expected: tuple[str, str]
) -> None:
    splitter = ReasoningSplitter(FORM[name], begins)
    in_pieces(splitter, list(text))
    assert text[splitter.content_from :] == expected[1]
    end = splitter.thoughts_end
    if end is None:
        assert "" in expected  # one part is all there is
    else:
        assert text[:end].endswith(FORM[name].end)
        assert text[end : splitter.content_from].strip() == ""
        assert expected[0] in text[:end]
    assert splitter.is_thinking == (end is None and bool(expected[0]))


def test_thoughts_are_given_as_they_come() -> None:
    splitter = ReasoningSplitter(QWEN, OPENED)
    assert splitter.is_thinking
    assert splitter.push("Hm") == ("Hm", "")
    assert splitter.push(", so. ") == (", so.", "")  # the white space may be the end's
    assert splitter.push("And </") == (" And", "")
    assert splitter.push("b") == (" </b", "")
    assert splitter.is_thinking
    assert splitter.push("</think>") == ("", "")
    assert not splitter.is_thinking
    assert splitter.push("\nA") == ("", "A")
    assert splitter.push(" ") == ("", " ")


def test_little_is_held_of_long_thoughts() -> None:
    splitter = ReasoningSplitter(QWEN, OPENED)
    for _ in range(1000):
        splitter.push("thoughts < and more </th ")
    assert len(splitter._held) < 20


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("qwen3", r"{%- set content = content.split('</think>')[-1].lstrip('\n') %}"),
        ("qwen3", r"{{- '<think>\n\n</think>\n\n' }}"),
        ("granite", "Write your thoughts after 'Here is my thought process:' and write your"),
        (None, "{% for message in messages %}{{ message.content }}{% endfor %}"),
        (None, "thinking is <thinking>"),
    ],
)
def test_the_format_is_the_one_that_the_template_shows(name: str | None, template: str) -> None:
    form = choose(template)
    assert (None if form is None else form.name) == name
    assert choose(template, "none") is None
    assert choose(template, "deepseek_r1") is FORM["deepseek_r1"]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|im_start|>assistant\n<think>\n", OPENED),
        ("<｜Assistant｜><think>", OPENED),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", Opening.CONTENT),
        ("<|im_start|>assistant\n<think></think>", Opening.CONTENT),
        ("<|im_start|>assistant\n", Opening.UNKNOWN),
        ("What is <think>?<|im_end|>\n<|im_start|>assistant\n", Opening.UNKNOWN),
    ],
)
def test_the_prompt_says_how_the_answer_begins(prompt: str, expected: Opening) -> None:
    assert opening(QWEN, prompt) is expected
    always = OPENED if expected is Opening.UNKNOWN else expected
    assert opening(FORM["deepseek_r1"], prompt) is always


def test_an_answer_goes_on_where_it_stopped() -> None:
    for said, expected in (
        ("<think>\nHm", OPENED),
        ("<think>\nHm</think>", Opening.CONTENT),
        ("A <think>", Opening.CONTENT),
    ):
        assert opening_of_rest(QWEN, said) is expected
    assert opening_of_rest(FORM["deepseek_r1"], "Hm") is OPENED


def test_a_template_that_looks_for_thoughts_in_the_content_finds_them_there() -> None:
    thought = {"role": "assistant", "content": "A fox.", "reasoning_content": "Hm."}
    plain = {"role": "user", "content": "Hello"}
    knows = "{{ message.reasoning_content }}"
    assert with_thoughts_inside(QWEN, knows, [plain, thought]) == [plain, thought]
    inside = {**thought, "content": "<think>\nHm.\n</think>\n\nA fox."}
    looks = "{{ content.split('</think>')[-1] }}"
    assert with_thoughts_inside(QWEN, looks, [plain, thought]) == [plain, inside]
    assert split(QWEN, inside["content"]) == ("Hm.", "A fox.")
    # Where nothing would take them out again, they are left out as ever.
    assert with_thoughts_inside(GRANITE, "after 'Here is my response:'", [thought]) == [thought]
