"""/v1/completions: answers in OpenAI's older shape, which is only text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_hybrid.request import TokenLogprob
from megatron_hybrid.server.http.choice import Choice, Delta
from megatron_hybrid.server.http.generation import Generation
from megatron_hybrid.server.http.logprobs import CompletionLogprobs, EchoedPrompt
from megatron_hybrid.server.http.prepared import PreparedCompletion
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.http.streaming import Chunk, ChunkAnswers, versions_of


class CompletionAnswers(ChunkAnswers):
    """Of one request's prompts, with the prompt before them, if it is wanted, and with token ids.

    As events: one for each piece. The first of an echoed choice waits until what it says of the
    prompt is there, which comes with the first token of the prompt's first choice.
    """

    def __init__(
        self, serving: Serving, completion: PreparedCompletion, generation: Generation
    ) -> None:
        """Begins; raises what `Generation.start` raises."""
        wanted = completion.generation
        number = len(completion.prompts) * wanted.params.n
        super().__init__(serving, generation, wanted, number=number, name="text_completion")
        self._tokenizer = serving.tokenizer
        self._n = wanted.params.n
        self._with_logprobs = wanted.params.logprobs is not None
        self._prompts = completion.prompts
        self._echoed = completion.echoed
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._texts: dict[int, Callable[[str], bytes]] = {}  # of the choices that have begun
        self._held: dict[int, list[Delta]] = {}  # by prompt
        generation.start(completion.prompts, lambda index: Choice(index, self._tokenizer, wanted))

    def choice(self, answer: Delta) -> Chunk:
        return self._choice(answer, first=True)

    def _choice(self, delta: Delta, *, first: bool) -> Chunk:
        """first: this piece is the choice's first one, so the prompt comes with it."""
        text = delta.text
        prompt = self._echoed[delta.index // self._n] if self._echoed else None
        logprobs: dict[str, Any] | None = None
        if self._with_logprobs:
            logprobs = self._lists(delta.index, prompt, delta.logprobs, first)
        if prompt is not None and first:
            text = prompt.text + text
        choice = _entry(delta.index, text, logprobs, delta.finish_reason)
        if self._wanted.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if first:
                choice["prompt_token_ids"] = self._prompts[delta.index // self._n].tolist()
        return choice

    def _lists(
        self, index: int, prompt: EchoedPrompt | None, entries: list[TokenLogprob], first: bool
    ) -> dict[str, Any]:
        shape = self._logprobs.get(index)
        if shape is None:
            offset = len(prompt.text) if prompt is not None else 0
            shape = self._logprobs[index] = CompletionLogprobs(self._tokenizer, offset)
        lists = shape(entries)
        if prompt is None or not first:
            return lists
        # An aborted request may end without them.
        unknown = [None] * len(prompt.token_ids)
        known = self._generation.prompt_logprobs.get(index // self._n, unknown)
        before = shape.prompt(prompt, known)
        return {name: before[name] + lists[name] for name in lists}

    def events(self, delta: Delta) -> bytes:
        encode_text = self._texts.get(delta.index)
        text_is_all = not (delta.finish_reason or delta.logprobs or delta.token_ids)
        if encode_text is not None and text_is_all:
            return encode_text(delta.text)
        if not (self._echoed and self._with_logprobs):
            return self._event(delta)
        prompt, number = divmod(delta.index, self._n)
        if prompt not in self._generation.prompt_logprobs and number != 0:
            self._held.setdefault(prompt, []).append(delta)
            return b""
        return b"".join(map(self._event, [delta, *self._held.pop(prompt, [])]))

    def _event(self, delta: Delta) -> bytes:
        index = delta.index
        first = index not in self._texts
        if first:
            self._texts[index] = self.text_events(lambda text: _entry(index, text, None, None))
        return self.event(self._choice(delta, first=first) | versions_of(delta))


def _entry(
    index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
) -> Chunk:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
