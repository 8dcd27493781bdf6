"""One choice of an HTTP answer while it grows: thoughts, text, tool calls, and their tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_hybrid.request import FinishReason, RequestEvent, TokenLogprob, VersionSpan
from megatron_hybrid.routed_experts import RoutedExperts
from megatron_hybrid.server.http.protocol.generation_request import GenerationRequest
from megatron_hybrid.server.http.tool_calls.formats import Call
from megatron_hybrid.server.http.tool_calls.reader import Piece, ToolCallReader
from megatron_hybrid.text.answer_places import GeneratedAnswer
from megatron_hybrid.text.answer_text import AnswerText
from megatron_hybrid.text.reasoning import ReasoningSplitter
from megatron_hybrid.text.tokenizer import Tokenizer

TOOL_CALLS = "tool_calls"  # OpenAI's reason for an answer that ended with calls
# Where a stop string cut the text, how many tokens back the last whole one may be.
MAX_CUT_TOKENS = 64


@dataclass(slots=True)
class Delta:
    """What is new in one choice. `finish_reason` is set on its last delta, exactly once.

    reasoning: what was thought, all of it before the text.
    token_ids: every token that counts as generated, if the request asks for them.
    stop: the stop string that ended it.
    in_order: where there are calls, these and the text as they were said.
    weight_versions: with the last delta, of the whole answer, if it has several or is asked for
    them.
    routed_experts: with the last delta, of prompt and answer, if they were asked for.
    """

    index: int
    text: str
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    calls: list[Call] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    reasoning: str = ""
    stop: str | None = None
    in_order: list[Piece] = field(default_factory=list)
    weight_versions: list[VersionSpan] = field(default_factory=list)
    routed_experts: RoutedExperts | None = None


class Choice(AnswerText):
    """index: in the HTTP answer, where several prompts may have several choices each.
    tokenizer: None for an answer in token ids alone.
    splitter: finds thoughts; reader: finds tool calls in what comes after them.
    visible_ids: special tokens that the text shows, since it needs them.
    on_end: called with an answer that ended by itself, at its length or at a stop string: what the
    client sees besides the calls, the calls, and the tokens with the model's own text.
    """

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer | None,
        request: GenerationRequest,
        reader: ToolCallReader | None = None,
        visible_ids: frozenset[int] = frozenset(),
        on_end: Callable[[str, list[Call], GeneratedAnswer], None] | None = None,
        splitter: ReasoningSplitter | None = None,
    ) -> None:
        if request.show_special and tokenizer is not None:
            visible_ids = tokenizer.special_ids
        super().__init__(tokenizer, request.params.stop, visible_ids, request.show_stop)
        self.index = index
        self._tokenizer = tokenizer
        self._request = request
        self._splitter = splitter
        self._reader = reader
        self._visible_ids = visible_ids
        self._on_end = on_end
        # Of an answer that is followed: tokens, the model's own text, what the client sees, calls.
        self._token_ids: list[int] = []
        self._generated: list[str] = []
        self._shown: list[str] = []
        self._calls: list[Call] = []
        self._reasoning_tokens: int | None = None  # once they are all there

    @property
    def reasoning_tokens(self) -> int | None:
        """How many of the tokens so far were thoughts and their marks; None for a model without."""
        if self._splitter is None:
            return None
        if self._splitter.is_thinking:
            return self.completion_tokens
        end = self._splitter.thoughts_end
        if self._reasoning_tokens is None and end is not None:
            self._reasoning_tokens = self._count_thoughts(self._splitter, end)
        return self._reasoning_tokens or 0

    def _count_thoughts(self, splitter: ReasoningSplitter, end: int) -> int:
        """Of an answer whose thoughts end there in its text."""
        assert self._tokenizer is not None
        for mark in splitter.form.end:
            token_id = self._tokenizer.token_id(mark)
            if token_id in self._token_ids:
                return self._token_ids.index(token_id) + 1

        def reach(length: int) -> int:
            return len(self._text_of(self._token_ids[:length]))

        # The mark is several tokens: the first ones whose text reaches its end.
        return bisect_left(range(len(self._token_ids)), end, key=reach)

    def advance(self, event: RequestEvent) -> Delta:
        """Go on with the event. Not after the choice has ended."""
        new = self.take(event)
        reason = None if self.finish_reason is None else self.finish_reason.value
        with_ids = self._request.return_token_ids
        token_ids = new.token_ids if with_ids else []
        # OpenAI's have no entry for the id that ended the answer; beside the ids it has one.
        logprobs = new.logprobs if with_ids else new.logprobs[: new.num_shown]
        stop = self.stop_hit
        delta = Delta(self.index, new.text, logprobs, reason, token_ids=token_ids, stop=stop)
        if reason is not None and (self._request.return_weight_versions or len(self.versions) > 1):
            delta.weight_versions = self.version_spans()
        if self._splitter is not None or self._reader is not None or self._on_end is not None:
            self._follow(new.token_ids[: new.num_shown], delta)
        return delta

    def _follow(self, token_ids: Sequence[int], delta: Delta) -> None:
        self._token_ids += token_ids
        self._generated.append(delta.text)
        if self._splitter is not None:
            delta.reasoning, delta.text = self._splitter.push(delta.text)
            if self.finish_reason is not None:
                reasoning, text = self._splitter.flush()
                delta.reasoning, delta.text = delta.reasoning + reasoning, delta.text + text
        if self._reader is not None:
            pieces = self._reader.push(delta.text) if delta.text else []
            if self.finish_reason is not None:
                pieces += self._reader.flush()
            delta.text = "".join(piece for piece in pieces if isinstance(piece, str))
            delta.calls = [piece for piece in pieces if isinstance(piece, Call)]
            delta.in_order = pieces if delta.calls else []
        self._shown.append(delta.text)
        self._calls += delta.calls
        if self._on_end and self.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._on_end("".join(self._shown), self._calls, self._generated_answer())
        if self.finish_reason is FinishReason.STOP and self._calls:
            delta.finish_reason = TOOL_CALLS

    def _generated_answer(self) -> GeneratedAnswer:
        """All tokens; where a stop string cut the text, maybe inside a token, those that lie wholly
        inside it, and their part of it."""
        text = "".join(self._generated)
        thoughts = 0 if self._splitter is None else self._splitter.content_from
        if self.stop_hit is None:
            return GeneratedAnswer(self._token_ids, text, thoughts)
        most = len(self._token_ids)
        for length in range(most, max(0, most - MAX_CUT_TOKENS), -1):
            known = self._text_of(self._token_ids[:length])
            if text.startswith(known):
                thoughts = min(thoughts, len(known))
                return GeneratedAnswer(self._token_ids[:length], known, thoughts)
        return GeneratedAnswer([], "")

    def _text_of(self, token_ids: Sequence[int]) -> str:
        assert self._tokenizer is not None
        is_special, visible = self._tokenizer.is_special, self._visible_ids
        shown = [one for one in token_ids if one in visible or not is_special(one)]
        return self._tokenizer.decode(shown, skip_special_tokens=False)
