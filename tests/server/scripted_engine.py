"""The fake engine as an actor: it says what it is told to, whatever is asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_hybrid.request import RequestEvent
from megatron_hybrid.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine


class ScriptedEngine(FakeEngine):
    """Answers the first request with the first text, the second with the second one, and all others
    with the last one, in tokens of single characters where it can.

    `marks`: texts that are tokens of their own. `burst`: how many tokens a step has, as of drafts
    that are accepted.
    """

    max_seq_length = 4096
    burst = 1

    def __init__(self, tokenizer: Tokenizer, *texts: str, marks: tuple[str, ...] = ()) -> None:
        super().__init__(tokenizer.vocab_size, tokenizer.eos_token_ids)
        self._answers = [_ids(tokenizer, text, marks) for text in texts]
        self._eos = tokenizer.eos_token_ids
        self._turns: dict[str, int] = {}  # which text a request gets

    @property
    def ids(self) -> list[int]:
        """Of the last request's answer, or the first one's before there is any."""
        return self._answers[max(0, min(len(self._turns), len(self._answers)) - 1)]

    def add_request(self, request_id: str, *more: Any, **options: Any) -> None:
        super().add_request(request_id, *more, **options)
        self._turns[request_id] = min(len(self._turns), len(self._answers) - 1)

    def _advance(self, request_id: str, index: int, one: Any) -> RequestEvent:
        event = self._advance_by_one(request_id, index, one)
        for _ in range(self.burst - 1):
            if event.finish_reason is None:
                more = self._advance_by_one(request_id, index, one)
                more.token_ids = event.token_ids + more.token_ids
                if event.logprobs is not None and more.logprobs is not None:
                    more.logprobs = event.logprobs + more.logprobs
                event = more
        return event

    def _advance_by_one(self, request_id: str, index: int, one: Any) -> RequestEvent:
        script = [*self._answers[self._turns[request_id]], *self._eos]
        playing = replace(one, prompt=script[-index:] + script[:-index])
        event = super()._advance(request_id, index, playing)
        one.last_token = playing.last_token
        event.prompt_tokens = len(one.prompt)
        return event


def _ids(tokenizer: Tokenizer, text: str, marks: tuple[str, ...]) -> list[int]:
    pieces = [text]
    for mark in marks:
        pieces = [part for piece in pieces for part in _around(piece, mark)]
    parts = [[piece] if piece in marks else list(piece) for piece in pieces]
    return [token_id for part in parts for one in part for token_id in tokenizer.encode(one)]


def _around(text: str, mark: str) -> list[str]:
    before, found, after = text.partition(mark)
    return [before, found, *_around(after, mark)] if found else [text]
