"""/v1/completions: text or token ids in, text out, in OpenAI's older shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flask import Response

from megatron_hybrid.request import TokenLogprob
from megatron_hybrid.server.http.generation import Delta, Generation
from megatron_hybrid.server.http.http_errors import json_response
from megatron_hybrid.server.http.logprobs import CompletionLogprobs, EchoedPrompt
from megatron_hybrid.server.http.preparation import PreparedCompletion
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.http.streaming import Chunk, EventFrame, collect, stream
from megatron_hybrid.text.tokenizer import Tokenizer


def answer_completion(
    serving: Serving, completion: PreparedCompletion, generation: Generation
) -> Response:
    """Run one completion request; raises what `Generation` raises."""
    wanted = completion.generation
    shapes = _Shapes(serving.tokenizer, completion, generation)
    generation.start(completion.prompts)
    head: Chunk = {
        "id": generation.request_id,
        "object": "text_completion",
        "created": generation.created,
        "model": serving.options.model_name,
    }
    if wanted.stream:
        frame = EventFrame(generation, head, wanted)
        return stream(generation, frame, _CompletionEvents(frame, shapes))
    answers = collect(generation, len(completion.prompts) * wanted.params.n)
    choices = [shapes.choice(answer, first=True) for answer in answers]
    return json_response({**head, "choices": choices, "usage": generation.usage()})


class _Shapes:
    """Pieces of answers as entries of "choices": with the prompt before them, if it is wanted, and
    with token ids."""

    def __init__(
        self, tokenizer: Tokenizer, completion: PreparedCompletion, generation: Generation
    ) -> None:
        wanted = completion.generation
        self.with_logprobs = wanted.params.logprobs is not None
        self.with_token_ids = wanted.return_token_ids
        self.n = wanted.params.n
        self.prompt_logprobs = generation.prompt_logprobs
        self._tokenizer = tokenizer
        self._prompts = completion.prompts
        self._echoed = completion.echoed
        self._logprobs: dict[int, CompletionLogprobs] = {}

    @property
    def waits_for_prompt(self) -> bool:
        """Whether a choice begins with what is known only when its prompt is computed."""
        return bool(self._echoed) and self.with_logprobs

    def choice(self, delta: Delta, *, first: bool) -> Chunk:
        """first: this piece is the choice's first one, so the prompt comes with it."""
        text = delta.text
        prompt = self._echoed[delta.index // self.n] if self._echoed else None
        logprobs: dict[str, Any] | None = None
        if self.with_logprobs:
            logprobs = self._lists(delta.index, prompt, delta.logprobs, first)
        if prompt is not None and first:
            text = prompt.text + text
        choice = _choice(delta.index, text, logprobs, delta.finish_reason)
        if self.with_token_ids:
            choice["token_ids"] = delta.token_ids
            if first:
                choice["prompt_token_ids"] = self._prompts[delta.index // self.n].tolist()
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
        known = self.prompt_logprobs.get(index // self.n, [None] * len(prompt.token_ids))
        before = shape.prompt(prompt, known)
        return {name: before[name] + lists[name] for name in lists}


class _CompletionEvents:
    """One event for each piece. The first of an echoed choice waits until what it says of the
    prompt is there, which comes with the first token of the prompt's first choice."""

    def __init__(self, frame: EventFrame, shapes: _Shapes) -> None:
        self._frame = frame
        self._shapes = shapes
        self._waits_for_prompt = shapes.waits_for_prompt
        self._texts: dict[int, Callable[[str], bytes]] = {}  # of the choices that have begun
        self._held: dict[int, list[Delta]] = {}  # by prompt

    def __call__(self, delta: Delta) -> bytes:
        encode_text = self._texts.get(delta.index)
        text_is_all = not (delta.finish_reason or delta.logprobs or delta.token_ids)
        if encode_text is not None and text_is_all:
            return encode_text(delta.text)
        if not self._waits_for_prompt:
            return self._event(delta)
        prompt = delta.index // self._shapes.n
        is_first_choice = delta.index % self._shapes.n == 0
        if prompt not in self._shapes.prompt_logprobs and not is_first_choice:
            self._held.setdefault(prompt, []).append(delta)
            return b""
        return b"".join(map(self._event, [delta, *self._held.pop(prompt, [])]))

    def _event(self, delta: Delta) -> bytes:
        index = delta.index
        first = index not in self._texts
        if first:
            self._texts[index] = self._frame.text_events(
                lambda text: _choice(index, text, None, None)
            )
        return self._frame.event(self._shapes.choice(delta, first=first))


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
) -> Chunk:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
