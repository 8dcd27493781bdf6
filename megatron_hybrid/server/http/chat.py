"""/v1/chat/completions: messages to token ids, and answers in OpenAI's chat shape."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from flask import Response

from megatron_hybrid.request import TokenLogprob
from megatron_hybrid.server.http.answer_record import AnswerRecord, CompleteAnswer
from megatron_hybrid.server.http.generation import Delta, Generation
from megatron_hybrid.server.http.http_errors import json_response
from megatron_hybrid.server.http.logprobs import chat_logprobs
from megatron_hybrid.server.http.preparation import PreparedChat
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.http.streaming import (
    Chunk,
    EventFrame,
    collect,
    stream,
)
from megatron_hybrid.server.http.tool_calls.reader import as_openai


def answer_chat(serving: Serving, chat: PreparedChat, generation: Generation) -> Response:
    """Run one chat request; raises what `Generation` raises."""
    wanted = chat.generation
    generation.start([chat.prompt], chat.message_ends, partial(_record, serving, chat))
    with_logprobs = wanted.params.logprobs is not None
    head: Chunk = {
        "id": generation.request_id,
        "object": "chat.completion.chunk" if wanted.stream else "chat.completion",
        "created": generation.created,
        "model": serving.options.model_name,
    }

    def logprobs(entries: list[TokenLogprob]) -> dict[str, Any] | None:
        return chat_logprobs(serving.tokenizer, entries) if with_logprobs else None

    prompt_token_ids = chat.prompt.tolist() if wanted.return_token_ids else None
    if wanted.stream:
        frame = EventFrame(generation, head, wanted)
        return stream(generation, frame, _ChatEvents(frame, logprobs, prompt_token_ids))
    answers = collect(generation, wanted.params.n)
    choices = [_choice(answer, logprobs) for answer in answers]
    if prompt_token_ids is not None:
        head["prompt_token_ids"] = prompt_token_ids
        for choice, answer in zip(choices, answers, strict=True):
            choice["token_ids"] = answer.token_ids
    return json_response({**head, "choices": choices, "usage": generation.usage()})


def _record(serving: Serving, chat: PreparedChat) -> AnswerRecord | None:
    """Follows one choice; None if nothing is to be found in it or remembered of it."""
    calling, tools = serving.tool_calling, chat.tools
    reader = calling.reader(tools)
    if reader is None and serving.answers is None:
        return None
    visible = calling.visible_ids if reader is not None else frozenset()
    return AnswerRecord(serving.tokenizer, reader, visible, partial(_remember, serving, chat))


def _remember(serving: Serving, chat: PreparedChat, answer: CompleteAnswer) -> None:
    if serving.answers is None or not answer.generated.token_ids:
        return
    calls = [
        {"function": {"name": call.name, "arguments": call.arguments}} for call in answer.calls
    ]
    key = chat.keys.key_of({"content": answer.text, "tool_calls": calls})
    serving.answers.remember(key, *answer.generated)


def _choice(answer: Delta, logprobs: Any) -> Chunk:
    message: Chunk = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.calls:
        message["content"] = answer.text or None
        message["tool_calls"] = [as_openai(call) for call in answer.calls]
    return {
        "index": answer.index,
        "message": message,
        "logprobs": logprobs(answer.logprobs),
        "finish_reason": answer.finish_reason,
    }


class _ChatEvents:
    """An event with the role before a choice's first text, and one with the reason at its end.

    prompt_token_ids: for the very first event, if they are wanted.
    """

    def __init__(
        self,
        frame: EventFrame,
        logprobs: Callable[[list[TokenLogprob]], Any],
        prompt_token_ids: list[int] | None,
    ) -> None:
        self._event = frame.event
        self._prompt_token_ids = prompt_token_ids
        self._frame = frame
        self._logprobs = logprobs
        self._texts: dict[int, Callable[[str], bytes]] = {}  # of the choices that have begun
        self._calls: dict[int, int] = {}  # how many each choice has made

    def __call__(self, delta: Delta) -> bytes:
        index = delta.index
        encode_text = self._texts.get(index)
        events = b""
        if encode_text is None:
            encode_text = self._frame.text_events(lambda text: _chunk(index, {"content": text}))
            self._texts[index] = encode_text
            events = self._begin(_chunk(index, {"role": "assistant", "content": ""}))
        if delta.logprobs or delta.token_ids:
            chunk = _chunk(index, {"content": delta.text})
            chunk["logprobs"] = self._logprobs(delta.logprobs)
            if delta.token_ids:
                chunk["token_ids"] = delta.token_ids
            events += self._event(chunk)
        elif delta.text:
            events += encode_text(delta.text)
        for call in delta.calls:
            number = self._calls.get(index, 0)
            self._calls[index] = number + 1
            calls = [{"index": number, **as_openai(call)}]
            events += self._event(_chunk(index, {"tool_calls": calls}))
        if delta.finish_reason is not None:
            events += self._event({**_chunk(index, {}), "finish_reason": delta.finish_reason})
        return events

    def _begin(self, role: Chunk) -> bytes:
        is_first = len(self._texts) == 1
        return self._frame.opening(role, self._prompt_token_ids if is_first else None)


def _chunk(index: int, delta: dict[str, Any]) -> Chunk:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
