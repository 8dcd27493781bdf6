"""What a model thinks before it answers: how it marks that, and how an answer's text is split into
thoughts and content as it comes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from megatron_hybrid.text.detokenizer import overlap
from megatron_hybrid.text.tokenizer import Tokenizer

# Of a prompt's end: enough for a mark with white space, even in tokens of one character.
PROMPT_END_TOKENS = 32


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """name: for --reasoning-parser. begin, end: the marks around thoughts, each in any of these
    spellings. sign: what is found in the chat templates of models that think so (a regular
    expression). always: an answer begins with thoughts though the prompt does not say so.
    """

    name: str
    begin: tuple[str, ...]
    end: tuple[str, ...]
    sign: str
    always: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """All of them."""
        return self.begin + self.end


# The first one whose sign a template holds is taken.
FORMATS = (
    # Granite 3.2; when quantized it says "Here's", too
    ReasoningFormat(
        "granite",
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
        r"Here is my thought process:",
    ),
    # Qwen3 and 3.5, Nemotron 3, LFM2.5, Falcon-H1R, DeepSeek-R1
    ReasoningFormat("qwen3", ("<think>",), ("</think>",), r"</think>"),
    # models that think at once under a template that does not say so
    ReasoningFormat("deepseek_r1", ("<think>",), ("</think>",), r"</think>", always=True),
)
NAMES = tuple(form.name for form in FORMATS)


def choose(template: str, name: str = "auto") -> ReasoningFormat | None:
    """The format by its name, or the one that the chat template shows; None if it shows none, and
    for the name "none"."""
    for form in FORMATS:
        if name == form.name or name == "auto" and re.search(form.sign, template):
            return form
    return None


class Opening(Enum):
    """How an answer begins, as far as its prompt says it."""

    UNKNOWN = "unknown"  # with thoughts if it begins with their mark
    THOUGHTS = "thoughts"  # the prompt has opened them
    CONTENT = "content"  # the prompt has closed them: the answer has none


def special_marks(form: ReasoningFormat, tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of marks that are special tokens, which an answer's text would not show."""
    ids = map(tokenizer.token_id, form.marks)
    return frozenset(one for one in ids if one is not None and tokenizer.is_special(one))


def opening(form: ReasoningFormat, prompt_end: str) -> Opening:
    """Of an answer to a prompt that ends so."""
    end = prompt_end.rstrip()
    if end.endswith(form.end):
        return Opening.CONTENT
    return Opening.THOUGHTS if form.always or end.endswith(form.begin) else Opening.UNKNOWN


def opening_after(form: ReasoningFormat, prompt: Sequence[int], tokenizer: Tokenizer) -> Opening:
    """Of an answer to a prompt of these tokens."""
    return opening(form, tokenizer.decode(prompt[-PROMPT_END_TOKENS:], skip_special_tokens=False))


class Split(NamedTuple):
    """Pieces of the two parts of an answer."""

    reasoning: str
    content: str


class _Stage(Enum):
    START = 1  # a mark may come
    THOUGHTS = 2
    AFTER = 3  # white space between the mark and the content
    CONTENT = 4


