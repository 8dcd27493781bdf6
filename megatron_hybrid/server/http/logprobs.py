"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from megatron_hybrid.request import TokenLogprob
from megatron_hybrid.server.http.connection import let_others_run
from megatron_hybrid.text.detokenizer import IncrementalDetokenizer, bytes_of_token
from megatron_hybrid.text.tokenizer import Tokenizer

T = TypeVar("T")

PAUSE_EVERY = 256  # tokens; with 20 likeliest ones each, they take some milliseconds
LOWEST_LOGPROB = -9999.0  # JSON has no infinity


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The shape of /v1/chat/completions: a list of tokens with their bytes."""
    return {
        "content": [
            {
                **_chat_token(tokenizer, entry.token_id, entry.logprob),
                "top_logprobs": [
                    _chat_token(tokenizer, token_id, logprob) for token_id, logprob in entry.top
                ],
            }
            for entry in entries
        ],
        "refusal": None,
    }


class EchoedPrompt(NamedTuple):
    """A prompt as it is sent back. `added`: tokens at its start that the tokenizer put before the
    client's text."""

    token_ids: Sequence[int]
    text: str
    added: int = 0


class CompletionLogprobs:
    """The shape of /v1/completions: parallel lists, built up for one choice piece by piece.

    A token's offset is where its text begins in the choice's text, in characters: those that begin
    inside a character share its offset, and a special token, which is not shown, takes no room.
    """

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        """offset: characters of the prompt's text, if the choice begins with it."""
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._offset = offset

    def __call__(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The entries of the answer's next tokens."""
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push((entry.token_id,)))
        return self._lists([entry.token_id for entry in entries], entries, offsets)

    def prompt(
        self, prompt: EchoedPrompt, entries: Sequence[TokenLogprob | None]
    ) -> dict[str, Any]:
        """The entries of the prompt's tokens, null for the first."""
        detokenizer = IncrementalDetokenizer(self._tokenizer)
        offset, offsets = 0, []
        for number, token_id in enumerate(without_hurry(prompt.token_ids)):
            offsets.append(min(offset, len(prompt.text)))
            if not self._tokenizer.is_special(token_id):
                offset += len(detokenizer.push((token_id,)))
            elif number >= prompt.added:
                offset += len(self._tokenizer.token(token_id) or "")
        return self._lists(prompt.token_ids, entries, offsets)

    def _lists(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None], offsets: list[int]
    ) -> dict[str, Any]:
        def spelling(token_id: int) -> str:
            return _spelling(bytes_of_token(self._tokenizer, token_id))

        return {
            "tokens": list(map(spelling, token_ids)),
            "token_logprobs": [entry and finite(entry.logprob) for entry in entries],
            "top_logprobs": [
                entry and {spelling(token_id): finite(logprob) for token_id, logprob in entry.top}
                for entry in without_hurry(entries)
            ],
            "text_offset": offsets,
        }


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = bytes_of_token(tokenizer, token_id)
    return {"token": _spelling(data), "bytes": list(data), "logprob": finite(logprob)}


def _spelling(data: bytes) -> str:
    """The token's text, or its bytes spelled out when they are no whole characters."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def without_hurry(items: Sequence[T]) -> Iterator[T]:
    """The items, with pauses in which other greenlets go on: a prompt may have very many."""
    for number, item in enumerate(items):
        if number % PAUSE_EVERY == PAUSE_EVERY - 1:
            let_others_run()
        yield item


def finite(logprob: float) -> float:
    """As JSON can say it."""
    return max(logprob, LOWEST_LOGPROB)
