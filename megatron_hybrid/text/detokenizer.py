"""Token ids to text while they arrive: whole characters only, and never part of a stop string."""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Iterable, Sequence

from megatron_hybrid.text.tokenizer import Tokenizer

# A run of byte-fallback tokens is decoded as a whole; past this many it is shown where it stands.
MAX_BYTE_RUN = 64
# A character is at most four bytes, so a replacement character this many tokens back is final.
MAX_UNDECIDED_TOKENS = 8


class IncrementalDetokenizer:
    """Text of one answer, token by token, equal to `tokenizer.decode` of the whole.

    What could still change is held back: an unfinished character, and an end of the text that
    could be the beginning of a stop string. `stop_hit` is the stop string that ended the text
    (not part of it); `tokens_used` counts the tokens up to and including the one that completed
    it, or all of them. `visible_ids`: special tokens that the text shows all the same;
    `show_stop`: the stop string is part of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        visible_ids: frozenset[int] = frozenset(),
        show_stop: bool = False,
    ) -> None:
        self.stop_hit: str | None = None
        self.tokens_used = 0
        self._show_stop = show_stop
        self._stops = _Stops(stop) if stop else None
        self._visible_ids = visible_ids
        decoding = _ByteLevelDecoding if tokenizer.is_byte_level else _WindowDecoding
        self._decoding: _ByteLevelDecoding | _WindowDecoding = decoding(tokenizer)
        self._tokenizer = tokenizer

    def push(self, token_ids: Iterable[int]) -> str:
        """Take new tokens and return the text that is now certain; nothing after a stop string."""
        pieces = []
        for token_id in token_ids:
            if self.stop_hit is not None:
                break
            self.tokens_used += 1
            if self.shows(token_id):
                text = self._decoding.push(token_id)
                if text:
                    pieces.append(self._release(text))
        return "".join(pieces)

    def shows(self, token_id: int) -> bool:
        """Whether the token is part of the text."""
        return not self._tokenizer.is_special(token_id) or token_id in self._visible_ids

    def flush(self) -> str:
        """The text that was held back; call once, when no more tokens come."""
        if self.stop_hit is not None:
            return ""
        text = self._release(self._decoding.flush())
        if self._stops is not None and self.stop_hit is None:
            text += self._stops.held
        return text

    def _release(self, text: str) -> str:
        """The text that is certain with this new text; a stop string ends it."""
        if self._stops is None:
            return text
        certain, self.stop_hit = self._stops.push(text)
        return certain + self.stop_hit if self.stop_hit and self._show_stop else certain


class _Stops:
    """Looks for stop strings in a text that comes in pieces, and holds back what may begin one.

    By Knuth, Morris and Pratt: a character costs the same however long the strings are and however
    much is held back, since a request may have many of them, and many answers.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._begun = [0] * len(stops)  # characters of each that the text ends with
        self._firsts = frozenset(stop[0] for stop in stops)
        self.held = ""  # what may begin one

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that is certain now, and the stop string that ended it: the one that is complete
        first, of several the longest."""
        if not self.held and self._firsts.isdisjoint(text):
            return text, None
        whole = self.held + text
        for end in range(len(self.held), len(whole)):
            complete = self._advance(whole[end])
            if complete:
                hit = max(complete, key=len)
                self.held = ""
                return whole[: end + 1 - len(hit)], hit
        certain = len(whole) - max(self._begun)
        self.held = whole[certain:]
        return whole[:certain], None

    def _advance(self, character: str) -> list[str]:
        """The stop strings that are complete with this character."""
        complete = []
        for number, (stop, borders) in enumerate(self._stops):
            begun = self._begun[number]
            while begun and stop[begun] != character:
                begun = borders[begun - 1]
            begun += stop[begun] == character
            self._begun[number] = begun
            if begun == len(stop):
                complete.append(stop)
        return complete


@functools.lru_cache(maxsize=1024)
def _borders(text: str) -> tuple[int, ...]:
    """For each beginning of the text, the length of its longest proper one that also ends it."""
    borders = [0]
    for character in text[1:]:
        length = borders[-1]
        while length and text[length] != character:
            length = borders[length - 1]
        borders.append(length + (text[length] == character))
    return tuple(borders)


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without completing it."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class _ByteLevelDecoding:
    """Byte-level BPE: every token is a string of bytes, so decoding is UTF-8 decoding."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        token = self._tokenizer.token(token_id)
        return "" if token is None else self._utf8.decode(token_bytes(token))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoding:
    """Any other tokenizer: decode the tokens since the last certain text, after a few before them.

    Decoders look at their neighbours (a leading space is dropped only at the very start, bytes
    join to characters), so the new text is what the window shows beyond its old part.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # old tokens, whose text is out, then the new ones
        self._old_tokens = 0
        self._byte_run = 0

    def push(self, token_id: int) -> str:
        token = self._tokenizer.token(token_id)
        if token is None:
            return ""
        self._window.append(token_id)
        # One wrong byte changes the text of its whole run of byte tokens.
        self._byte_run = self._byte_run + 1 if _BYTE_TOKEN.fullmatch(token) else 0
        if 0 < self._byte_run < MAX_BYTE_RUN:
            return ""
        return self._advance(final=False)

    def flush(self) -> str:
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        text = self._decode(self._window)
        undecided = len(self._window) - self._old_tokens
        limit = MAX_BYTE_RUN + MAX_UNDECIDED_TOKENS if self._byte_run else MAX_UNDECIDED_TOKENS
        if text.endswith("\ufffd") and undecided < limit and not final:
            return ""
        new = text[len(self._decode(self._window[: self._old_tokens])) :]
        del self._window[: self._old_tokens]
        self._old_tokens = len(self._window)
        self._byte_run = 0
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def token_bytes(token: str) -> bytes:
    """The bytes behind a byte-level token's printable spelling (GPT-2's alphabet)."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:  # an added token, spelled as it stands
        return token.encode("utf-8")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling: printable bytes stand for themselves, the others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()


def bytes_of_token(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes that one token stands for by itself; a special token's are its name."""
    token = tokenizer.token(token_id)
    if token is None:
        return b""
    if tokenizer.is_byte_level:
        return token_bytes(token)
    if _BYTE_TOKEN.fullmatch(token):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode("utf-8")
