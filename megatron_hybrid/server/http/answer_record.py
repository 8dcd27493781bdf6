"""What one choice of a chat comes to: its text, its tool calls, and the tokens they were."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_hybrid.server.http.tool_calls.formats import Call
from megatron_hybrid.server.http.tool_calls.reader import ToolCallReader
from megatron_hybrid.text.answer_places import GeneratedAnswer
from megatron_hybrid.text.tokenizer import Tokenizer

# Where a stop string cut the text, how many tokens back the last whole one may be.
MAX_CUT_TOKENS = 64


class AnswerRecord:
    """Follows one choice from its first token to its end.

    on_end: called with an answer that ended by itself, at its length or at a stop string: what the
    client sees besides the calls, the calls, the tokens and the model's own text.
    visible_ids: special tokens that the text shows, since calls are marked by them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        reader: ToolCallReader | None,
        visible_ids: frozenset[int],
        on_end: Callable[[str, list[Call], GeneratedAnswer], None],
    ) -> None:
        self.visible_ids = visible_ids
        self._tokenizer = tokenizer
        self._reader = reader
        self._on_end = on_end
        self._token_ids: list[int] = []
        self._generated: list[str] = []  # pieces of the model's own text
        self._shown: list[str] = []  # pieces of what the client sees
        self.calls: list[Call] = []

    def advance(
        self, token_ids: Sequence[int], text: str, *, final: bool
    ) -> tuple[str, list[Call]]:
        """Take new tokens and their text; what the client sees of them now."""
        self._token_ids += token_ids
        self._generated.append(text)
        if self._reader is None:
            return text, []
        pieces = self._reader.push(text) if text else []
        if final:
            pieces += self._reader.flush()
        shown = "".join(piece for piece in pieces if isinstance(piece, str))
        calls = [piece for piece in pieces if isinstance(piece, Call)]
        self._shown.append(shown)
        self.calls += calls
        return shown, calls

    def end(self, *, cut: bool) -> None:
        """The answer is complete. `cut`: a stop string ended its text, maybe inside a token."""
        text = "".join(self._generated)
        token_ids, known = self._token_ids, text
        if cut:
            token_ids, known = self._inside(text)
        shown = text if self._reader is None else "".join(self._shown)
        self._on_end(shown, self.calls, GeneratedAnswer(token_ids, known))

    def _inside(self, text: str) -> tuple[list[int], str]:
        """The tokens that lie wholly inside the text, and their part of it."""
        most = len(self._token_ids)
        for length in range(most, max(0, most - MAX_CUT_TOKENS), -1):
            known = self._text_of(self._token_ids[:length])
            if text.startswith(known):
                return self._token_ids[:length], known
        return [], ""

    def _text_of(self, token_ids: Sequence[int]) -> str:
        shown = [
            one
            for one in token_ids
            if one in self.visible_ids or not self._tokenizer.is_special(one)
        ]
        return self._tokenizer.decode(shown, skip_special_tokens=False)
