"""What a chat shows: answers as they come, thoughts and notes dimmed, and nothing that a model
could steer the terminal with."""

from __future__ import annotations

import os
from typing import TextIO

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
# Control characters but for line feeds and tabs, as signs that stand for them. A carriage return
# goes: it could write over what stands in its line.
_SIGNS: dict[int, str] = {code: chr(0x2400 + code) for code in range(0x20)}
_SIGNS |= {code: "\ufffd" for code in range(0x80, 0xA0)} | {0x7F: "\u2421", 0x0D: ""}
del _SIGNS[0x09], _SIGNS[0x0A]


def clean(text: str) -> str:
    """The text without what a terminal would obey."""
    return text.translate(_SIGNS)


class Screen:
    """Shows thoughts and text of one answer after the other on `out`, notes on `notes`."""

    def __init__(self, out: TextIO, notes: TextIO) -> None:
        self._out, self._notes = out, notes
        self._dims = _takes_colours(out)
        self._in_thoughts = False
        self._line_is_begun = False

    def thought(self, text: str) -> None:
        """A piece of what the model thinks before it answers."""
        if not self._in_thoughts:
            self._in_thoughts = True
            self._out.write(_DIM if self._dims else "[thoughts]\n")
        self._write(text)

    def text(self, text: str) -> None:
        """A piece of the answer."""
        if self._in_thoughts:
            self._end_thoughts()
            self._out.write("\n" if self._dims else "[answer]\n")
        self._write(text)

    def end(self) -> None:
        """The answer is over: what comes next begins in a line of its own, undimmed."""
        if self._in_thoughts:
            self._end_thoughts()
        self._end_line()
        self._out.flush()

    def note(self, text: str) -> None:
        """A line of ours."""
        dims = _takes_colours(self._notes)
        text = clean(text)
        print(f"{_DIM}{text}{_PLAIN}" if dims else text, file=self._notes, flush=True)

    def _end_thoughts(self) -> None:
        self._in_thoughts = False
        if self._dims:
            self._out.write(_PLAIN)
        self._end_line()

    def _end_line(self) -> None:
        if self._line_is_begun:
            self._out.write("\n")
            self._line_is_begun = False

    def _write(self, text: str) -> None:
        if text := clean(text):
            self._out.write(text)
            self._out.flush()
            self._line_is_begun = not text.endswith("\n")


def _takes_colours(stream: TextIO) -> bool:
    return (
        stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "") != "dumb"
    )