class ReasoningSplitter:
    """Splits one answer, in pieces of any size.

    The first mark that ends the thoughts ends them, wherever it stands; behind it all is content,
    marks too. White space around marks belongs to neither part, but the content's first line keeps
    its indentation. An answer without thoughts is content as it is.
    """

    def __init__(self, form: ReasoningFormat, begins: Opening = Opening.UNKNOWN) -> None:
        self.form = form
        self._opened = begins is Opening.THOUGHTS
        self._stage = _Stage.CONTENT if begins is Opening.CONTENT else _Stage.START
        self._held = ""  # what is not certain yet: white space, and the beginning of a mark
        self._thought = False  # some thought was given
        self._length = 0  # characters taken
        self._content_from = 0
        # Where in the answer's text the mark that ends the thoughts has ended, in characters.
        self.thoughts_end: int | None = None

    @property
    def is_thinking(self) -> bool:
        """Whether what came so far are thoughts that go on."""
        return self._stage is _Stage.THOUGHTS or self._stage is _Stage.START and self._opened

    @property
    def content_from(self) -> int:
        """How many characters of the answer's text come before its content."""
        nothing_said = self.is_thinking or self._stage is _Stage.AFTER
        return self._length if nothing_said else self._content_from

    def push(self, text: str) -> Split:
        """Take new text; what is certain of each part now."""
        if self._stage is _Stage.CONTENT:
            return Split("", text)
        self._length += len(text)
        self._held += text
        return self._read(final=False)

    def flush(self) -> Split:
        """What was held back; call once, at the answer's end."""
        return self._read(final=True)

    def _read(self, *, final: bool) -> Split:
        reasoning = content = ""
        if self._stage is _Stage.START:
            self._begin(final)
        if self._stage is _Stage.THOUGHTS:
            reasoning = self._thoughts(final)
        if self._stage is _Stage.AFTER:
            self._skip_white_space()
        if self._stage is _Stage.CONTENT:
            content, self._held = self._held, ""
        return Split(reasoning, content)

    def _begin(self, final: bool) -> None:
        """Go on from the start if it is certain what comes."""
        text = self._held.lstrip()
        for mark in self.form.begin:
            if text.startswith(mark):
                self._held, self._stage = text[len(mark) :], _Stage.THOUGHTS
                return
        if final or not any(mark.startswith(text) for mark in self.form.begin):
            self._stage = _Stage.THOUGHTS if self._opened else _Stage.CONTENT

    def _thoughts(self, final: bool) -> str:
        """The thoughts that are certain; goes on behind the mark that ends them."""
        held = self._held if self._thought else self._held.lstrip()
        found = [(at, mark) for mark in self.form.end if (at := held.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            thoughts, self._held = held[:at].rstrip(), held[at + len(mark) :]
            self.thoughts_end = self._length - len(self._held)
            self._stage = _Stage.AFTER
        else:
            # The mark may go on, and white space before it is not part of the thoughts.
            keep = 0 if final else max(overlap(held, mark) for mark in self.form.end)
            thoughts = held[: len(held) - keep].rstrip()
            self._held = held[len(thoughts) :]
        self._thought = self._thought or bool(thoughts)
        return thoughts

    def _skip_white_space(self) -> None:
        text = self._held.lstrip()
        if text:
            space = self._held[: len(self._held) - len(text)]
            _, line_end, indentation = space.rpartition("\n")
            self._held = indentation + text if line_end else text
            self._content_from = self._length - len(self._held)
            self._stage = _Stage.CONTENT


def opening_of_rest(form: ReasoningFormat, said: str) -> Opening:
    """Of an answer that goes on with one that begins so."""
    splitter = ReasoningSplitter(form, Opening.THOUGHTS if form.always else Opening.UNKNOWN)
    splitter.push(said)
    return Opening.THOUGHTS if splitter.is_thinking else Opening.CONTENT


def split(form: ReasoningFormat, text: str, begins: Opening = Opening.UNKNOWN) -> Split:
    """The two parts of a whole answer."""
    splitter = ReasoningSplitter(form, begins)
    first, last = splitter.push(text), splitter.flush()
    return Split(first.reasoning + last.reasoning, first.content + last.content)


def with_thoughts_inside(
    form: ReasoningFormat, template: str, messages: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The messages as this template takes earlier thoughts. One that does not know the field
    `reasoning_content` may look for them in the content (LFM2, DeepSeek-R1), if at all."""
    looks = any(re.search(rf"""split\(\s*['"]{re.escape(end)}""", template) for end in form.end)
    if "reasoning_content" in template or not looks:
        return list(messages)
    return [_with_thoughts_inside(form, message) for message in messages]


def _with_thoughts_inside(form: ReasoningFormat, message: dict[str, Any]) -> dict[str, Any]:
    thoughts, content = message.get("reasoning_content"), message.get("content")
    if not thoughts or not isinstance(content, str):
        return message
    return {**message, "content": f"{form.begin[0]}\n{thoughts}\n{form.end[0]}\n\n{content}"}
