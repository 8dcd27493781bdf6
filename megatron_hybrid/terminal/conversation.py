"""A chat of several turns: its messages, and how an answer is got and shown."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from megatron_hybrid.terminal.client import Chunk, Server, Usage
from megatron_hybrid.terminal.screen import Screen

_REASONS = {
    "length": "cut off: no more tokens may follow (--max-tokens, or the model's context)",
    "abort": "ended by the server",
}


@dataclass
class Conversation:
    """system: what stands before all messages; None: nothing. sampling: fields of every request.

    shows_thoughts, shows_figures: whether they are shown as well.
    """

    server: Server
    model: str
    screen: Screen
    system: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    shows_thoughts: bool = True
    shows_figures: bool = True
    turns: list[dict[str, str]] = field(default_factory=list)
    question: str | None = None  # the last one
    is_kept: bool = False  # it and its answer, among the turns

    @property
    def messages(self) -> list[dict[str, str]]:
        """As a request has them."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.turns]

    def ask(self, question: str) -> None:
        """Show the answer as it comes; question and answer are remembered. Raises ServerError, or
        KeyboardInterrupt when the user ends it: then what came of it is kept, if any text did."""
        self.question = question
        self.turns.append({"role": "user", "content": question})
        answer = _Answer(self.screen, self.shows_thoughts)
        body = {
            "model": self.model,
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.sampling,
        }
        try:
            with closing(self.server.answer(body)) as chunks:
                for chunk in chunks:
                    answer.take(chunk)
        finally:
            self.is_kept = bool(answer.text or answer.finish_reason)
            if self.is_kept:
                self.turns.append(answer.message())
            else:
                self.turns.pop()
            self.screen.end()  # last: Ctrl-C may come again here
        if self.shows_figures:
            self.screen.note(f"[{answer.figures()}]")

    def forget_last(self) -> None:
        """Forget the last question with its answer."""
        if self.is_kept:
            del self.turns[-2:]
            self.is_kept = False

    def forget_all(self) -> None:
        """A new chat, with the same system message."""
        self.turns, self.question, self.is_kept = [], None, False


class _Answer:
    """What has come of an answer; times are in seconds."""

    def __init__(self, screen: Screen, shows_thoughts: bool) -> None:
        self.thoughts = self.text = ""
        self.finish_reason: str | None = None
        self._usage = Usage()
        self._screen, self._shows_thoughts = screen, shows_thoughts
        self._asked = time.monotonic()
        self._first = self._last = 0.0

    def take(self, chunk: Chunk) -> None:
        self._usage = chunk.usage or self._usage
        for choice in chunk.choices:
            thought = choice.delta.reasoning_content or choice.delta.reasoning or ""
            text = choice.delta.content or ""
            if thought or text:
                self._last = time.monotonic()
                self._first = self._first or self._last
            if thought:
                self.thoughts += thought
                if self._shows_thoughts:
                    self._screen.thought(thought)
            if text:
                self.text += text
                self._screen.text(text)
            self.finish_reason = choice.finish_reason or self.finish_reason

    def message(self) -> dict[str, str]:
        """As the next request has it. Thoughts go back unchanged: where the model's template shows
        them, the cached prefix holds to their end."""
        message = {"role": "assistant", "content": self.text}
        if self.thoughts:
            message["reasoning_content"] = self.thoughts
        return message

    def figures(self) -> str:
        """Tokens and times in words; what the server does not say is left out."""
        said, usage = [], self._usage
        tokens = usage.completion_tokens
        if usage.prompt_tokens is not None:
            cached = usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens
            of_them = "" if cached is None else f", {cached:,} of them cached"
            said.append(f"{usage.prompt_tokens:,} prompt tokens{of_them}")
        if tokens is not None:
            details = usage.completion_tokens_details
            thoughts = details and details.reasoning_tokens
            of_them = f", {thoughts:,} of them thoughts" if thoughts else ""
            said.append(f"{tokens:,} answer tokens{of_them}")
        if self._first:
            speed = f"first after {self._first - self._asked:.2f} s"
            if tokens and tokens > 1 and self._last > self._first:
                speed += f", {(tokens - 1) / (self._last - self._first):.1f} tokens/s"
            said.append(speed)
        if self.finish_reason in _REASONS:
            said.append(_REASONS[self.finish_reason])
        return "; ".join(said) or "no figures"
