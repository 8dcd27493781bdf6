"""A request's events into an answer: its text, the tokens that count, and why it ended. One for the
offline LLM and for HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_hybrid.request import FinishReason, RequestEvent, TokenLogprob, VersionSpan
from megatron_hybrid.text.detokenizer import IncrementalDetokenizer
from megatron_hybrid.text.tokenizer import Tokenizer


class NewText(NamedTuple):
    """What an event adds to an answer."""

    text: str  # that is certain now
    # Up to the one that completed a stop string. An id that ended the answer is the last of them.
    token_ids: list[int]
    num_shown: int  # of token_ids: all but the id that ended the answer, if that is no text
    logprobs: list[TokenLogprob]  # one for each of token_ids, if the event has them


class AnswerText:
    """One answer while it grows.

    `finish_reason` is None until it ends; `stop_reason` is the stop string or the token id that
    ended it, `stop_hit` the stop string alone, of which the engine does not know.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop: Sequence[str] = (),
        visible_ids: frozenset[int] = frozenset(),
        show_stop: bool = False,
    ) -> None:
        """`tokenizer`: None for an answer in token ids alone. `stop`: strings that end the text.
        `visible_ids`: special tokens that the text shows all the same. `show_stop`: the text ends
        with what has ended it, a stop string or the text of an id."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.stop_hit: str | None = None
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        # Of which weights the tokens are, and from which of them on.
        self.versions: list[tuple[str, int]] = []
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(tokenizer, stop, visible_ids, show_stop)
        self._show_stop = show_stop

    def count_prompt(self, event: RequestEvent) -> None:
        """What the event says of the prompt; `take` does it, too."""
        # one that the engine did not write itself says nothing of it
        self.prompt_tokens = max(self.prompt_tokens, event.prompt_tokens)
        self.cached_tokens = max(self.cached_tokens, event.cached_tokens)

    def take(self, event: RequestEvent) -> NewText:
        """Go on with the event. Not after the answer has ended."""
        self.count_prompt(event)
        hides_end = (
            event.stop_token_id is not None
            and bool(event.token_ids)
            and not self._shows_end(event.token_ids[-1])
        )
        shown = event.token_ids[:-1] if hides_end else event.token_ids
        text, used = self._push(shown, final=event.finish_reason is not None)
        num_shown = used
        if self.stop_hit is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, self.stop_hit
        else:
            self.finish_reason, self.stop_reason = event.finish_reason, event.stop_token_id
            used += hides_end
        if used and (not self.versions or self.versions[-1][0] != event.weight_version):
            self.versions.append((event.weight_version, self.completion_tokens))
        self.completion_tokens += used
        return NewText(text, event.token_ids[:used], num_shown, event.token_logprobs()[:used])

    def version_spans(self) -> list[VersionSpan]:
        """Which tokens are of which weights, in order; none without a token."""
        ends = [*(start for _, start in self.versions[1:]), self.completion_tokens]
        return [VersionSpan(*one, end) for one, end in zip(self.versions, ends, strict=False)]

    def _shows_end(self, token_id: int) -> bool:
        """Whether this id, which ended the answer, is part of its text."""
        return (
            self._show_stop and self._detokenizer is not None and self._detokenizer.shows(token_id)
        )

    def _push(self, token_ids: list[int], *, final: bool) -> tuple[str, int]:
        """The text that is certain with these tokens, and how many of them it took."""
        detokenizer = self._detokenizer
        if detokenizer is None:
            return "", len(token_ids)
        before = detokenizer.tokens_used
        text = detokenizer.push(token_ids)
        if final:
            text += detokenizer.flush()
        self.stop_hit = detokenizer.stop_hit
        return text, detokenizer.tokens_used - before
