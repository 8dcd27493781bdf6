"""Tool calls read out of an answer's text as it comes."""

from __future__ import annotations

import json
import secrets
from typing import Any

from megatron_hybrid.server.http.tool_calls.formats import Call, NotACall, Schemas, ToolFormat
from megatron_hybrid.text.detokenizer import overlap

Piece = str | Call


class ToolCallReader:
    """Splits one answer into text and calls.

    Text flows until a mark; what may begin one, and white space at the end, is held back, since
    the white space before a call and after the last one belongs to neither. What is no call comes
    out as text.
    """

    def __init__(self, form: ToolFormat, schemas: Schemas) -> None:
        self._form = form
        self._schemas = schemas
        self._held = ""
        self._mark: int | None = None  # where in `_held` a call begins
        self._searched = 0  # no end mark that could end it stands before here
        self._last: Piece | None = None

    def push(self, text: str) -> list[Piece]:
        """Take new text; the text and the calls that are now certain, in order."""
        self._held += text
        return self._read(final=False)

    def flush(self) -> list[Piece]:
        """What was held back; call once, at the answer's end."""
        return self._read(final=True)

    def _read(self, *, final: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while self._read_call(pieces, final) if self._mark is not None else self._find(pieces):
            pass
        if self._mark is None:
            self._give(pieces, self._certain(final))
            if final and not (isinstance(self._last, Call) and not self._held.strip()):
                self._give(pieces, len(self._held))
        return pieces

    def _find(self, pieces: list[Piece]) -> bool:
        """Go to the next begin mark; False if there is none."""
        begin = self._form.begin
        if self._form.end:
            mark = self._held.find(begin)
        else:  # the whole answer is a call, or none of it
            mark = len(self._held) - len(self._held.lstrip())
            if self._last is not None or not self._held.startswith(begin, mark):
                mark = -1
        if mark < 0:
            return False
        text = len(self._held[:mark].rstrip())
        self._give(pieces, text)
        self._mark = mark - text
        self._searched = self._mark + len(begin)
        return True

    def _certain(self, final: bool) -> int:
        """How many characters are neither white space at the end nor may begin a mark."""
        keep = overlap(self._held, self._form.begin) if self._form.end and not final else 0
        return len(self._held[: len(self._held) - keep].rstrip())

    def _read_call(self, pieces: list[Piece], final: bool) -> bool:
        """Read the body that begins at the mark; False if it needs more text."""
        assert self._mark is not None
        end_mark = self._form.end
        end = self._held.find(end_mark, self._searched) if end_mark else -1
        if end < 0 and not final:
            # The end mark may have begun at the end of what is held.
            self._searched = max(self._searched, len(self._held) - len(end_mark) + 1)
            return False
        # An answer that was cut short, or whose model left the mark out, ends the body too.
        after = len(self._held) if end < 0 else end + len(end_mark)
        body = self._held[self._body : after if end < 0 else end]
        try:
            calls = self._form.calls(body, self._schemas)
        except NotACall as error:
            if error.may_go_on and end >= 0:  # an end mark inside a string
                self._searched = after
            else:  # a call may still come after this one's first end mark
                first = self._held.find(end_mark, self._body) if end_mark else -1
                self._give(pieces, len(self._held) if first < 0 else first + len(end_mark))
            return True
        pieces += calls
        self._last = calls[-1]
        self._held, self._mark = self._held[after:], None
        return True

    @property
    def _body(self) -> int:
        """Where the body begins in what is held."""
        assert self._mark is not None
        return self._mark + (len(self._form.begin) if self._form.end else 0)

    def _give(self, pieces: list[Piece], length: int) -> None:
        """This much of what is held, as text."""
        if length:
            pieces.append(self._held[:length])
            self._last = pieces[-1]
        self._held, self._mark = self._held[length:], None


def read_answer(form: ToolFormat, schemas: Schemas, text: str) -> tuple[str, list[Call]]:
    """The text and the calls of a whole answer."""
    reader = ToolCallReader(form, schemas)
    pieces = reader.push(text) + reader.flush()
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    return content, [piece for piece in pieces if isinstance(piece, Call)]


def as_openai(call: Call) -> dict[str, Any]:
    """A call as an entry of `tool_calls`, with a new id."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }
